"""Synthetic examples of the shapes and types of a record, to try a model where no private record may be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedspa.examples import Examples, Tree, count, layout, mapped, named_leaves, taken
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.tasks import Classification, Task
from fedspa.learning.tasks.base import OutputTask
from fedspa.learning.threads import Switches, generators_kept, one_example_a_time

_MADE, _GIVEN = 7, 4  # synthetic examples, and at most so many of those given
_ANY = 2**16 - 1  # where a leaf takes this, it is no index
_LARGE = 1000  # integers of a leaf that takes any
_BYTE = 255

Largest = dict[str, int]
_FOUND: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], Largest]] = WeakKeyDictionary()


def synthetic_examples(like: Examples, module: nn.Module, task: Task | None = None) -> list[Examples]:
    """Examples of the shapes and types of `like`, and then those of `like` itself, each with a first dimension of 1.

    Floats have the same values in another order, larger and smaller, negative and very large ones, and whole numbers.
    None is constant, for models that divide by an example's own spread. Integers cover the range that the module
    accepts: the whole vocabulary of an Embedding, for example. The first example has few zeros. Where the range of its
    target is not known it has that of `like`, which is valid whatever the task.
    """
    first = Examples(_row(like.x, 0), _row(like.y, 0))
    largest = _Probe(module, task, first).largest()
    words = max(_vocabularies(module), default=_BYTE + 1) - 1
    made = [
        Examples(
            _varied(first.x, n, "x", largest, words),
            _varied(first.y, n, "y", largest, words) if n or largest.get("y", 1) > 1 else first.y,
        )
        for n in range(_MADE)
    ]
    return made + [Examples(_row(like.x, n), _row(like.y, n)) for n in range(min(_GIVEN, count(like.x)))]


def _row(tree: Tree, n: int) -> Tree:
    return mapped(lambda leaf: leaf.cpu().clone(), taken(tree, slice(n, n + 1)))


def _varied(tree: Tree, n: int, root: str, largest: Largest, words: int) -> Tree:
    return _named(tree, root, lambda name, leaf: _leaf(leaf, n, largest.get(name, 1), words, "mask" in name))


def _named(tree: Tree, name: str, function: Callable[[str, Tensor], Tensor]) -> Tree:
    """The same tree with `function` of each tensor's name and value."""
    if isinstance(tree, Tensor):
        return function(name, tree)
    if isinstance(tree, dict):
        return {key: _named(part, f"{name}.{key}", function) for key, part in tree.items()}
    return tuple(_named(part, f"{name}.{place}", function) for place, part in enumerate(tree))


def _leaf(like: Tensor, n: int, largest: int, words: int, mask: bool) -> Tensor:
    place = torch.arange(like.numel()).view(like.shape)
    if like.is_floating_point():
        ramp = torch.linspace(0, 1, like.numel()).view(like.shape)
        whole = (7 * place + 3) % (words + 1)
        made = [ramp, 1 - ramp, ramp.square() / 3, 3 * ramp + 1, -2 * ramp, 1e6 * (ramp - 0.5), whole]
    elif like.dtype != torch.bool and mask:
        # A mask that hides everything would make every output the same: none is made.
        there, late = torch.ones_like(place), (4 * place < 3 * place.numel()).long()
        made = [there, late, (place + 1) % 2, 1 - place % 3 % 2, there, late, there]
    elif largest == 1:
        thirds = place % 3 % 2
        made = [(place + 1) % 2, thirds, 1 - thirds, torch.ones_like(place), like.flip(-1), like.roll(1), 1 - place % 2]
    else:
        middle, all_of_them = largest // 2 + place % (largest - largest // 2 + 1), (7 * place + 3) % (largest + 1)
        made = [1 + place % largest, all_of_them, largest - place % (largest + 1), middle]
        made += [like.flip(-1), like.roll(1), all_of_them.flip(-1)]
    return made[n].to(like.dtype)


def _vocabularies(module: nn.Module) -> set[int]:
    return {layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)}


class _Probe:
    """The largest integer that a module accepts in each leaf of an example, found by trying on a copy."""

    def __init__(self, module: nn.Module, task: Task | None, first: Examples) -> None:
        self._module, self._task, self._first = module, task, first

    def largest(self) -> Largest:
        layouts = layout(self._first.x), layout(self._first.y), "" if self._task is None else self._task.name
        found = _FOUND.setdefault(self._module, {})
        if layouts not in found:
            found[layouts] = self._largest()
        return found[layouts]

    def _largest(self) -> Largest:
        known: Largest = {}
        if isinstance(self._task, Classification) and self._task.classes is not None:
            known["y"] = max(1, self._task.classes - 1)
        names = [name for name in self._integers() if name not in known]
        if not names:
            return known
        try:
            model = FlatModel(copied(self._module).to("cpu"), self._task)
        except Exception:  # torch cannot copy all that a module may hold; a trial refuses it by name
            return known
        theta = model.flatten()
        with generators_kept(), one_example_a_time(), torch.no_grad():
            for name in names:
                takes = partial(self._accepts, model, theta, known, name)
                most = next(filter(takes, self._candidates(model, theta)), 1)
                known[name] = _LARGE if most == _ANY else most
        return known

    def _integers(self) -> Iterator[str]:
        """The names of leaves that may be indices. A task that makes targets of inputs has none of its own."""
        for root, tree in (("x", self._first.x), ("y", self._first.y)):
            for name, leaf in named_leaves(tree, root):
                integers = not leaf.is_floating_point() and leaf.dtype != torch.bool
                if integers and leaf.numel() and "mask" not in name:
                    yield name

    def _candidates(self, model: FlatModel, theta: Tensor) -> list[int]:
        """From above: what only a leaf that is no index accepts, then the last row of each Embedding, and the last
        class of the outputs."""
        sizes = {_ANY + 1, *_vocabularies(model.module)}
        if isinstance(model.task, OutputTask):
            with suppress(Exception):  # the user's forward may raise anything
                sizes |= {*model.outputs(theta, _varied(self._first.x, 0, "x", {}, 1)).shape[1:]}
        return sorted({size - 1 for size in sizes if size > 2}, reverse=True)

    def _accepts(self, model: FlatModel, theta: Tensor, known: Largest, name: str, value: int) -> bool:
        def leaf_at(other: str, leaf: Tensor) -> Tensor:
            if other != name:
                return _leaf(leaf, 0, known.get(other, 1), 1, "mask" in other) if other.startswith("x") else leaf
            made = _leaf(leaf, 0, value, 1, mask=False)
            made.view(-1)[0] = value
            return made

        switches = Switches()
        try:
            x, y = (_named(tree, root, leaf_at) for root, tree in (("x", self._first.x), ("y", self._first.y)))
            return bool(model.mean_loss(theta, x, y).isfinite())
        except Exception:  # the user's forward may raise anything
            return False
        finally:
            switches.put_back()
