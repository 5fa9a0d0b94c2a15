"""The quickstart in Flower's simulation engine (Ray): the simulator's bits, and no process left."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="needs the extra: pip install 'fedspa[flower]'")

import json
import shutil
import sys
import tomllib
from pathlib import Path

import torch

import fedspa
from fedspa.flower.settings import read_config

from .test_deployment import until
from .test_strategy import theta

EXAMPLES = Path(__file__).parents[2] / "examples"


def simulate(app, changes, monkeypatch):
    """The app's own settings, without Flower."""
    monkeypatch.syspath_prepend(app)
    declared = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    flat = {f"{section}.{key}": value for section, keys in declared.items() for key, value in keys.items()}
    config, _ = read_config(flat | changes)
    try:
        fedspa.run(config)
    finally:
        for name in ("quickstart", "quickstart.data", "quickstart.model", "loopback"):
            sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_quickstart_gives_the_simulators_bits(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "hospital")
    from loopback import Deployment

    app = tmp_path / "app"
    shutil.copytree(EXAMPLES / "flower-quickstart", app)
    changes = {"federation.rounds": 2, "privacy.noise": "seeded", "run.out": str(tmp_path / "run")}
    with Deployment(tmp_path / "deployment") as deployment:
        deployment.start_simulator()
        run = deployment.submit(app, changes, "--federation-config", "num-supernodes=8 client-resources-num-cpus=1")
        simulate(app, changes | {"run.out": str(tmp_path / "twin")}, monkeypatch)
        until((tmp_path / "run/summary.json").exists, 180)  # cheaper to ask for than the run's status
        finished = deployment.wait(run, 30)
        assert finished["status"] == "finished:completed", deployment.output(run)[-3000:]
    assert deployment.processes() == []

    assert torch.equal(theta(tmp_path / "run"), theta(tmp_path / "twin"))
    same = [json.loads((tmp_path / folder / "summary.json").read_text()) for folder in ("run", "twin")]
    assert {key: same[0][key] for key in ("accuracy_last", "epsilon", "payload_bytes")} == {
        key: same[1][key] for key in ("accuracy_last", "epsilon", "payload_bytes")
    }
