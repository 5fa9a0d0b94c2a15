"""`fedspa.sklearn.FederatedClassifier`, as scikit-learn's users use a classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import ConfigError, DataError
from fedspa.sklearn import FederatedClassifier

RANGES = [[-1.0] * 3, [1.0] * 3]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def records(count: int = 600, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).uniform(-1, 1, (count, 3))
    return x, np.where(x[:, 0] > x[:, 1], "well", "ill")


def test_it_learns_and_answers_in_the_given_classes() -> None:
    x, y = records()
    model = FederatedClassifier(RANGES, epsilon=4.0).fit(x, y, sites=np.arange(600) % 3)
    assert model.classes_.tolist() == ["ill", "well"]
    chances = model.predict_proba(x)
    assert np.allclose(chances.sum(axis=1), 1)
    assert np.array_equal(model.predict(x), model.classes_[chances.argmax(axis=1)])
    assert model.score(*records(seed=1)) > 0.85
    summary = model.result_.summary
    assert summary["epsilon"] <= 4.0
    assert summary["agents"] == 3
    assert model.report.exists()


def test_real_columns_beside_the_model_without_privacy() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    ranges = np.stack([x.min(0), x.max(0)])  # as if a textbook had them
    model = FederatedClassifier(ranges, epsilon=8.0, delta=1e-4, rounds=20)
    model.fit(x[::2], y[::2], sites=np.arange(285) % 3)
    scaled = 2 * (x - ranges[0]) / (ranges[1] - ranges[0]) - 1
    pooled = LogisticRegression(max_iter=1000).fit(scaled[::2], y[::2]).score(scaled[1::2], y[1::2])
    assert model.score(x[1::2], y[1::2]) > pooled - 0.1


def test_it_is_a_scikit_learn_estimator() -> None:
    model = FederatedClassifier(RANGES, epsilon=2.0, rounds=3)
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(epsilon=5.0).epsilon == 5.0
    with pytest.raises(NotFittedError):
        model.predict(records()[0])
    x, y = records(300)
    assert len(cross_val_score(model, x, y, cv=3)) == 3


def test_each_fit_spends_and_the_ledger_adds_up() -> None:
    x, y = records()
    model = FederatedClassifier(RANGES, rounds=2)
    for _ in range(2):
        model.fit(x, y)
    with Ledger.open(Path("runs/ledger.sqlite"), create=False) as ledger:
        assert sum(ledger.spent("agent-0").values()) == 4


def test_persons_are_protected_where_they_are_given() -> None:
    x, y = records()
    model = FederatedClassifier(RANGES, delta=1e-4).fit(
        x, y, sites=np.arange(600) % 3, persons=np.arange(600) // 6 * 3 + np.arange(600) % 3
    )
    assert model.result_.summary["unit"] == "person"


BAD: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"ranges": [[0, 0], [1, 1]]}, {}, DataError, r"two rows of 3 numbers"),
    ({"ranges": [[1, 1, 1], [0, 0, 0]]}, {}, DataError, "each lowest value below"),
    ({"epsilon": -1.0}, {}, ConfigError, "privacy.epsilon"),
    ({"settings": {"algorithm": {"bath": 3}}}, {}, ConfigError, "bath"),
    ({}, {"sites": [1, 2]}, DataError, r"sites has shape \(2,\); one site for each of the 600 records"),
    ({}, {"y": ["one"] * 600}, DataError, "class one alone"),
]


@pytest.mark.parametrize(("arguments", "given", "error", "message"), BAD)
def test_bad_input_is_one_line(
    arguments: dict[str, Any], given: dict[str, Any], error: type[Exception], message: str
) -> None:
    x, y = records()
    with pytest.raises(error, match=message) as caught:
        FederatedClassifier(**{"ranges": RANGES, **arguments}).fit(x, given.pop("y", y), **given)
    assert "\n" not in str(caught.value)


def test_other_columns_are_refused_as_scikit_learn_does() -> None:
    model = FederatedClassifier(RANGES, rounds=2).fit(*records())
    with pytest.raises(ValueError, match="features"):
        model.predict(np.zeros((2, 4)))
