"""A table of records: one row a patient, the label in the last column. Here the file comes with scikit-learn."""

from __future__ import annotations

from importlib import resources

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Labels = NDArray[np.int64]

# The greatest value that each of the ten measures of a cell nucleus takes, in round numbers: for its mean over the
# nuclei of an image, its standard error, and its worst. They are from the data set's public description. For records of
# your own take them from a textbook or an instrument's range: computed from the records they would be a release.
LARGEST = {
    # measure: (mean, error, worst)
    "radius": (30, 3, 40),
    "texture": (40, 5, 50),
    "perimeter": (200, 20, 250),
    "area": (2500, 500, 4000),
    "smoothness": (0.2, 0.03, 0.2),
    "compactness": (0.3, 0.1, 1),
    "concavity": (0.4, 0.4, 1),
    "concave points": (0.2, 0.05, 0.3),
    "symmetry": (0.3, 0.1, 0.7),
    "fractal dimension": (0.1, 0.03, 0.2),
}


def load(fifth: int = 0) -> tuple[Table, Labels, Table, Labels]:
    """(train_x, train_y, test_x, test_y): every fifth row is held out. Features from -1 to about 1, 1 is benign."""
    with resources.files("sklearn.datasets.data").joinpath("breast_cancer.csv").open() as file:
        table = np.loadtxt(file, delimiter=",", skiprows=1)
    scale = np.array(list(LARGEST.values())).T.ravel()
    x, y = 2 * table[:, :-1] / scale - 1, table[:, -1].astype(np.int64)
    held_out = np.arange(len(y)) % 5 == fifth
    return x[~held_out], y[~held_out], x[held_out], y[held_out]
