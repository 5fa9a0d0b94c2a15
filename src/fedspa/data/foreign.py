"""What people have, as trees of tensors: arrays, torch `Dataset`s, Hugging Face's `datasets.Dataset`s, partitioners.

Nothing of theirs is imported: a thing is known by what it can do. Whole numbers become int64, other numbers float32,
truth values stay bool. No record is padded, cut or scaled: that is a choice, and whoever has the records makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.data import plugin
from fedspa.errors import DataError, quoted

Tree = Tensor | dict[str, "Tree"] | tuple["Tree", ...]
TARGETS = ("labels", "label", "target")
_KINDS = {"U": "text", "S": "bytes", "M": "dates", "m": "durations", "c": "complex numbers"}


@dataclass(frozen=True, eq=False)
class Parts:
    """Training records of all agents one after another, `owners` (whose each is, from 0), and records for testing."""

    train_x: Tree
    train_y: Tree
    test_x: Tree
    test_y: Tree
    owners: NDArray[np.int64]


def from_agents(agents: Sequence[Any], *, test: Any, target: str | None = None) -> Parts:
    """Each agent's own records, in a list with an entry per agent; `test` is one such entry.

    An entry is a pair (x, y), a dict of arrays, a torch Dataset or a `datasets.Dataset`. In a dict, what is learned is
    under `target`, or under labels, label or target.
    """
    if not isinstance(agents, Sequence) or isinstance(agents, str | bytes) or not agents:
        raise DataError(f"from_agents was given {quoted(agents, 60)}; a list with an entry per agent is needed")
    return _joined([examples(entry, f"agent {i}", target) for i, entry in enumerate(agents)], test, target)


def from_partitioner(partitioner: Any, *, test: Any, target: str | None = None) -> Parts:
    """The partitions of a partitioner of flwr-datasets, an agent each: it has `num_partitions` and `load_partition`."""
    try:
        partitions = [partitioner.load_partition(i) for i in range(int(partitioner.num_partitions))]
    except Exception as cause:  # its own code, which may raise anything
        raise DataError(f"the partitioner failed ({plugin.one_line(cause)}); has it been given its dataset?") from cause
    if not partitions:
        raise DataError("the partitioner has no partitions; one per agent is needed")
    return from_agents(partitions, test=test, target=target)


def examples(source: Any, what: str, target: str | None = None) -> tuple[Tree, Tree]:
    """(x, y) of one entry, as `from_agents` takes it; `what` names it in errors."""
    try:
        x, y = _read(source, what, target)
    except RecursionError:
        raise DataError(f"{what} is nested too deeply") from None
    _check_count(x, y, what)
    return x, y


def _read(source: Any, what: str, target: str | None) -> tuple[Tree, Tree]:
    if isinstance(source, tuple) and len(source) == 2:
        return _tree(source[0], f"{what}: x"), _tree(source[1], f"{what}: y")
    if isinstance(source, Mapping):
        return _divided(_tree(source, what), what, target)
    if hasattr(source, "iloc"):
        raise DataError(f"{what} is a frame; describe its columns by a schema (docs/data.md), or give arrays (x, y)")
    if hasattr(source, "with_format") and not _transforms(source):
        return _divided(_tree(_columns(source, what), what), what, target)
    if hasattr(source, "__getitem__") and not isinstance(source, str | bytes | np.ndarray | Tensor):
        return _items(source, what, target)
    raise DataError(
        f"{what} is a {type(source).__name__}; a pair (x, y), a dict of arrays, or a Dataset with __getitem__ and "
        "__len__ is needed"
    )


def _joined(entries: list[tuple[Tree, Tree]], test: Any, target: str | None) -> Parts:
    (train_x, train_y), counts = entries[0], [_count(y) for _, y in entries]
    tests = examples(test, "test", target)
    for i, (x, y) in enumerate([*entries, tests]):
        what = f"agent {i}" if i < len(entries) else "test"
        for part, first, other in (("x", train_x, x), ("y", train_y, y)):
            _check_like(first, other, f"{what}: {part}")
    owners = np.repeat(np.arange(len(entries), dtype=np.int64), counts)
    train_x, train_y = (_map(lambda *leaves: torch.cat(leaves), *trees) for trees in zip(*entries))
    test_x, test_y = (_map(lambda _, leaf: leaf, *pair) for pair in zip((train_x, train_y), tests))
    return Parts(train_x, train_y, test_x, test_y, owners)


def _divided(tree: Tree, what: str, target: str | None) -> tuple[Tree, Tree]:
    """A dict without its target, and the target."""
    assert isinstance(tree, dict)
    found = [key for key in (TARGETS if target is None else (target,)) if key in tree]
    if len(found) != 1:
        wanted = f"one of {', '.join(map(repr, TARGETS))}, or target=" if target is None else repr(target)
        raise DataError(f"{what} has the keys {quoted(list(tree))}; {wanted} must say which of them is learned")
    x = {key: value for key, value in tree.items() if key != found[0]}
    if not x:
        raise DataError(f"{what} has nothing but {found[0]!r}; a model needs something to learn it from")
    return x, tree[found[0]]


def _transforms(source: Any) -> bool:
    """Whether a `datasets.Dataset` makes its records when they are asked for: another format would lose that."""
    form = getattr(source, "format", None)
    return isinstance(form, Mapping) and form.get("type") == "custom"


def _columns(source: Any, what: str) -> dict[str, Any]:
    """The columns of a `datasets.Dataset`."""
    if not hasattr(source, "__len__"):
        raise DataError(f"{what} is a {type(source).__name__}, which has no length; load it whole, not as a stream")
    try:
        return dict(source.with_format("numpy")[:])
    except Exception as cause:  # decoding is its own code, which may raise anything
        raise DataError(f"{what} cannot be read ({plugin.one_line(cause)})") from cause


def _items(source: Any, what: str, target: str | None) -> tuple[Tree, Tree]:
    """Of a map-style Dataset: its items, stacked."""
    if not hasattr(source, "__len__"):
        raise DataError(f"{what} is a {type(source).__name__}, which has no length; a map-style Dataset is needed")
    items: list[Tree] = []
    for i in range(_length(source, what)):
        try:
            item = source[i]
        except Exception as cause:  # the user's code may raise anything
            raise DataError(f"{what}: record {i} failed in its own code ({plugin.one_line(cause)})") from cause
        if not isinstance(item, Mapping | tuple | list) or (not isinstance(item, Mapping) and len(item) < 2):
            raise DataError(f"{what}: record {i} is a {type(item).__name__}; a pair (x, y) or a dict is needed")
        items.append(_tree(tuple(item) if isinstance(item, list) else item, f"{what}: record {i}"))
    if not items:
        raise DataError(f"{what} has no records")
    for i, item in enumerate(items):
        _check_like(items[0], item, f"{what}: record {i}", records=False)
    stacked = _map(lambda *leaves: torch.stack(leaves), *items)
    if isinstance(stacked, tuple):
        return stacked[0] if len(stacked) == 2 else stacked[:-1], stacked[-1]
    return _divided(stacked, what, target)


def _length(source: Any, what: str) -> int:
    try:
        return len(source)
    except Exception as cause:
        raise DataError(f"{what} cannot say how many records it has ({plugin.one_line(cause)})") from cause


def _tree(value: Any, what: str) -> Tree:
    """Tensors in place of whatever a tree has for leaves. Lists are arrays, tuples are trees."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise DataError(f"{what} has the key {quoted(key, 60)}; keys must be texts")
        if not value:
            raise DataError(f"{what} is an empty dict")
        return {key: _tree(part, f"{what}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple):
        if not value:
            raise DataError(f"{what} is an empty tuple")
        return tuple(_tree(part, f"{what}[{i}]") for i, part in enumerate(value))
    return _leaf(value, what)


def _leaf(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        value = _array(value, what)
    if value.is_nested:
        raise DataError(f"{what} is a nested tensor, whose records differ in shape; pad or cut them to one shape")
    try:
        tensor: Tensor = value.detach().cpu().to_dense()
    except Exception as cause:  # one on a device without data
        raise DataError(f"{what} is no plain tensor ({plugin.one_line(cause)})") from cause
    if tensor.is_complex() or tensor.is_quantized:
        raise DataError(f"{what} holds {tensor.dtype}; real numbers are needed")
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)


def _array(value: Any, what: str) -> Tensor:
    if hasattr(value, "column_names"):
        raise DataError(f"{what} is a {type(value).__name__}, not an array; give one Dataset, as in data['train']")
    if isinstance(value, list) and any(isinstance(part, Tensor) for part in value):
        leaves = [_leaf(part, f"{what}[{i}]") for i, part in enumerate(value)]
        _refuse_ragged(leaves, what)
        for i, leaf in enumerate(leaves):
            _check_like(leaves[0], leaf, f"{what}[{i}]", records=False)
        return torch.stack(leaves)
    try:
        array = np.asarray(value)
    except Exception as cause:
        _refuse_ragged(value, what)
        raise DataError(f"{what} is no array of numbers ({plugin.one_line(cause)})") from cause
    if array.dtype.kind not in "biuf":
        _refuse_ragged(array, what)
        kind = _KINDS.get(array.dtype.kind, "objects")
        example = f", as {quoted(array.flat[0], 60)}" if array.size else ""
        raise DataError(f"{what} holds {kind}{example}; numbers are needed: encode it, or take it out")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and int(array.max()) >= 2**63:
        raise DataError(f"{what} holds {array.max()}, which is too large for int64")
    wide = {"b": np.bool_, "f": np.float32}.get(array.dtype.kind, np.int64)
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.array(array, dtype=wide))


def _refuse_ragged(value: Any, what: str) -> None:
    """If records have different shapes, a DataError that names two of them."""
    try:
        shapes = [tuple(np.shape(part)) for part in value]
    except Exception:  # not even its records are arrays
        return
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise DataError(
                f"{what} is ragged: record 0 has shape {shapes[0]} and record {i} has {shape}; pad or cut them to one "
                "shape"
            )


def _check_count(x: Tree, y: Tree, what: str) -> None:
    """Every leaf has a first dimension, the same for all: the records."""
    leaves = [*_leaves(y, "y"), *_leaves(x, "x")]
    for path, leaf in leaves:
        if leaf.ndim == 0:
            raise DataError(f"{what}: {path} is a single number; an array with a value per record is needed")
        if len(leaf) != len(leaves[0][1]):
            raise DataError(f"{what}: {path} has {len(leaf)} records and {leaves[0][0]} has {len(leaves[0][1])}")
    if not len(leaves[0][1]):
        raise DataError(f"{what} has no records")


def _check_like(first: Tree, other: Tree, what: str, *, records: bool = True) -> None:
    """Two trees have the same keys, and leaves of the same type and shape (of a record, where they hold many)."""
    versus = "the first agent" if records else "record 0"
    if isinstance(first, dict) and isinstance(other, dict) and first.keys() == other.keys():
        for key in first:
            _check_like(first[key], other[key], f"{what}[{key!r}]", records=records)
    elif isinstance(first, tuple) and isinstance(other, tuple) and len(first) == len(other):
        for i, (mine, yours) in enumerate(zip(first, other)):
            _check_like(mine, yours, f"{what}[{i}]", records=records)
    elif isinstance(first, Tensor) and isinstance(other, Tensor):
        here, there = (tuple(leaf.shape[1:] if records else leaf.shape) for leaf in (other, first))
        if here != there:
            raise DataError(f"{what} has shape {here} and that of {versus} has {there}; pad or cut them to one shape")
        if other.dtype != first.dtype:
            raise DataError(f"{what} holds {other.dtype} and that of {versus} {first.dtype}; make them the same")
    else:
        raise DataError(f"{what} is {_shape(other)} and that of {versus} is {_shape(first)}; they must be alike")


def _shape(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"a dict of {quoted(sorted(tree), 100)}"
    return f"a tuple of {len(tree)}" if isinstance(tree, tuple) else "a tensor"


def _leaves(tree: Tree, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
        return
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(part, f"{path}[{key!r}]")


def _map(function: Callable[..., Tensor], *trees: Any) -> Tree:
    """Leaf by leaf, over trees that are alike; keys are in the order of the first."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: _map(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple):
        return tuple(_map(function, *parts) for parts in zip(*trees))
    return function(*trees)


def _count(tree: Tree) -> int:
    return len(next(_leaves(tree, ""))[1])
