"""All problems of a module at once, each with its layer, why, and the line that fixes it."""

from __future__ import annotations

import pickle
import random
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fedspa
from fedspa.engine.choose import EngineRequest, choose
from fedspa.errors import ConfigError
from fedspa.examples import Examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.layers import check_layers, require_module
from fedspa.learning.validate import try_failures


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn1(self.conv1(x)))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)  # type: ignore[no-any-return]


class Drawing(nn.Module):
    """Python's or numpy's numbers, or those of a generator of its own."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.draw()  # type: ignore[no-any-return]


class Last(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]  # type: ignore[no-any-return]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]  # type: ignore[no-any-return]


def found(module: nn.Module, example: object = None) -> list[tuple[str, str, bool]]:
    return [(problem.layer, problem.kind, problem.unsound) for problem in fedspa.check(module, example)]


def compiled() -> nn.Module:
    """As torch.compile returns it."""
    return nn.Sequential(OrderedDict(_orig_mod=nn.Linear(4, 3)))


def old_spectral_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(4, 3)))


BY_NAME: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "BatchNorm1d": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "1", "mixes", "fedspa.fix"),
    "BatchNorm2d": (lambda: nn.Sequential(Residual(4)), "0.bn1", "mixes", "fedspa.fix"),
    "no statistics": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval(),
        "1",
        "eval mode too",
        "fedspa.fix",
    ),
    "InstanceNorm": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True)),
        "1",
        "running statistics",
        "fedspa.fix",
    ),
    "lazy": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "1", "no sizes yet", "`module(example)`"),
    "compiled": (
        compiled,
        "",
        "torch.compile",
        "give `module._orig_mod`",
    ),
    "meta": (lambda: nn.Sequential(nn.Linear(4, 3, device="meta")), "0", "'meta'", "'cpu'"),
    "frozen": (lambda: nn.Linear(4, 3).requires_grad_(False), "", "no trainable", "requires_grad_"),
    "empty": (nn.Flatten, "", "no trainable", "add a layer"),
    "half": (lambda: nn.Sequential(nn.Linear(4, 3).half()), "0", "float16", "get_submodule('0').float()"),
    "complex": (lambda: nn.Linear(4, 3, dtype=torch.complex64), "", "complex64", "real and imaginary"),
    "max_norm": (lambda: nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), "0", "max_norm", "max_norm = None"),
    "spectral_norm of all": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), "", "spectral", "module.eval()"),
    "old spectral_norm": (old_spectral_norm, "1", "spectral", "get_submodule('1').eval()"),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
@pytest.mark.parametrize("name", BY_NAME)
def test_kinds_and_modes_say_it_without_an_example(name: str) -> None:
    make, layer, why, mend = BY_NAME[name]
    module = make()
    [problem] = fedspa.check(module)
    assert problem.layer == layer
    assert problem.unsound
    assert why in problem.why
    assert mend in problem.fix
    where = f"the module's layer '{layer}' ({problem.kind})" if layer else f"the module itself ({problem.kind})"
    assert str(problem).startswith(where)
    with pytest.raises(ConfigError) as caught:
        check_layers(module)
    assert str(caught.value) == str(problem)


SOUND: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "frozen statistics": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()), torch.rand(3, 4)),
    "frozen InstanceNorm": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True)).eval(),
        torch.rand(3, 2, 5),
    ),
    "Dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.rand(3, 4)),
    "Dropout(0)": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), torch.rand(3, 4)),
    "FractionalMaxPool": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.FractionalMaxPool2d(2, output_size=3)),
        torch.rand(3, 1, 8, 8),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), torch.rand(3, 5, 4)),
    "attention": (Attending, torch.rand(3, 5, 4)),
    "LSTM": (lambda: Last(nn.LSTM(4, 3, num_layers=2, dropout=0.4, batch_first=True)), torch.rand(3, 5, 4)),
    "weight_norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))), torch.rand(3, 4)),
    "frozen spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(), torch.rand(3, 4)),
    "tokens": (lambda: nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(24, 3)), torch.randint(50, (3, 6))),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_is_passed_in_silence(name: str) -> None:
    make, example = SOUND[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [str(problem) for problem in fedspa.check(make(), example)] == []


class Keyword(nn.Module):
    """As transformers' models take and give."""

    def __init__(self, scale: bool = False) -> None:
        super().__init__()
        self.words, self.head, self.scale = nn.Embedding(40, 6), nn.Linear(6, 2), scale

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        weights = attention_mask.float()
        if self.scale:
            weights = weights / weights.mean()
        return {"logits": self.head((self.words(input_ids) * weights.unsqueeze(-1)).mean(1)), "mask": weights}


