"""Sites whose model has a frozen body: the simulator's bits, features once per process, no word about a record."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

from pathlib import Path
from typing import Any

import numpy as np
import torch
from frozen_nets import chain
from safetensors.torch import load_file

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.data.datasets import load
from fedspa.examples import Examples, blank
from fedspa.flower import trainer
from fedspa.flower.settings import read_config
from fedspa.flower.trainer import Held
from fedspa.learning.backbone import Split
from fedspa.learning.tasks import Classification

FROZEN = {"model.name": "frozen_nets:chain", "algorithm.compression": 0.2}
PERSONS = {"data.name": "small_records:visits", "data.person": "patient", "data.person_records": 3}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_TRAINERS", {})


@pytest.mark.parametrize(
    "overrides",
    [{}, PERSONS | {"model.name": "frozen_nets:wide", "algorithm.batch": 10}],
    ids=["records", "persons"],
)
def test_same_bits_as_the_simulator(simulation, train, tmp_path: Path, overrides: dict[str, Any]) -> None:
    simulation.run_config |= FROZEN | {"federation.rounds": 2} | overrides
    summary = train(simulation)
    assert "the frozen body" in summary["engine_reason"]
    config, _ = read_config(simulation.run_config | {"run.out": str(tmp_path / "twin")})
    twin = fedspa.run(config)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "twin"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "run/metrics.jsonl").read_text() == (tmp_path / "twin/metrics.jsonl").read_text()
    same = twin.summary.keys() - {"seconds"}
    assert {key: summary[key] for key in same} == {key: twin.summary[key] for key in same}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records went through the body at a time; a made-up one is none."""
    made: list[int] = []
    plain = Split.features

    def counting(self: Split, x: Any) -> Any:
        made.extend([] if x is self.tried else [len(x)])
        return plain(self, x)

    monkeypatch.setattr(Split, "features", counting)
    return made


def deployed(grid, train) -> dict[str, Any]:
    for node in grid.nodes.values():
        node |= {"model": "frozen_nets:chain"}
    return train(grid, federation__rounds=2, **{key.replace(".", "__"): value for key, value in FROZEN.items()})


def test_a_deployed_site_makes_features_once(deployment, train, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one whose record is bad refuses nothing."""
    made = counted(monkeypatch)
    bad = deployment.nodes[100]["data"]
    records = dict(np.load(bad))
    records["x"][3] = np.nan
    np.savez(bad, **records)
    summary = deployed(deployment, train)
    assert summary["dropped"] == {}
    held = sum(len(np.load(node["data"])["y"]) for node in deployment.nodes.values())
    scored = len(load("digits", None).test_y)
    assert set(made) == {1}
    assert len(made) == held + scored  # in two rounds


def test_one_trainer_serves_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    record = blank((1, 8, 8))
    found = trainer.trainer_for("frozen_nets:chain", record, Classification(10), None, "auto", 1, False)
    assert found is trainer.trainer_for("frozen_nets:chain", record, Classification(10), None, "auto", 1, False)
    assert found.engine.name == "native"
    assert found.dimension == 1450
    x, y = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 10
    held = Held(Examples(x, y), torch.tensor([7, 2]), record, None)
    made = counted(monkeypatch)
    for _ in range(2):
        features, labels = found.examples(held, strict=False)
        assert features.shape == (2, 144)
        assert labels.tolist() == [7, 2]
    assert made == [1, 1]
    torch.testing.assert_close(features, chain()[:-1](x[[7, 2]]))


def test_whether_there_is_a_split_does_not_depend_on_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split rounds otherwise than the whole: were it made for few records only, one more would change all others."""
    monkeypatch.setattr("fedspa.learning.features.MEMORY", 100)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: pytest.fail("a site asked how much room there is"))
    record = blank((1, 8, 8))
    found = trainer.trainer_for("frozen_nets:chain", record, Classification(10), None, "auto", 1, False)
    x, y = torch.randn(50, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 10
    assert found.examples(Held(Examples(x, y), None, record, None), strict=False).x.shape == (50, 144)


def test_a_deployed_site_draws_what_the_server_drew(deployment, train) -> None:
    for node in deployment.nodes.values():
        node |= {"model": "frozen_nets:drawn"}
    changed = FROZEN | {"model.name": "frozen_nets:drawn", "run.seed": 3, "federation.rounds": 1}
    summary = train(deployment, **{key.replace(".", "__"): value for key, value in changed.items()})
    assert summary["dropped"] == {}


def test_a_site_with_another_body_refuses_before_it_pays(deployment, train) -> None:
    first, *others = deployment.nodes.values()
    first |= {"model": "frozen_nets:drawn"}  # where the server loads a chain
    for node in others:
        node |= {"model": "frozen_nets:chain"}
    changed = FROZEN | {"run.seed": 3, "flower.quorum": 1, "federation.rounds": 1}
    summary = train(deployment, **{key.replace(".", "__"): value for key, value in changed.items()})
    assert set(summary["dropped"]) == {"refused-terms"}
    with Ledger.open(Path(first["ledger"]), create=False) as ledger:
        assert ledger.spent(first["agent"]) == {}
