"""A search on Flower: trials and scores are rounds, which agents judge, pay for and answer like all others."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export
from fedspa.analytics.statistics import release_config
from fedspa.errors import FedspaError
from fedspa.flower.terms import TermsError, from_record
from fedspa.runs.config import flat

from .local_grid import POLICY, LocalGrid
from .test_resume import Killed, die_in_round, honest
from .test_strategy import TRIALS

CHOSEN = {key.replace(".", "__"): value for key, value in TRIALS.items()} | {"algorithm__batch": 20}
SCORED = 2  # the round in which two trials of a round each are scored


def entries(tmp_path, site: int) -> list:
    return export(tmp_path / f"site-{site}/ledger.sqlite")["entries"]


def test_agents_of_their_own_score_within_their_own_limits(deployment, train, tmp_path):
    """Their policies allow half of the coordinates and l2 clipping: they judge the run, and a score is none of both."""
    summary = train(deployment, **CHOSEN)
    assert summary["dropped"] == {}
    tuning = summary["tuning"]
    assert (tuning["scored_by"], tuning["scoring"]["rounds"]) == ("agents", [SCORED])
    assert all(len(trial["scores"]) == 1 and trial["scores"][0] is not None for trial in tuning["trials"])
    for site in range(4):
        found = Counter(entry["message"] for entry in entries(tmp_path, site))
        assert found == {f"round-{t}": 1 for t in range(5)}
        assert len({str(entry["event"]) for entry in entries(tmp_path, site)}) == 1
        with Ledger.open(tmp_path / f"site-{site}/ledger.sqlite", create=False) as ledger:
            assert ledger.epsilon(f"site-{site}", 1e-3, "add-remove") == pytest.approx(summary["epsilon"])
    for message in deployment.replies:  # an answer is a payload, of scores too
        assert list(message.content) == ["update"]
        assert list(message.content["update"]) == ["payload"]


@pytest.mark.parametrize("t", [1, SCORED])
def test_a_server_killed_in_the_search_goes_on_and_nobody_pays_twice(deployment, train, tmp_path, t):
    die_in_round(deployment, t, 2)
    with pytest.raises(Killed):
        train(deployment, **CHOSEN)
    answered = [reply.content["update"]["payload"] for reply in deployment.replies]
    deployment.fault = honest
    summary = train(deployment, flower__resume=True)
    assert summary["dropped"] == {}
    assert summary["tuning"]["scoring"]["rounds"] == [SCORED]
    for site in range(4):
        assert Counter(entry["message"] for entry in entries(tmp_path, site)) == {f"round-{r}": 1 for r in range(5)}
    again = [reply.content["update"]["payload"] for reply in deployment.replies[len(answered) :]]
    assert len(again) == 4 * (5 - t)


def test_what_is_no_question_for_scores_is_refused_and_costs_nothing(deployment, train, tmp_path):
    train(deployment, **CHOSEN)
    question = next(m for m in deployment.sent if m.metadata.group_id == str(SCORED))
    record, models = question.content["terms"], question.content["theta"]["theta"].numpy()
    assert from_record(record).scored == len(models) == 2
    spent = len(entries(tmp_path, 0))
    for scored, array in (
        (2, models[:1]),
        (1, models),
        (0, models),
        (2, models.astype(np.float64)),
        (2, np.full_like(models, np.nan)),
        (2, models[:, :-1]),
    ):
        question.content["terms"] = ConfigRecord({**record, "scored": scored, "round": 4})
        question.content["theta"] = ArrayRecord({"theta": Array(array)})
        assert dict(deployment.answer(question).content["update"]) == {"refusal": "terms"}
    assert len(entries(tmp_path, 0)) == spent
    for scored in (-1, 65, 1.0, True):
        with pytest.raises(TermsError, match="scored"):
            from_record(ConfigRecord({**record, "scored": scored}))


def test_what_a_trial_spends_stops_an_agent_whose_budget_ends(deployment, train, tmp_path):
    """The whole plan is announced with the first round: an agent without the budget for both refuses both."""
    for site in range(4):
        policy = tmp_path / f"site-{site}/policy.toml"
        policy.write_text(policy.read_text().replace("epsilon = 8.0", "epsilon = 0.5"))
    with pytest.raises(FedspaError, match=r"4 of 4 agents refuse this run \(budget\)"):
        train(deployment, **CHOSEN)
    assert not any(entries(tmp_path, site) for site in range(4))


# Statistics of sites over Flower: released under each site's policy and budget, and only where it allows them.


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
