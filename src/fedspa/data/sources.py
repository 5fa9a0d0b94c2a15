"""Records from Python objects as trees of tensors: arrays, torch `Dataset`s, Hugging Face's `datasets.Dataset`s.

Other libraries are not imported: a source is recognised by its methods. Records are read in one of two modes.

- *Strict*, for the simulator: anything wrong with a record is a DataError that names it.
- *Tolerant*, for a site: the content of one record must not decide whether or how the site answers. A cell that is no
  number becomes NaN, a missing id has no person, and only what all records share is refused: an object that is no
  array, differing shapes, no records.

Whole numbers become int64, other numbers float32, truth values stay bool. No record is padded, cut or scaled: the user
makes that choice.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from fedspa.data import plugin
from fedspa.data.columns import InvalidCell, identifier
from fedspa.errors import DataError, quoted
from fedspa.examples import TARGETS, Tree, count, joined, leaves, mapped, require_aligned


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Within it, whatever a foreign object's own code raises is a DataError of one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as cause:
        raise DataError(f"{what} cannot be read as numbers of one shape ({plugin.one_line(cause)})") from cause


class Entry(NamedTuple):
    """Inputs and targets. `key` is the key of the targets in a dict, "" for examples without targets, and None where
    inputs and targets came separately."""

    x: Tree
    y: Tree
    key: str | None


def examples(source: Any, what: str, target: str | None = None) -> Entry:
    """Read one source strictly: a pair (x, y), a dict of arrays, a torch Dataset or a `datasets.Dataset`.

    The targets of a dict are under `target`, by default under one of `TARGETS`. With `target=""` there are no targets:
    everything is input, which may then be a single array. `what` names the source in errors.
    """
    entry = _read(source, what, target)
    for part, tree in (("x", entry.x), ("y", entry.y)):
        require_aligned(tree, f"{what}: {part}")
    if count(entry.x) != count(entry.y):
        raise DataError(f"{what}: x has {count(entry.x)} records and y has {count(entry.y)}")
    if not count(entry.x):
        raise DataError(f"{what} has no records")
    return entry


def inputs(source: Any, what: str) -> Tree:
    """Read inputs without targets, strictly: arrays, tensors, and dicts and tuples of them, a row per example."""
    tree = read_tree(source, what)
    require_aligned(tree, what)
    if not count(tree):
        raise DataError(f"{what} has no records")
    return tree


def inputs_and_targets(source: Any, what: str) -> tuple[Any, Any, Any, str | None]:
    """Return the inputs, targets, persons and the targets' key of what a site's own function returned."""
    if isinstance(source, tuple) and len(source) in (2, 3):
        return source[0], source[1], source[2] if len(source) == 3 else None, None
    found = [key for key in TARGETS if key in source] if isinstance(source, Mapping) else []
    if isinstance(source, Mapping) and source and len(found) < 2:
        key = found[0] if found else ""  # texts whose next token is learned have no targets beside them
        rest = {name: part for name, part in source.items() if name != key}
        return rest, source[key] if key else None, None, key
    raise DataError(
        f"{what} gave a {type(source).__name__}; needed: a pair (x, y), a triple (x, y, persons) "
        "or a dict that includes labels"
    )


def require_alike(first: Tree, other: Tree, what: str, versus: str, *, records: bool = True) -> None:
    """Raise a DataError unless two trees have the same keys, and leaves of the same type and shape. With `records`, the
    first dimension counts records and may differ."""
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
        return _with_target(read_tree(source, what), what, target)
    if hasattr(source, "with_format") and not _transforms(source):
        return _with_target(read_tree(_columns(source, what), what), what, target)
    if target == "" and isinstance(source, tuple | np.ndarray | Tensor):
        return _with_target(read_tree(source, what), what, target)
    if isinstance(source, tuple) and len(source) == 2:
        return Entry(read_tree(source[0], f"{what}: x"), read_tree(source[1], f"{what}: y"), None)
    if hasattr(source, "__getitem__") and not isinstance(source, str | bytes | np.ndarray | Tensor):
        return _items(source, what, target)
    advice = "; a DataLoader makes batches of a Dataset: give its .dataset" * isinstance(source, DataLoader)
    raise DataError(
        f"{what} is a {type(source).__name__}; a pair (x, y), a dict of arrays, or a Dataset with __getitem__ and "
        f"__len__ is needed{advice}"
    )


def _with_target(tree: Tree, what: str, target: str | None) -> Entry:
    """Split a dict into inputs and target; without targets, everything is input."""
    if target == "":
        first = next(leaves(tree))
        # Each example still has a row, which is empty.
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
    """Return whether a `datasets.Dataset` transforms its records on access: another format would lose the transform."""
    form = getattr(source, "format", None)
    return isinstance(form, Mapping) and form.get("type") == "custom"


def _columns(source: Any, what: str) -> dict[str, Any]:
    """Return the columns of a `datasets.Dataset`."""
    with _reading(what):
        return dict(source.with_format("numpy")[:])


def _items(source: Any, what: str, target: str | None) -> Entry:
    """Stack the items of a map-style Dataset."""
    items: list[Tree] = []
    with _reading(what):
        for i in range(len(source)):
            with _reading(f"{what}: record {i}"):
                items.append(_item(source[i], f"{what}: record {i}", target))
    if not items:
        raise DataError(f"{what} has no records")
    for i, tree in enumerate(items):
        require_alike(items[0], tree, f"{what}: record {i}", "record 0", records=False)
    stacked = joined([mapped(lambda leaf: leaf.unsqueeze(0), tree) for tree in items])
    if isinstance(stacked, tuple) and target != "":
        return Entry(stacked[0] if len(stacked) == 2 else stacked[:-1], stacked[-1], None)
    return _with_target(stacked, what, target)


def _item(item: Any, what: str, target: str | None) -> Tree:
    if target == "" or isinstance(item, Mapping):
        return read_tree(item, what)
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"{what} is a {type(item).__name__}; a pair (x, y) or a dict is needed")
    return tuple(read_tree(part, f"{what}[{place}]") for place, part in enumerate(item))


def read_tree(value: Any, what: str, *, tolerant: bool = False, integers: bool = True, lists: bool = True) -> Tree:
    """Convert nested dicts and tuples of arrays into a tree of tensors.

    Lists are arrays, and so are tuples of bare numbers; other tuples are trees. With `integers`, whole numbers and
    truth values keep their type, else all become float32. In tolerant mode the type of a list or of a frame's column is
    not used, since a single cell can change it: with `integers` it is refused, unless `lists` accepts it as float32.
    """
    with _reading(what):
        return _tree(value, what, _Mode(tolerant, integers, lists))


class _Mode(NamedTuple):
    tolerant: bool = False
    integers: bool = True
    lists: bool = True


def _tree(value: Any, what: str, mode: _Mode) -> Tree:
    inner = mode._replace(lists=mode.lists and not mode.tolerant)  # lists are accepted as targets, not inside a dict
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise DataError(f"{what} has the key {quoted(key, 60)}; keys must be texts")
        if not value:
            raise DataError(f"{what} is an empty dict")
        return {key: _tree(part, f"{what}[{key!r}]", inner) for key, part in value.items()}
    if isinstance(value, tuple) and not value:
        raise DataError(f"{what} is an empty tuple")
    if isinstance(value, tuple) and _holds_trees(value, mode):
        return tuple(_tree(part, f"{what}[{i}]", inner) for i, part in enumerate(value))
    return _leaf(value, what, mode)


def _holds_trees(value: tuple[Any, ...], mode: _Mode) -> bool:
    """Return whether a tuple is a tree rather than an array. In tolerant mode no cell of a record decides it."""
    if mode.tolerant:
        return any(hasattr(part, "shape") or isinstance(part, Mapping) for part in value)
    return not all(isinstance(part, numbers.Number) for part in value)


def _leaf(value: Any, what: str, mode: _Mode) -> Tensor:
    typed = isinstance(getattr(value, "dtype", None), np.dtype | torch.dtype) and not hasattr(value, "iloc")
    if mode.tolerant and mode.integers and not mode.lists and not typed:
        raise DataError(f"{what} is a {type(value).__name__}; give an array or tensor, whose type says what it holds")
    if isinstance(value, Tensor):
        if value.is_nested:  # which would be filled up with zeros
            raise DataError(f"{what} is a nested tensor, whose records differ in shape; pad or cut them to one shape")
        value = value.detach().cpu().to_dense()
        if not value.is_complex() and not value.is_quantized:
            floats = value.is_floating_point() or not mode.integers
            whole_type = torch.bool if value.dtype == torch.bool else torch.int64
            kept: Tensor = value.to(torch.float32 if floats else whole_type)
            return kept
        if not mode.tolerant:
            raise DataError(f"{what} holds {value.dtype}; real numbers are needed")
    elif not mode.tolerant and isinstance(value, list) and any(isinstance(part, Tensor) for part in value):
        return torch.stack([_leaf(part, f"{what}[{i}]", mode) for i, part in enumerate(value)])
    array = _array(value, what, mode)
    whole = mode.integers and (typed or not mode.tolerant)
    dtype = {"b": np.bool_, "i": np.int64, "u": np.int64}.get(array.dtype.kind, np.float32) if whole else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(np.array(array, dtype=dtype))


def _array(value: Any, what: str, mode: _Mode) -> NDArray[Any]:
    """Return an array of real numbers. In tolerant mode, cells of text, objects and complex numbers are converted one
    by one, because a single one gives a whole array its type; what is no real number becomes NaN."""
    if hasattr(value, "column_names"):
        raise DataError(f"{what} is a {type(value).__name__}, not an array; give one Dataset, as in data['train']")
    array = np.asarray(value)
    kind = array.dtype.kind
    if mode.tolerant and kind in "OSU":
        return np.array([_number(cell) for cell in array.reshape(-1)]).reshape(array.shape)
    if mode.tolerant and kind == "c":
        return np.where(array.imag == 0, array.real, np.nan)
    if kind not in "biuf":
        example = f", as {quoted(array.ravel()[:1].tolist()[0], 60)}" if array.size else ""
        classes = " (classes: numpy.unique(texts, return_inverse=True)[1])" * (kind in "US")
        raise DataError(
            f"{what} holds {array.dtype}{example}; real numbers are needed, as many for each record: encode "
            f"it{classes}, or take it out"
        )
    if not mode.tolerant and kind == "u" and array.dtype.itemsize == 8 and array.size and int(array.max()) >= 2**63:
        raise DataError(f"{what} holds {array.max()}, which is too large for int64")
    return array


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _shape(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"a dict of {quoted(sorted(tree), 100)}"
    return f"a tuple of {len(tree)}" if isinstance(tree, tuple) else "a tensor"


def id_cells(ids: Any) -> NDArray[Any]:
    """Return ids as an array in which a missing one can be recognised: numpy alone turns a missing one among texts
    into the text "nan", and drops a mask."""
    ids = ids.detach().cpu() if isinstance(ids, Tensor) else ids
    if isinstance(ids, np.ma.MaskedArray):
        cells = np.asarray(ids).astype(object)
        cells[np.ma.getmaskarray(ids)] = None
        return cells
    return np.asarray(ids) if hasattr(ids, "dtype") else np.array(list(ids), dtype=object)


def _id(cell: Any) -> str | None:
    """Return an id as tables read it, so that 17 and "17 " are one person; None where it is missing. Another kind of
    object raises InvalidCell."""
    return identifier(cell.decode("utf-8", "surrogateescape") if isinstance(cell, bytes) else cell)


def number_persons(ids: Any, records: int, what: str) -> NDArray[np.int64]:
    """Number the persons of a site's records, in the order of their first record; -1 where the id is missing."""
    cells = id_cells(ids)
    if cells.shape != (records,):
        raise DataError(f"{what} has persons of shape {cells.shape}; one id per record is needed, for {records}")
    known: dict[str, int] = {}  # not in an array of texts, in which all are as long as the longest

    def number(cell: Any) -> int:
        try:
            text = _id(cell)
        except InvalidCell:
            return -1
        return -1 if text is None else known.setdefault(text, len(known))

    return np.array([number(cell) for cell in cells.tolist()], dtype=np.int64)


