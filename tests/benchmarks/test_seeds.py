"""Results are never of seeds that settings were chosen with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import seeds
from reproduction.rows import FIRST_SEED, TRIAL_KINDS

RESULTS = seeds.LOG.parent / "results"


def test_the_log_names_them() -> None:
    assert seeds.of_trials("**Seeds of trials**: 0 to 2, 7, 10 to 11\n") == {0, 1, 2, 7, 10, 11}
    used = seeds.of_trials(seeds.LOG.read_text("utf-8"))
    assert {0, 4, 905, 914} <= used
    assert not used & set(range(FIRST_SEED, FIRST_SEED + 1000))


@pytest.mark.parametrize("log", ["", "**Seeds of trials**: 1\n**Seeds of trials**: 2\n"])
def test_one_line_names_them_all(log: str) -> None:
    with pytest.raises(SystemExit, match="it must have one"):
        seeds.of_trials(log)


@pytest.mark.parametrize(
    "words", ["0–99", "0-99", "0 to99", "800 to 999.", "0 to 9 and 12", "1,000", "99 to 0", "0 to"]
)
def test_a_range_in_other_words_is_refused_and_not_read_as_its_ends(words: str) -> None:
    text = f"**Seeds of trials**: {words}\n"
    with pytest.raises(SystemExit, match=r"Seeds of trials.* must read as"):
        seeds.of_trials(text)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (914, 1), (790, 20)])
def test_a_seed_of_a_trial_is_refused(first: int, count: int) -> None:
    with pytest.raises(SystemExit, match=r"reproduction/log\.md"):
        seeds.fresh(first, count)
    assert list(seeds.fresh(5000, 2)) == [5000, 5001]


def test_no_epsilon_is_not_an_epsilon_of_zero() -> None:
    assert seeds.largest([1.0, 2.0]) == 2.0
    assert seeds.largest([1.0, None]) is None


@pytest.mark.parametrize("path", sorted(RESULTS.glob("t*-*.json")), ids=lambda path: path.stem)
def test_the_papers_tables_and_curves_have_none_of_them(path: Path) -> None:
    kept = json.loads(path.read_text("utf-8"))
    shown = [
        cell
        for row in kept.get("points", kept.get("rows"))
        for cell in (row, *(row.get(kind, {}) for kind in TRIAL_KINDS))
        if "accuracy_last" in cell
    ]
    assert shown
    for cell in shown:
        seeds.fresh(cell.get("first_seed") or 0, cell["seeds"])


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_no_kept_run_has_one_of_them(path: Path) -> None:
    """Where a result keeps the summaries of its runs."""
    for summary in json.loads(path.read_text("utf-8")).get("summaries", []):
        seeds.fresh(summary["seed"], 1)
