"""The search along what is known: on functions whose best point is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspa.runs.halving import Settings
from fedspa.tuning.search import CLIP, RATE, Search, apart

START: dict[str, Any] = {RATE: 10.0, CLIP: 0.1, "algorithm.ema": 0.8}


def hill(rate: float, clip: float) -> Any:
    """Best where rate × clip and clip are these; falls with the distance in octaves."""

    def score(settings: Settings) -> list[float]:
        product = float(settings[RATE]) * float(settings[CLIP])
        away = abs(math.log2(product / (rate * clip))) + 0.1 * abs(math.log2(float(settings[CLIP]) / clip))
        return [-away, -away - 0.01]

    return score


@given(st.floats(0.05, 2000), st.floats(0.01, 1))
def test_it_comes_within_a_step_of_the_best(rate: float, clip: float) -> None:
    search = Search(hill(rate, clip))
    found = search.run(START, {}, local=False)
    product = float(found[RATE]) * float(found[CLIP])
    assert abs(math.log(product / (rate * clip))) <= math.log(3)
    assert abs(math.log(float(found[CLIP]) / clip)) <= math.log(3) * 1.05
    assert len(search.found) <= 30


def test_the_clip_moves_with_the_rate_against_it() -> None:
    tried: list[Settings] = []
    Search(lambda settings: tried.append(settings) or [0.0]).run(START, {}, local=False)
    products = [float(s[RATE]) * float(s[CLIP]) for s in tried if s[CLIP] != START[CLIP]]
    assert products == pytest.approx([1.0, 1.0], rel=0.01)  # three digits are kept


def test_nothing_is_scored_twice_and_chance_moves_nothing() -> None:
    tried: list[Any] = []

    def noisy(settings: Settings) -> list[float]:
        tried.append(tuple(sorted(settings.items())))
        return [0.5, 0.5] if settings == START else [0.9, 0.12]  # better on average, and not by more than chance

    assert Search(noisy).run(START, {}, local=False) == START
    assert len(tried) == len(set(tried))


def test_declared_values_are_tried_in_place_of_its_own() -> None:
    tried: list[Settings] = []

    def score(settings: Settings) -> list[float]:
        tried.append(settings)
        return [1.0 if settings.get("algorithm.server") == "momentum" else 0.0]

    space = {RATE: [5.0, 20.0], "algorithm.ema": [0.3], "algorithm.server": ["average", "momentum"]}
    found = Search(score).run(START, space, local=False)
    assert found["algorithm.server"] == "momentum"
    assert {s[RATE] for s in tried if s[CLIP] == START[CLIP]} == {10.0, 5.0, 20.0}
    assert {s["algorithm.ema"] for s in tried} == {0.8, 0.3}


def test_what_diverged_is_no_candidate() -> None:
    search = Search(lambda settings: [] if settings[RATE] != 10.0 else [0.1])
    assert search.run(START, {}, local=False)[RATE] == 10.0
    assert all(settings[RATE] == 10.0 for settings in search.ranking)


@pytest.mark.parametrize(("factor", "kept"), [(1.2, 1), (2.0, 2)])
def test_candidates_for_trials_lie_apart(factor: float, kept: int) -> None:
    assert len(apart([START, {**START, RATE: 10.0 * factor}], 4)) == kept


def test_a_gain_beats_only_what_it_passes_by_more_than_its_own_spread() -> None:
    """Of fifteen comparisons two or three pass a standard error by chance alone."""
    scores = {"old": [0.5] * 6, "noisy": [0.55, 0.51, 0.56, 0.48, 0.55, 0.49], "steady": [0.55, 0.54, 0.56] * 2}
    search = Search(lambda settings: scores[str(settings["algorithm.server"])])
    old, noisy, steady = ({"algorithm.server": name} for name in scores)
    assert not search.beats(noisy, old)
    assert search.beats(steady, old)
    assert not search.beats(old, old)
