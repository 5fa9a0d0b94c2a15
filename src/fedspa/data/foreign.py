"""What people have, as trees of tensors: arrays, torch `Dataset`s, Hugging Face's `datasets.Dataset`s.

Nothing of theirs is imported: a thing is known by what it can do. Whole numbers become int64, other numbers float32,
truth values stay bool. No record is padded, cut or scaled: that is a choice, and whoever has the records makes it.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedspa.data import plugin
from fedspa.errors import DataError, quoted
from fedspa.examples import TARGETS, Tree, count, joined, leaves, mapped, require_aligned

_KINDS = {"U": "text", "S": "bytes", "M": "dates", "m": "durations", "c": "complex numbers"}


class Entry(NamedTuple):
    """Inputs and targets. `key`: where in a dict the targets lay, "" where there are none; None where they came apart
    from the inputs."""

    x: Tree
    y: Tree
    key: str | None


def examples(source: Any, what: str, target: str | None = None) -> Entry:
    """What one source holds: a pair (x, y), a dict of arrays, a torch Dataset or a `datasets.Dataset`.

    In a dict, what is learned is under `target`, or under one of `TARGETS`. Where `target` is "", nothing is: all are
    inputs, which may then be one array too. `what` names the source in errors.
    """
    try:
        entry = _read(source, what, target)
    except RecursionError:
        raise DataError(f"{what} is nested too deeply") from None
    for part, tree in (("x", entry.x), ("y", entry.y)):
        require_aligned(tree, f"{what}: {part}")
    if count(entry.x) != count(entry.y):
        raise DataError(f"{what}: x has {count(entry.x)} records and y has {count(entry.y)}")
    if not count(entry.x):
        raise DataError(f"{what} has no records")
    return entry


def inputs(source: Any, what: str) -> Tree:
    """Inputs alone, without targets: arrays, tensors, and dicts and tuples of them, a row per example."""
    try:
        tree = _tree(source, what)
    except RecursionError:
        raise DataError(f"{what} is nested too deeply") from None
    require_aligned(tree, what)
    if not count(tree):
        raise DataError(f"{what} has no records")
    return tree


def require_alike(first: Tree, other: Tree, what: str, versus: str, *, records: bool = True) -> None:
    """Two trees have the same keys, and leaves of the same type and shape (of a record, where they hold many)."""
    if isinstance(first, dict) and isinstance(other, dict) and first.keys() == other.keys():
        for key in first:
            require_alike(first[key], other[key], f"{what}[{key!r}]", versus, records=records)
    elif isinstance(first, tuple) and isinstance(other, tuple) and len(first) == len(other):
        for i, (mine, yours) in enumerate(zip(first, other)):
            require_alike(mine, yours, f"{what}[{i}]", versus, records=records)
    elif isinstance(first, Tensor) and isinstance(other, Tensor):
        here, there = (tuple(leaf.shape[1:] if records else leaf.shape) for leaf in (other, first))
        if here != there:
            raise DataError(f"{what} has shape {here} and that of {versus} has {there}; pad or cut them to one shape")
        if other.dtype != first.dtype:
            raise DataError(f"{what} holds {other.dtype} and that of {versus} {first.dtype}; make them the same")
    else:
        raise DataError(f"{what} is {_shape(other)} and that of {versus} is {_shape(first)}; they must be alike")


def _read(source: Any, what: str, target: str | None) -> Entry:
    if hasattr(source, "iloc"):
        raise DataError(f"{what} is a frame; fedspa.from_table takes it with a schema, or give arrays (x, y)")
    if isinstance(source, Mapping):
        return _divided(_tree(source, what), what, target)
    if hasattr(source, "with_format") and not _transforms(source):
        return _divided(_tree(_columns(source, what), what), what, target)
    if target == "" and isinstance(source, tuple | np.ndarray | Tensor):
        return _divided(_tree(source, what), what, target)
    if isinstance(source, tuple) and len(source) == 2:
        return Entry(_tree(source[0], f"{what}: x"), _tree(source[1], f"{what}: y"), None)
    if hasattr(source, "__getitem__") and not isinstance(source, str | bytes | np.ndarray | Tensor):
        return _items(source, what, target)
    raise DataError(
        f"{what} is a {type(source).__name__}; a pair (x, y), a dict of arrays, or a Dataset with __getitem__ and "
        "__len__ is needed"
    )


def _divided(tree: Tree, what: str, target: str | None) -> Entry:
    """A dict without its target, and the target; anything whole, and no targets."""
    if target == "":
        first = next(leaves(tree))
        # There is still a row for each example, with nothing in it.
        return Entry(tree, torch.zeros(len(first) if first.ndim else 0, 0, dtype=torch.int64), "")
    assert isinstance(tree, dict)
    found = [key for key in (TARGETS if target is None else (target,)) if key in tree]
    if len(found) != 1:
        wanted = f"just one of {', '.join(map(repr, TARGETS))}" if target is None else quoted(target, 60)
        raise DataError(
            f"{what} has the keys {quoted(list(tree))}; {wanted} must be among them: target= names what is learned, "
            "and target='' says that nothing is"
        )
    x = {key: value for key, value in tree.items() if key != found[0]}
    if not x:
        raise DataError(f"{what} has nothing but {found[0]!r}; a model needs something to learn it from")
    return Entry(x, tree[found[0]], found[0])


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


def _items(source: Any, what: str, target: str | None) -> Entry:
    """Of a map-style Dataset: its items, stacked."""
    if not hasattr(source, "__len__"):
        raise DataError(f"{what} is a {type(source).__name__}, which has no length; a map-style Dataset is needed")
    items: list[Tree] = []
    for i in range(_length(source, what)):
        try:
            item = source[i]
        except Exception as cause:  # the user's code may raise anything
            raise DataError(f"{what}: record {i} failed in its own code ({plugin.one_line(cause)})") from cause
        items.append(_item(item, f"{what}: record {i}", target))
    if not items:
        raise DataError(f"{what} has no records")
    for i, tree in enumerate(items):
        require_alike(items[0], tree, f"{what}: record {i}", "record 0", records=False)
    stacked = joined([mapped(lambda leaf: leaf.unsqueeze(0), tree) for tree in items])
    if isinstance(stacked, tuple) and target != "":
        return Entry(stacked[0] if len(stacked) == 2 else stacked[:-1], stacked[-1], None)
    return _divided(stacked, what, target)


def _item(item: Any, what: str, target: str | None) -> Tree:
    if target == "":
        return _tree(item, what)
    if isinstance(item, Mapping):
        return _tree(item, what)
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"{what} is a {type(item).__name__}; a pair (x, y) or a dict is needed")
    return tuple(_tree(part, f"{what}[{place}]") for place, part in enumerate(item))


def _length(source: Any, what: str) -> int:
    try:
        return len(source)
    except Exception as cause:
        raise DataError(f"{what} cannot say how many records it has ({plugin.one_line(cause)})") from cause


def _tree(value: Any, what: str) -> Tree:
    """Tensors in place of whatever a tree has for leaves. Lists are arrays; tuples are trees, but of bare numbers."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise DataError(f"{what} has the key {quoted(key, 60)}; keys must be texts")
        if not value:
            raise DataError(f"{what} is an empty dict")
        return {key: _tree(part, f"{what}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple) and not value:
        raise DataError(f"{what} is an empty tuple")
    if isinstance(value, tuple) and not all(isinstance(part, numbers.Number) for part in value):
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
        parts = [_leaf(part, f"{what}[{i}]") for i, part in enumerate(value)]
        _refuse_ragged(parts, what)
        for i, leaf in enumerate(parts):
            require_alike(parts[0], leaf, f"{what}[{i}]", "record 0", records=False)
        return torch.stack(parts)
    try:
        array = np.asarray(value)
    except Exception as cause:
        _refuse_ragged(value, what)
        raise DataError(f"{what} is no array of numbers ({plugin.one_line(cause)})") from cause
    if array.dtype.kind not in "biuf":
        _refuse_ragged(array, what)
        kind = _KINDS.get(array.dtype.kind, "objects")
        example = f", as {quoted(array.ravel()[:1].tolist()[0], 60)}" if array.size else ""
        classes = " (classes: numpy.unique(texts, return_inverse=True)[1])" * (array.dtype.kind in "US")
        raise DataError(f"{what} holds {kind}{example}; numbers are needed: encode it{classes}, or take it out")
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


def _shape(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"a dict of {quoted(sorted(tree), 100)}"
    return f"a tuple of {len(tree)}" if isinstance(tree, tuple) else "a tensor"
