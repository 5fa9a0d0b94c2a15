"""Tests of fedspa.analytics; a package, as names of its files are also those of other folders."""
