"""Statistics of sites over Flower: released under each site's policy and budget, and only where it allows them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.analytics.statistics import release_config
from fedspa.runs.config import flat

from .local_grid import POLICY, LocalGrid

SCHEMA = """
[data.table.columns]
age = {kind = "number", range = [0, 100]}
ward = {kind = "category", categories = ["a", "b"], missing = "indicator"}
ill = {kind = "flag", target = true}
"""
TABLE = tomllib.loads(SCHEMA)["data"]
RECORDS = (80, 120, 300)


@pytest.fixture
def federation(tmp_path: Path) -> Callable[..., LocalGrid]:
    """Three sites with a table each, one of them with a row that cannot be read; and a server with its own."""
    rng = np.random.default_rng(3)

    def write(path: Path, records: int, more: str = "") -> None:
        lines = [
            f"{rng.integers(20, 90)},{rng.choice(['a', 'b', ''])},{rng.choice(['true', 'false'])}"
            for _ in range(records)
        ]
        path.write_text("\n".join(["age,ward,ill", *lines]) + "\n" + more)

    write(tmp_path / "server.csv", 20)
    (tmp_path / "schema.toml").write_text(SCHEMA)

    def make(epsilon: float = 8.0, **node: Any) -> LocalGrid:
        nodes = {}
        for number, records in enumerate(RECORDS):
            home = tmp_path / f"site-{number}"
            home.mkdir()
            write(home / "rows.csv", records, "old,a,true\n" if number == 0 else "")
            policy = POLICY.format(epsilon=epsilon).replace("max_compression = 0.5", "max_compression = 1.0")
            (home / "policy.toml").write_text(policy)
            Ledger.open(home / "ledger.sqlite").close()
            nodes[100 + number] = {
                "agent": f"site-{number}",
                "data": str(home / "rows.csv"),
                "schema": str(tmp_path / "schema.toml"),
                "classes": 2,
                "policy": str(home / "policy.toml"),
                "ledger": str(home / "ledger.sqlite"),
                "statistics": True,
                **node,
            }
        config = fedspa.load(
            {
                "federation": {"agents": 3, "per_round": 3},
                "data": {**TABLE, "name": "server.csv", "dir": str(tmp_path), "holdout": 0.5},
                "privacy": {"noise_multiplier": 0.8, "delta": 1e-3},
            }
        )
        asked = release_config(config, {"bins": 10}, None, tmp_path / "run")
        run = {key: value for key, value in flat(asked).items() if value is not None and "columns" not in key}
        run |= {"data.table.columns": json.dumps(TABLE["table"]["columns"])}
        flower = {"records": 300, "round_timeout": 20.0, "start_timeout": 0.1, "poll": 0.01, "quorum": 1}
        return LocalGrid(nodes, run | {f"flower.{key}": value for key, value in flower.items()})

    return make


def test_sites_release_statistics_once(federation, train, tmp_path: Path) -> None:
    grid = federation(epsilon=20.0)
    summary = train(grid)
    assert summary["dropped"] == {}
    found = fedspa.Statistics.load(tmp_path / "run")
    assert len(found.sites) == 3
    assert found.value("records") == pytest.approx(sum(RECORDS), abs=8)  # without the row that cannot be read
    assert found.value("records", site=found.sites[2]) in [pytest.approx(each, abs=8) for each in RECORDS]
    for node in grid.nodes.values():
        with Ledger.open(Path(str(node["ledger"])), create=False) as ledger:
            (event,) = ledger.spent(str(node["agent"])).elements()
            assert event.rate == 1.0


def test_a_site_that_does_not_allow_statistics_refuses(federation, train) -> None:
    grid = federation(epsilon=20.0, statistics=False)
    summary = train(grid)
    assert summary["dropped"]["refused-terms"] == 3
    for node in grid.nodes.values():
        with Ledger.open(Path(str(node["ledger"])), create=False) as ledger:
            assert not ledger.spent(str(node["agent"]))


def test_the_budget_of_a_site_covers_statistics_too(federation, train) -> None:
    summary = train(federation(epsilon=1.0))
    assert summary["dropped"]["refused-budget"] == 3
