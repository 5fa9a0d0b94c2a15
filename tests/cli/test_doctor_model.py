"""`fedspa doctor --model`: what a run would do with a model, for people and as JSON; bad questions are one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedspa.cli import main, step_time
from fedspa.engine.native import library
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

class Left(Centred):
    depth = 0

    def forward(self, x):
        self.depth += 1
        x = x.flatten(1)
        made = self.layer(x if x.sum() > 0 else x + 1)
        self.depth -= 1
        return made

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
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Run `fedspa doctor <words>` in this process, in a folder with those models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(step_time, "_SECONDS", 0.01)
    (tmp_path / "asked_models.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "asked_models", raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def run(words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedspa", "doctor", *words.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


def found(call: Call, words: str) -> dict[str, Any]:
    code, out, err = call(f"{words} --json")
    assert code == 0, err
    return dict(json.loads(out))


@built
def test_a_model_by_name_on_the_quickstarts_records(call: Call) -> None:
    code, out, _ = call("--model mlp")
    assert code == 0
    lines = {line.split()[0]: line.strip() for line in out.splitlines()}
    assert lines["model"].endswith("mlp: d = 4,810 parameters")
    assert "(1, 8, 8) float32 (data 'digits')" in lines["records"]
    assert lines["check"].endswith("nothing is wrong with it")
    assert lines["engine"].endswith("native on cpu: the fastest that can run this model here")
    assert "ms per agent with B = 36" in lines["a"]


@built
def test_an_own_module_is_told_what_keeps_it_from_a_faster_engine(call: Call, tmp_path: Path) -> None:
    finding = found(call, "--model asked_models:normed")
    assert finding["sound"] is True
    assert (finding["trained"], finding["frozen"]) == (64 * 8 + 8 + 16 + 90, 0)
    assert finding["engine"] == "traced"
    assert finding["passed"] == {"native": "it knows no layer GroupNorm ('2')"}
    assert finding["why"] == "not native: it knows no layer GroupNorm ('2')"
    hints = [hint for hint in finding["hints"] if not hint.startswith("run.device")]  # where a GPU is not used
    assert [hint.partition(" by ")[0] for hint in hints] == ["for native: replace GroupNorm ('2')"]
    assert finding["step"]["ms_per_agent_step"] > 0
    assert not (tmp_path / "runs").exists()


def test_it_says_what_a_run_does(call: Call) -> None:
    words = ["model.name=asked_models:half", "privacy.noise=exact"]
    finding = found(call, "--model asked_models:half --set privacy.noise=exact")
    job = prepare(load(None, words))
    assert finding["engine"] == job.engine.name == job.trained_by["engine"]
    assert finding["why"] == job.trained_by["engine_reason"]
    assert finding["hints"] == job.trained_by["engine_hints"]
    assert (finding["trained"], finding["frozen"]) == (90, 64 * 8 + 8)


@built
def test_a_shape_stands_in_for_data(call: Call) -> None:
    finding = found(call, "--model mnist-cnn --shape 1,28,28 --set algorithm.batch=4")
    assert (finding["data"], finding["examples"]) == ("made up", "(1, 28, 28) float32")
    assert (finding["trained"], finding["batch"], finding["engine"]) == (21_840, 4, "native")
    assert found(call, "--model logistic --shape 30 --classes 3")["trained"] == 31 * 3


def test_a_config_brings_data_device_and_algorithm(call: Call, tmp_path: Path) -> None:
    settings = "[algorithm]\nname = 'fedavg'\nbatch = 7\n[model]\nname = 'logistic'\n[run]\nengine = 'reference'\n"
    (tmp_path / "own.toml").write_text(settings)
    finding = found(call, "--model own.toml")
    assert (finding["model"], finding["batch"], finding["engine"]) == ("logistic", 7, "reference")
    assert finding["why"] == "run.engine = 'reference'"
    assert finding["hints"] == ["run.engine = 'auto' takes the fastest that can"]
    (tmp_path / "whole.toml").write_text(
        "[algorithm]\nname = 'cpsgd'\nlocal_steps = 1\n[privacy]\nsampling = 'fixed'\nepsilon = 4.0\n"
        "delta = 1e-3\nclip = 'coordinate'\nclip_value = 0.1\nneighbours = 'replace-one'\n"
        "[federation]\nper_round = 10\n"
    )
    finding = found(call, "--model whole.toml")
    assert finding["step"]["steps"] == 1


@pytest.mark.parametrize("name", ["mixing", "lazy", "Counting", "Left"])
def test_an_unsound_model_is_listed_and_no(call: Call, name: str) -> None:
    words = {
        "mixing": "BatchNorm1d",
        "lazy": "has no sizes yet",
        "Counting": "keeps something of one example",
        "Left": "leaves something of an example behind",  # which the engine's own trial finds
    }
    code, out, _ = call(f"--model asked_models:{name}")
    assert code == 1
    assert words[name] in out
    assert "none: a run refuses this model" in out
    code, out, _ = call(f"--model asked_models:{name} --json")
    assert code == 1
    finding = json.loads(out)
    assert (finding["sound"], finding["engine"], finding["step"]) == (False, None, None)
    assert finding["problems"][0]["mend"]


def test_a_warning_is_no_refusal(call: Call) -> None:
    finding = found(call, "--model asked_models:Centred")
    assert [problem["unsound"] for problem in finding["problems"]] == [False]
    assert finding["engine"] == "traced"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--model nobody", "choose one of mnist-cnn, cifar10-cnn, small-cnn, logistic, mlp, or 'package.module:funct"),
        ("--model asked_models:nobody", "module 'asked_models' has no 'nobody'"),
        (
            "--model nowhere:build",
            "put nowhere beside the config, start fedspa in the folder that holds it, or install it",
        ),
        (
            "--model asked_models:fails",
            "failed in its own code (RuntimeError: there is no file of weights, at asked_models.py:",
        ),
        ("--model asked_models:still", "has no trainable parameters"),
        ("--model asked_models:wide", "these are the quickstart's records: --shape 1,28,28 makes up others"),
        ("--model mnist-cnn", "these are the quickstart's records: --shape 1,28,28 makes up others"),
        ("--model mnist-cnn --shape 1,8,8", "height and width of at least 16; logistic and mlp fit any shape\n"),
        ("--model nowhere.toml", "nowhere.toml: No such file"),
        ("--model mlp --shape 3,x", "--shape is '3,x'; give the sides of one record, as in 1,28,28"),
        ("--model mlp --shape 0,3", "--shape is '0,3'"),
        ("--model mlp --classes 3", "there is no --shape"),
        ("--model mlp --shape 4 --classes 1", "a classifier needs at least 2"),
        ("--model mlp --set run.nothing=1", "run.nothing"),
        ("--model mlp --set run.device=nowhere", "cannot compute on this machine; cpu can"),
        ("--model mlp --set run.engine=stacked --set privacy.noise=exact --set task.label_smoothing=0.1", "'auto'"),
        ("--shape 3", "go with --model, and there is none"),
        ("--set run.seed=1", "go with --model, and there is none"),
    ],
)
def test_what_cannot_be_asked_is_one_line_that_teaches(call: Call, words: str, told: str) -> None:
    code, out, err = call(words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert told in err


def test_a_shape_beside_a_config_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[model]\nname = 'mlp'\n")
    code, _, err = call("--model own.toml --shape 3")
    assert code == 2
    assert "leave one of them out" in err


@pytest.mark.gpu
def test_on_a_gpu_its_memory_is_told(call: Call) -> None:
    finding = found(call, "--model mlp --set run.device=cuda")
    assert (finding["device"], finding["engine"]) == ("cuda", "stacked")
    assert finding["step"]["memory_mib"] > 0
    assert found(call, "--model asked_models:Centred --set run.device=cuda")["engine"] == "traced"


def test_memory_that_cannot_be_told_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(_field: str) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(step_time, "_resident", nowhere)
    monkeypatch.setattr(step_time, "_SECONDS", 0.01)
    measured = step_time.step_time(prepare(load(None, ["model.name=logistic"])))
    assert measured.memory_mib is None
    assert measured.ms_per_agent_step > 0
