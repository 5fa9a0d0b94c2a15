"""What the traced back end does not take: whatever could fail for one example, mix two, or be traced wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_nets import norm_resnet, random_net
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from traced_nets import Net, data, rows, texts

from fedspa.engine import Unsupported
from fedspa.engine.choose import EngineRequest, decide
from fedspa.engine.traced import TracedEngine, trace_engine
from fedspa.engine.traced import program as programs
from fedspa.engine.traced.allowed import ALLOWED, RANDOM, require_gpu_rules
from fedspa.engine.traced.capture import Untraceable, capture, for_any_size
from fedspa.engine.traced.program import Cuts
from fedspa.examples import Examples, Tree
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import modes


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        return 2 * delta


def caught(net: Any, x: Tensor) -> Tensor:
    """vmap refuses the question, and the module takes the refusal for an answer."""
    try:
        return net.head(x) * (1 if bool(x.sum() > 0) else 3)  # type: ignore[no-any-return]
    except RuntimeError:
        return -net.head(x)  # type: ignore[no-any-return]


def chosen_rows(net: Any, x: Tensor) -> Tensor:
    return net.head(x)[torch.arange(len(x)), :, x.long().sum(1).clamp(0, 0)]  # type: ignore[no-any-return]


def of_floats(function: Callable[[Any, Tensor], Tensor], features: int = 8) -> tuple[nn.Module, Tree]:
    return Net(function, head=nn.Linear(features, 3)), rows(4, torch.Generator().manual_seed(0))


def of_words(function: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Tree]:
    return Net(function, head=nn.Linear(6, 3)), texts(4, torch.Generator().manual_seed(0))


WHOLE = "divides whole numbers"
CONTROL, OUTSIDE, INDEX = "data-dependent control flow", "may fail for one example, or has no rule here", "unchecked"
CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Tree]], str]] = {
    "if": (lambda: of_floats(lambda net, x: net.head(x) if x.sum() > 0 else -net.head(x)), CONTROL),
    "item": (lambda: of_floats(lambda net, x: net.head(x) * x.sum().item()), CONTROL),
    "one_hot": (lambda: of_words(lambda net, x: net.head(functional.one_hot(x, 6).float().sum(1))), CONTROL),
    "tried and caught": (lambda: of_floats(caught), "are not those of single ones"),
    "a long LSTM": (
        lambda: (Net(lambda net, x: net.g(x)[0][:, -1], g=nn.LSTM(2, 3, batch_first=True)), torch.rand(5, 300, 2)),
        "a recurrent layer of more than 256 steps",
    ),
    "a packed sequence": (
        lambda: (
            Net(lambda net, x: net.g(pack_padded_sequence(x, [2] * len(x), True))[1][0], g=nn.GRU(8, 3)),
            torch.rand(5, 2, 8),
        ),
        CONTROL,
    ),
    "inverse": (
        lambda: of_floats(
            lambda net, x: net.head(torch.linalg.inv(x.view(-1, 2, 4)[:, :, :2] + 9 * torch.eye(2)).flatten(1)), 4
        ),
        OUTSIDE,
    ),
    "Cholesky": (lambda: of_floats(lambda net, x: net.head(x) + torch.linalg.cholesky(torch.eye(3) + x[0, 0])[0]), ""),
    "columns by index": (
        lambda: (Net(chosen_rows, head=nn.Unflatten(1, (4, 2))), of_floats(caught)[1]), "",
    ),
    "columns by index behind an ellipsis": (lambda: of_words(lambda net, x: net.head(x.float()[..., x[0] % 6])), INDEX),
    "take_along_dim": (lambda: of_words(lambda net, x: net.head(torch.take_along_dim(x.float(), x, 1))), INDEX),
    "scatter": (lambda: of_words(lambda net, x: net.head(torch.zeros(1, 6).scatter(1, x % 6, 1.0))), INDEX),
    "whole numbers divided": (lambda: of_words(lambda net, x: net.head((20 // (x - 7)).float())), WHOLE),
    "their remainder": (lambda: of_words(lambda net, x: net.head((20 % (x - 7)).float())), WHOLE),
    "in place": (lambda: of_words(lambda net, x: net.head(x.clone().floor_divide_(x - 7).float())), WHOLE),
    "drawn in place": (lambda: of_floats(lambda net, x: net.head(x + torch.empty_like(x).normal_())), "draws by"),
    "rounded division": (
        lambda: of_words(lambda net, x: net.head(torch.div(x, x - 7, rounding_mode="trunc").float())),
        WHOLE,
    ),
    "C's remainder": (lambda: of_words(lambda net, x: net.head(torch.fmod(x, x - 7).float())), WHOLE),
    "function of its own": (lambda: of_floats(lambda net, x: Doubled.apply(net.head(x))), "vmap"),  # type: ignore[no-untyped-call]
    "sort": (lambda: of_floats(lambda net, x: net.head(x.sort(1)[0])), OUTSIDE),
    "binary_cross_entropy": (
        lambda: of_floats(lambda net, x: net.head(x) + functional.binary_cross_entropy(x.sigmoid(), x.sigmoid())),
        OUTSIDE,
    ),
    "unfilled memory": (lambda: of_floats(lambda net, x: net.head(x) + torch.empty(3).uniform_()), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_reason(name: str) -> None:
    torch.manual_seed(0)
    make, why = CASES[name]
    module, x = make()
    found = trace_engine(module, Examples(x, torch.zeros(4, dtype=torch.int64)), None, 1)
    assert isinstance(found, Unsupported)
    assert why in str(found)
    assert "\n" not in str(found)


def test_every_allowed_operation_is_one_of_torchs() -> None:
    """A name with a slip in it would allow nothing, and nobody would notice."""
    missing = [name for name in ALLOWED | RANDOM if not hasattr(torch.ops.aten, name)]
    assert missing == []


def test_none_of_the_allowed_operations_changes_the_shape_by_values_or_raises_for_them() -> None:
    """Those of torch's operations that are known to."""
    by_values = {"nonzero", "masked_select", "unique_dim", "_unique2", "item", "_local_scalar_dense"}
    raising = {"linalg_inv_ex", "linalg_cholesky_ex", "binary_cross_entropy", "nll_loss_forward", "one_hot", "bincount",
               "multinomial", "poisson", "linalg_eigh", "linalg_solve_ex", "histc", "take", "put", "_embedding_bag",
               "nll_loss2d_forward", "multilabel_margin_loss_forward", "multi_margin_loss", "_ctc_loss"}  # fmt: skip
    assert not ALLOWED & (by_values | raising)


