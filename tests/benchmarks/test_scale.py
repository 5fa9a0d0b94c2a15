"""The benchmark of growth: its slopes, and a small sweep."""

from __future__ import annotations

import pytest

import scale


def test_slope_is_the_exponent_of_the_upper_half() -> None:
    points = [(float(x), 50.0 if x < 8 else 3 * x**1.5) for x in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert scale.slope(points[3:]) == pytest.approx(1.5)
    assert scale.slope(points) == pytest.approx(1.5, abs=0.1)


def test_only_what_is_named_varies() -> None:
    for name, rounds in scale.VARIED.items():
        for value, each in rounds.items():
            seen = {"agents": each.agents, "d": each.d, "k": each.active, "tau": each.steps, "B": each.batch}
            middle = {"agents": 8, "d": scale.D, "k": round(0.1 * scale.D), "tau": 20, "B": 16}
            moved = {key for key in seen if seen[key] != middle[key]} - {name}
            assert seen[name] == value
            assert moved <= ({"k"} if name == "d" else set())  # k stays a tenth of d


@pytest.mark.parametrize("engine", ["native", "generic"])
def test_a_sweep_of_two_rounds(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "in_fresh_process", lambda measure, *arguments: measure(*arguments))
    small = scale.Round(agents=1, hidden=4, steps=1, batch=2)
    result = scale.vary({1: small, 2: scale.replace(small, agents=2)}, engine, repeats=1, cores=1)
    assert [row["value"] for row in result["rows"]] == [1, 2]
    assert all(row["ms"] > 0 for row in result["rows"])
