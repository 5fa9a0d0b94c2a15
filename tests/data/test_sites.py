"""A table per agent: `data.name = "sites/*.csv"`, `from_agents` of tables, and agents by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import ConfigError, DataError
from fedspa.tuning.suggest import suggest_for

SCHEMA: dict[str, Any] = {
    "columns": {"age": {"kind": "number", "range": [0, 100]}, "ill": {"kind": "flag", "target": True}}
}
TABLE = {**SCHEMA, "columns": {**SCHEMA["columns"], "patient": {"kind": "ignore"}}}
SIZES = {"north": 30, "south": 50, "west hospital": 40}


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """A folder with a file per site; ids of patients begin at 1 in each of them."""
    folder = tmp_path / "sites"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, records in SIZES.items():
        ages = random.integers(0, 100, records)
        rows = [f"{1 + i // 2},{age},{'yes' if age > 50 else 'no'}" for i, age in enumerate(ages)]
        (folder / f"{name}.csv").write_text("\n".join(["patient,age,ill", *rows]) + "\n")
    return folder


def config(sites: Path, **data: Any) -> dict[str, Any]:
    return {
        "federation": {"agents": 3, "per_round": 3, "rounds": 1},
        "data": {"name": "sites/*.csv", "dir": str(sites.parent), "holdout": 0.2, "table": TABLE, **data},
        "algorithm": {"local_steps": 1, "batch": 4},
        "privacy": {"epsilon": 4.0},
        "run": {"out": str(sites.parent / "out")},
    }


def test_agents_have_the_names_of_their_files_everywhere(sites: Path) -> None:
    result = fedspa.run(config(sites), progress=False)
    names = list(SIZES)
    assert result.summary["agent_names"] == names
    with Ledger.open(sites.parent / "ledger.sqlite", create=False) as ledger:  # shared by the runs beside it
        assert {name: sum(ledger.spent(name).values()) for name in names} == dict.fromkeys(names, 1)
    page = (result.folder / "report.html").read_text("utf-8")
    assert all(name in page for name in names)
    assert "agent-0" not in page


def test_a_frame_per_agent_is_what_the_files_are(sites: Path) -> None:
    pandas = pytest.importorskip("pandas")
    given = config(sites)
    frames = {name: fedspa.from_table(pandas.read_csv(sites / f"{name}.csv"), TABLE) for name in SIZES}
    given["data"] = {"holdout": 0.2}
    given["run"]["seed"] = 3
    given["privacy"]["noise"] = "seeded"
    by_file = config(sites)
    by_file["privacy"]["noise"], by_file["run"] = "seeded", {"seed": 3, "out": str(sites.parent / "files")}
    scores = [
        fedspa.run(given, data=fedspa.from_agents(frames), progress=False).summary["score_last"],
        fedspa.run(by_file, progress=False).summary["score_last"],
    ]
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "sites/*.parquet"}, r"no file in .* matches it \(see data.dir\)"),
        ({"partition": "shards"}, "each file is one agent's: leave one of them out"),
        ({"table": {**TABLE, "agent": "clinic"}}, "a file per agent, and the column 'clinic' of data.table.agent says"),
        ({"table": {"columns": {"age": SCHEMA["columns"]["age"]}}}, "mark what is to be learned"),
    ],
)
def test_what_does_not_fit_is_one_line(sites: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        fedspa.run(config(sites, **change), progress=False)


def test_agents_that_are_left_out_are_those_of_the_data(sites: Path) -> None:
    """And with them the agents of a round, statistics and evaluation; the run's files have the numbers."""
    given = config(sites, agent_holdout=0.3)
    given["federation"] = {"rounds": 1}
    result = fedspa.run({**given, "run": {"out": str(sites.parent / "run")}}, progress=False)
    settings = fedspa.load(result.folder / "config.toml")
    assert (settings.federation.agents, settings.federation.per_round) == (3, 3)
    assert "federation.agents" in settings.run.chosen
    assert fedspa.evaluate(result.folder, epsilon=5.0, out=sites.parent / "scores").sites == list(SIZES)
    assert fedspa.statistics(given, epsilon=5.0, out=sites.parent / "numbers").sites == list(SIZES)
    assert suggest_for(fedspa.load(given)).settings["federation.agents"] == 3


def test_a_list_of_files_is_a_federation(sites: Path) -> None:
    """Agents are in the order of the list, in every file of the run, and a file that is not there is named."""
    names = [str(sites / "south.csv"), "sites/north.csv"]
    given = config(sites, name=names)
    given["federation"] = {"rounds": 1}
    result = fedspa.run({**given, "run": {"out": str(sites.parent / "run")}}, progress=False)
    assert result.summary["agent_names"] == ["south", "north"]
    assert fedspa.load(result.folder / "config.toml").data.name == "|".join(names)
    assert fedspa.load(given).data == fedspa.load(config(sites, name="|".join(names))).data
    with pytest.raises(DataError, match=r"'sites/east\.csv' is no file"):
        fedspa.run(config(sites, name=["sites/east.csv", "sites/north.csv"]), progress=False)
    with pytest.raises(ConfigError, match=r"data\.name"):
        fedspa.load(config(sites, name=["sites/north.csv", 3]))


def test_a_name_that_no_ledger_takes_is_refused() -> None:
    x, y = np.zeros((2, 1), dtype=np.float32), np.array([0, 1])
    with pytest.raises(DataError, match="a name has 1 to 200 characters that can be printed"):
        fedspa.from_arrays(x, y, x, y, name="demo", owners=["a\nb", "c"])
