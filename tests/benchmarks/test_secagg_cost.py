"""The benchmark of secure aggregation runs, and compares like with like."""

from __future__ import annotations

import pytest

import secagg


def test_a_small_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secagg, "RECORDS", 4)
    found = secagg.case(3, 300, 2)
    assert found["equal_to_the_bit"]
    assert found["bits"] == 8  # ±(3·8 + 32·√3): 161 sums
    assert found["bytes"] == 56 + 300 + 8
    assert found["plain_bytes"] == {"words_of_the_sum": 300, "fewest_bits_of_a_member": 263, "int16": 600}
    assert found["times_plain"]["int16"] == pytest.approx(364 / 600)
    assert found["train_ms"]["median"] > 0
    assert found["loopback"]["masked_s"]["lowest"] > 0
