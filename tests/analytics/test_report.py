"""Reports of runs that released statistics or scores."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

import fedspa
from fedspa.report import render
from fedspa.report.parts import page
from fedspa.report.record import read

COLUMNS = {
    "age": {"kind": "number", "range": [0, 100]},
    "town": {"kind": "category", "categories": ["<b>north</b>", "south"]},
    "sick": {"kind": "flag", "target": True},
}


def federation(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Write a table of two sites; return it and a config that trains on it."""
    rng = np.random.default_rng(3)
    lines = ["site,part,age,town,sick"]
    for number in range(400):
        town = ("<b>north</b>", "south")[rng.integers(2)]
        age, part = rng.integers(20, 90), "test" if number < 40 else "train"
        lines.append(f"{'ab'[number % 2]},{part},{age},{town},{'yes' if age > 60 else 'no'}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    return tmp_path, {
        "federation": {"agents": 2, "per_round": 2, "rounds": 2},
        "data": {
            "name": "table.csv",
            "dir": str(tmp_path),
            "agent_holdout": 0.4,
            "table": {"agent": "site", "split": "part", "columns": COLUMNS},
        },
        "algorithm": {"batch": 10, "server": "average"},
        "privacy": {"epsilon": 5.0, "delta": 1e-4},
        "run": {"out": str(tmp_path / "trained")},
    }


def released(tmp_path: Path) -> tuple[fedspa.Statistics, fedspa.Evaluation]:
    folder, config = federation(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fedspa.statistics(config, epsilon=8.0, by_class=True, out=folder / "stats")
        run = fedspa.run(config)
        return found, fedspa.evaluate(run.folder, epsilon=8.0, out=folder / "scores")


def test_pages(tmp_path: Path) -> None:
    found, scores = released(tmp_path)
    for each, titles in ((found, {"age, true", "town, false"}), (scores, {"AUC by agent", "Calibration"})):
        assert each.folder is not None
        record = read(each.folder)
        [run] = page([record]).runs
        assert titles <= {figure.title for figure in run.numbers.figures}
        text = render([record])
        assert "<b>north" not in text
        assert "Released numbers" in text
        assert "by round" not in text
        # Each number of the table is on the page, for all agents and for each.
        shown = {cell for _, _, rows in run.numbers.tables for row in rows for cell in row}
        assert all(cell in text for cell in shown if "<" not in cell)
        assert [name for name, *_ in run.numbers.tables] == ["All agents", *each.sites]


def test_beside_a_training(tmp_path: Path) -> None:
    """Runs that train are drawn by round; those that release numbers have no rounds to compare."""
    released(tmp_path)
    alone, both = (page([read(tmp_path / name) for name in names]) for names in (["trained"], ["trained", "stats"]))
    assert [figure.curves for figure in both.figures if figure.key != "epsilon"] == [
        figure.curves for figure in alone.figures if figure.key != "epsilon"
    ]
    assert [row[0] for row in both.comparison] == ["trained", "stats"]
