"""docs/paper.md shows the kept results, line by line, and every statement in it has its test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

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
    cell = {"epsilon": 0.1385, "epsilon_floor": 100.4161, "members": 100, "accuracy_best": {"mean": 50.0}}
    row = {"algorithm": "cpsgd", "compression": 0.4, "adversary": "secure-aggregation", "published": cell}
    (line,) = page._cpsgd({"rows": [row | {"printed": {"diverged": True}}]})
    assert "ε = 0.139 (floor 100.417)" in line


def test_a_spread_of_one_figure_is_one_figure() -> None:
    points = [
        {"epsilon_target": epsilon, "status": "done", "accuracy_last": {"mean": mean}, "compression": p}
        for epsilon, best in ((0.5, 90.06), (1.0, 95.13))
        for mean, p in ((best, 1.0), (95.02 if best > 95 else 90.0, 0.1))
    ]
    assert page._best({"points": points}).endswith("between the best and the worst p lie 0.1 points.")
    points[0]["accuracy_last"] = {"mean": 91.5}
    assert page._best({"points": points}).endswith("lie 0.1 to 1.5 points.")


@pytest.mark.parametrize("name", [name for name in KEPT if name.startswith("tradeoff")])
def test_at_no_epsilon_does_a_p_below_one_do_better_than_chance_allows(name: str) -> None:
    """As the page says of Figure 1: by no more than the confidence intervals of the two."""
    assert "At\nno ε of our curves does a p below 1 do better than p = 1" in PAGE
    found = page.result(name)
    assert found is not None
    points = {
        (point["epsilon_target"], point["compression"]): point["accuracy_last"]["values"] for point in found["points"]
    }
    for (epsilon, p), values in points.items():
        full = points[epsilon, 1.0]
        reach = sum(half_interval(each) or 0.0 for each in (values, full))
        assert fmean(values) - fmean(full) <= reach, (epsilon, p)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_every_part_has_its_place(name: str) -> None:
    for part in ("table", "findings", "curve"):
        assert PAGE.count(f"<!-- {part}: {name} -->\n") == 1


@pytest.mark.parametrize("name", KEPT)
def test_results_say_where_they_come_from(name: str) -> None:
    found = page.result(name)
    assert found is not None
    for part in (found, *found.get("parts", [])):
        assert part["command"].startswith(("fedspa table ", "fedspa tradeoff "))
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
def test_nothing_in_a_picture_is_cut_off(name: str) -> None:
    figure = plot.picture(page.result(name) or {})
    figure.draw_without_rendering()
    (axes,) = figure.axes
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width, text.get_text()
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height, text.get_text()


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


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", PAGE) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / "docs" / link).resolve().exists(), link


def test_fedavg_with_a_falling_step_is_the_kept_result() -> None:
    found = json.loads((page.RESULTS / "mnist-fedavg-decay.json").read_text("utf-8"))
    assert f"reaches {found['accuracy']:.2f} ± {found['accuracy_interval']:.2f} %" in PAGE


def test_keep_takes_over_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "table.json"
    source.write_text(json.dumps({"command": "fedspa table mnist", "rows": []}))
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    page.keep(source, "table-mnist", "A copy.")
    found = page.result("table-mnist")
    assert found is not None
    assert found["note"] == "A copy."
    page.keep(source, "tradeoff-mnist", "A copy.")
    page.keep(source, "tradeoff-mnist", None)
    assert (again := page.result("tradeoff-mnist")) is not None
    assert again["note"] == "A copy."
    assert page.result("table-cifar10") is None
    assert "Not run yet." in page.filled("<!-- table: cifar10 -->\n<!-- end -->\n")


def _kept(**cells: Any) -> dict[str, Any]:
    """A table whose rows are cpSGD's under secure aggregation: `p04=1.0` has p = 0.4 and a cell of 1.0."""
    rows = [
        {"algorithm": "cpsgd", "compression": int(p[1:]) / 10, "adversary": "secure-aggregation", "published": cell}
        for p, cell in cells.items()
    ]
    return {
        "command": f"fedspa table mnist --rows {','.join(cells)}",
        "commits": ["a"],
        "hardware": ["b"],
        "rows": rows,
    }


def _parts(found: dict[str, Any]) -> list[list[str]]:
    return [page._names(found, part) for part in found["parts"]]


