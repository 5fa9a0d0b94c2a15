"""Binomial noise on rounded sums: cpSGD."""
