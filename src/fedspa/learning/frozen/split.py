"""A module as a frozen body, which makes features of a record, and a head, which is all that is trained.

The head has the trained parameters of the whole in their order, so that θ is the same vector: whoever sends, clips,
noises or stores θ notices nothing. What is found is tried against the whole before it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedspa.examples import Examples, Tree, blanks, joined, layout, leaves, mapped, moved
from fedspa.learning.flat import copied
from fedspa.learning.forward import Modes, in_modes, modes, outputs
from fedspa.learning.frozen.built import built
from fedspa.learning.frozen.cut import Cut, Values, bytes_of, cut
from fedspa.learning.frozen.same import require_apart, require_same
from fedspa.learning.frozen.traced import Traced, Untraced, by_layers, by_operations
from fedspa.learning.synthetic import synthetic_examples
from fedspa.learning.tasks import Task
from fedspa.learning.tasks.base import OfOutputs
from fedspa.learning.threads import one_example_a_time

_ALONE, _TOGETHER = 4, 3  # examples that it is tried with
_LEAST_SHARE = 0.1  # of a forward pass, below which features are not worth their room
_MOST_BYTES = 2**24  # of a record's features
# Features that are larger than the record by more than so many bytes must save so many multiplications for each byte:
# moving it takes as long, to a GPU longer.
_FEW_BYTES, _LEAST_PER_BYTE = 2**14, 100


@dataclass(frozen=True)
class Split:
    """`body` takes the tensors of records and gives what `head` takes in a module's place. `like` is that of the
    made-up record `tried`, and `told` is for people."""

    body: nn.Module
    head: nn.Module
    modes: Modes
    tried: Tree
    like: Tree
    told: str

    def features(self, x: Tree) -> Tree:
        """Of examples, of which copies are made, in the modes that the layers were in when it was found."""
        return _features(self.body, self.modes, x)


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
    copy, device = copied(module), next(module.parameters()).device
    given = [
        Examples(*(moved(tree, device) for tree in each))
        for each in [*synthetic_examples(like, module, task), _blank(like)]
    ]
    why = "it takes none of the records that were made up to try it"
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), one_example_a_time():
        examples = [example for example in reversed(given) if _takes(copy, example.x)][:_ALONE]
        if not examples:
            return why
        several = joined([examples[place % len(examples)].x for place in range(_TOGETHER)])
        ways: list[Callable[[], Traced]] = [
            lambda: by_layers(copy, examples[0].x),
            lambda: by_operations(copy, several),
        ]
        for trace in ways:
            try:
                halves, first = _tried(copy, trace(), examples, several, task)
                return _of(module, halves, examples[0].x, first)
            except Untraced as cause:
                why = str(cause)
            except Exception as error:  # of what a graph holds, not all runs by itself
                why = f"its graph does not run ({type(error).__name__})"
    return why


def _tried(module: nn.Module, traced: Traced, examples: list[Examples], several: Tree, task: Task) -> tuple[Cut, Tree]:
    """The two halves, and the features of the first example."""
    alone = [_values(traced, example.x) for example in examples]
    halves = cut(traced, alone, _values(traced, several))
    body, head = _halves(halves)
    if [*map(id, _trained(head))] != [*map(id, _trained(module))]:
        raise Untraced("its head does not hold the trained parameters in their order")
    x, kept, device = examples[0].x, modes(body), next(module.parameters()).device
    if halves.share < _LEAST_SHARE:
        raise Untraced(
            f"it is {halves.share:.0%} of a forward pass, which is not worth the room for its features{halves.drawing}"
        )
    first = _features(body, kept, x)
    if (size := bytes_of(leaves(first))) > _MOST_BYTES:
        raise Untraced(f"it makes {size:,} bytes of a record, and at most {_MOST_BYTES:,} are kept")
    larger = size - bytes_of(leaves(x))
    if larger > _FEW_BYTES and halves.work < _LEAST_PER_BYTE * larger:
        raise Untraced(f"its features are {larger:,} bytes larger than a record, and sooner made anew than moved")
    if device.type != "cpu":  # where engines try what they train
        copied(head).to("cpu")(*(leaf.cpu() for leaf in leaves(first)))
    require_same(module, head, lambda x: _features(body, kept, x), examples, task)
    require_apart(lambda x: _features(body, kept, x), [example.x for example in examples[:_TOGETHER]], several)
    return halves, first


def _of(module: nn.Module, halves: Cut, tried: Tree, first: Tree) -> Split:
    """What was found on a copy, of the module itself."""
    root = nn.Module()
    root.add_module("module", module)
    for name, buffer in halves.root.named_buffers(recurse=False):
        root.register_buffer(name, buffer)
    for name, child in halves.root.named_children():
        if name != "module":
            root.add_module(name, child)
    body, head = _halves(halves._replace(root=root))
    frozen = sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)
    told = (
        f"the frozen body ({halves.share:.0%} of a forward pass; {frozen:,} parameters are frozen) runs once per "
        f"record and makes features {layout(first)}"
    )
    return Split(body, head, modes(body), moved(tried, "cpu"), moved(first, "cpu"), told)


def _halves(halves: Cut) -> tuple[nn.Module, nn.Module]:
    return built("Body", halves.body, halves.root), built("Head", halves.head, halves.root)


def _features(body: nn.Module, wanted: Modes, x: Tree) -> Tree:
    with torch.no_grad(), in_modes(wanted):
        found = body(*(leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves(x)))
    assert isinstance(found, tuple)
    return found[0] if len(found) == 1 else found


def _values(traced: Traced, x: Tree) -> Values:
    values = Values(traced)
    with torch.no_grad():
        values.run(*(leaf.clone() for leaf in leaves(x)))
    return values


def _blank(like: Examples) -> Examples:
    return Examples(blanks(like.x), blanks(like.y))


def _takes(module: nn.Module, x: Tree) -> bool:
    try:
        with torch.no_grad():
            found = outputs(module, mapped(lambda leaf: leaf.clone(), x))
    except Exception:  # the user's forward may raise anything
        return False
    return isinstance(found, Tensor)


def _trained(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def _hooked(layer: nn.Module) -> bool:
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return any(hooks) or "forward" in vars(layer)