def test_rows_that_were_not_run_again_stay() -> None:
    order = [f"cpsgd-{p}-secure-aggregation" for p in ("0.1", "0.4", "0.5", "1")]
    old, new = _kept(p10=1.0, p04=2.0), _kept(p04=3.0, p01=4.0)
    found = page.merged(old, new, order)
    assert [(row["compression"], row["published"]) for row in found["rows"]] == [(0.1, 4.0), (0.4, 3.0), (1.0, 1.0)]
    assert found["command"] == old["command"]
    assert _parts(found) == [[order[0], order[1]]]
    assert found["parts"][0]["command"] == new["command"]
    again = page.merged(found, _kept(p04=5.0, p05=6.0), order)
    assert _parts(again) == [[order[0]], [order[1], order[2]]]
    whole = _kept(p01=0, p04=0, p05=0, p10=0)
    assert page.merged(again, whole, order) == whole


def test_cells_that_were_not_run_again_stay() -> None:
    order = ["cpsgd-0.4-secure-aggregation"]
    old, new = _kept(p04="old"), _kept(p04=None)
    old["rows"][0] |= {"tuned": "old", "cost": 3.0}
    new["rows"][0] |= {"tuned": "new", "cost": None}
    del new["rows"][0]["published"]
    found = page.merged(old, new, order)
    assert {key: found["rows"][0][key] for key in ("published", "tuned", "cost")} == {
        "published": "old",
        "tuned": "new",
        "cost": 3.0,
    }
    assert _parts(found) == [["cpsgd-0.4-secure-aggregation-tuned"]]
    assert _parts(page.merged(found, new, order)) == [["cpsgd-0.4-secure-aggregation-tuned"]]
    assert page.merged(found, old, order) == old


def test_a_row_whose_cells_were_all_run_again_keeps_no_old_origin() -> None:
    order = [f"cpsgd-{p}-secure-aggregation" for p in ("0.4", "1")]
    whole, tuned = _kept(p04={}) | {"commits": ["c"]}, _kept(p04=None)
    whole["rows"][0] |= {"tuned": {}}
    tuned["rows"][0] |= {"tuned": {}}
    del tuned["rows"][0]["published"]
    found = page.merged(_kept(p04={}, p10={}), whole, order)
    for new in (tuned, _kept(p04={})):
        found = page.merged(found, new, order)
    assert _parts(found) == [[f"{order[0]}-tuned"], [f"{order[0]}-published"]]
    assert not any("commit c" in line for line in page._origins(found))


@pytest.mark.parametrize("name", [name for name in KEPT if name.startswith("table")])
def test_every_cell_has_one_origin(name: str) -> None:
    found = page.result(name)
    assert found is not None
    named = [key for part in found["parts"] for key in part["cells"]]
    assert len(named) == len({*named})
    assert {*named} <= {*page._cells(found)}


def test_every_part_of_a_table_says_where_it_comes_from() -> None:
    cell = {"first_seed": 2000}
    part = _kept(p04=0) | {"commits": ["c"], "cells": ["cpsgd-0.4-secure-aggregation-published"]}
    found = _kept(p04=cell) | {"parts": [part]}
    (later,) = page._origins(found)
    assert page._origins(found | {"note": "A copy."}) == [later, "A copy."]
    first, again = page._origins(found | {"rows": [*found["rows"], *_kept(p05=cell)["rows"]]})
    assert first.startswith("All other rows: `fedspa table")
    assert again == later
    assert later.startswith("cpsgd-0.4-secure-aggregation: `fedspa table")
    assert "commit c" in later
    assert later.endswith("Seeds from 2000 on: no setting was tried on them.")


def test_findings_are_told_from_the_figures() -> None:
    def accuracy(mean: float) -> dict[str, object]:
        return {"mean": mean, "std": 0.5, "values": [mean - 0.5, mean, mean + 0.5]}

    def row(algorithm: str, p: float, printed: float, published: float, verified: float) -> dict[str, object]:
        cell = {"accuracy_best": accuracy(published), "epsilon": 0.3}
        sound = {"accuracy_last": accuracy(verified), "payload_bytes": 1000 * p}
        return {
            "algorithm": algorithm,
            "compression": p,
            "adversary": "local",
            "printed": {"accuracy": printed},
            "published": cell,
            "verified": sound,
        }

    rows = [
        row("fedspa", 0.1, 92.0, 20.0, 86.0),
        row("fedspa", 1.0, 94.0, 91.5, 87.0),
        row("fedavg", 1.0, 96.9, 98.4, 0),
    ]
    found = {"rows": rows}
    assert page._fedavg(found) == ["**FedAvg: reproduced.** 98.40 % at best, 96.90 printed."]
    assert page._published(found)[0].startswith("**The private rows at the published noise: not reproduced.** 20.0")
    assert (
        "a spread of 1.0 points, and the means are known to ± 1.2 at worst." in page._sound(found, "verified", "x")[0]
    )
    assert "shrinks 10 times" in page._sound(found, "verified", "x")[0]
