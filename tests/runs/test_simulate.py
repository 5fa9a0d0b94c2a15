"""Whole runs, small: they learn, they repeat to the bit, and what they report adds up."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sample_plans import BINOMIAL_PLAN
from torch import Tensor, nn

import fedspa
from fedspa import mechanisms
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.policy import PolicyRefusal
from fedspa.algorithms import Agent
from fedspa.algorithms.cpsgd.plan import BINOMIAL
from fedspa.errors import BudgetError, ConfigError, LedgerError, PrivacyError
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.privacy.accounting import epsilon
from fedspa.runs.books import Books
from fedspa.runs.config import load
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.setup import prepare
from fedspa.runs.simulate import Simulation
from fedspa.runs.statement import plain_words, shown, statement
from fedspa.runs.summary import TOGETHER
from fedspa.wire.payload import HEADER_BYTES

SMALL: dict[str, dict[str, Any]] = {
    "federation": {"agents": 6, "rounds": 4, "per_round": 3},
    "algorithm": {"compression": 0.2, "local_steps": 3, "batch": 10, "local_lr": 0.5, "server": "average"},
    "privacy": {"epsilon": 3.0, "clip_value": 0.3},
    "run": {"engine": "generic"},
}


def small(tmp_path: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    merged = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {*SMALL, *sections}}
    merged["run"].setdefault("out", str(tmp_path / "run"))
    return {name: {key: value for key, value in keys.items() if value is not None} for name, keys in merged.items()}


FEDAVG = {"algorithm": {"name": "fedavg", "compression": 1.0}, "privacy": {"epsilon": None}}
DP_FED = {"algorithm": {"name": "dp-fed", "compression": 1.0}}


@pytest.mark.parametrize(
    ("engine", "sampling", "noted"),
    [("traced", "poisson", True), ("traced", "fixed", False), ("generic", "poisson", False)],
)
def test_records_that_were_taken_together_are_told(tmp_path: Path, engine: str, sampling: str, noted: bool) -> None:
    """Neighbours under Poisson sampling have another number of places, and with it other roundings."""
    sections = {"federation": {"rounds": 1}, "privacy": {"sampling": sampling}, "run": {"engine": engine}}
    assert (TOGETHER in fedspa.run(small(tmp_path, **sections)).summary["warnings"]) == noted


@pytest.mark.parametrize(
    "sections",
    [
        {},
        FEDAVG,
        DP_FED,
        {"algorithm": {"mask": "shared"}},
        {"algorithm": {"mask": "fixed", "server": "momentum"}},
        {"algorithm": {"server": "adam", "server_lr": 0.05, "lr_decay": "sqrt"}},
        {"privacy": {"clip": "coordinate", "clip_value": 0.01}},
        {"privacy": {"clip_rule": "quantile"}},
        {"privacy": {"sampling": "fixed"}},
        {"privacy": {"neighbours": "replace-one"}},
        {"privacy": {"noise": "exact"}},
        {"privacy": {"noise": "secure"}},
        {"algorithm": {"coding": "f16"}},
        {"algorithm": {"coding": "f32"}},
        {"federation": {"participation": "uniform", "cap": 1}},
        {"data": {"partition": "dirichlet"}},
        {"data": {"partition": "shards"}},
        {"model": {"name": "mlp"}},
        {"run": {"engine": "reference"}},
    ],
    ids=lambda sections: "-".join(str(v) for keys in sections.values() for v in keys.values()) or "default",
)
def test_every_choice_runs_and_keeps_its_promise(tmp_path: Path, sections: dict[str, Any]) -> None:
    result = fedspa.run(small(tmp_path, **sections))
    summary = result.summary
    assert summary["rounds"] == 4
    assert all(math.isfinite(metrics.loss) for metrics in result.metrics)
    if summary["algorithm"] == "fedavg":
        assert summary["epsilon"] is None
    else:
        assert 0 < summary["epsilon"] <= 3.0
        assert summary["epsilon"] <= summary["epsilon_replace_one"]


def test_the_summary_has_the_keys_that_scripts_rely_on(tmp_path: Path) -> None:
    result = fedspa.run(small(tmp_path))
    wanted = (
        "algorithm accuracy_best accuracy_last epsilon epsilon_replace_one delta neighbours sampling accountant "
        "noise_multiplier participations_max uplink_bytes compression rounds seconds seed"
    )
    assert set(wanted.split()) <= set(result.summary)
    assert json.loads((result.folder / "summary.json").read_text()) == result.summary
    assert result.summary["neighbours"] == "add-remove"
    assert result.summary["accountant"] == "pld"


def test_a_ledger_of_both_samplings_has_a_total_under_replace_one(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared.sqlite")
    fedspa.run(small(tmp_path, run={"out": str(tmp_path / "first"), "ledger": shared}, privacy={"sampling": "fixed"}))
    summary = fedspa.run(small(tmp_path, run={"out": str(tmp_path / "second"), "ledger": shared})).summary
    assert (summary["neighbours"], summary["epsilon_total"]) == ("add-remove", None)
    (note,) = (warning for warning in summary["warnings"] if "over all runs" in warning)
    with Ledger.open(shared, create=False) as ledger:
        largest = max(ledger.epsilon(f"agent-{i}", summary["delta"], "replace-one") for i in range(6))
    assert summary["epsilon_replace_one"] < largest
    assert f"under replace-one it is {shown(largest)} at δ = 0.001" in note
    again = small(
        tmp_path,
        run={"out": str(tmp_path / "third"), "ledger": shared},
        privacy={"neighbours": "replace-one"},
    )
    assert fedspa.run(again).summary["epsilon_total"] > largest


def test_an_event_of_a_newer_fedspa_that_comes_while_training_costs_the_total_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = str(tmp_path / "shared.sqlite")

    def newer(metrics: RoundMetrics) -> None:
        if metrics.round == 2:
            with Ledger.open(shared, create=False) as ledger:
                ledger.reserve("agent-0", BINOMIAL_PLAN.event, "other", "0")
            monkeypatch.delitem(BINOMIAL.events, "binomial")
            mechanisms._event_of.cache_clear()

    result = fedspa.run(small(tmp_path, run={"ledger": shared}), on_round=newer)
    assert result.summary["epsilon"] > 0
    assert result.summary["epsilon_total"] is None
    (note,) = (warning for warning in result.summary["warnings"] if "over all runs" in warning)
    assert "newer fedspa" in note
    assert "\n" not in note
    assert (result.folder / "model.safetensors").exists()


def test_a_ledger_of_a_newer_fedspa_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = str(tmp_path / "shared.sqlite")
    with Ledger.open(shared) as ledger:
        ledger.reserve("agent-0", BINOMIAL_PLAN.event, "other", "0")
    monkeypatch.delitem(BINOMIAL.events, "binomial")
    mechanisms._event_of.cache_clear()
    with pytest.raises(LedgerError, match="written by a newer fedspa"):
        fedspa.run(small(tmp_path, run={"out": str(tmp_path / "second"), "ledger": shared}))
    assert not (tmp_path / "second").exists()


def test_the_folder_holds_what_the_run_did(tmp_path: Path) -> None:
    result = fedspa.run(small(tmp_path))
    assert {path.name for path in result.folder.iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "summary.json",
        "model.safetensors",
        "ledger.sqlite",
    }
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert lines[-1]["accuracy"] == result.summary["accuracy_last"]
    saved = load_file(result.folder / "model.safetensors")
    for name, value in result.module.state_dict().items():
        assert torch.equal(saved[name], value)
    again = load(result.folder / "config.toml", ["run.out=none"])
    assert again.algorithm.compression == 0.2


def test_same_seed_same_bits_other_seed_other_bits(tmp_path: Path) -> None:
    runs = [
        fedspa.run(small(tmp_path, run={"out": str(tmp_path / name), "seed": seed}, privacy={"noise": "seeded"}))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    metrics = [(run.folder / "metrics.jsonl").read_bytes() for run in runs]
    models = [(run.folder / "model.safetensors").read_bytes() for run in runs]
    assert metrics[0] == metrics[1] != metrics[2]
    assert models[0] == models[1] != models[2]


def test_secure_noise_never_repeats(tmp_path: Path) -> None:
    runs = [
        fedspa.run(small(tmp_path, run={"out": str(tmp_path / name), "seed": 1}, privacy={"noise": "secure"}))
        for name in "ab"
    ]
    assert (runs[0].folder / "model.safetensors").read_bytes() != (runs[1].folder / "model.safetensors").read_bytes()


def test_epsilon_is_what_the_ledger_says(tmp_path: Path) -> None:
    """Two ways to the same figure: the run's own count, and the agents' durable record."""
    result = fedspa.run(small(tmp_path))
    summary = result.summary
    with Ledger.open(result.folder / "ledger.sqlite", create=False) as ledger:
        largest = max(ledger.epsilon(f"agent-{i}", summary["delta"], "add-remove") for i in range(6))
        counts = [sum(ledger.spent(f"agent-{i}").values()) for i in range(6)]
    assert largest == pytest.approx(summary["epsilon"], rel=1e-9)
    assert max(counts) == summary["participations_max"] == 2
    assert sum(counts) == 12


def test_all_agents_sample_at_the_rate_of_the_smallest_holding(tmp_path: Path) -> None:
    """Holdings differ by one record, and the rate does not: it is public, so ε is the smaller holding's for all."""
    result = fedspa.run(small(tmp_path, federation={"agents": 8, "per_round": 8, "rounds": 2}))
    z = result.summary["noise_multiplier"]
    sizes = Counter(len(held) for held in _holdings(8))
    assert len(sizes) == 2
    event = GaussianEvent("poisson", 10, min(sizes), 3, z, noise="secure")
    assert result.summary["epsilon"] == pytest.approx(epsilon({event: 2}, 1e-3, neighbours="add-remove"), rel=1e-9)
    with Ledger.open(result.folder / "ledger.sqlite", create=False) as ledger:
        assert all(ledger.spent(f"agent-{i}") == {event: 2} for i in range(8))


