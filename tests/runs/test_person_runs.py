"""Runs whose unit is the person: what is trained on, what is promised, what is written down, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_records
from small_runs import ALGORITHMS, WIDE_POLICY, small

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify
from fedspa.agent.policy import PolicyRefusal
from fedspa.data.adapters import from_arrays
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError, FedspaError, LedgerError
from fedspa.examples import count
from fedspa.privacy.accounting import gaussian_epsilon
from fedspa.running import run as simulate
from fedspa.runs.config import load
from fedspa.runs.guarantee import statement
from fedspa.runs.setup import Simulated, prepare, trained_on

VISITS = {"data": {"name": "small_records:visits"}}


POLICY = WIDE_POLICY + 'unit = "person"\n'


def visits(out: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    return small(out, **{"data": VISITS["data"] | sections.pop("data", {}), **sections})


def prepared(**sections: dict[str, Any]) -> Simulated:
    return prepare(load(visits(Path("nowhere"), **sections)))


@pytest.mark.parametrize("rule", ["iid", "dirichlet:0.5"])
def test_persons_are_dealt_and_not_records(rule: str) -> None:
    job = prepared(data={"partition": rule}, algorithm={"batch": 2})
    data = small_records.visits()
    assert data.persons is not None
    assert count(job.train.y) == 120
    assert sorted(np.concatenate(job.holdings).tolist()) == list(range(120))
    assert {len(held) for held in job.holdings} == {20}
    assert (job.plan.records, job.plan.unit, job.plan.event.unit) == (20, "person", "person")
    counts = job.train.x["count"]  # type: ignore[call-overload, index]
    assert counts.tolist() == np.bincount(data.persons).tolist()


def test_which_records_count_follows_no_public_seed() -> None:
    """Under a seed that the server knows, one person more would give everybody behind them other records."""
    data = replace(small_records.visits(), persons=np.zeros(len(small_records.visits().train_y), np.int64))  # type: ignore[arg-type]
    drawn = {
        noise: [
            trained_on(load(visits(Path("x"), privacy={"noise": noise})), data).y.tolist()  # type: ignore[union-attr]
            for _ in range(2)
        ]
        for noise in ("secure", "exact", "seeded")
    }
    assert drawn["secure"][0] != drawn["secure"][1]
    assert drawn["exact"][0] != drawn["exact"][1]
    assert drawn["seeded"][0] == drawn["seeded"][1]


@pytest.mark.parametrize("name", ["fedspa", "cpsgd"])
def test_every_algorithm_trains_on_persons(tmp_path: Path, name: str) -> None:
    summary = simulate(visits(tmp_path / "run", **ALGORITHMS[name])).summary
    assert summary["unit"] == "person"
    assert (summary["task"], summary["engine"]) == ("classification", "generic")
    assert 0 <= summary["accuracy_last"] <= 1
    assert "for each person of each agent" in statement(summary)


def test_a_ledger_holds_one_unit_per_agent(tmp_path: Path) -> None:
    """Each way round, whatever the policy: the refusal comes before anything is written."""
    for first, second in ((VISITS, {}), ({}, VISITS)):
        ledger = tmp_path / f"{len(first)}.sqlite"
        simulate(small(tmp_path / f"first-{len(first)}", **first, run={"ledger": str(ledger)}))
        with pytest.raises(
            LedgerError, match=r"agent 'agent-\d' has entries that protect each (person|record), and"
        ) as e:
            simulate(small(tmp_path / f"second-{len(first)}", **second, run={"ledger": str(ledger)}))
        assert "\n" not in str(e.value)
        assert verify(ledger) == []
        assert not (tmp_path / f"second-{len(first)}").exists()
        with Ledger.open(ledger, create=False) as books:
            assert {event.unit for event in books.spent("agent-0")} <= {"person" if first else "record"}


def test_a_resume_with_other_persons_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_records.visits()
    assert data.persons is not None
    made = small(tmp_path / "run")

    def stop(data: Dataset) -> None:
        simulate(made, data=data, stop=lambda: True)

    with pytest.raises(FedspaError, match="stopped after round 1"):
        stop(data)
    others = replace(data, persons=np.roll(data.persons, 1))
    with pytest.raises(FedspaError, match="the digest of the persons is another"):
        simulate(data=others, resume=tmp_path / "run")
    with pytest.raises(FedspaError):
        simulate(data=replace(data, persons=None), resume=tmp_path / "run")
    assert simulate(data=data, resume=tmp_path / "run").summary["unit"] == "person"
    told = json.loads((tmp_path / "run/summary.json").read_text())["provenance"]
    assert not any("persons" in key for key in told)  # a digest without noise stays beside the records


def test_an_agent_may_be_one_persons_phone(tmp_path: Path) -> None:
    """m = 1: nothing is sampled, every step has all of the noise, and δ must be small against all phones."""
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(30), 5)
    y = rng.integers(0, 2, 150)
    x = rng.normal(size=(150, 3)) + 2 * y[:, None]
    data = replace(from_arrays(x, y, x[:40], y[:40], name="phones", persons=owners), owners=owners)
    made: dict[str, Any] = {
        "federation": {"agents": 30, "rounds": 2, "per_round": 15},
        "algorithm": {"local_steps": 2, "batch": 1},
        "privacy": {"noise_multiplier": 3.0, "delta": 1e-3},
        "run": {"out": str(tmp_path / "run")},
    }
    result = fedspa.run(made, data=data)
    with Ledger.open(tmp_path / "ledger.sqlite", create=False) as ledger:
        (event,) = ledger.spent("agent-0")
    assert (event.records, event.rate, event.unit) == (1, 1.0, "person")
    # Two steps of one round each cost a plain Gaussian of 3/√2: nothing is amplified.
    assert result.summary["epsilon"] == pytest.approx(gaussian_epsilon(2**0.5 / 3, 1e-3), rel=1e-6)
    assert result.summary["epsilon_replace_one"] == pytest.approx(gaussian_epsilon(2 * 2**0.5 / 3, 1e-3), rel=1e-6)
    with pytest.raises(ConfigError, match=r"30 agents hold up to 1 persons each: it must be below 1/30"):
        fedspa.run(made | {"privacy": {"noise_multiplier": 3.0, "delta": 0.04}}, data=data)


def test_an_agent_of_both_units_has_no_total(tmp_path: Path) -> None:
    """Written by someone else's hands: what is stated of that agent is no ε."""
    records, persons = (prepare(load(made)).plan for made in (small(tmp_path / "a"), visits(tmp_path / "b")))
    assert records is not None
    assert persons is not None
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.reserve("a", records.event, "run", "0")
        ledger.require_unit = lambda events: None  # type: ignore[method-assign]
        ledger.reserve("a", persons.event, "run", "1")
        ledger.reserve("b", persons.event, "run", "1")
        with pytest.raises(FedspaError, match="do not add up"):
            ledger.total("a", 1e-3, "add-remove")


def test_a_policy_may_ask_for_persons(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    asked = {"policy": str(tmp_path / "policy.toml")}
    with pytest.raises(PolicyRefusal, match="each record is protected, this policy asks for each person"):
        simulate(small(tmp_path / "records", run=asked))
    assert simulate(visits(tmp_path / "persons", run=asked)).summary["unit"] == "person"
