"""Rehearsals: on no agent's record, in no ledger, under the noise of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.data.dataset import Dataset
from fedspa.runs.records import records_of
from fedspa.runs.setup import Simulated, prepare
from fedspa.tuning import proxy
from fedspa.tuning.proxy import ProxyRuns


def made_up(records: int = 600) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(records, 6)).astype(np.float32)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).astype(np.int64)
    return fedspa.from_arrays(x[100:], y[100:], x[:100], y[:100], name="made up")


def job_of(tmp_path: Path, **privacy: Any) -> tuple[Simulated, Dataset]:
    config = fedspa.load(
        {
            "federation": {"agents": 8, "per_round": 4, "rounds": 3},
            "data": {"holdout": 0.2},
            "algorithm": {"batch": 20, "local_steps": 2, "compression": 0.5},
            "privacy": {"epsilon": 3.0, "noise": "seeded", **privacy},
            "run": {"threads": 1, "ledger": str(tmp_path / "ledger.sqlite")},
        }
    )
    records = records_of(config, made_up())
    return prepare(config, records), records


def test_only_the_servers_records_are_in_it_and_no_ledger_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, records = job_of(tmp_path)

    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("a proxy run touched a ledger")

    monkeypatch.setattr(Ledger, "open", touched)
    monkeypatch.setattr(Ledger, "reserve_many", touched)
    assert job.plan is not None
    runs = ProxyRuns(job.config, job.plan, records)
    own = {tuple(row.tolist()) for row in records.test_x}  # type: ignore[union-attr]
    for part in runs._parts:
        both = torch.cat([part.train_x, part.test_x])  # type: ignore[list-item]
        assert {tuple(row.tolist()) for row in both} == own
        assert len(both) == len(own)  # none is trained on and scored by
    assert len(runs.curves({}).repeats[0]) == 3
    assert not (tmp_path / "ledger.sqlite").exists()


def test_its_noise_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, records = job_of(tmp_path)
    assert job.plan is not None
    runs = ProxyRuns(job.config, job.plan, records)
    plan = prepare(runs._config, runs._parts[0]).plan
    assert plan is not None
    assert plan.sigma == pytest.approx(job.plan.sigma)
    assert plan.event.rate == pytest.approx(job.plan.event.rate, rel=0.1)
    assert (plan.local_steps, plan.active, plan.clip_value) == (2, job.plan.active, job.plan.clip_value)


def test_a_module_that_was_given_stays_as_it_was(tmp_path: Path) -> None:
    """It is trained in place by the run itself, which must not begin where a proxy run ended."""
    job, records = job_of(tmp_path)
    assert job.plan is not None
    module = torch.nn.Linear(6, 2)
    before = {name: values.clone() for name, values in module.state_dict().items()}
    runs = ProxyRuns(job.config, job.plan, records, module=module)
    assert runs.curves({}) == runs.curves({})
    assert all(torch.equal(values, before[name]) for name, values in module.state_dict().items())


def test_what_has_no_gaussian_noise_is_told_what_is_left(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "federation": {"agents": 4, "per_round": 4, "rounds": 4},
        "data": {"holdout": 0.2},
        "algorithm": {"name": "cpsgd", "local_steps": 1, "batch": 20},
        "privacy": {"epsilon": 50.0, "sampling": "fixed", "clip": "coordinate", "noise": "seeded"},
        "run": {"out": str(tmp_path / "run")},
    }
    with pytest.raises(fedspa.FedspaError, match=r"has no proxy .* public 'none'"):
        fedspa.tune(given, data=made_up())
    assert not (tmp_path / "run").exists()


def test_a_public_data_set_stands_in(tmp_path: Path) -> None:
    job, records = job_of(tmp_path)
    assert job.plan is not None
    runs = ProxyRuns(job.config, job.plan, records, "digits")
    assert runs._parts[0].train_x.shape[1:] == (1, 8, 8)  # type: ignore[union-attr]
    assert runs.curves({}).last is not None


@pytest.mark.parametrize("theirs", [400, 40])
def test_what_the_agents_hold_is_not_public(theirs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pays for a proxy run: on the agents' own records it would be a search that no ε covers."""
    job, records = job_of(tmp_path)
    assert job.plan is not None
    own = replace(
        made_up(900),
        train_x=torch.cat([made_up(900).train_x[-300:], records.train_x[:theirs]]),  # type: ignore[index, list-item]
        train_y=torch.cat([made_up(900).train_y[-300:], records.train_y[:theirs]]),  # type: ignore[index, list-item]
    )
    monkeypatch.setattr(proxy, "records_of", lambda config: own)
    with pytest.raises(fedspa.FedspaError, match=rf"holds {theirs} of the 400 records that the agents hold"):
        ProxyRuns(job.config, job.plan, records, "digits")


def test_a_record_that_is_like_an_agents_by_chance_may_be_public(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, records = job_of(tmp_path)
    assert job.plan is not None
    public = replace(made_up(900), train_x=made_up(900).train_x[-300:], train_y=made_up(900).train_y[-300:])  # type: ignore[index]
    public.train_x[:3], public.train_y[:3] = records.train_x[:3], records.train_y[:3]  # type: ignore[index]
    monkeypatch.setattr(proxy, "records_of", lambda config: public)
    ProxyRuns(job.config, job.plan, records, "digits")


def test_the_search_itself_refuses_the_agents_data_set(tmp_path: Path) -> None:
    given = {
        "federation": {"agents": 8, "per_round": 4, "rounds": 10},
        "data": {"name": "digits", "holdout": 0.1},
        "privacy": {"epsilon": 3.0, "noise": "seeded"},
        "run": {"out": str(tmp_path / "run")},
    }
    with pytest.raises(fedspa.FedspaError, match=r"public is 'digits', which holds 1,298 of the 1,298 records"):
        fedspa.tune(given, public="digits")
    assert not (tmp_path / "run").exists()


def test_a_model_that_diverges_has_no_curve(tmp_path: Path) -> None:
    job, records = job_of(tmp_path)
    assert job.plan is not None
    wild = {"algorithm.server": "average", "algorithm.server_lr": 1e10, "algorithm.local_lr": 1e10}
    curves = ProxyRuns(job.config, job.plan, records).curves({**wild, "privacy.clip_value": 1e10})
    assert curves.last is None or abs(curves.last) <= 1
