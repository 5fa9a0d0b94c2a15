"""Bad arguments to the Python API, and a user's own code that fails.

Before, `fedspa.run(3)`, callbacks that cannot be called and Datasets of lists were raw exceptions, some after a folder
was made; text labels were told of numpy's types, and a loader that called sys.exit ended the process. Each must be a
FedspaError of one line, with the user's own exception as its cause, and nothing written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import LONG, files, one_line
from torch import nn

import fedspa
from fedspa.errors import FedspaError
from fedspa.runs.config import Config, load


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")


class Array:
    """What is no array, and fails when asked."""

    def __array__(self, *arguments: object, **options: object) -> np.ndarray:
        raise ZeroDivisionError("mine")


X, Y = np.zeros((40, 4), dtype=np.float32), np.arange(40) % 2
ARGUMENTS: dict[str, Callable[[Path], object]] = {
    "config is a number": lambda folder: fedspa.run(3),  # type: ignore[arg-type]
    "config is a list": lambda folder: fedspa.run([("privacy", {})]),  # type: ignore[arg-type]
    "config is bytes": lambda folder: fedspa.run(b"config.toml"),  # type: ignore[arg-type]
    "config has a number for a key": lambda folder: fedspa.run({3: {}}),  # type: ignore[dict-item]
    "config has a NUL in its path": lambda folder: fedspa.run("a\0b"),
    "config is a folder": lambda folder: fedspa.run(folder),
    "config is a class": lambda folder: fedspa.run(Config),  # type: ignore[arg-type]
    "resume is no run": lambda folder: fedspa.run(resume=folder),
    "resume is nowhere": lambda folder: fedspa.run(resume=folder / LONG),
    "on_round is a number": lambda folder: fedspa.run(on_round=3),  # type: ignore[arg-type]
    "stop is a truth": lambda folder: fedspa.run(stop=True),  # type: ignore[arg-type]
    "data is a tuple": lambda folder: fedspa.run(data=(X, Y, X, Y)),  # type: ignore[arg-type]
    "data is a text": lambda folder: fedspa.run(data="digits"),  # type: ignore[arg-type]
    "module without values": lambda folder: fedspa.run(module=nn.Linear(64, 10, device="meta")),
    "module is a class": lambda folder: fedspa.run(module=nn.Linear),  # type: ignore[arg-type]
    "module has nothing to learn": lambda folder: fedspa.run(module=nn.Flatten()),
    "module fails": lambda folder: fedspa.run(module=Failing()),
    "module is of another shape": lambda folder: fedspa.run(module=nn.Linear(3, 10)),
    "labels are text": lambda folder: fedspa.from_arrays(X, np.array(["cat", "dog"] * 20), X, Y, name="mine"),
    "labels are bytes": lambda folder: fedspa.from_arrays(X, np.array([b"c", b"d"] * 20), X, Y, name="mine"),
    "labels are dates": lambda folder: fedspa.from_arrays(X, Y.astype("M8[D]"), X, Y, name="mine"),
    "labels are dicts": lambda folder: fedspa.from_arrays(X, [{}] * 40, X, Y, name="mine"),
    "labels are nothing": lambda folder: fedspa.from_arrays(X, None, X, Y, name="mine"),
    "features fail": lambda folder: fedspa.from_arrays(Array(), Y, X, Y, name="mine"),
    "features are a text": lambda folder: fedspa.from_arrays("x", Y, X, Y, name="mine"),
    "a name is a number": lambda folder: fedspa.from_arrays(X, Y, X, Y, name=3),  # type: ignore[arg-type]
    "a Dataset of arrays": lambda folder: fedspa.Dataset(X, Y, X, Y, classes=2, name="mine"),  # type: ignore[arg-type]
    "a Dataset of lists": lambda folder: fedspa.Dataset([], [], [], [], classes=2, name="mine"),  # type: ignore[arg-type]
    "load takes a number": lambda folder: fedspa.load(3),  # type: ignore[arg-type]
    "an override is a number": lambda folder: fedspa.load(None, [3]),  # type: ignore[list-item]
    "overrides are a number": lambda folder: fedspa.load(None, 3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", ARGUMENTS.values(), ids=ARGUMENTS)
def test_whatever_a_run_is_given_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedspaError) as caught:
        call(tmp_path)
    one_line(caught.value)
    assert files(tmp_path) == set()


@pytest.mark.parametrize("key", ["data.name", "model.name"])
@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("def made(*_): return {}['mine']", "KeyError"),
        ("def made(*_): raise ValueError('two\\nlines\\x1b[31m')", "ValueError"),
        ("def made(*_): import sys; sys.exit(3)", "SystemExit"),
        ("def made(*_): raise RecursionError", "RecursionError"),
        ("1/0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("def __getattr__(name): raise RuntimeError('mine')", "RuntimeError"),
        ("def made(*_): return 3", None),
        ("def made(*_): return (1, 2, 3, 4)", None),
        ("def made(*_): return ('a', 'b', 'c', 'd')", None),
    ],
)
def test_a_users_own_code_that_fails_is_named_and_chained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, body: str, cause: str | None
) -> None:
    name = f"users_{abs(hash((key, body)))}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        with pytest.raises(FedspaError) as caught:
            fedspa.run(load(None, [f"{key}={name}:made"]))
    finally:
        sys.dont_write_bytecode = before
    one_line(caught.value)
    assert f"{name}:made" in str(caught.value)
    if cause is not None:
        assert cause in str(caught.value)
        assert type(caught.value.__cause__).__name__ == cause
    assert files(tmp_path) == {f"{name}.py"}


def test_a_dataset_of_any_name_gets_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"federation": {"agents": 2, "rounds": 1, "per_round": 1}, "privacy": {"epsilon": 2.0}}
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    for name in ("", LONG, "é" * 200, "a\0b", "a/b", "..", "a\nb", "\udcff"):
        data = fedspa.from_arrays(x, Y, x, Y, name=name)
        result = fedspa.run(config, data=data)
        assert result.folder.parent == Path("runs")
        assert fedspa.run(resume=result.folder, data=data).summary == result.summary
