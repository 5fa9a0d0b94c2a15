"""`fedspa suggest`: numbers from numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.cli import app
from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.accounting import epsilon
from fedspa.runs.halving import Settings
from fedspa.runs.setup import Simulated, prepare, records_of
from fedspa.tuning.proxy import CLIP, RATE, ProxyRuns, Search
from fedspa.tuning.suggest import suggest


def test_its_noise_keeps_epsilon_and_no_less_would() -> None:
    found = suggest(100, 600, 3930, 1.0, delta=1e-3, rounds=45)
    assert found.participations == 5

    def cost(noise: float) -> float:
        event = GaussianEvent("poisson", 600, 600, 5, noise)
        return epsilon({event: found.participations}, 1e-3, neighbours="add-remove")

    assert cost(found.noise_multiplier) <= 1.0 < cost(found.noise_multiplier * 0.999)


def test_it_can_be_run_and_its_bytes_are_those_of_the_run(tmp_path: Path) -> None:
    found = suggest(10, 144, 650, 2.0, delta=1e-3, compression=0.2)
    settings = [f"{key}={json.dumps(value)}" for key, value in found.settings.items()]
    config = fedspa.load(
        {"privacy": {"noise": "seeded"}, "run": {"out": str(tmp_path / "run"), "threads": 1}}, settings
    )
    summary = fedspa.run(config).summary
    assert summary["noise_multiplier"] == found.noise_multiplier
    assert summary["dimension"] == found.dimension
    assert summary["payload_bytes"] == pytest.approx(found.upload_bytes, rel=0.1)
    assert summary["accuracy_last"] > 0.7


@pytest.mark.parametrize(
    ("asked", "word"), [(0.01, "nothing can be learned"), (1000.0, "hardly anything is protected"), (1.0, None)]
)
def test_it_warns_where_nothing_is_learned_or_protected(asked: float, word: str | None) -> None:
    found = suggest(10, 600, 3930, asked).warnings
    assert len(found) == (word is not None)
    assert word is None or found[0].startswith(word)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"agents": 0}, "--agents is 0"),
        ({"delta": 0.1}, "--delta is 0.1"),
        ({"compression": 2.0}, "--compression is 2"),
        ({"per_round": 11}, "--per-round is 11"),
    ],
)
def test_bad_numbers(given: dict[str, Any], word: str) -> None:
    numbers: dict[str, Any] = {"agents": 10, "records": 100, "dimension": 50, "epsilon": 1.0, **given}
    with pytest.raises(ConfigError, match=word):
        suggest(**numbers)


def test_on_the_command_line() -> None:
    words = ["suggest", "--agents", "10", "--records", "144", "--parameters", "650", "--epsilon", "2"]
    shown = CliRunner().invoke(app, words).stdout
    assert "[algorithm]" in shown
    assert "Parameters  650" in shown
    stated = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert stated["dimension"] == 650
    assert stated["settings"]["algorithm.batch"] == 144
    refused = CliRunner().invoke(app, ["suggest", "--agents", "10", "--records", "144", "--epsilon", "2"])
    assert "--parameters missing" in str(refused.exception)


# The search along what is known: on functions whose best point is known.

START: dict[str, Any] = {RATE: 10.0, CLIP: 0.1, "algorithm.ema": 0.8}


def hill(rate: float, clip: float) -> Any:
    """Best where rate × clip and clip are these; falls with the distance in octaves."""

    def score(settings: Settings) -> list[float]:
        product = float(settings[RATE]) * float(settings[CLIP])
        away = abs(math.log2(product / (rate * clip))) + 0.1 * abs(math.log2(float(settings[CLIP]) / clip))
        return [-away, -away - 0.01]

    return score


@given(st.floats(0.05, 2000), st.floats(0.01, 1))
def test_it_comes_within_a_step_of_the_best(rate: float, clip: float) -> None:
    search = Search(hill(rate, clip))
    found = search.run(START, {}, local=False)
    product = float(found[RATE]) * float(found[CLIP])
    assert abs(math.log(product / (rate * clip))) <= math.log(3)
    assert abs(math.log(float(found[CLIP]) / clip)) <= math.log(3) * 1.05
    assert len(search.found) <= 30


def test_the_clip_moves_with_the_rate_against_it() -> None:
    tried: list[Settings] = []
    Search(lambda settings: tried.append(settings) or [0.0]).run(START, {}, local=False)
    products = [float(s[RATE]) * float(s[CLIP]) for s in tried if s[CLIP] != START[CLIP]]
    assert products == pytest.approx([1.0, 1.0], rel=0.01)  # three digits are kept


def test_nothing_is_scored_twice_and_chance_moves_nothing() -> None:
    tried: list[Any] = []

    def noisy(settings: Settings) -> list[float]:
        tried.append(tuple(sorted(settings.items())))
        return [0.5, 0.5] if settings == START else [0.9, 0.12]  # better on average, and not by more than chance

    assert Search(noisy).run(START, {}, local=False) == START
    assert len(tried) == len(set(tried))


def test_a_gain_beats_only_what_it_passes_by_more_than_its_own_spread() -> None:
    """Of fifteen comparisons two or three pass a standard error by chance alone."""
    scores = {"old": [0.5] * 6, "noisy": [0.55, 0.51, 0.56, 0.48, 0.55, 0.49], "steady": [0.55, 0.54, 0.56] * 2}
    search = Search(lambda settings: scores[str(settings["algorithm.server"])])
    old, noisy, steady = ({"algorithm.server": name} for name in scores)
    assert not search.beats(noisy, old)
    assert search.beats(steady, old)
    assert not search.beats(old, old)


# Proxy runs: on no agent's record, in no ledger, under the noise of the run.


def made_up(records: int = 600) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(records, 6)).astype(np.float32)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).astype(np.int64)
    return fedspa.from_arrays(x[100:], y[100:], x[:100], y[:100], name="made up")


CLINICS = Path(__file__).parents[1] / "runs" / "clinics.csv"


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


def test_a_run_on_a_table_has_proxy_runs_on_its_held_out_rows() -> None:
    columns = {"clinic": {"kind": "ignore"}, "part": {"kind": "ignore"}, "ward": {"kind": "ignore"}}
    columns |= {"age": {"kind": "number", "range": [0, 110], "missing": 50}, "smoker": {"kind": "ignore"}}
    columns["score"] = {"kind": "number", "range": [0, 200], "target": True}
    config = fedspa.load(
        {
            "federation": {"agents": 3, "per_round": 2, "rounds": 2},
            "data": {"name": str(CLINICS), "holdout": 0.4, "table": {"columns": columns}},
            "algorithm": {"batch": 5, "local_steps": 1},
            "privacy": {"noise_multiplier": 2.0, "noise": "seeded"},
        }
    )
    records = records_of(config)
    job = prepare(config, records)
    assert job.plan is not None
    assert ProxyRuns(job.config, job.plan, records).curves({}).name == "rmse"


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
    runs = ProxyRuns(job.config, job.plan, records)
    plan = prepare(runs._config, runs._parts[0]).plan
    assert plan.sigma == pytest.approx(job.plan.sigma)
    assert plan.event.rate == pytest.approx(job.plan.event.rate, rel=0.1)
    assert (plan.local_steps, plan.active, plan.clip_value) == (2, job.plan.active, job.plan.clip_value)
