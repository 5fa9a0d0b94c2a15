"""Frozen parts in bfloat16 and float16: their rounding is no fault of a trace, and a wrong trace is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_twins import Twins
from test_traced_refusals import mixed, planted
from torch import Tensor, nn
from torch.nn import functional

from fedspa.engine import Unsupported
from fedspa.engine.local import LocalTask
from fedspa.engine.traced import TracedEngine, gpu_stack, trace_engine
from fedspa.engine.traced.capture import capture
from fedspa.engine.traced.gpu_rounds import Rounds
from fedspa.engine.traced.program import Program, trace
from fedspa.examples import Examples, Tree
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import modes
from fedspa.mechanisms.gaussian.plan import GaussianPlan

KINDS = [torch.bfloat16, torch.float16]


class Adapted(nn.Module):
    """A frozen linear layer with B·A beside it in float32."""

    def __init__(self, width: int, kind: torch.dtype) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).to(kind).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.b(self.a(x.float())).to(x.dtype)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Tokens, attention with adapters, an MLP, and a head in float32."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.words, self.norm = (
            each.to(kind).requires_grad_(False) for each in (nn.Embedding(11, 16), nn.LayerNorm(16))
        )
        self.query, self.value = Adapted(16, kind), Adapted(16, kind)
        self.key, self.up, self.down = (
            nn.Linear(*sizes).to(kind).requires_grad_(False) for sizes in ((16, 16), (16, 64), (64, 16))
        )
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        heads = (
            each(self.norm(x)).unflatten(-1, (2, 8)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        x = x + functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.down(functional.gelu(self.up(x)))
        return self.head(x.mean(1).float())  # type: ignore[no-any-return]


class Convolved(nn.Module):
    """Frozen convolutions between trained layers: the module casts by itself."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.first, self.head, self.kind = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(72, 3), kind
        layers = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.body = nn.Sequential(*layers).to(kind).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(torch.relu(self.first(x)).to(self.kind)).float().flatten(1))  # type: ignore[no-any-return]


class Autocast(nn.Module):
    """Weights in float32, and arithmetic in the lower precision."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.first, self.head, self.kind = nn.Linear(5, 16), nn.Linear(16, 3), kind
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.kind):
            x = self.body(self.first(x))
        return self.head(x.float())  # type: ignore[no-any-return]


NETS: dict[str, tuple[Callable[[torch.dtype], nn.Module], Callable[[int], Tensor]]] = {
    "attention": (Attention, lambda n: torch.arange(6 * n).view(n, 6) * 7 % 11),
    "convolutions": (Convolved, lambda n: torch.randn(n, 1, 6, 6)),
    "autocast": (Autocast, lambda n: torch.randn(n, 5)),
}
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "another example's": lambda values: values.roll(1, 0),
    "another coordinate's": lambda values: values.flip(1),
    "too large": lambda values: values * 1.05,
    "lost": lambda values: torch.where(torch.arange(len(values)).unsqueeze(1) == 6, torch.zeros(()), values),
    "not a number": lambda values: values + torch.nan,
    "mixed": mixed,
}


def made(net: str, kind: torch.dtype) -> tuple[nn.Module, Examples]:
    torch.manual_seed(0)
    return NETS[net][0](kind), Examples(NETS[net][1](2), torch.arange(2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", NETS)
def test_rounding_is_no_fault_and_faults_are_found(
    net: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, like = made(net, kind)
    assert isinstance(trace_engine(module, like, None, 1), TracedEngine)
    for name, wrong in WRONG.items():
        with monkeypatch.context() as patched:
            planted(patched, wrong, parameter=0)
            found = trace_engine(module, like, None, 1)
        assert isinstance(found, Unsupported), name
        assert "are not those of single ones" in str(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", NETS)
def test_gradients_are_those_of_single_examples_up_to_rounding(net: str, kind: torch.dtype) -> None:
    module, like = made(net, kind)
    x, y = NETS[net][1](9), torch.arange(9) % 3
    theta = FlatModel(module).flatten()
    found = torch.cat(list(TracedEngine(module, like).rows(theta, x, y, None)))
    wanted = FlatModel(module).per_example_gradients(theta, x, y)
    assert float((found - wanted).norm() / wanted.norm()) < 20 * torch.finfo(kind).eps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", NETS)
def test_an_example_s_gradient_has_the_same_bits_beside_any_others(net: str, kind: torch.dtype) -> None:
    module, like = made(net, kind)
    engine, theta = TracedEngine(module, like), FlatModel(module).flatten()
    x, y = NETS[net][1](8), torch.arange(8) % 3

    def row(x: Tree, y: Tensor) -> Any:
        return torch.cat(list(engine.rows(theta, x, y, None)))[3]

    alone, others = row(x, y), torch.arange(8) != 3
    changed, spoilt = x.clone(), x.clone()
    changed[others] = x[others].flip(0)
    spoilt[others] = 1000 if net == "attention" else torch.nan  # type: ignore[assignment]
    for beside in (changed, spoilt):
        assert torch.equal(row(beside, torch.where(others, (y + 1) % 3, y)), alone)


@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize("net", NETS)
def test_a_trace_for_a_gpu_leaves_other_types_to_torch(net: str, agents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of whole layers are for float32. By their twins, from a trace as a GPU has it."""
    monkeypatch.setattr(gpu_stack, "work_on", Twins)
    module, like = made(net, torch.bfloat16)
    graph = capture(FlatModel(module), modes(module), like, 3, layers=True).graph
    names = {node: str(node.target) for node in graph.nodes}
    kept_whole = [node for node in names if names[node].startswith("fedspa.") and "normed" not in names[node]]
    assert kept_whole
    assert not any(given.meta.get("dtype") in KINDS for node in kept_whole for given in node.all_input_nodes)
    engine, theta = TracedEngine(module, like), FlatModel(module).flatten()

    def traced_for_a_gpu(agents: int | None) -> Program:
        return trace(engine._model, engine._modes, like, gpu_stack.keep, agents, factors=True, layers=True)

    d = len(theta)
    plan = GaussianPlan(d, d, "l2", 0.5, "poisson", 9, 20, 2, 1, 1e-9, "add-remove", 1e-4)
    tasks = [
        LocalTask(NETS[net][1](20), torch.arange(20) % 3, None, 1.0, 0.3, plan, bytes([n]) * 32) for n in range(agents)
    ]
    rounds = Rounds(traced_for_a_gpu, like, d, torch.device("cpu"))
    for one, other in zip(rounds.train(theta, tasks), engine.train(theta, tasks)):
        assert float((one.delta - other.delta).norm() / other.delta.norm()) < 0.1
        assert one.zeroed == other.zeroed == 0
