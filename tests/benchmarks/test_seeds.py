"""Results are never of seeds that settings were chosen with."""

from __future__ import annotations

import pytest

import seeds
from fedspa.paper.rows import FIRST_SEED


def test_the_log_names_them() -> None:
    assert seeds.of_trials("**Seeds of trials**: 0 to 2, 7, 10 to 11\n") == {0, 1, 2, 7, 10, 11}
    used = seeds.of_trials(seeds.LOG.read_text("utf-8"))
    assert {0, 4, 905, 914} <= used
    assert not used & set(range(FIRST_SEED, FIRST_SEED + 1000))


@pytest.mark.parametrize("log", ["", "**Seeds of trials**: 1\n**Seeds of trials**: 2\n"])
def test_one_line_names_them_all(log: str) -> None:
    with pytest.raises(SystemExit, match="it must have one"):
        seeds.of_trials(log)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (914, 1), (790, 20)])
def test_a_seed_of_a_trial_is_refused(first: int, count: int) -> None:
    with pytest.raises(SystemExit, match=r"experiments/log\.md"):
        seeds.fresh(first, count)
    assert list(seeds.fresh(5000, 2)) == [5000, 5001]
