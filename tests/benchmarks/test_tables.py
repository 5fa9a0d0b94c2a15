"""The documentation's tables are the kept results, and every kept result says where it comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import accuracy
import seeds
import tables
from fedspa.runs.config import load
from fedspa.runs.guarantee import SEEDED
from reproduction import rows
from reproduction.rows import FIRST_SEED, TRIAL_KINDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", tables.TABLES)
def test_the_page_has_what_was_kept(name: str) -> None:
    page, _ = tables.TABLES[name]
    text = (ROOT / page).read_text("utf-8")
    assert tables.put(text, name) == text, f"run `python benchmarks/tables.py`: {page} is not what the results say"


@pytest.mark.parametrize("page", sorted({page for page, _ in tables.TABLES.values()}))
def test_every_place_for_a_table_has_one(page: str) -> None:
    named = re.findall(r"<!-- table: (\S+) -->", (ROOT / page).read_text("utf-8"))
    assert sorted(named) == sorted(name for name, (of, _) in tables.TABLES.items() if of == page)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path) -> None:
    provenance = json.loads(path.read_text("utf-8"))["provenance"]
    assert provenance["command"].startswith("python benchmarks/")
    assert re.fullmatch(r"[0-9a-f]{12}\+?", provenance["commit"])
    assert re.match(r"\d{4}-\d\d-\d\dT", provenance["date"])
    assert {"cpu", "cores", "memory_gib"} == provenance["hardware"].keys()
    assert provenance["versions"]["torch"]


# Results are never of seeds that settings were chosen with.

RESULTS = seeds.LOG.parent / "results"


def test_the_log_names_them() -> None:
    assert seeds.of_trials("**Seeds of trials**: 0 to 2, 7, 10 to 11\n") == {0, 1, 2, 7, 10, 11}
    used = seeds.of_trials(seeds.LOG.read_text("utf-8"))
    assert {0, 4, 905, 914} <= used
    assert not used & set(range(FIRST_SEED, FIRST_SEED + 1000))


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


# The kept results of docs/accuracy.md come from the configs as they are.


def test_every_audit_holds() -> None:
    kept = json.loads((ROOT / "reproduction" / "results" / "audits.json").read_text("utf-8"))
    assert {*kept["audits"]} == {*accuracy.CONFIGS}
    assert not kept["provenance"]["commit"].endswith("+")
    for report in kept["audits"].values():
        assert report["holds"]
        assert all(check["holds"] for check in report["checks"])


@pytest.mark.parametrize("name", accuracy.CONFIGS)
def test_kept_results_are_those_of_their_config(name: str) -> None:
    kept = json.loads((ROOT / "reproduction" / "results" / f"{name}.json").read_text("utf-8"))
    config = load(rows.find_config(name))
    assert config.data.holdout == 0
    assert not {run["seed"] for run in kept["summaries"]} & seeds.of_trials(seeds.LOG.read_text("utf-8"))
    for run in kept["summaries"]:
        assert run["rounds"] == config.federation.rounds
        assert run["private"] is True or run["not_private_because"] == SEEDED
        assert run["adversary"] == config.privacy.adversary
        assert run["neighbours"] == (config.privacy.neighbours or "add-remove")
        assert run["epsilon"] <= config.privacy.epsilon
        if not isinstance(config.algorithm.compression, list):
            assert run["compression"] == pytest.approx(config.algorithm.compression, abs=0.001)
        assert run["delta"] == config.privacy.delta
