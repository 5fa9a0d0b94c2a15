"""Frozen layers that are quantised, and parts that were compiled: they run, and a run of them is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedspa
from fedspa.engine.choose import EngineRequest, decide
from fedspa.errors import ConfigError
from fedspa.examples import Examples
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features
from fedspa.learning.tasks import Classification

Make = Callable[[int, int], nn.Module]


class Int8(nn.Parameter):
    """As torchao holds the weights of a frozen layer."""


Int8.__module__ = "torchao.quantization"


def imitated(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs).requires_grad_(False)
    layer.weight = Int8(layer.weight.detach(), requires_grad=False)
    return layer


def in_8_bits(inputs: int, outputs: int) -> nn.Module:
    library = pytest.importorskip("bitsandbytes")
    layer: nn.Module = library.nn.Linear8bitLt(inputs, outputs, has_fp16_weights=False, threshold=6.0)
    layer.load_state_dict(nn.Linear(inputs, outputs).state_dict())
    return layer.to("cpu").requires_grad_(False)


def in_4_bits(inputs: int, outputs: int) -> nn.Module:
    library = pytest.importorskip("bitsandbytes")
    layer: nn.Module = library.nn.Linear4bit(inputs, outputs, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict(nn.Linear(inputs, outputs).state_dict())
    return fedspa.fix(layer.to("cpu").requires_grad_(False))


def by_torchao(inputs: int, outputs: int) -> nn.Module:
    library = pytest.importorskip("torchao.quantization")
    layers = nn.Sequential(nn.Linear(inputs, outputs))
    library.quantize_(layers, library.Int8WeightOnlyConfig())
    return layers.requires_grad_(False)


KINDS: list[Make] = [imitated, in_8_bits, in_4_bits, by_torchao]


class Adapted(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(64, 64), make(64, 64)
        self.a, self.b, self.head = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.frozen(x) + self.b(self.a(x))))  # type: ignore[no-any-return]


def with_body(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(make(64, 64), nn.Tanh(), nn.Linear(64, 3))


def with_adapter(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return Adapted(make)


def records() -> fedspa.Dataset:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(69, 64, generator=generator), torch.arange(69) % 3
    return fedspa.from_arrays(x[:60], y[:60], x[60:], y[60:], name="records")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [with_body, with_adapter])
@pytest.mark.parametrize("make", KINDS)
def test_a_run_is_saved_and_loaded(make: Make, build: Callable[[Make], nn.Module], tmp_path: Path) -> None:
    module, name = build(make), "2.weight" if build is with_body else "b.weight"
    before = module.state_dict()[name].clone()
    config = {
        "federation": {"agents": 2, "rounds": 2, "per_round": 2},
        "algorithm": {"local_steps": 1, "batch": 5},
        "privacy": {"noise_multiplier": 1.0, "epsilon": None},
        "run": {"out": str(tmp_path / "run")},
    }
    result = fedspa.run(config, data=records(), module=module)
    assert not torch.equal(before, result.module.state_dict()[name])
    loaded = fedspa.load_model(tmp_path / "run", module=build(make))
    x = torch.randn(4, 64)
    assert torch.equal(loaded.eval()(x), result.module.eval()(x))
    other = nn.Sequential(imitated(64, 64), nn.Tanh(), nn.Linear(64, 3), nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="not those of this"):
        fedspa.load_model(tmp_path / "run", module=other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", KINDS)
def test_a_record_s_features_are_of_that_record_alone(make: Make) -> None:
    """Also beside a record with outliers, by which LLM.int8() takes another way for whole columns."""
    module, like = with_body(make), Examples(torch.randn(2, 64), torch.arange(2))
    found = split(module, like, Classification(3))
    assert isinstance(found, Split), found
    x = torch.randn(6, 64)
    beside = x.clone()
    beside[[0, 2, 4]] *= 1e4
    for per_example in (True, False):
        alone, among = (Features(found, each, strict=True, per_example=per_example).of() for each in (x, beside))
        assert isinstance(alone, Tensor)
        assert isinstance(among, Tensor)
        assert torch.equal(alone[[1, 3, 5]], among[[1, 3, 5]])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", KINDS)
def test_adapters_beside_it_keep_records_apart(make: Make) -> None:
    like = Examples(torch.randn(2, 64), torch.arange(2))
    engine = decide(
        EngineRequest("auto", with_adapter(make), like, "cpu", 1, exact=False, task=Classification(3))
    ).make()
    assert engine.separates_records


def compiled() -> nn.Module:
    inner = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16)).requires_grad_(False)
    return nn.Sequential(torch.compile(inner), nn.Tanh(), torch.compile(nn.Linear(16, 3)))  # type: ignore[arg-type]


def test_compiled_parts_are_taken_out_of_their_wrappers() -> None:
    module = compiled()
    assert any("fedspa.fix" in str(problem) for problem in fedspa.check(module))
    fixed = fedspa.fix(module)
    assert fedspa.check(fixed, torch.randn(2, 5)) == []
    assert [type(layer).__name__ for layer in fixed] == ["Sequential", "Tanh", "Linear"]  # type: ignore[attr-defined]
    assert type(fixed[0][1]).__name__ == "GroupNorm"  # type: ignore[index]
    assert next(iter(fixed.state_dict())) == "0.0.weight"
    whole = torch.compile(nn.Linear(5, 3))
    assert type(fedspa.fix(whole)) is nn.Linear  # type: ignore[arg-type]
    assert type(module[0]).__name__ == "OptimizedModule"  # type: ignore[index]


class Packing(nn.Linear):
    """As bitsandbytes' Linear4bit on a CPU with AVX512-BF16."""

    support_avx512bf16_for_cpu = True


def test_a_layer_that_loses_its_gradient_once_it_is_evaluated_is_named() -> None:
    module = nn.Sequential(nn.Linear(5, 8), Packing(8, 8).requires_grad_(False), nn.Linear(8, 3))
    (problem,) = fedspa.check(module)
    assert (problem.layer, problem.kind) == ("1", "Packing")
    assert "no gradient" in str(problem)
    assert fedspa.check(fedspa.fix(module), torch.randn(2, 5)) == []
    assert module[1].support_avx512bf16_for_cpu
