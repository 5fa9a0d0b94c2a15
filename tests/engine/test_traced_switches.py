"""What torch.fx forgets is in no engine's graph: every engine trains what the module itself would train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import fedspa
from fedspa.engine import Unsupported
from fedspa.engine.native.chain import _traced, _Tracer
from fedspa.errors import ConfigError

Switch = Callable[[], AbstractContextManager[object]]
SWITCHES: list[Switch] = [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)]


class Switched(nn.Module):
    """A chain of layers, the first of them under a switch."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.body, self.head, self.switch = nn.Linear(4, 6), nn.Linear(6, 2), switch

    def forward(self, x: Tensor) -> Tensor:
        with self.switch():
            h = self.body(x).tanh()
        out: Tensor = self.head(h)
        return out


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_within_the_forward_pass_is_refused(switch: Switch) -> None:
    fx.Tracer().trace(Switched(switch))  # which says nothing of it
    with pytest.raises(Unsupported, match="which a chain of layers cannot express"):
        _traced(Switched(switch))


@pytest.mark.parametrize("around", SWITCHES)
def test_a_switch_around_the_tracing_is_not(around: Switch) -> None:
    with around():
        assert len(_Tracer().trace(Switched(torch.enable_grad)).nodes) == 5


def test_a_part_without_gradients_has_none_on_any_engine(tmp_path: Path) -> None:
    """The native engine used to train it, since a chain of the same layers would."""
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    data = fedspa.from_arrays(x[:64], (x[:64, 0] > 0).long(), x[64:], (x[64:, 0] > 0).long(), name="made")
    found = []
    for engine in ("auto", "reference"):
        torch.manual_seed(0)
        config = {
            "federation": {"agents": 2, "per_round": 2, "rounds": 2},
            "algorithm": {"batch": 8, "local_steps": 2, "local_lr": 1.0, "server": "average"},
            "privacy": {"epsilon": 50.0, "delta": 1e-3, "noise": "seeded"},
            "run": {"out": str(tmp_path / engine), "engine": engine},
        }
        found.append(fedspa.run(config, data=data, module=Switched(torch.no_grad)).module.state_dict())
    for name, wanted in found[1].items():
        torch.testing.assert_close(found[0][name], wanted)


class NeverAlone(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("a batch of one")
        return super().forward(x)


def test_a_module_that_takes_no_record_alone_is_one_line(tmp_path: Path) -> None:
    x, y = torch.randn(40, 4), torch.arange(40) % 2
    data = fedspa.from_arrays(x, y, x, y, name="made")
    with pytest.raises(ConfigError, match=r"cannot take one record by itself.*a batch of one") as refused:
        fedspa.run(
            {"privacy": {"epsilon": 4.0}, "run": {"out": str(tmp_path / "run")}}, data=data, module=NeverAlone(4, 2)
        )
    assert isinstance(refused.value.__cause__, ValueError)
