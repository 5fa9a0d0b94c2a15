"""Diagnoses from cell nuclei (scikit-learn's copy of the Wisconsin data): 150 records per site, 119 for the server."""

import numpy as np
from sklearn.datasets import load_breast_cancer

SITES = ("north", "south", "west")
PER_SITE = 150


def held_out():
    """For the server: it evaluates on these. (The first pair would be training records, which it has none of.)"""
    x, y = _scaled()
    ours = slice(len(SITES) * PER_SITE, None)
    return x[ours], y[ours], x[ours], y[ours]


def of_site(name):
    """What a site would have in its own files."""
    x, y = _scaled()
    start = SITES.index(name) * PER_SITE
    return x[start : start + PER_SITE], y[start : start + PER_SITE]


def _scaled():
    """Features in units of the server's own records: scaling by the sites' records would cost budget."""
    data = load_breast_cancer()
    x, y = np.log1p(data.data), data.target
    ours = x[len(SITES) * PER_SITE :]
    return (x - ours.mean(axis=0)) / ours.std(axis=0), y
