"""`fedspa doctor` and `--version`: what is missing is a failed check with what to do, never an exception."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fedspa.cli import doctor
from fedspa.engine.native import library
from fedspa.errors import Check, failures
from fedspa.runs.config import load
from fedspa.runs.setup import prepare

Call = Callable[..., tuple[int, str, str]]

MODELS = """
import torch
from torch import nn

def normed(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.GroupNorm(2, 8), nn.Linear(8, classes))

def mixing():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1) - x.flatten(1).mean(0))

class Counting(Centred):
    seen = 0.0

    def forward(self, x):
        self.seen += 1.0
        return self.layer(x.flatten(1) + self.seen)

def half():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    module[1].requires_grad_(False)
    return module

def still():
    return half().requires_grad_(False)

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))

def wide():
    return nn.Linear(5, 10)

def fails():
    raise RuntimeError("there is no file of weights")
"""
built = pytest.mark.skipif(library.library() is None, reason="the native engine was not built")


@pytest.fixture
def quick(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Call in a folder with those models."""
    monkeypatch.delenv("FEDSPA_DATA", raising=False)
    (tmp_path / "asked_models.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "asked_models", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return call


def found(call: Call, words: str) -> dict[str, str]:
    """What is said of each subject; several of one subject are joined."""
    code, out, err = call(f"doctor {words} --json")
    assert code == 0, err
    said: dict[str, str] = {}
    for check in json.loads(out)["checks"]:
        said[check["subject"]] = "; ".join(filter(None, (said.get(check["subject"]), check["detail"])))
    return said


def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Check]:
    """Run every check but the quickstart's round."""
    monkeypatch.setattr(doctor, "_quickstart", lambda: iter(()))
    monkeypatch.setattr(doctor._quickstart, "__name__", "quickstart", raising=False)
    return {check.subject: check for check in doctor.check_machine()}


def test_it_runs_a_round_and_is_ready(quick: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"none": ("nowhere", "nowhere"), "sums": ("numpy", "numpy")})
    code, out, _ = quick("doctor")
    assert code == 0
    assert out.startswith("fedspa: ready\n")
    for words in ("pip install 'fedspa[none]'", f"numpy {metadata.version('numpy')}", "one round in"):
        assert words in out


def test_without_torch_it_says_so_and_exits_1(tmp_path: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; from fedspa.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", program, "doctor", "--json"], cwd=tmp_path, capture_output=True)
    assert result.returncode == 1, result.stderr
    checks = json.loads(result.stdout)
    assert checks["ready"] is False
    assert {check["subject"]: check["passed"] for check in checks["checks"]}["torch"] is False
    assert list(tmp_path.iterdir()) == []


def test_a_native_engine_that_was_not_built_is_not_required(quick: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    checks = machine(monkeypatch)
    assert checks["native"].passed is False
    assert "install a C compiler" in checks["native"].detail
    assert not failures(checks.values())  # another engine trains
    code, out, _ = quick("--version")
    assert (code, out.endswith("native engine not built, see fedspa doctor)\n")) == (0, True)


@built
def test_an_own_module_is_told_what_keeps_it_from_a_faster_engine(quick: Call, tmp_path: Path) -> None:
    said = found(quick, "--model asked_models:normed")
    assert said["model"].endswith(f"d = {64 * 8 + 8 + 16 + 90:,} parameters")
    assert said["engine"].startswith("traced on cpu")
    assert "GroupNorm" in said["not native"]
    assert "GroupNorm" in said["faster"]
    assert not (tmp_path / "runs").exists()


def test_it_says_what_a_run_does(quick: Call) -> None:
    said = found(quick, "--model asked_models:half --set privacy.noise=exact")
    job = prepare(load(None, ["model.name=asked_models:half", "privacy.noise=exact"]))
    assert said["engine"] == f"{job.engine.name} on cpu: {job.trained_by['engine_reason']}"
    assert said.get("faster", "") == "; ".join(job.trained_by["engine_hints"])
    assert said["model"].endswith(f"d = 90 parameters, {64 * 8 + 8} frozen")


@built
def test_a_shape_replaces_the_data(quick: Call) -> None:
    said = found(quick, "--model mnist-cnn --shape 1,28,28 --set algorithm.batch=4")
    assert said["records"] == "(1, 28, 28) float32 (data 'synthetic')"
    assert said["model"] == "mnist-cnn: d = 21,840 parameters"
    assert said["engine"].startswith("native")
    assert "d = 93 parameters" in found(quick, "--model logistic --shape 30 --classes 3")["model"]


def test_a_config_brings_data_device_and_algorithm(quick: Call, tmp_path: Path) -> None:
    settings = "[algorithm]\nname = 'fedavg'\nbatch = 7\n[model]\nname = 'logistic'\n[run]\nengine = 'reference'\n"
    (tmp_path / "own.toml").write_text(settings)
    assert found(quick, "--model own.toml")["engine"] == "reference on cpu: run.engine = 'reference'"
    code, _, err = quick("doctor --model own.toml --shape 3")
    assert (code, "leave one of them out" in err) == (2, True)


@pytest.mark.parametrize("name", ["mixing", "lazy", "Counting"])
def test_a_model_that_cannot_be_trained_privately_is_refused(quick: Call, name: str) -> None:
    code, out, _ = quick(f"doctor --model asked_models:{name} --json")
    said = json.loads(out)
    assert (code, said["ready"]) == (1, False)
    assert {check["subject"] for check in said["checks"]} == {"model", "records", "problem"}


def test_the_version_names_torch_and_the_instruction_set_without_importing_torch(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "missing", lambda: None)
    monkeypatch.setattr(library, "best_level", lambda: "neon")
    assert call("--version")[1] == f"fedspa {metadata.version('fedspa')} (torch {torch.__version__}, native neon)\n"
    program = (
        "import atexit, sys\nfrom fedspa.cli import main\nsys.argv = ['fedspa', '--version']\n"
        "atexit.register(lambda: print('torch' in sys.modules))\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(")\nFalse\n")
