"""Where a simulation's private randomness starts: the seed decides it where there is no ε, or where it was asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import ALGORITHMS, small
from small_sums import SUMS

from fedspa.runs.config import load
from fedspa.runs.records import root_of

NOISY = {
    **{name: sections for name, sections in ALGORITHMS.items() if name != "fedavg"},
    **{f"{name}, in sums": sections for name, sections in SUMS.items()},
}


def with_noise(noise: str, sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {**sections, "privacy": {**sections.get("privacy", {}), "noise": noise}}


@pytest.mark.parametrize("name", NOISY)
def test_whoever_adds_noise_draws_it_anew(tmp_path: Path, name: str) -> None:
    for noise in ("secure", "exact"):
        config = load(small(tmp_path / "run", **with_noise(noise, NOISY[name])))
        assert root_of(config) != root_of(config)


@pytest.mark.parametrize("noise", ["secure", "exact", "seeded"])
def test_without_noise_the_seed_decides(tmp_path: Path, noise: str) -> None:
    one, same = (load(small(tmp_path / "run", **with_noise(noise, ALGORITHMS["fedavg"]))) for _ in range(2))
    assert root_of(one) == root_of(same)
    other = load(small(tmp_path / "run", **with_noise(noise, {**ALGORITHMS["fedavg"], "run": {"seed": 5}})))
    assert root_of(other) != root_of(one)
