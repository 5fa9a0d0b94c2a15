"""docs/paper.md shows the kept results, line by line, and every statement in it has its test."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from intervals import half_interval
from reproduction import page, plot, table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper.md").read_text("utf-8")
KEPT = sorted(path.stem for path in page.RESULTS.glob("t*-*.json"))  # table-…, tradeoff-…


def test_the_page_is_what_the_results_say() -> None:
    """After a change: python -m reproduction.page fill."""
    assert page.filled(PAGE) == PAGE


def test_no_epsilon_is_rounded_down() -> None:
    cell = {"epsilon": 0.1385, "epsilon_worst_case": 100.4161, "members": 100, "accuracy_best": {"mean": 50.0}}
    row = {"algorithm": "cpsgd", "compression": 0.4, "adversary": "secure-aggregation", "published": cell}
    (line,) = page._cpsgd({"rows": [row | {"printed": {"diverged": True}}]})
    assert "ε = 0.139 (worst case 100.417)" in line


@pytest.mark.parametrize("name", KEPT)
def test_results_say_where_they_come_from(name: str) -> None:
    found = page.result(name)
    assert found is not None
    for part in (found, *found.get("parts", [])):
        assert part["command"].startswith(("python -m reproduction table ", "python -m reproduction tradeoff "))
        assert part["commits"]
        assert all(re.fullmatch(r"[0-9a-f]{7,40}", commit) for commit in part["commits"])
        assert part["hardware"]
    for line in page._origins(found):
        assert line in PAGE
    if name.startswith("table"):
        assert table.markdown(found) in PAGE
        assert ("Nothing follows from their accuracies" in PAGE) or not found["quick"]


@pytest.mark.parametrize("name", [name for name in KEPT if name.startswith("tradeoff")])
def test_pictures_show_the_kept_data(name: str) -> None:
    found = page.result(name)
    assert found is not None
    assert plot.fingerprint(found) in (ROOT / "docs" / "figures" / f"{name}.svg").read_text("utf-8")


@pytest.mark.parametrize("name", [name for name in KEPT if name.startswith("tradeoff")])
def test_no_p_below_one_does_better_than_one_beyond_doubt(name: str) -> None:
    """As the page says of every curve."""
    found = page.result(name)
    assert found is not None
    by = {(p["epsilon_target"], p["compression"]): p["accuracy_last"] for p in found["points"] if p["status"] == "done"}
    whole = {epsilon: accuracy for (epsilon, p), accuracy in by.items() if p == 1}
    assert len(whole) >= 4
    for (epsilon, p), accuracy in by.items():
        if p < 1 and epsilon in whole:
            halves = [half_interval(each["values"]) for each in (accuracy, whole[epsilon])]
            if None not in halves:  # of one seed nothing is said
                assert accuracy["mean"] - whole[epsilon]["mean"] <= sum(filter(None, halves)), (epsilon, p)


def test_every_statement_about_the_paper_has_its_test() -> None:
    defined = set(
        re.findall(r"^def (test_\w+)", (ROOT / "reproduction" / "tests" / "test_claims.py").read_text("utf-8"), re.M)
    )
    cited = set(re.findall(r"\*(test_\w+)\*", PAGE))
    assert cited == defined


def test_fedavg_with_a_falling_step_is_the_kept_result() -> None:
    found = json.loads((page.RESULTS / "mnist-fedavg-decay.json").read_text("utf-8"))
    assert f"reaches {found['accuracy']:.2f} ± {found['accuracy_interval']:.2f} %" in PAGE


@pytest.mark.parametrize("name", [name for name in KEPT if name.startswith("table")])
def test_every_cell_has_one_origin(name: str) -> None:
    found = page.result(name)
    assert found is not None
    named = [key for part in found["parts"] for key in part["cells"]]
    assert len(named) == len({*named})
    assert {*named} <= {*page._cells(found)}
