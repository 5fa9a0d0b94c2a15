"""Apps in Flower's simulation engine (Ray): the simulator's bits, and no process left."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="needs the extra: pip install 'fedspa[flower]'")

import io
import json
import sys
import tomllib
import zipfile
from pathlib import Path

import torch
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

import fedspa
from fedspa.cli.deployment import new
from fedspa.errors import ConfigError
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
        for name in ("quickstart", "quickstart.data", "quickstart.model", "my_data", "my_model", "loopback"):
            sys.modules.pop(name, None)


def test_the_quickstart_trains_by_its_own_settings(tmp_path, monkeypatch):
    simulate(EXAMPLES / "flower-quickstart", {"federation.rounds": 1, "run.out": str(tmp_path / "run")}, monkeypatch)
    assert json.loads((tmp_path / "run/summary.json").read_text())["epsilon"] <= 4


def test_what_fedspa_new_makes_is_an_app_and_ships_its_code_only(tmp_path):
    app = tmp_path / "My Study 2"
    new(app, flower=True)
    assert {path.name for path in app.iterdir()} == {"pyproject.toml", "README.md", "my_data.py", "my_model.py"}
    config, warnings = load_and_validate(app / "pyproject.toml")
    assert (config["project"]["name"], warnings) == ("my-study-2", [])
    (app / "records.npz").write_bytes(b"secret")
    (app / "keys.toml").write_text("secret = 1")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as bundle:
        names = {name for name in bundle.namelist() if not name.startswith(".info")}
    assert names == {"pyproject.toml", "my_data.py", "my_model.py"}
    with pytest.raises(ConfigError, match="is not empty"):
        new(app, flower=True)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_an_app_that_fedspa_new_made_gives_the_simulators_bits(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "hospital")
    from loopback import Deployment

    app = tmp_path / "app"
    new(app, flower=True)
    changes = {"federation.rounds": 1, "privacy.noise": "seeded", "run.out": str(tmp_path / "run")}
    changes |= {"federation.agents": 2, "federation.per_round": 2}
    with Deployment(tmp_path / "deployment") as deployment:
        deployment.start_simulator()
        run = deployment.submit(app, changes, "--federation-config", "num-supernodes=2 client-resources-num-cpus=1")
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
