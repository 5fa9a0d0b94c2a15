"""Whole runs, small: they learn, they repeat to the bit, and what they report adds up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.policy import PolicyRefusal
from fedspa.algorithms import Agent
from fedspa.errors import BudgetError, ConfigError, PrivacyError
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.accounting import epsilon
from fedspa.runs.config import load
from fedspa.runs.guarantee import describe_guarantee, statement
from fedspa.runs.local import LocalTransport
from fedspa.runs.loop import TOGETHER, run_round
from fedspa.runs.run_ledger import RunLedger
from fedspa.runs.setup import prepare
from fedspa.server.coordinator import Coordinator
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


def test_a_run_leaves_what_it_did_and_two_ways_to_its_epsilon(tmp_path: Path) -> None:
    """The files, the keys that scripts rely on, and ε by the run's own count and by the agents' durable record."""
    result = fedspa.run(small(tmp_path))
    summary, folder = result.summary, result.folder
    wanted = (
        "algorithm accuracy_best accuracy_last epsilon epsilon_replace_one delta neighbours sampling accountant "
        "noise_multiplier participations_max uplink_bytes compression rounds seconds seed"
    )
    assert set(wanted.split()) <= set(summary)
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert (summary["neighbours"], summary["accountant"]) == ("add-remove", "pld")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert lines[-1]["accuracy"] == summary["accuracy_last"]
    saved = load_file(folder / "model.safetensors")
    for name, value in result.module.state_dict().items():
        assert torch.equal(saved[name], value)
    assert load(folder / "config.toml", ["run.out=none"]).algorithm.compression == 0.2
    with Ledger.open(folder / "ledger.sqlite", create=False) as ledger:
        largest = max(ledger.epsilon(f"agent-{i}", summary["delta"], "add-remove") for i in range(6))
        counts = [sum(ledger.spent(f"agent-{i}").values()) for i in range(6)]
    assert largest == pytest.approx(summary["epsilon"], rel=1e-9)
    assert max(counts) == summary["participations_max"] == 2
    assert sum(counts) == 12


def test_same_seed_same_bits_other_seed_other_bits(tmp_path: Path) -> None:
    runs = [
        fedspa.run(small(tmp_path, run={"out": str(tmp_path / name), "seed": seed}, privacy={"noise": noise}))
        for name, seed, noise in (("a", 1, "seeded"), ("b", 1, "seeded"), ("c", 2, "seeded"), ("d", 1, "secure"))
    ]
    metrics = [(run.folder / "metrics.jsonl").read_bytes() for run in runs]
    models = [(run.folder / "model.safetensors").read_bytes() for run in runs]
    assert metrics[0] == metrics[1] != metrics[2]
    assert models[0] == models[1]
    assert len(set(models)) == 3


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


@pytest.mark.slow
def test_the_quickstart_learns_under_its_guarantee(tmp_path: Path) -> None:
    result = fedspa.run(load(None, [f'run.out="{tmp_path / "run"}"']))
    assert result.summary["accuracy_last"] > 0.84
    assert result.summary["epsilon"] <= load().privacy.epsilon  # type: ignore[operator]


class TestBadInput:
    """Refused in one line that names the key, with nothing written; attacks/test_bad_input.py has the grid."""

    def test_a_folder_in_use_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "precious").write_text("data")
        with pytest.raises(ConfigError, match=r"run\.out.*not empty"):
            fedspa.run(small(tmp_path))
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


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
            x, y = agent.take(torch.arange(agent.records))
            assert torch.equal(x, job.data.train_x[own])
            assert torch.equal(y, job.data.train_y[own])
            seen += 1
        return job.server.algorithm.respond(theta, terms, agents, engine)

    algorithm = replace(job.server.algorithm, respond=respond)
    watched = replace(job, server=replace(job.server, algorithm=algorithm))
    with RunLedger(job, tmp_path) as accounts:
        server, transport = Coordinator(watched.server), LocalTransport(watched, accounts)
        for cohort in ([0, 1], [4, 5], [2, 3, 0], [1], []):
            run_round(server, transport, cohort)
    assert seen == 8


def test_seeded_noise_may_be_too_small_for_one_relation_or_for_any(tmp_path: Path) -> None:
    """A simulation may have any noise. Where a relation has no ε every page says so, and nothing fails at the end."""
    full = {"sampling": "poisson", "delta": 1e-5, "clip_value": 0.3, "epsilon": None, "noise": "seeded"}
    for name, noise, finite in (("one", 0.3, True), ("none", 0.01, False)):
        settings = {"privacy": {**full, "noise_multiplier": noise}, "algorithm": {"batch": 240, "local_steps": 1}}
        result = fedspa.run(small(tmp_path, run={"out": str(tmp_path / name)}, **settings))
        assert (result.summary["epsilon"] is not None, result.summary["epsilon_replace_one"]) == (finite, None)
        assert ("ε = ∞ under replace-one" in statement(result.summary)) is finite
        assert describe_guarantee(result.summary, 6)
        assert "epsilon" in repr(result) or "ε" in repr(result) or "NONE" in repr(result)
        assert (tmp_path / name / "report.html").exists()
    settings = {"privacy": {**full, "noise_multiplier": 0.01, "noise": "secure"}, "algorithm": {"batch": 240}}
    with pytest.raises(PrivacyError, match="no accountant gives a finite ε"):
        fedspa.run(small(tmp_path, run={"out": str(tmp_path / "secure")}, **settings))


@pytest.mark.parametrize(
    ("engine", "sampling", "noted"),
    [("traced", "poisson", True), ("traced", "fixed", False), ("generic", "poisson", False)],
)
def test_records_that_were_taken_together_are_told(tmp_path: Path, engine: str, sampling: str, noted: bool) -> None:
    """Neighbours under Poisson sampling have another number of places, and with it other roundings."""
    sections = {"federation": {"rounds": 1}, "privacy": {"sampling": sampling}, "run": {"engine": engine}}
    assert (TOGETHER in fedspa.run(small(tmp_path, **sections)).summary["warnings"]) == noted


def test_uplink_bytes_are_measured_on_payloads(tmp_path: Path) -> None:
    dense = fedspa.run(small(tmp_path, run={"out": str(tmp_path / "dense")}, **FEDAVG)).summary
    assert dense["payload_bytes"] == HEADER_BYTES + 4 * 650
    assert dense["uplink_bytes"] == dense["payload_bytes"] * 2  # 12 uploads of 6 agents
    sparse = fedspa.run(small(tmp_path, run={"out": str(tmp_path / "sparse")})).summary
    assert sparse["payload_bytes"] < HEADER_BYTES + 130 / 2  # 130 values at under 4 bits
