"""The attack: between a kill and `--resume`, swap what a run trains on, trains, or computes with.

A checkpoint used to know labels, counts and d. Every training record replaced, the test records replaced, Tanh changed
to ReLU at the same d, another fedspa version, another instruction set: each went on and ended with exit 0, as one run.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedspa
from fedspa.engine.native import library
from fedspa.running import run as simulate
from fedspa.runs import checkpoint
from fedspa.runs.checkpoint import CheckpointError
from fedspa.runs.config import load
from fedspa.runs.rundir import Stopped

SLOPE = 1.0
# Its layers, values and sources are digested; what else it holds shows in its scores.
OTHER_MODULE = "the digest of the module is another|with the same parameters: the code of its task, of its module"


def config(out: Path, noise: str = "seeded") -> dict[str, Any]:
    return {
        "federation": {"agents": 4, "rounds": 3, "per_round": 2},
        "algorithm": {"compression": 0.5, "local_steps": 2, "batch": 10},
        "privacy": {"noise_multiplier": 2.0, "noise": noise},
        "run": {"engine": "generic", "threads": 1, "out": str(out)},
    }


def records(**changes: Tensor) -> fedspa.Dataset:
    chance = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 4, generator=chance), torch.arange(200) % 2
    parts = {"train_x": x[:160], "train_y": y[:160], "test_x": x[160:], "test_y": y[160:]}
    return fedspa.from_arrays(*(changes.get(name, part) for name, part in parts.items()), name="mine")


class Net(nn.Module):
    """Whatever can decide a forward pass: a layer, a function, a constant, a frozen weight, a buffer, a list."""

    def __init__(
        self, layer: nn.Module, function: Callable[[Tensor], Tensor], scale: float, frozen: float, offset: float
    ) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 3), layer, nn.Linear(3, 2)
        self.function, self.scale, self.extras = function, scale, [1, {"a": scale}]
        self.frozen = nn.Parameter(torch.full((1,), frozen), requires_grad=False)
        self.register_buffer("offset", torch.full((1,), offset))

    def forward(self, x: Tensor) -> Tensor:
        offset = self.get_buffer("offset")
        return self.last(self.function(self.layer(self.first(x))) * self.scale * self.frozen + offset) * sloped(1.0)


def sloped(x: float) -> float:
    return SLOPE * x


def net(**changes: Any) -> Net:
    parts = {"layer": nn.Tanh(), "function": torch.sin, "scale": 1.0, "frozen": 1.0, "offset": 0.0}
    return Net(**(parts | changes))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each noise, stopped after its first round; tests go on with copies."""
    folders = {noise: tmp_path_factory.mktemp("begun") / noise for noise in ("seeded", "secure")}
    for noise, folder in folders.items():
        with pytest.raises(Stopped):
            simulate(config(folder, noise), data=records(), module=net(), stop=lambda: True)
    return folders


@pytest.fixture
def stopped(begun: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun["seeded"], tmp_path / "run"))


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("train_x", "training records"),
        ("train_y", "training labels"),
        ("test_x", "test records"),
        ("test_y", "test labels"),
    ],
)
def test_records(stopped: Path, part: str, name: str) -> None:
    values = getattr(records(), part)
    other = values.flip(0) if part.endswith("y") else values.clone()
    if part.endswith("x"):
        other[7, 2] = torch.nextafter(other[7, 2], torch.tensor(9.0))  # the last bit of one number
    with pytest.raises(CheckpointError, match=f"the digest of the {name} is another") as caught:
        simulate(resume=stopped, data=records(**{part: other}), module=net())
    assert "\n" not in str(caught.value)


def test_an_own_data_function_that_changed_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "import torch, fedspa\nx = torch.arange(400.0).view(100, 4) * {}\ny = torch.arange(100) % 2\n"
    source += "def load():\n    return x, y, x, y\n"
    (tmp_path / "changing_records.py").write_text(source.format(0.01))
    named = config(tmp_path / "run") | {"data": {"name": "changing_records:load"}}
    with pytest.raises(Stopped):
        simulate(named, stop=lambda: True)
    (tmp_path / "changing_records.py").write_text(source.format(0.015))
    del sys.modules["changing_records"]
    with pytest.raises(CheckpointError, match="digest of the training records"):
        simulate(resume=tmp_path / "run")


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": nn.ReLU()},
        {"layer": nn.ELU(0.5)},
        {"function": torch.cos},
        {"function": lambda x: x * 2},
        {"scale": 2.0},
        {"frozen": 2.0},
        {"offset": 1.0},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_module_of_the_same_size(stopped: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=OTHER_MODULE):
        simulate(resume=stopped, data=records(), module=net(**changes))


def test_two_lambdas_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        simulate(config(tmp_path / "run"), data=records(), module=net(function=lambda x: x + 1), stop=lambda: True)
    with pytest.raises(CheckpointError, match=OTHER_MODULE):
        simulate(resume=tmp_path / "run", data=records(), module=net(function=lambda x: x + 2))


