"""docs/choosing.md: its sentences say what its kept figures say (tests/benchmarks/test_tables.py holds the tables)."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from fedspa.mechanisms.gaussian.calibrate import noise_multiplier
from fedspa.runs.config import load

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "choosing.md").read_text("utf-8").split())


def test_the_price_of_half_the_budget() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "choosing.json").read_text("utf-8"))["rows"]
    noise = [row["noise_multiplier"] for row in rows if row["key"] == "privacy.epsilon"]
    ratios = [more / less for more, less in pairwise(noise)]
    assert f"Half the ε takes {min(ratios):.1f} to {max(ratios):.1f} times the noise" in PAGE


def test_the_price_of_a_smaller_delta() -> None:
    quickstart = load(None)
    epsilon, batch, steps = quickstart.privacy.epsilon, quickstart.algorithm.batch, quickstart.algorithm.local_steps
    assert epsilon is not None
    large, small = (
        noise_multiplier(
            epsilon, delta, sampling="poisson", batch=batch, records=144, steps=steps,
            participations=quickstart.federation.rounds, neighbours="add-remove",
        )
        for delta in (1e-3, 1e-5)
    )  # fmt: skip
    assert f"From 10⁻³ to 10⁻⁵ takes some {round(10 * (small / large - 1)) * 10} % more noise." in PAGE
