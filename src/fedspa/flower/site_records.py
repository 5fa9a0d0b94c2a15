"""A site's own records: a table with its schema, an `.npz` with the arrays x and y, or `package.module:function`.

The site's node-config names them, never the server. They are read in tolerant mode (`fedspa.data.sources`): the content
of one record must not decide whether or how the site answers. A record with a number that is not finite, with a label
outside the site's classes, or without an id where the site names persons, is *bad*. It stays among the records, whose
number is unchanged, and is filled with values that no model takes: NaN, and whole numbers below any token or label. Its
gradient then counts as zero. This depends on the record and on the site's own settings alone. A record without an id is
in no person's example either: its person may have other records, and would contribute to a release twice. Only the
site's operator is informed.
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
from fedspa.data.columns import load_schema
from fedspa.data.datasets import read_npz
from fedspa.data.plugin import is_table
from fedspa.data.sources import inputs_and_targets, number_persons, read_tree
from fedspa.data.table import read_table
from fedspa.errors import ConfigError, DataError
from fedspa.examples import Tree, count, joined, leaves, mapped, require_aligned, taken, zero_examples
from fedspa.learning.tasks import Task
from fedspa.runs.sections import Data


@dataclass(frozen=True, eq=False)
class Records:
    """Inputs and targets: float32, int64 or bool. `bad` lists the numbers of the bad records. `key` is the key of the
    targets in a dict. `persons` numbers the person of each record from 0, where the site names persons; -1 where the id
    is missing."""

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
    """Load the records that a node-config names. A function that takes an argument is called with the node-config.

    With `classes`, targets are labels. `transform` maps the inputs, each by itself; bad ones are zeros there. Whole
    numbers among the inputs become float32, as the built-in models take them, unless `integers`. So do targets in
    lists, which have no type of their own; labels become int64.
    """
    name, person = str(node["data"]), node.get("person")
    if "schema" in node and name.endswith(".npz"):
        raise ConfigError(f"node-config: schema is {node['schema']!r}, and data = {name!r} is no table: leave it out")
    if is_table(name):
        return _table(Path(name), node, classes)
    made: Any = _npz(Path(name), person) if name.endswith(".npz") else _call(name, node)
    what = f"data = {name!r}"
    inputs, targets, ids, key = inputs_and_targets(made, what)
    x = read_tree(inputs, f"{what}: x", tolerant=True, integers=integers, lists=False)
    y = torch.zeros(count(x), 0) if targets is None else read_tree(targets, f"{what}: y", tolerant=True)
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
    persons = None if ids is None else number_persons(ids, count(x), what)
    good = _finite(x) & _finite(y)
    if persons is not None:
        good &= torch.from_numpy(persons >= 0)
    if classes is not None:
        assert isinstance(y, Tensor)
        good &= torch.from_numpy(np.isin(y.numpy(), np.arange(classes)))
        y = y.where(good, 0).to(torch.int64)
    if transform is not None:
        x = _mapped(transform, x, good, what)
    return Records(_invalidated(x, good), y, tuple((~good).nonzero().flatten().tolist()), key, persons)


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


def settled(records: Records, task: Task, what: str) -> Records:
    """Convert targets as the task needs them, and give bad records targets that no task takes: some models take any
    input. A record whose target the task rejects is bad too; a kind of target that the task rejects is an error."""
    targets = partial(task.targets, what=what)
    y, bad = task.labels(records.x, records.y), set(records.bad)
    try:
        made = targets(y)
    except DataError:
        blank = targets(zero_examples(y))  # refused for all

        def parts(first: int, last: int) -> Iterator[Tree]:
            """Convert by halves: reading is not paid for, so its duration must hardly depend on one record."""
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
    return replace(records, x=_invalidated(records.x, good), y=_invalidated(made, good), bad=tuple(sorted(bad)))


def _finite(tree: Tree) -> Tensor:
    """Return which records contain only finite numbers."""
    good = torch.ones(count(tree), dtype=torch.bool)
    for leaf in leaves(tree):
        if leaf.is_floating_point():
            good &= leaf.isfinite().reshape(len(leaf), -1).all(dim=1)
    return good


def _invalidated(tree: Tree, good: Tensor) -> Tree:
    """Fill bad records with values that no model takes."""

    def invalidate(leaf: Tensor) -> Tensor:
        if leaf.dtype == torch.bool or bool(good.all()):
            return leaf
        nothing = torch.nan if leaf.is_floating_point() else torch.iinfo(leaf.dtype).min
        return leaf.masked_fill(~good.view(-1, *[1] * (leaf.ndim - 1)), nothing)

    return mapped(invalidate, tree)


def _mapped(transform: Callable[[Tensor], Tensor], x: Tree, good: Tensor, what: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise DataError(f"{what}: features are of images, one tensor each; this has several")
    return transform(x.masked_fill(~good.view(-1, *[1] * (x.ndim - 1)), 0))


def _npz(path: Path, person: object) -> tuple[Any, ...]:
    members = ("x", "y") if person is None else ("x", "y", str(person))
    if not path.exists():
        raise DataError(
            f"there are no records yet: '{path}' is not there; put an .npz with the arrays {', '.join(members)} there, "
            "or name in data where they are: another .npz, a table with a schema, or module:function"
        )
    return tuple(read_npz(path, members).values())


def _call(name: str, node: Mapping[str, Any]) -> object:
    function = plugin.resolve(name, key="data", error=DataError)
    arguments = (dict(node),) if inspect.signature(function).parameters else ()
    return plugin.call(function, *arguments, what=f"data = {name!r}", error=DataError)