def test_a_constant_that_a_helper_of_the_forward_reads(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest reads it; the same parameters no longer score the same."""
    monkeypatch.setitem(globals(), "SLOPE", 2.0)
    with pytest.raises(CheckpointError, match="with the same parameters: the code of its task, of its module"):
        simulate(resume=stopped, data=records(), module=net())


def test_code_that_no_digest_reaches_shows_in_the_scores(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of functions is looked up at run time; the same parameters no longer score the same."""
    monkeypatch.setattr(checkpoint, "digest_code", lambda module: "blind")
    with pytest.raises(Stopped):
        simulate(config(stopped.with_name("blind")), data=records(), module=net(), stop=lambda: True)
    with pytest.raises(CheckpointError, match="with the same parameters: the code of its task, of its module"):
        simulate(resume=stopped.with_name("blind"), data=records(), module=net(function=torch.cos))


@pytest.mark.parametrize(
    ("fact", "change"),
    [
        ("fedspa version", lambda patch: patch.setattr(checkpoint, "__version__", "0.0.9")),
        ("set of editions", lambda patch: patch.setattr(checkpoint, "EDITIONS", {"mask": 2})),
        ("instruction set", lambda patch: patch.setattr(library, "best_level", lambda: "another")),
        ("torch version", lambda patch: patch.setattr(torch, "__version__", "2.99.1")),
        ("numpy version", lambda patch: patch.setattr(checkpoint.np, "__version__", "2.99.1")),
        ("Python version", lambda patch: patch.setattr("platform.python_version_tuple", lambda: ("3", "9", "0"))),
    ],
)
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_versions_that_change_bits(
    begun: dict[str, Path],
    tmp_path: Path,
    fact: str,
    change: Any,
    noise: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same bits are promised under seeded noise only; what a run means is its editions' in any case."""
    shutil.copytree(begun[noise], tmp_path / "run")
    with monkeypatch.context() as patched:
        change(patched)
        if noise == "seeded" or fact == "set of editions":
            with pytest.raises(CheckpointError, match=f"the {fact} was '.*' and is '.*start a new run"):
                simulate(resume=tmp_path / "run", data=records(), module=net())
        else:
            simulate(resume=tmp_path / "run", data=records(), module=net())
            assert f"the {fact} was" in caplog.text
            told = [record for record in caplog.records if f"the {fact} was" in record.getMessage()]
            assert [record.levelno for record in told] == [logging.WARNING]


def test_the_same_module_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Other addresses, other hash seeds, source compiled anew: no run may be refused for that."""
    (tmp_path / "own_net.py").write_text(
        "import functools, torch\nfrom torch import nn\nWORDS = {'b': 1, 'a': 2}\n"
        "def helper(x, kinds=('tanh', 'relu')):\n"
        "    return torch.tanh(x) if 'tanh' in {'tanh', 'silu', 'gelu'} else x\n"
        "class Part:\n"
        "    def __init__(self, size): self.size = size\n"
        "class Own(nn.Module):\n"
        "    names = ['x', 'y']\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.f = nn.Linear(3, 3), functools.partial(helper, kinds=('tanh',))\n"
        "        self.g, self.kinds = (lambda x: self.f(x) + 1), {'p', 'q', 'r', 's'}\n"
        "        self.parts = {Part(1), Part(2), Part(3)}\n"
        "        self.a.register_forward_hook(lambda m, i, o: o * 2)\n"
        "    @property\n"
        "    def size(self): return len(WORDS)\n"
        "    def forward(self, x): return self.g(self.a(x))\n"
        "if __name__ != '__main__':\n"
        "    from fedspa.runs.checkpoint import digest_code\n"
        "    print(digest_code(Own()))\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", "import own_net"],
            cwd=tmp_path,
            env={"PYTHONHASHSEED": str(seed), "PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 32


def test_what_does_not_decide_a_run_may_differ(stopped: Path) -> None:
    """Fresh first values, another place of the class, another working folder: the checkpoint has the parameters."""
    torch.manual_seed(99)
    assert simulate(resume=stopped, data=records(), module=net()).summary["rounds"] == 3
    assert load(stopped / "config.toml").model.name == "given:Net"


def test_a_digest_of_records_stays_beside_them(tmp_path: Path) -> None:
    """It has no noise: published, it would confirm a guess at one record to whoever knows all others."""
    result = simulate(config(tmp_path / "run", "secure"), data=records(), module=net())
    hidden = [str(value) for value in checkpoint.digests_of(records()).values()]
    assert len(hidden) == 4
    told = {str(value) for value in result.summary["provenance"].values()}
    assert not told & {*hidden, "160"}
    for file in filter(Path.is_file, (tmp_path / "run").rglob("*")):
        found = any(value.encode() in file.read_bytes() for value in hidden)
        assert found == (file.suffix == ".safetensors" and file.parent.name == "checkpoint"), file
