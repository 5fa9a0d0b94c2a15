"""The comparison table: its rows, its fields, and what it warns of."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.compare import Comparison, rows, warnings

MNIST: dict[str, Any] = {"batch": 10, "records": 600, "local_steps": 300, "participations": 5, "delta": 1e-3}
KEYS = [
    ("verified", "poisson", "add-remove", "pld"),
    ("verified", "poisson", "add-remove", "rdp"),
    ("verified", "poisson", "replace-one", "pld"),
    ("verified", "fixed", "replace-one", "pld"),
    ("verified", "fixed", "replace-one", "rdp"),
    ("published", "fixed", "replace-one", "theorem-1"),
    ("published-corrected", "fixed", "replace-one", "theorem-1"),
]


def test_fields_are_the_agreed_ones() -> None:
    assert [f.name for f in fields(Comparison)] == [
        "method",
        "sampling",
        "neighbours",
        "accountant",
        "noise",
        "epsilon",
        "sound",
    ]
    row = rows(noise=5.0, **MNIST)[0]
    with pytest.raises(FrozenInstanceError):
        row.sound = True  # type: ignore[misc]


def test_noise_for_an_epsilon() -> None:
    table = rows(epsilon=1.0, **MNIST)
    assert [(r.method, r.sampling, r.neighbours, r.accountant) for r in table] == KEYS
    assert [r.noise for r in table] == pytest.approx([1.83, 2.03, 3.33, 4.12, 7.71, 9.30, 13.15], rel=0.01)
    assert [r.sound for r in table] == [True, True, True, True, True, False, False]
    assert all(0.99 < r.epsilon <= 1.0 for r in table[:5])
    assert [r.epsilon for r in table[5:]] == pytest.approx([1.0, 1.0])


def test_epsilon_at_a_noise() -> None:
    table = rows(noise=9.291, **MNIST)
    assert [(r.method, r.sampling, r.neighbours, r.accountant) for r in table] == KEYS
    assert {r.noise for r in table} == {9.291}
    poisson_pld, poisson_rdp, replaced, fixed_pld, fixed_rdp, published, corrected = (r.epsilon for r in table)
    assert published == pytest.approx(1.0, rel=1e-3)
    assert fixed_pld == pytest.approx(0.33, rel=0.02)  # what the paper's noise truly gives
    assert corrected > published > fixed_rdp > fixed_pld > replaced > poisson_rdp > poisson_pld


def test_corrected_is_sound_where_the_range_holds() -> None:
    table = rows(noise=2.0, batch=1, records=10**5, local_steps=10**4, participations=10**5, delta=0.5)
    assert [r.sound for r in table[5:]] == [False, True]
    told = warnings(table, batch=1, records=10**5, local_steps=10**4, participations=10**5, delta=0.5)
    assert any(w.startswith("published-corrected") and "inside the range" in w for w in told)
    assert any("1/records" in w for w in told)
    assert table[3].epsilon <= table[6].epsilon  # and the verified ε agrees that it holds


def test_warnings_name_both_faults() -> None:
    told = warnings(rows(epsilon=1.0, **MNIST), **MNIST)
    assert any(w.startswith("published:") and "√2" in w for w in told)
    assert any(w.startswith("published:") and "outside the range" in w for w in told)
    assert any(w.startswith("published-corrected:") and "outside the range" in w and "3.1" in w for w in told)
    assert any("verified epsilon 0.3267" in w for w in told)
    assert not any("1/records" in w for w in told)


@pytest.mark.parametrize("choice", [{}, {"epsilon": 1.0, "noise": 1.0}])
def test_exactly_one_of_epsilon_and_noise(choice: dict[str, float]) -> None:
    with pytest.raises(PrivacyError, match="exactly one"):
        rows(**choice, **MNIST)  # type: ignore[arg-type]