def test_dicts_and_tuples_are_given_as_the_module_takes_them() -> None:
    tokens, mask = torch.randint(40, (3, 7)), torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 2 + [0] * 5])
    as_dict = {"input_ids": tokens, "attention_mask": mask}
    assert found(Keyword(), as_dict) == []
    assert found(Keyword(), (tokens, mask.bool())) == []
    assert found(Keyword(scale=True), as_dict) == [("", "Keyword", False)]
    [problem] = fedspa.check(Keyword(), {"input_ids": tokens, "mask": mask})
    assert "unexpected keyword argument 'mask'" in problem.why
    with pytest.raises(ConfigError, match="the example holds a str"):
        fedspa.check(Keyword(), {"input_ids": tokens, "attention_mask": "all"})
    with pytest.raises(ConfigError, match="module is a str"):
        fedspa.check("module")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (lambda: np.random.rand(), "numpy.random"),  # noqa: NPY002
        (lambda: random.random(), "Python's random"),
        (np.random.default_rng(3).random, "gives an example another gradient"),
    ],
    ids=["numpy", "python", "own"],
)
def test_randomness_from_elsewhere_is_found(draw: Callable[[], float], named: str) -> None:
    module, example = nn.Sequential(nn.Linear(4, 4), Drawing(draw)), torch.rand(2, 4)
    before = generators()
    [problem] = fedspa.check(module, example)
    assert named in problem.why
    assert "torch's default generator" in problem.fix
    assert generators() == before


def generators() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, bytes(keys), *rest, bytes(torch.get_rng_state().tolist())


def test_a_check_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(Residual(2), nn.Flatten(), nn.Linear(50, 4), Counting())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module[1].eval()
    assert len(fedspa.check(module, torch.rand(2, 2, 5, 5))) == 2
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module[3].calls == 0
    assert [layer.training for layer in module] == [True, False, True, True]


def test_what_an_error_leaves_behind_is_found_as_a_run_finds_it() -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.depth = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.depth += 1
            made = self.layer(x)
            self.depth -= 1
            return made  # type: ignore[no-any-return]

    [problem] = fedspa.check(nn.Sequential(nn.Linear(4, 4), Left()), torch.rand(3, 4))
    assert (problem.layer, problem.kind, problem.unsound) == ("1", "Left", True)
    with pytest.raises(ConfigError) as refused:
        try_failures(nn.Sequential(nn.Linear(4, 4), Left()), Examples(torch.rand(1, 4), torch.zeros(1).long()))
    assert str(refused.value) == str(problem)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(problem)  # as a worker's comes back


# What torch makes of a module, and what is none: each runs, or is refused in a line that says what to give instead.


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


def in_int8(*, trained: bool) -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 3))
    module[1].requires_grad_(trained).weight = Int8(module[1].weight.detach(), requires_grad=trained)
    return module


def trained_in_int8() -> nn.Module:
    return in_int8(trained=True)


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
    "sharded": (lambda: nn.Sequential(nn.Flatten(), Sharded(16, 3)), "not sharded"),
    "partly quantised": (partly_quantised, "by bitsandbytes or torchao"),
    "trained in int8": (trained_in_int8, "get_submodule('1').requires_grad_(False)"),
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
        lambda: in_int8(trained=False),
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


def test_all_are_listed_and_the_first_is_refused_with_their_number() -> None:
    module = nn.Sequential(nn.Conv2d(1, 8, 3), Residual(8), Residual(8), nn.Flatten(), nn.Linear(288, 4), Counting())
    assert found(module) == [("1.bn1", "BatchNorm2d", True), ("2.bn1", "BatchNorm2d", True)]
    with_state = [*found(module), ("5", "Counting", True)]
    assert found(module, torch.rand(2, 1, 8, 8)) == with_state
    with pytest.raises(ConfigError, match=r"layer '1\.bn1' \(BatchNorm2d\).*\(1 more: fedspa\.check\(module\) lists"):
        check_layers(module)


def test_a_module_that_does_not_take_the_example_is_a_problem() -> None:
    [problem] = fedspa.check(nn.Linear(4, 3), torch.rand(2, 5))
    assert "has no gradient for an example made like (5,)" in problem.why
    assert "RuntimeError" in problem.why


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
