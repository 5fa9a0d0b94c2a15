"""What torch makes of a module, and what is none: each runs, or is refused in a line that says what to give instead."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fedspa
from fedspa.engine.choose import EngineRequest, choose
from fedspa.errors import ConfigError
from fedspa.examples import Examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.layers import require_module

X = torch.rand(2, 1, 4, 4)
SPEC = Examples(X[:1], torch.zeros(1, dtype=torch.int64))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def in_inference() -> nn.Module:
    with torch.inference_mode():
        return net()


def compiled_in_place() -> nn.Module:
    module = net()
    module.compile()
    return module


def sparse() -> nn.Module:
    module = net()
    module[1].weight = nn.Parameter(module[1].weight.detach().to_sparse())
    return module


def partly_quantised() -> nn.Module:
    module = net()
    module[1] = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(16, 8)), {nn.Linear})[0]
    return module


class Int8(nn.Parameter):
    """As torchao and bitsandbytes hold the weights of a frozen layer."""


Int8.__module__ = "torchao.quantization"


def frozen_in_int8() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 3))
    module[1].requires_grad_(False).weight = Int8(module[1].weight.detach(), requires_grad=False)
    return module


class Labelled(nn.Linear):
    """A state that no file of tensors holds: the run would end in an error once it is trained."""

    def get_extra_state(self) -> object:
        return {"made": "today"}

    def set_extra_state(self, state: object) -> None:
        pass


class Sharded(nn.Linear):
    """As `fully_shard` makes of a layer."""


Sharded.__module__ = "torch.distributed.fsdp._fully_shard"

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (lambda: torch.jit.script(net()), "Sequential(module)"),
    "compiled part in place": (lambda: nn.Sequential(compiled_in_place()), "get_submodule('0').compile()"),
    "data parallel": (lambda: nn.DataParallel(net()), "give `module.module`"),
    "sharded": (lambda: nn.Sequential(nn.Flatten(), Sharded(16, 3)), "not sharded"),
    "partly quantised": (partly_quantised, "before it was quantised"),
    "frozen in int8": (frozen_in_int8, "frozen parts in bfloat16"),
    "sparse": (sparse, "to_dense"),
    "inference mode": (in_inference, "outside of it"),
    "state": (lambda: nn.Sequential(nn.Flatten(), Labelled(16, 3)), "outside of `get_extra_state`"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(kind: str) -> None:
    make, mend = REFUSED[kind]
    module = make()
    problems = fedspa.check(module, X)
    assert any(mend in str(problem) for problem in problems), problems
    assert all(problem.unsound for problem in problems)
    with pytest.raises(ConfigError) as refused:
        FlatModel(module)
    assert str(problems[0]) in str(refused.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(torch.jit.script(net())),
        lambda: nn.Sequential(torch.jit.trace(net(), X)),
        lambda: torch.fx.symbolic_trace(net()),
        lambda: torch.optim.swa_utils.AveragedModel(net()),
    ],
)
def test_what_is_sound_trains(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert fedspa.check(module, X) == []
    engine = choose(EngineRequest("auto", module, SPEC, "cpu", 1, False))
    assert engine.separates_records


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (nn.Linear, "the class Linear; give what it makes, as Linear()"),
        ([nn.Flatten(), nn.Linear(4, 2)], "a list; `torch.nn.Sequential(*module)`"),
        ([1, 2], "a list; it must be a torch.nn.Module"),
        ("model.pt", "a str; it must be"),
    ],
)
def test_what_is_no_module_is_refused(given: object, why: str) -> None:
    for ask in (require_module, fedspa.check):
        with pytest.raises(ConfigError) as refused:
            ask(given)  # type: ignore[operator]
        assert why in str(refused.value)


def test_a_module_that_cannot_be_copied_is_listed() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lock = nn.Linear(4, 2), threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    [problem] = fedspa.check(Locked(), torch.rand(2, 4))
    assert "cannot be copied" in problem.why
    assert "lock" in problem.why


def test_a_module_that_has_no_eval_mode_is_refused_in_one_line() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(net(), (X,)).module()
        with pytest.raises(ConfigError, match="the module cannot be switched to eval mode"):
            fedspa.run({"privacy": {"epsilon": 8.0}}, module=exported)