# A program that is wrong.


def planted(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Tensor], parameter: int = 1) -> None:
    right = Cuts.take

    def take(cuts: Cuts, number: int, size: int, made: Any) -> Any:
        part = right(cuts, number, size, made)
        return part._replace(values=wrong(part.values)) if number == parameter else part

    monkeypatch.setattr(Cuts, "take", take)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda values: values.roll(1, 0),  # another example's
        lambda values: values.flip(1),  # another coordinate's
        lambda values: values * 1.05,
        lambda values: torch.where(torch.arange(len(values)).unsqueeze(1) == 6, torch.zeros(()), values),
        lambda values: values + torch.nan,
    ],
)
def test_a_wrong_rule_is_found_before_it_is_used(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, like = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)), data("MLP", 4)
    assert isinstance(trace_engine(module, like, None, 1), TracedEngine)
    planted(monkeypatch, wrong)
    found = trace_engine(module, like, None, 1)
    assert isinstance(found, Unsupported)
    assert "are not those of single ones" in str(found)


def test_a_wrong_rule_behind_weights_of_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an adapter, which starts with zeros: at the first θ the layers before it have no gradient."""
    module, like = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)), data("MLP", 4)
    nn.init.zeros_(module[2].weight)
    planted(monkeypatch, lambda values: 2 * values)
    assert isinstance(trace_engine(module, like, None, 1), Unsupported)


def test_a_wrong_rule_behind_dropout_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is left out of the comparison, not the layers around it."""
    for layers in ([nn.Dropout(0.5)], [nn.Dropout(0.1), nn.AlphaDropout(0.3)]):
        module, like = nn.Sequential(nn.Linear(8, 7), *layers, nn.Tanh(), nn.Linear(7, 3)), data("MLP", 4)
        assert isinstance(trace_engine(module, like, None, 1), TracedEngine)
    planted(monkeypatch, lambda values: 2 * values)
    assert isinstance(trace_engine(module, like, None, 1), Unsupported)


def mixed(values: Tensor) -> Tensor:
    """A hundredth of each example's gradient is its neighbour's."""
    return torch.lerp(values, values.roll(1, 0), 0.01)


