"""The comparison table of `fedspa privacy`."""

from __future__ import annotations

from typing import Any

import pytest

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.calibrate import compare

MNIST: dict[str, Any] = {"batch": 10, "records": 600, "local_steps": 300, "participations": 5, "delta": 1e-3}
KEYS = [("poisson", "add-remove", "pld"), ("poisson", "replace-one", "pld"), ("fixed", "replace-one", "pld")]


def test_noise_for_an_epsilon() -> None:
    table = compare(epsilon=1.0, **MNIST)
    assert [(row.sampling, row.neighbours, row.accountant) for row in table] == KEYS
    assert [row.noise for row in table] == pytest.approx([1.83, 3.33, 4.12], rel=0.01)
    assert all(0.99 < row.epsilon <= 1.0 for row in table)


def test_epsilon_at_a_noise() -> None:
    table = compare(noise=9.291, **MNIST)
    assert [(row.sampling, row.neighbours, row.accountant) for row in table] == KEYS
    assert {row.noise for row in table} == {9.291}
    poisson, replaced, fixed = (row.epsilon for row in table)
    assert fixed == pytest.approx(0.33, rel=0.02)  # what the paper's noise gives
    assert fixed > replaced > poisson


@pytest.mark.parametrize("choice", [{}, {"epsilon": 1.0, "noise": 1.0}])
def test_exactly_one_of_epsilon_and_noise(choice: dict[str, float]) -> None:
    with pytest.raises(PrivacyError, match="exactly one"):
        compare(**choice, **MNIST)  # type: ignore[arg-type]
