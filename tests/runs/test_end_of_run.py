"""Whatever fails once ε is spent, the folder still has the model and the ledger, and at the end of a run a summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedspa

CONFIG = {
    "federation": {"agents": 2, "per_round": 2, "rounds": 3},
    "privacy": {"epsilon": 4.0, "delta": 1e-3},
    "algorithm": {"compression": 0.5, "batch": 8, "local_steps": 1},
}


def config(folder: Path, **run: Any) -> dict[str, Any]:
    return {**CONFIG, "run": {"out": str(folder), **run}}


def records() -> fedspa.Dataset:
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return fedspa.from_arrays(x[:100], y[:100], x[100:], y[100:], name="records")


def shared() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 2))


def test_one_layer_under_two_names_trains_is_saved_and_loaded(tmp_path: Path) -> None:
    module, start = shared(), shared()
    fedspa.run(config(tmp_path / "run"), data=records(), module=module)
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())
    assert module[0] is module[2]
    assert not torch.equal(module[0].weight, start[0].weight)
    again = fedspa.RunResult.load(tmp_path / "run", module=shared())
    x = records().test_x
    assert isinstance(x, Tensor)
    assert torch.equal(again.module(x), module.eval()(x))


class OwnState(nn.Linear):
    """A module whose state_dict fails."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        raise RuntimeError("not now")


def whole(folder: Path) -> dict[str, Any]:
    """The summary of a run that has all its files."""
    assert (folder.parent / "ledger.sqlite").is_file()
    assert load_file(folder / "model.safetensors")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == 3
    return summary


def test_a_module_that_cannot_be_saved_leaves_its_parameters(tmp_path: Path) -> None:
    module = OwnState(4, 2)
    fedspa.run(config(tmp_path / "run"), data=records(), module=module)
    whole(tmp_path / "run")
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(kept["weight"], module.weight)
    assert torch.equal(kept["bias"], module.bias)


def test_the_model_is_written_before_the_summary_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no summary")

    with monkeypatch.context() as broken:
        broken.setattr("fedspa.runs.loop.summarise", fail)
        with pytest.raises(RuntimeError, match="no summary"):
            fedspa.run(config(tmp_path / "run"), data=records(), module=nn.Linear(4, 2))
    assert load_file(tmp_path / "run" / "model.safetensors")
    assert (tmp_path / "ledger.sqlite").is_file()
    # Nothing is trained again: what is missing is made of what is there.
    fedspa.run(resume=tmp_path / "run", data=records(), module=nn.Linear(4, 2))
    whole(tmp_path / "run")