def check_ids(ids: Any, what: str) -> NDArray[Any]:
    """Return ids as an array, strictly. A missing id is a DataError: a person of whom only some records are known would
    not be protected."""
    try:
        array = id_cells(ids)
        kinds = {type(one) for one in array.flat} if array.dtype.kind == "O" else set()
        if any(kinds <= {kind} for kind in (str, bytes, int)):
            array = np.asarray(array.tolist() or array)
        missing = _without_id(array)
    except Exception as cause:  # a foreign object's own conversion may raise anything
        raise DataError(f"{what} are not an array of ids ({plugin.one_line(cause)})") from cause
    if len(missing):
        rows = ", ".join(map(str, missing[:5])) + ", …" * (len(missing) > 5)
        raise DataError(
            f"{what}: {len(missing)} of {len(array)} ids are missing, as {quoted(array.tolist()[missing[0]], 60)}, of "
            f"the records {rows}: together they would count as one; fill them in, or take those records out"
        )
    if array.dtype.kind not in "iuUS" or array.ndim != 1:
        raise DataError(
            f"{what} are {array.dtype} of shape {array.shape}: one id per training record is needed, a whole number "
            "or a text, and none may be missing"
        )
    return np.char.strip(array) if array.dtype.kind in "US" else array  # "17 " is 17, as in tables


def _without_id(array: NDArray[Any]) -> NDArray[np.int64]:
    """Return the numbers of the records whose id is missing."""
    if array.ndim != 1 or array.dtype.kind in "OV":
        return np.array([i for i, one in enumerate(array.tolist()) if _is_missing(one)], dtype=np.int64)
    values, places = np.unique(array, return_inverse=True)
    return np.flatnonzero(np.array([_is_missing(one) for one in values.tolist()], dtype=np.bool_)[places])


def _is_missing(cell: Any) -> bool:
    try:
        return _id(cell) is None
    except InvalidCell:  # present, though no id
        return False
