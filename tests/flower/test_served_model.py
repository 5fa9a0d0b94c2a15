"""The model that a Flower server trained is loaded from its folder as one of the simulator's is."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import torch

import fedspa
from fedspa.flower.settings import read_config


def test_it_is_the_simulators_twin(simulation, train, tmp_path):
    train(simulation)
    config, _ = read_config(simulation.run_config | {"run.out": str(tmp_path / "twin")})
    twin = fedspa.run(config)
    served = fedspa.RunResult.load(tmp_path / "run")
    assert torch.equal(served.module[1].weight, twin.module[1].weight)
    assert served.card().startswith("# Model card: run\n\n> **NOT PRIVATE.**")
    assert (served.predict(torch.rand(4, 1, 8, 8)) >= 0).all()