def _holdings(agents: int) -> list[Any]:
    from fedspa.data.datasets import load as load_data
    from fedspa.data.partition import partition

    return partition(load_data("digits", None).train_y.numpy(), agents, "iid", alpha=1.0, seed=0)


def test_uplink_bytes_are_measured_on_payloads(tmp_path: Path) -> None:
    dense = fedspa.run(small(tmp_path, run={"out": str(tmp_path / "dense")}, **FEDAVG)).summary
    assert dense["payload_bytes"] == HEADER_BYTES + 4 * 650
    assert dense["uplink_bytes"] == dense["payload_bytes"] * 2  # 12 uploads of 6 agents
    sparse = fedspa.run(small(tmp_path, run={"out": str(tmp_path / "sparse")})).summary
    assert sparse["payload_bytes"] < HEADER_BYTES + 130 / 2  # 130 values at under 4 bits


def test_integers_on_the_wire_change_the_model_little(tmp_path: Path) -> None:
    losses = {
        coding: fedspa.run(small(tmp_path, run={"out": str(tmp_path / coding)}, algorithm={"coding": coding}))
        .metrics[-1]
        .loss
        for coding in ("f32", "int")
    }
    assert losses["int"] == pytest.approx(losses["f32"], rel=0.1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"module": nn.Linear(7, 2)}, r"the module cannot take the data's records, of shape \(5,\)"),
        (
            {"module": nn.Linear(5, 1)},
            r"the module: it must give one score per class, .*\(batch, 2\) .* gave \(3, 1\)",
        ),
        ({"module": nn.Sequential(nn.Linear(5, 3))}, r"gave \(3, 3\)"),
        ({"module": nn.LSTM(5, 3)}, r"one score per class.* gave \(3, 3\)"),
        ({"module": nn.Linear}, r"module is the class Linear; give what it makes, as Linear\(\)"),
        ({"data": (1, 2, 3, 4)}, r"data is a tuple; make it by fedspa\.from_arrays"),
    ],
)
def test_what_is_given_in_python_is_checked_in_a_line(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    x, y = torch.randn(40, 5), torch.arange(40) % 2
    own = {"data": fedspa.from_arrays(x, y, x, y, name="mine"), **given}
    with pytest.raises(fedspa.FedspaError, match=said) as caught:
        fedspa.run(small(tmp_path / "run", federation={"agents": 2, "per_round": 2}), **own)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_own_module_and_data(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    data = fedspa.from_arrays(x[:300], y[:300], x[300:], y[300:], name="mine")
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    config = small(tmp_path, federation={"agents": 3, "rounds": 20}, algorithm={"compression": 1.0, "local_lr": 1.0})
    result = fedspa.run(config, data=data, module=net)
    assert result.module is net
    assert result.summary["accuracy_last"] > 0.85


@pytest.mark.slow
def test_the_quickstart_learns_under_its_guarantee(tmp_path: Path) -> None:
    result = fedspa.run(load(None, [f'run.out="{tmp_path / "run"}"']))
    assert result.summary["accuracy_last"] > 0.84
    assert result.summary["epsilon"] <= load().privacy.epsilon  # type: ignore[operator]


class Restless(nn.Module):
    """Keeps what it saw last, where no layer shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.last = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.last = self.last, float(x.mean())
        return self.layer(x.flatten(1) - before)


class TestBadInput:
    """Refused in one line that names the key, with nothing written."""

    @pytest.mark.parametrize(
        ("sections", "words"),
        [
            ({"algorithm": {"compression": 0.001}}, ["algorithm.compression", "650"]),
            ({"algorithm": {"batch": 500}}, ["algorithm.batch", "240"]),
            ({"privacy": {"delta": 0.01}}, ["privacy.delta", "1/241"]),
            ({"federation": {"agents": 5000}}, ["federation.agents", "records"]),
            ({"model": {"name": "mnist-cnn"}}, ["model", "mnist-cnn"]),
            ({"model": {"name": "resnet"}}, ["model.name", "logistic"]),
            ({"model": {"name": "nowhere:net"}}, ["model.name", "nowhere"]),
            ({"run": {"device": "tpu"}}, ["run.device", "tpu"]),
            ({"run": {"policy": "/nowhere/policy.toml"}}, ["policy"]),
        ],
        ids=lambda value: str(value),
    )
    def test_one_line_and_no_folder(self, tmp_path: Path, sections: dict[str, Any], words: list[str]) -> None:
        with pytest.raises(fedspa.errors.FedspaError) as caught:
            fedspa.run(small(tmp_path, **sections))
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value)
        assert not (tmp_path / "run").exists()

    def test_a_model_that_keeps_state_fails_before_anything_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"Restless\) gives an example another gradient once others were seen"):
            fedspa.run(small(tmp_path), module=Restless())
        assert not (tmp_path / "run").exists()

    def test_a_folder_in_use_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "precious").write_text("data")
        with pytest.raises(ConfigError, match=r"run\.out.*not empty"):
            fedspa.run(small(tmp_path))
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"run\.out"):
            fedspa.run(small(tmp_path, run={"out": str(tmp_path / "file" / "run")}))


class TestGuard:
    """The agents' own limits hold over runs."""

    POLICY = """
        epsilon = 1.5
        delta = 1e-3
        neighbours = "add-remove"
        min_noise_multiplier = 0.5
        max_local_steps = 10
        max_rounds = 10
        max_compression = 0.5
        clippings = ["l2"]
        """

    def guarded(self, tmp_path: Path, name: str, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
        (tmp_path / "policy.toml").write_text(self.POLICY)
        run = {
            "out": str(tmp_path / name),
            "ledger": str(tmp_path / "l.sqlite"),
            "policy": str(tmp_path / "policy.toml"),
            "engine": "auto",
        }
        lasting = {"federation": {"rounds": 10}, "algorithm": {"local_steps": 10, "batch": 80}}
        return small(tmp_path, run=run, **{**lasting, "privacy": {"epsilon": 1.0}, **sections})

    def test_a_second_run_over_the_cap_is_refused_before_it_starts(self, tmp_path: Path) -> None:
        """Two budgets of ε = 1 compose to 1.51 here, not to 2: above the cap of 1.5 all the same."""
        first = fedspa.run(self.guarded(tmp_path, "first"))
        assert first.summary["epsilon"] <= 1.0
        assert first.summary["epsilon_total"] == pytest.approx(first.summary["epsilon"])
        with pytest.raises(BudgetError, match=r"left.*cap 1\.5"):
            fedspa.run(self.guarded(tmp_path, "second"))
        assert not (tmp_path / "second").exists()

    def test_runs_on_one_ledger_add_up_in_the_summary(self, tmp_path: Path) -> None:
        for name in ("first", "second"):
            config = self.guarded(tmp_path, name)
            del config["run"]["policy"]
            result = fedspa.run(config)
        assert result.summary["epsilon"] <= 1.0
        assert 1.4 < result.summary["epsilon_total"] < 2.0
        assert "with all runs in the ledger" in statement(result.summary)

    def test_terms_laxer_than_the_policy_are_refused_by_code(self, tmp_path: Path) -> None:
        with pytest.raises(PolicyRefusal) as caught:
            fedspa.run(self.guarded(tmp_path, "run", algorithm={"local_steps": 11}))
        assert caught.value.code == "too-many-steps"
        assert not (tmp_path / "run").exists()


def test_every_agent_trains_on_its_own_records(tmp_path: Path) -> None:
    """Rounds of agents with more and fewer records than those before: none sees what another left."""
    job = prepare(load(small(tmp_path, **FEDAVG)))
    sizes = (50, 7, 80, 30, 11, 1)
    held = np.random.default_rng(0).permutation(len(job.data.train_y))
    starts = np.cumsum([0, *sizes])
    job = replace(job, holdings=[held[first : first + size] for first, size in zip(starts, sizes)])
    seen = 0

    def respond(theta: Tensor, terms: Any, agents: Sequence[Agent], engine: Any) -> Iterator[Any]:
        nonlocal seen
        for agent in agents:
            own = torch.from_numpy(job.holdings[agent.number])
            assert torch.equal(agent.x, job.data.train_x[own])
            assert torch.equal(agent.y, job.data.train_y[own])
            seen += 1
        return job.server.algorithm.respond(theta, terms, agents, engine)

    algorithm = replace(job.server.algorithm, respond=respond)
    simulation = Simulation(replace(job, server=replace(job.server, algorithm=algorithm)))
    with Books(job, tmp_path) as books:
        for cohort in ([0, 1], [4, 5], [2, 3, 0], [1], []):
            simulation.round(cohort, books)
    assert seen == 8


@pytest.mark.slow
def test_fedavg_reproduces_on_mnist(tmp_path: Path) -> None:
    """The paper prints 96.87 % after 45 rounds; 97 % is passed well before (98.4 % at the end)."""
    folder = os.environ.get("FEDSPA_DATA")
    if folder is None:
        pytest.skip("set FEDSPA_DATA to a folder with MNIST's files to run this test")
    overrides = [f'data.dir="{folder}"', f'run.out="{tmp_path / "run"}"', "federation.rounds=12"]
    config = load(Path("reproduction/configs/mnist-fedavg.toml"), overrides)
    assert fedspa.run(config).summary["accuracy_best"] >= 0.97


def test_a_folder_without_a_run_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume is '.*/none', which holds no run"):
        fedspa.run(resume=tmp_path / "none")


def test_seeded_noise_may_be_too_small_for_one_relation_or_for_any(tmp_path: Path) -> None:
    """A simulation may have any noise. Where a relation has no ε every page says so, and nothing fails at the end."""
    full = {"sampling": "poisson", "delta": 1e-5, "clip_value": 0.3, "epsilon": None, "noise": "seeded"}
    for name, noise, finite in (("one", 0.3, True), ("none", 0.01, False)):
        settings = {"privacy": {**full, "noise_multiplier": noise}, "algorithm": {"batch": 240, "local_steps": 1}}
        result = fedspa.run(small(tmp_path, run={"out": str(tmp_path / name)}, **settings))
        assert (result.summary["epsilon"] is not None, result.summary["epsilon_replace_one"]) == (finite, None)
        assert ("ε = ∞ under replace-one" in statement(result.summary)) is finite
        assert plain_words(result.summary, 6)
        assert "epsilon" in repr(result) or "ε" in repr(result) or "NONE" in repr(result)
        assert (tmp_path / name / "report.html").exists()
    settings = {"privacy": {**full, "noise_multiplier": 0.01, "noise": "secure"}, "algorithm": {"batch": 240}}
    with pytest.raises(PrivacyError, match="no accountant gives a finite ε"):
        fedspa.run(small(tmp_path, run={"out": str(tmp_path / "secure")}, **settings))
