"""The documentation's tables are the kept results, and every kept result says where it comes from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import tables

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


@pytest.mark.parametrize("page", sorted({page for page, _ in tables.TABLES.values()}))
def test_a_marker_begins_a_table_or_stands_within_a_line(page: str) -> None:
    """Elsewhere Markdown takes what follows it for HTML."""
    for line in (ROOT / page).read_text("utf-8").splitlines():
        if "<!-- table: " in line and not line.endswith("-->"):
            assert re.match(r"\s*[^\s<]", line), line


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path) -> None:
    provenance = json.loads(path.read_text("utf-8"))["provenance"]
    assert provenance["command"].startswith("python benchmarks/")
    assert re.fullmatch(r"[0-9a-f]{12}\+?", provenance["commit"])
    assert re.match(r"\d{4}-\d\d-\d\dT", provenance["date"])
    assert {"cpu", "cores", "memory_gib"} == provenance["hardware"].keys()
    assert provenance["versions"]["torch"]


def test_a_changed_result_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text("utf-8"))
    kept["varied"]["d"]["time_slope"] += 1
    (tmp_path / "scale.json").write_text(json.dumps(kept), "utf-8")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = (ROOT / "docs" / "engine.md").read_text("utf-8")
    assert tables.put(text, "scale") != text


def test_a_missing_result_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.table("scale") == "Not measured yet: `benchmarks/results/scale.json` is missing.\n"


def test_readme_has_a_command_for_every_benchmark() -> None:
    lines = (ROOT / "benchmarks" / "README.md").read_text("utf-8").splitlines()
    helpers = {"provenance.py", "intervals.py", "sentences.py", "accuracy.py", "ending.py", "zoo_models.py"}
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - helpers
    assert scripts == {match[1] for line in lines if (match := re.match(r"\| `(\w+\.py)` \|", line))}
    for script in scripts:
        assert any(f"`python benchmarks/{script}" in line for line in lines), script
