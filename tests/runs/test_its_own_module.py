"""A card goes with a module whose parameters are those of the run, all of them and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from fedspa.errors import ConfigError
from fedspa.runs.rebuild import require_its_own


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()


def tied(module: nn.Sequential) -> None:
    """The same values under another name are no other values."""
    module.append(nn.Linear(4, 4))
    module[3].weight, module[3].bias = module[0].weight, module[0].bias


def moved(module: nn.Sequential) -> None:
    module[2].bias.data += 1e-3


def with_buffer(module: nn.Sequential) -> None:
    module.register_buffer("scale", torch.ones(3))


@pytest.mark.parametrize("change", [lambda module: None, tied, lambda module: module.append(nn.Softmax(1))])
def test_the_runs_own_parameters_pass(change: Callable[[nn.Sequential], object], tmp_path: Path) -> None:
    module = net()
    save_model(module, str(tmp_path / "model.safetensors"))
    change(module)
    require_its_own(module, tmp_path)


def test_tied_weights_of_the_run_pass(tmp_path: Path) -> None:
    module = net()
    tied(module)
    save_model(module, str(tmp_path / "model.safetensors"))
    require_its_own(module, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        moved,
        with_buffer,
        lambda module: module.append(nn.Linear(4, 2)),
        lambda module: module.pop(2),
        lambda module: module.insert(0, nn.Linear(4, 4)),
    ],
)
def test_other_parameters_are_refused(change: Callable[[nn.Sequential], object], tmp_path: Path) -> None:
    module = net()
    save_model(module, str(tmp_path / "model.safetensors"))
    change(module)
    with pytest.raises(ConfigError, match="other parameters than the run"):
        require_its_own(module, tmp_path)
