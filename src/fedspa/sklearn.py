"""A scikit-learn classifier that is trained by a simulated federation under local differential privacy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from fedspa.data.adapters import from_arrays
from fedspa.errors import DataError
from fedspa.result import RunResult
from fedspa.running import run


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Train a classifier on records of several sites, each of which adds its own noise.

    Every call of `fit` spends ε of the records that it is given, and so does every fold of a cross-validation. Runs in
    one folder share a ledger, which adds them up. Column ranges must be public: minima and maxima of the records would
    be a release that no ε counts.

    Args:
        ranges: The lowest and the highest value of each column, as two rows. Values are cut to it and scaled to −1 … 1.
            Without, columns are taken as they are: scale them by public numbers first.
        epsilon: ε for each record, over the whole training; for each person, where `fit` is given `persons`.
        delta: δ, below 1 over the records of a site, or over all persons.
        model: `logistic`, `mlp`, or the name of a model function as in `model.name`.
        rounds: Rounds of training, in each of which all sites take part.
        settings: Further sections of a config, as `{"algorithm": {"local_steps": 5}}` (docs/config.md). What they leave
            out follows from public numbers, as in every run.
        random_state: The seed of what is not noise.

    Attributes:
        classes_: The classes, sorted.
        n_features_in_: The number of columns.
        result_: The finished run as a `fedspa.RunResult`: its summary, its report and its ledger.

    Examples:
        >>> import numpy as np
        >>> from fedspa.sklearn import FederatedClassifier
        >>> x = np.random.default_rng(0).uniform(-1, 1, (600, 2))
        >>> y = np.where(x[:, 0] > 0, "ill", "well")
        >>> model = FederatedClassifier(ranges=[[-1, -1], [1, 1]], epsilon=4.0)
        >>> model = model.fit(x, y, sites=np.arange(600) % 3)
        >>> model.predict(x[:2]).shape, model.predict_proba(x[:2]).shape
        ((2,), (2, 2))
    """

    def __init__(
        self,
        ranges: ArrayLike | None = None,
        *,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        model: str = "logistic",
        rounds: int = 10,
        settings: dict[str, dict[str, Any]] | None = None,
        random_state: int = 0,
    ) -> None:
        self.ranges = ranges
        self.epsilon = epsilon
        self.delta = delta
        self.model = model
        self.rounds = rounds
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike, sites: ArrayLike | None = None, persons: ArrayLike | None = None) -> Self:
        """Train on these records.

        Args:
            X: Records, a row each.
            y: Their classes: numbers or words. The set of classes is taken as public.
            sites: The site of each record. Without, all are of ten sites, in turn.
            persons: The person of each record. Each person is then protected, with all records.

        Returns:
            The classifier itself.

        Raises:
            ConfigError: A setting is not allowed.
            DataError: The records cannot be trained on.
        """
        x, labels = validate_data(self, X, y, dtype=np.float32)
        self.classes_, targets = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y has the class {self.classes_[0]} alone; a classifier needs at least 2")
        owners = np.arange(len(x)) % 10 if sites is None else np.asarray(sites)
        if owners.shape != (len(x),):
            raise DataError(f"sites has shape {owners.shape}; one site for each of the {len(x)} records is needed")
        agents = len(np.unique(owners))
        scaled = self._scaled(x)
        # Nothing is scored on records: that would be a release. The server's one record is made of zeros.
        blank = np.zeros((1, x.shape[1]), np.float32), np.zeros(1, np.int64)
        data = from_arrays(
            scaled,
            targets,
            *blank,
            name="records given to fit",
            owners=owners,
            persons=persons,
            classes=len(self.classes_),
        )
        config = _merged(
            {
                "federation": {"agents": agents, "per_round": agents, "rounds": self.rounds},
                "model": {"name": self.model},
                "privacy": {"epsilon": self.epsilon, "delta": self.delta},
                "run": {"seed": self.random_state},
            },
            self.settings or {},
        )
        self.result_: RunResult = run(config, data=data, progress=False)
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the class of each record.

        Args:
            X: Records, a row each.

        Returns:
            A class per record.
        """
        chances = self.predict_proba(X)
        found: NDArray[Any] = self.classes_[np.argmax(chances, axis=1)]
        return found

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        """Return the probability of each class for each record.

        Args:
            X: Records, a row each.

        Returns:
            A row per record, a column per class in the order of `classes_`.
        """
        check_is_fitted(self, "result_")
        x = validate_data(self, X, dtype=np.float32, reset=False)
        return self.result_.predict_proba(self._scaled(x))

    @property
    def report(self) -> Path:
        """Return the file of the run's report."""
        check_is_fitted(self, "result_")
        return self.result_.folder / "report.html"

    def _scaled(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.ranges is None:
            return x
        bounds = np.asarray(self.ranges, np.float32)
        if bounds.shape != (2, x.shape[1]) or not (bounds[0] < bounds[1]).all():
            raise DataError(
                f"ranges has shape {bounds.shape}; two rows of {x.shape[1]} numbers are needed, each lowest value "
                "below its highest"
            )
        low, high = bounds
        scaled: NDArray[np.float32] = 2 * (np.clip(x, low, high) - low) / (high - low) - 1
        return scaled


def _merged(first: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {section: {**first.get(section, {}), **other.get(section, {})} for section in {**first, **other}}
