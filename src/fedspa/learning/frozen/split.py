"""A module as a frozen body, which makes features of a record, and a head, which is all that is trained.

The head has the trained parameters of the whole in their order, so that θ is the same vector: whoever sends, clips,
noises or stores θ notices nothing. What is found is tried against the whole before it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedspa.examples import Examples, Tree, blanks, joined, layout, leaves, mapped, moved
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import Modes, in_modes, modes, outputs, returned
from fedspa.learning.frozen.built import built
from fedspa.learning.frozen.cut import Values, bytes_of, cut
from fedspa.learning.frozen.traced import Traced, Untraced, by_layers, by_operations
from fedspa.learning.made_up import made_up
from fedspa.learning.tasks import Task
from fedspa.learning.tasks.base import OfOutputs
from fedspa.learning.threads import one_example_a_time

_TOGETHER = 3
_LEAST_SHARE = 0.1  # of a forward pass, below which keeping features is not worth their room
_MOST_BYTES = 2**24  # of a record's features
_TOLERANCE = 1e-3  # of the largest number: float32, and on a GPU other sums
_SEED = 20_19


@dataclass(frozen=True)
class Split:
    """`body` takes records as the module does, and gives what `head` takes: a tensor, or a tuple of them. `like` is what
    it gives for a blank record. `told` is for people."""

    body: nn.Module
    head: nn.Module
    modes: Modes
    like: Tree
    told: str

    def features(self, x: Tree) -> Tree:
        """Of examples, of which copies are made, in the modes that the layers were in when it was found."""
        with torch.no_grad(), in_modes(self.modes):
            found = self.body(*(leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves(x)))
        assert isinstance(found, tuple)
        made = tuple(part.detach() for part in found)
        return made[0] if len(made) == 1 else made

    def same_head(self, other: Split) -> bool:
        """Whether what the head does is the same, layer by layer, and of features that are made alike."""
        return type(self.head).code == type(other.head).code and layout(self.like) == layout(other.like)  # type: ignore[attr-defined]


def split(module: nn.Module, like: Examples, task: Task) -> Split | str:
    """The module cut behind its frozen body, for records made as those `like` which one is given; or why it is not.

    "" where nothing is frozen. The task is that of records. Nothing of a record is looked at: whether there is a split
    depends on the module and on the layout of a record alone.
    """
    if all(parameter.requires_grad for parameter in module.parameters()):
        return ""
    if not isinstance(task, OfOutputs):
        return f"the task ({task.name}) calls the module in a way of its own"
    if any(_hooked(layer) for layer in module.modules()):
        return "the module has hooks, or a forward of its own"
    device = next(module.parameters()).device
    examples = [Examples(*(moved(tree, device) for tree in each)) for each in made_up(like)]
    whys = []
    with torch.random.fork_rng(devices=[]), one_example_a_time():
        taken = [example.x for example in examples if _takes(module, example.x)]
        if not taken:
            return "it takes none of the records that were made up to try it"
        several = joined([taken[place % len(taken)] for place in range(_TOGETHER)])
        ways: list[Callable[[], Traced]] = [
            lambda: by_layers(module, taken[0]),
            lambda: by_operations(module, several),
        ]
        for trace in ways:
            try:
                return _found(module, trace(), taken, several, like, examples, task)
            except Untraced as why:
                whys.append(str(why))
            except Exception as error:  # of what a graph holds, not all runs by itself
                whys.append(f"its graph does not run ({type(error).__name__})")
    return "; ".join(dict.fromkeys(whys))


def _found(
    module: nn.Module,
    traced: Traced,
    taken: list[Tree],
    several: Tree,
    like: Examples,
    examples: list[Examples],
    task: Task,
) -> Split:
    alone, together = [_values(traced, x) for x in taken], _values(traced, several)
    halves = cut(traced, alone, together)
    body, head = (built(name, graph, halves.root) for name, graph in (("Body", halves.body), ("Head", halves.head)))
    if [*map(id, _trained(head))] != [*map(id, _trained(module))]:
        raise Untraced("its head does not hold the trained parameters in their order")
    device = next(module.parameters()).device
    blank = mapped(lambda leaf: leaf.to(device), blanks(like.x))
    found = Split(body, head, modes(body), (), "")
    first = found.features(blank if _takes(module, blank) else taken[0])
    if (size := bytes_of(leaves(first))) > _MOST_BYTES:
        raise Untraced(f"the frozen part makes {size:,} bytes of a record: at most {_MOST_BYTES:,} are kept")
    share = _work(body, taken[0]) / max(1, _work_of(lambda: returned(module, taken[0])))
    if share < _LEAST_SHARE:
        raise Untraced(f"the frozen part is {share:.0%} of a forward pass: less than is worth keeping its features")
    _require_same(module, found, examples, task)
    _require_apart(found, taken, several)
    return Split(body, head, found.modes, mapped(lambda leaf: leaf.cpu(), first), _told(module, share, first))


def _values(traced: Traced, x: Tree) -> Values:
    values = Values(traced)
    with torch.no_grad():
        values.run(*(leaf.clone() for leaf in leaves(x)))
    return values


def _require_same(module: nn.Module, found: Split, examples: list[Examples], task: Task) -> None:
    """Outputs and gradients are those of the whole, at two θ."""
    whole, head = FlatModel(module, task), FlatModel(found.head, task)
    theta = whole.flatten()
    elsewhere = theta + 0.05 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1)).to(theta)
    tried = 0
    for at in (theta, elsewhere):
        for x, y in examples:
            try:
                expected = _seeded(lambda: whole.gradient(at, x, y)), _seeded(lambda: whole.outputs(at, x))
            except Exception:  # it need not take every record that is made up
                continue
            before = torch.get_rng_state()
            features = found.features(x)
            if not torch.equal(before, torch.get_rng_state()):
                raise Untraced("the frozen part draws random numbers")
            kept = mapped(lambda leaf: leaf.clone(), features)
            given = _seeded(lambda: head.gradient(at, features, y)), _seeded(lambda: head.outputs(at, features))
            if not all(map(_close, expected, given)):
                raise Untraced("cut in two, it gives something else")
            if not all(map(_equal, leaves(kept), leaves(features))):
                raise Untraced("what is trained changes the features in place")
            tried += 1
    if not tried:
        raise Untraced("no record that was made up has a gradient")


def _require_apart(found: Split, alone: list[Tree], several: Tree) -> None:
    """A record has the same features among others as alone, as near as rounding lets them, and each time the same."""
    together = found.features(several)
    for place in range(min(_TOGETHER, len(alone))):
        for one, again, many in zip(
            leaves(found.features(alone[place])), leaves(found.features(alone[place])), leaves(together)
        ):
            if not _equal(one, again):
                raise Untraced("the frozen part gives a record something else each time")
            if not _close(one, many[place : place + 1]):
                raise Untraced("the frozen part mixes records")


def _seeded(function: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(_SEED)
    return function().detach()


def _close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    if one.shape != other.shape:
        return False
    finite = one.isfinite()
    scale = float(one[finite].abs().max()) if bool(finite.any()) else 0.0
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(one, other) or ((one == other) | (one != one) & (other != other)).all())


def _takes(module: nn.Module, x: Tree) -> bool:
    try:
        with torch.no_grad():
            outputs(module, mapped(lambda leaf: leaf.clone(), x))
    except Exception:  # the user's forward may raise anything
        return False
    return True


def _trained(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def _hooked(layer: nn.Module) -> bool:
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return any(hooks) or "forward" in vars(layer)


def _work(body: nn.Module, x: Tree) -> int:
    return _work_of(lambda: body(*(leaf.clone() for leaf in leaves(x))))


def _work_of(function: Callable[[], object]) -> int:
    """Multiplications and additions of products and convolutions."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function()
    return int(counter.get_total_flops())


def _told(module: nn.Module, share: float, features: Tree) -> str:
    frozen = sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)
    return (
        f"the frozen body, {share:.0%} of a forward pass and {frozen:,} frozen parameters in all, runs once per record; "
        f"its features are {layout(features)}"
    )
