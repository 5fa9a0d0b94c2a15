"""The benchmark of secure aggregation runs, and compares like with like."""

from __future__ import annotations

import math

import pytest

import secagg
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.session import Session


def test_a_small_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secagg, "RECORDS", 8)
    found = secagg.case(5, 300, 2)
    bits = found["bits"]
    assert found["equal_to_the_bit"]
    assert found["bytes"] == 56 + math.ceil((300 + math.ceil(64 / bits)) * bits / 8)
    assert found["plain_bytes"]["words_of_the_sum"] == math.ceil(300 * bits / 8)
    assert found["plain_bytes"]["fewest_bits_of_a_member"] < found["plain_bytes"]["words_of_the_sum"]
    assert found["times_plain"]["int16"] == pytest.approx(found["bytes"] / 600)
    assert found["train_ms"]["median"] > 0
    assert found["loopback"]["masked_s"]["lowest"] > 0


def test_lengths() -> None:
    publics = {name: SecretKey.generate().public for name in "ab"}
    session = Session("run", 1, 1, publics, bytes(32), -100, 100, 1000)
    found = secagg.lengths(session, 15)
    assert found["bytes"] == 56 + 1008
    assert found["plain_bytes"] == {"words_of_the_sum": 1000, "fewest_bits_of_a_member": 625, "int16": 2000}
