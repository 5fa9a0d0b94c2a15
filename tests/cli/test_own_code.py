"""Functions of one's own: found beside the config from any folder; where they fail, file and line are named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedspa
from fedspa.errors import ConfigError
from fedspa.running import Stopped
from fedspa.runs.config import load
from fedspa.runs.metrics import RoundMetrics

Call = Callable[..., tuple[int, str, str]]

CODE = """\
import torch
from torch import nn


def data():
    x = torch.linspace(-1, 1, 120)[:, None]
    return x[:90], (x[:90, 0] > 0).long(), x[90:], (x[90:, 0] > 0).long()


def model():
    return nn.Linear(1, 2)


def loss(module, example):
    x, y = example
    return nn.functional.cross_entropy(module(x), y)


def no_data():
    return {}["records"]


def no_model():
    return nn.Linear(1, -2)


def no_loss(module, example):
    x, y = example
    return module(x) @ y.unknown


class Forward(nn.Linear):
    def forward(self, x):
        return super().forward(x) @ torch.zeros(7)


def forward():
    return Forward(1, 2)
"""
CONFIG = """\
[federation]
agents = 2
per_round = 2
rounds = 3
[data]
name = "own_code:data"
[model]
name = "own_code:model"
[task]
name = "own_code:loss"
[algorithm]
compression = 1.0
local_steps = 1
batch = 10
[privacy]
noise_multiplier = 2.0
noise = "seeded"
delta = 1e-3
[run]
engine = "generic"
threads = 1
"""


@pytest.fixture
def project(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its folder; the current one is another."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "own_code.py").write_text(CODE)
    (folder / "config.toml").write_text(CONFIG)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


def test_a_run_is_begun_and_resumed_from_any_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        fedspa.run(load(project / "config.toml", ["run.out=out"]), stop=lambda: True)
    out = Path("out").absolute()
    monkeypatch.chdir(tmp_path)
    del sys.modules["own_code"]
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "project" not in entry])
    assert fedspa.run(resume=out).summary["rounds"] == 3


def line(words: str) -> int:
    return next(number for number, text in enumerate(CODE.splitlines(), 1) if words in text)


@pytest.mark.parametrize(
    ("key", "function", "kind", "at"),
    [
        ("data.name", "no_data", "KeyError", '{}["records"]'),
        ("model.name", "no_model", "RuntimeError", "nn.Linear(1, -2)"),
        ("task.name", "no_loss", "AttributeError", "y.unknown"),
        ("model.name", "forward", "RuntimeError", "torch.zeros(7)"),
    ],
)
def test_what_fails_is_one_line_with_the_place(
    project: Path, call: Call, key: str, function: str, kind: str, at: str
) -> None:
    code, _, err = call("run", str(project / "config.toml"), "--set", f"{key}=own_code:{function}")
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith(f"fedspa: {key} = 'own_code:{function}'")
    assert f"({kind}: " in err
    assert f"{Path('project', 'own_code.py')}:{line(at)})" in err
    assert err.endswith("; FEDSPA_TRACEBACK=1 shows the way there\n")


def test_the_whole_traceback_can_be_had(project: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSPA_TRACEBACK", "1")
    code, _, err = call("run", str(project / "config.toml"), "--set", "data.name=own_code:no_data")
    assert code == 2
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.splitlines()[-1].startswith("fedspa: data.name = 'own_code:no_data' failed in its own code (KeyError")


def test_ones_own_mistake_in_a_config_has_no_traceback_to_offer(project: Path, call: Call) -> None:
    code, _, err = call("run", str(project / "config.toml"), "--set", "run.seed=-1")
    assert code == 2
    assert "FEDSPA_TRACEBACK" not in err


def test_a_metric_that_fails_names_its_line(project: Path) -> None:
    def metric(outputs: object, targets: object) -> float:
        raise ValueError("no such class")

    with pytest.raises(
        ConfigError, match=rf"'mine' failed \(ValueError: no such class, at .*{Path(__file__).name}:\d+\)"
    ):
        fedspa.run(project / "config.toml", metrics={"mine": metric})


def test_a_hook_that_fails_is_raised_as_it_is_and_the_run_goes_on_later(project: Path, tmp_path: Path) -> None:
    def hook(metrics: RoundMetrics) -> None:
        if metrics.round == 1:
            raise ZeroDivisionError("mine")

    config = load(project / "config.toml", [f"run.out='{tmp_path / 'run'}'"])
    with pytest.raises(ZeroDivisionError) as caught:
        fedspa.run(config, on_round=hook)
    assert caught.traceback[-1].path == Path(__file__)
    assert fedspa.run(resume=tmp_path / "run").summary["rounds"] == 3
