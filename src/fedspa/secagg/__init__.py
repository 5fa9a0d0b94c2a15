"""Secure aggregation: a server that adds up integers which it cannot read one by one. docs/secagg.md specifies it."""