def require_told_apart(net: nn.Module, x: Tensor, parameter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The net is traced; and not where one parameter's gradients are mixed."""
    net(x[:1])
    like = Examples(x, torch.arange(len(x)))
    assert isinstance(trace_engine(net, like, None, 1), TracedEngine)
    planted(monkeypatch, mixed, parameter)
    assert "are not those of single ones" in str(trace_engine(net, like, None, 1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_nets_are_traced_and_mixed_gradients_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = random_net(seed)
    require_told_apart(net, x, seed % sum(1 for _ in net.parameters()), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [9])
def test_derivatives_that_jump_by_rounding_are_no_fault(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With seed 9 (on the CPU of its author) a ReLU is on for plain autograd and off for the trace."""
    require_told_apart(*norm_resnet(seed), 0, monkeypatch)


def test_a_fault_of_its_own_is_an_obstacle_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("val")

    monkeypatch.setattr(programs, "_base", broken)
    found = trace_engine(nn.Linear(8, 3), data("MLP", 2), None, 1)
    assert isinstance(found, Unsupported)
    assert "KeyError" in str(found)


# One graph from two.


def graphs(*shapes: list[Any]) -> list[fx.Graph]:
    made = []
    for shape in shapes:
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.ops.aten.view.default, (x, shape)))
        made.append(graph)
    return made


@pytest.mark.parametrize(
    ("few", "more", "why"),
    [
        ([3, 4], [5, 4, 1], "shapes depend"),
        ([4], [7], "4 becomes 7 with 5 examples in place of 3"),
        ([0.25], [0.75], "becomes"),
        ([True], [False], "becomes"),
    ],
)
def test_what_does_not_grow_in_a_straight_line_is_refused(few: list[Any], more: list[Any], why: str) -> None:
    with pytest.raises(Untraceable, match=why):
        for_any_size(*graphs(few, more), (3, 5))


def test_a_line_through_two_sizes_gives_all() -> None:
    graph, _ = for_any_size(*graphs([3, 7, 8], [5, 13, 8]), (3, 5))
    run = fx.GraphModule(nn.Module(), graph).forward
    for size in (1, 2, 4, 9, 70):
        x = torch.zeros(size * (3 * size - 2) * 8)
        assert run(size, x).shape == (size, 3 * size - 2, 8)


def test_what_grows_with_the_square_is_found_by_the_examples() -> None:
    """9 and 25 lie on a line that is wrong elsewhere."""
    graph, _ = for_any_size(*graphs([9], [25]), (3, 5))
    run = fx.GraphModule(nn.Module(), graph).forward
    for size in programs._SIZES:
        assert run(size, torch.zeros(size, size)).shape == (size * size,)
    for size in (1, 8):  # those of `verify`: 7 examples go in a block of 8
        with pytest.raises(RuntimeError):
            run(size, torch.zeros(size, size))


def test_an_operation_that_takes_something_else_is_refused() -> None:
    made = []
    for swapped in (False, True):
        graph = fx.Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        graph.output(graph.call_function(torch.ops.aten.sub.Tensor, (y, x) if swapped else (x, y)))
        made.append(graph)
    with pytest.raises(Untraceable, match="what its operations take"):
        for_any_size(*made, (3, 5))


def test_the_trial_comes_first() -> None:
    """A model that keeps what it sees is refused before anything is traced, and is left as it was."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(8, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x) * self.calls  # type: ignore[no-any-return]

    module, like = Keeping(), data("MLP", 2)
    chosen = decide(EngineRequest("auto", module, like, "cpu", 1, exact=True))
    assert chosen.engine == "generic"
    assert "keeps something of one example" in str(chosen.passed["traced"])
    assert module.calls == 0
    assert FlatModel(module).dimension == 27


def test_what_a_forward_makes_and_changes_in_place_is_made_anew_each_time() -> None:
    """Else it would be a state that grows from block to block, by too little to be seen when it is tried."""

    def grown(net: Any, x: Tensor) -> Tensor:
        factor = torch.tensor([1.0, 1.0, 1.0])
        factor += 1e-3
        return net.head(x) * factor  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module, x = of_floats(grown)
    y = torch.zeros(4, dtype=torch.int64)
    found = trace_engine(module, Examples(x, y), None, 1)
    assert isinstance(found, TracedEngine)
    theta = FlatModel(module).flatten()
    first, *others = (torch.cat(list(found.rows(theta, x, y, None))) for _ in range(50))
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, FlatModel(module).per_example_gradients(theta, x, y))


@pytest.mark.parametrize(
    ("layer", "shape", "refused"),
    [
        (nn.Conv2d(2, 3, 2), (2, 4, 4), False),
        (nn.Conv1d(2, 3, 2), (2, 4), True),
        (nn.Conv3d(2, 3, 2), (2, 4, 4, 4), True),
        (nn.ConvTranspose2d(2, 3, 2), (2, 4, 4), True),
    ],
)
def test_a_gpu_has_a_rule_for_the_weights_of_plain_convolutions_only(
    layer: nn.Module, shape: tuple[int, ...], refused: bool
) -> None:
    module = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2))
    like = Examples(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64))
    module(like.x)
    graph = capture(FlatModel(module), modes(module), like, 3, layers=True).graph
    if refused:
        with pytest.raises(Untraceable, match="Conv2d only"):
            require_gpu_rules(graph)
    else:
        require_gpu_rules(graph)


@pytest.mark.filterwarnings("ignore")
def test_auto_says_why_and_takes_another() -> None:
    module, x = of_floats(lambda net, x: net.head(x.sort(1)[0]))
    chosen = decide(
        EngineRequest("auto", module, Examples(x, torch.zeros(4, dtype=torch.int64)), "cpu", 1, exact=False)
    )
    assert chosen.engine == "generic"
    assert "aten.sort" in str(chosen.passed["traced"])
