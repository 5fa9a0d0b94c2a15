"""An agent's own records: a table by its schema, an `.npz` with the arrays x and y, or `package.module:function`.

The name is written in the agent's node-config, never taken from the server. What one record holds must never show in
whether or how the agent answers, so no record can spoil the reading. One with numbers that are not finite, with a label
that is none of the site's classes, or without an id where others say whose they are, is *bad*. It stays among the
records, whose number it does not change, and is filled with what no model takes: NaN, and whole numbers below any token
or label. Its gradient then counts as zero. That depends on the record and on the site's own settings alone. One without
an id is in no person's example either: its person may be among the others, and would add to a release twice. Only what
all records share is refused: an array that is none, other shapes, no records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.data import plugin
from fedspa.data.columns import Odd, identifier, is_table, load_schema
from fedspa.data.files import read_npz
from fedspa.data.persons import id_array
from fedspa.data.table import read_table
from fedspa.errors import ConfigError, DataError
from fedspa.examples import TARGETS, Tree, blanks, count, joined, leaves, mapped, require_aligned, taken
from fedspa.learning.tasks import Task
from fedspa.runs.sections import Data


@dataclass(frozen=True, eq=False)
class Records:
    """Inputs and targets: float32, int64 or bool. `bad` are the numbers of the bad ones. `key` says where the targets
    lay in a dict that held all. `persons` says whose each is, by numbers from 0, where the site names them; -1 where a
    record does not say."""

    x: Tree
    y: Tree
    bad: tuple[int, ...]
    key: str | None = None
    persons: NDArray[np.int64] | None = None


def load(
    node: Mapping[str, Any],
    classes: int | None,
    transform: Callable[[Tensor], Tensor] | None = None,
    *,
    integers: bool = False,
) -> Records:
    """The records that a node-config names. A function is called with it where it takes an argument, else without.

    With `classes`, a target is a label. `transform` maps all inputs, each by itself; of a bad one it sees zeros.
    Whole numbers among the inputs become float32, as the models that come with fedspa take them, unless `integers`.
    So do targets in lists, which have no type of their own; labels become int64.
    """
    name, person = str(node["data"]), node.get("person")
    if "schema" in node and name.endswith(".npz"):
        raise ConfigError(f"node-config: schema is {node['schema']!r}, and data = {name!r} is no table: leave it out")
    if is_table(name):
        return _table(Path(name), node, classes)
    made: Any = _npz(Path(name), person) if name.endswith(".npz") else _users(name, node)
    what = f"data = {name!r}"
    inputs, targets, ids, key = _parts(made, what)
    x = _tree(inputs, f"{what}: x", integers)
    y = torch.zeros(count(x), 0) if targets is None else _tree(targets, f"{what}: y", True, lists=True)
    for tree, part in ((x, "x"), (y, "y")):
        require_aligned(tree, f"{what}: {part}")
    first = next(leaves(x))
    if count(x) != count(y) or not first.numel() or (first.ndim < 2 and not integers):
        shapes = (tuple(next(leaves(tree)).shape) for tree in (x, y))
        raise DataError(
            "{} has x of shape {} and y of shape {}; (records, ...) and as many targets are needed, and at least one "
            "record".format(what, *shapes)
        )
    if classes is not None and not (isinstance(y, Tensor) and y.ndim == 1):
        raise DataError(f"{what}: y must be one label per record; node-config: task names what else is learned")
    if person is not None and ids is None:
        raise ConfigError(f"node-config: person is {person!r}, and {what} names no persons; return (x, y, persons)")
    persons, named = _persons(ids, count(x), what)
    good = _finite(x) & _finite(y) & named
    if classes is not None:
        assert isinstance(y, Tensor)
        good &= torch.from_numpy(np.isin(y.numpy(), np.arange(classes)))
        y = y.where(good, 0).to(torch.int64)
    if transform is not None:
        x = _mapped(transform, x, good, what)
    return Records(_spoilt(x, good), y, tuple((~good).nonzero().flatten().tolist()), key, persons)


def _table(path: Path, node: Mapping[str, Any], classes: int | None) -> Records:
    named = node.get("schema")
    if not isinstance(named, str) or not named:
        raise ConfigError(f"node-config: data is '{path}'; schema=\"schema.toml\" must say what its columns are")
    schema = load_schema(Path(named), beside=frozenset(Data.model_fields))
    if node.get("person", schema.person) != schema.person:
        raise ConfigError(
            f"node-config: person is {node['person']!r}; of a table the schema says it, in [data], and {named} has "
            f"{'no person' if schema.person is None else f'person = {schema.person!r}'} there"
        )
    if "features" in node:
        raise ConfigError(f"node-config: features is {node['features']!r}; they are of images, and '{path}' is a table")
    if classes is not None and classes != schema.classes:
        learned = f"{schema.classes} classes" if schema.classes else f'what task="{schema.task}" is for'
        raise ConfigError(f"node-config: classes is {classes}; the target of the schema {named} is {learned}")
    found = read_table(path, schema, strict=False)
    kept = np.flatnonzero(~found.test) if found.test is not None else np.arange(len(found.y))
    if not len(kept):
        raise DataError(f"data = '{path}' has no records for training")
    place = {row: number for number, row in enumerate(kept.tolist())}
    index = torch.from_numpy(kept)
    return Records(
        found.x[index],
        found.y[index],
        tuple(place[row] for row in found.bad if row in place),
        None,
        None if found.persons is None else found.persons[kept],
    )


def _parts(made: Any, what: str) -> tuple[Any, Any, Any, str | None]:
    """Inputs, targets, persons, and the key of targets in a dict."""
    if isinstance(made, tuple) and len(made) in (2, 3):
        return made[0], made[1], made[2] if len(made) == 3 else None, None
    found = [key for key in TARGETS if key in made] if isinstance(made, Mapping) else []
    if isinstance(made, Mapping) and made and len(found) < 2:
        key = found[0] if found else ""  # texts whose next token is learned have no targets beside them
        inputs = {name: part for name, part in made.items() if name != key}
        return inputs, made[key] if key else None, None, key
    raise DataError(
        f"{what} gave a {type(made).__name__}; the pair (x, y), the three (x, y, persons) or a dict with labels in it "
        "is needed"
    )


def settled(records: Records, task: Task, what: str) -> Records:
    """With targets as the task takes them, and as none takes them where a record is bad: some models take any input.
    A record whose target the task does not take is bad too; where it would not take the kind of target at all, that is
    an error."""
    targets = partial(task.targets, what=what)
    y, bad = task.labels(records.x, records.y), set(records.bad)
    try:
        made = targets(y)
    except DataError:
        blank = targets(blanks(y))  # refused for all

        def parts(first: int, last: int) -> Iterator[Tree]:
            """By halves: reading is not paid for, and how long it takes must hardly depend on one record."""
            try:
                yield targets(taken(y, slice(first, last)))
            except DataError:
                if last - first == 1:
                    bad.add(first)
                    yield blank
                    return
                middle = (first + last) // 2
                yield from parts(first, middle)
                yield from parts(middle, last)

        made = joined(list(parts(0, count(y))))
    good = torch.ones(count(y), dtype=torch.bool)
    good[sorted(bad)] = False
    return replace(records, x=_spoilt(records.x, good), y=_spoilt(made, good), bad=tuple(sorted(bad)))


def _tree(value: Any, what: str, integers: bool, *, lists: bool = False) -> Tree:
    if isinstance(value, Mapping):
        return {str(key): _tree(part, f"{what} {key!r}", integers) for key, part in value.items()}
    if isinstance(value, tuple) and any(hasattr(part, "shape") or isinstance(part, Mapping) for part in value):
        return tuple(_tree(part, f"{what} {place}", integers) for place, part in enumerate(value))
    array = _numbers(value, what)
    # The type of a list or of a frame's column follows from what is in it: one missing value makes floats of all.
    typed = isinstance(getattr(value, "dtype", None), np.dtype | torch.dtype) and not hasattr(value, "iloc")
    if integers and not lists and not typed:
        raise DataError(f"{what} is a {type(value).__name__}; give an array or tensor, whose type says what it holds")
    if integers and typed and array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64))
    if integers and typed and array.dtype.kind == "b":
        return torch.from_numpy(array.copy())
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(array.astype(np.float32))


def _finite(tree: Tree) -> Tensor:
    """Which records have nothing but finite numbers."""
    good = torch.ones(count(tree), dtype=torch.bool)
    for leaf in leaves(tree):
        if leaf.is_floating_point():
            good &= leaf.isfinite().reshape(len(leaf), -1).all(dim=1)
    return good


def _spoilt(tree: Tree, good: Tensor) -> Tree:
    """With what no model takes in place of bad records."""

    def spoil(leaf: Tensor) -> Tensor:
        if leaf.dtype == torch.bool or bool(good.all()):
            return leaf
        nothing = torch.nan if leaf.is_floating_point() else torch.iinfo(leaf.dtype).min
        return leaf.masked_fill(~good.view(-1, *[1] * (leaf.ndim - 1)), nothing)

    return mapped(spoil, tree)


def _mapped(transform: Callable[[Tensor], Tensor], x: Tree, good: Tensor, what: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise DataError(f"{what}: features are of images, one tensor each; this has several")
    return transform(x.masked_fill(~good.view(-1, *[1] * (x.ndim - 1)), 0))


def _persons(ids: Any, records: int, what: str) -> tuple[NDArray[np.int64] | None, Tensor]:
    """Whose each record is, and which of them have an id."""
    if ids is None:
        return None, torch.ones(records, dtype=torch.bool)
    array = id_array(ids)
    if array.shape != (records,):
        raise DataError(f"{what} has persons of shape {array.shape}; one id per record is needed, for {records}")
    known: dict[str, int] = {}  # not in an array of texts, in which all are as long as the longest
    ids = map(_id, array.tolist())
    persons = [-1 if text is None else known.setdefault(text, len(known)) for text in ids]
    return np.array(persons, dtype=np.int64), torch.tensor(persons) >= 0


def _id(cell: Any) -> str | None:
    """An id as tables read it, so that 17 and "17 " are one person; None where there is none."""
    try:
        return identifier(cell.decode("utf-8", "surrogateescape") if isinstance(cell, bytes) else cell)
    except Odd:
        return None


def _numbers(values: Any, what: str) -> NDArray[Any]:
    """An array of real numbers. Text, objects and complex numbers, which one strange cell makes of a whole array, are
    read one by one; what is no real number becomes NaN."""
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu().to_dense()
            values = values.float() if values.is_floating_point() else values  # numpy knows no bfloat16
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} is not an array of numbers ({plugin.one_line(error)})") from error
    if array.dtype.kind in "OSU":
        array = np.array([_number(cell) for cell in array.reshape(-1)]).reshape(array.shape)
    if array.dtype.kind == "c":
        array = np.where(array.imag == 0, array.real, np.nan)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what} is an array of {array.dtype}; real numbers are needed")
    return array


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _npz(path: Path, person: object) -> tuple[Any, ...]:
    members = ("x", "y") if person is None else ("x", "y", str(person))
    if not path.exists():
        raise DataError(
            f"there are no records yet: '{path}' is not there; put an .npz with the arrays {', '.join(members)} there, "
            "or name in data where they are: another .npz, a table with a schema, or module:function"
        )
    return tuple(read_npz(path, members).values())


def _users(name: str, node: Mapping[str, Any]) -> object:
    function = plugin.resolve(name, key="data", error=DataError)
    try:
        return function(dict(node)) if inspect.signature(function).parameters else function()
    except (DataError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything, and a script exits
        raise DataError(f"data = {name!r} failed ({plugin.one_line(error)})") from error
