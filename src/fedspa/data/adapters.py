"""Datasets from Python objects: arrays, examples with their targets, one source per agent, partitions, tables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspa.data.columns import Schema, checked, load_schema
from fedspa.data.dataset import Dataset, require_finite
from fedspa.data.sources import Entry, check_ids, examples, require_alike
from fedspa.data.table import from_frame, read_table
from fedspa.errors import DataError, RunWarning, quoted, warn
from fedspa.examples import Tree, count, joined, layout, leaves, mapped, taken

Numbers = NDArray[np.int64]


def from_arrays(
    train_x: Any,
    train_y: Any,
    test_x: Any,
    test_y: Any,
    *,
    name: str,
    classes: int | None = None,
    owners: Any = None,
    persons: Any = None,
) -> Dataset:
    """Make a Dataset from four arrays or tensors, or dicts or tuples of them. Integers stay integers.

    Args:
        train_x: The agents' inputs, one row per record.
        train_y: Their targets. Where each target is one whole number, targets are classes.
        test_x: The inputs of the test set.
        test_y: Their targets.
        name: The name of the data in the run's files.
        classes: The number of classes. The model's size reveals it, so it should be public. By default it is the
            largest label plus one, which is not covered by any ε.
        owners: The agent of each training record, by an id: a whole number, or a text, which names the agent in
            reports and ledgers. Without it, the run partitions the records.
        persons: The person of each training record, by an id: ε then protects whole persons instead of records.

    Returns:
        The data, for `run(data=…)`.

    Raises:
        DataError: The records cannot be used as they are; one line says which and what to do.

    Examples:
        >>> import fedspa, numpy
        >>> x, y = numpy.random.default_rng(0).normal(size=(40, 3)), numpy.arange(40) % 2
        >>> data = fedspa.from_arrays(x[:30], y[:30], x[30:], y[30:], name="demo")
        >>> data.classes, data.train_x.shape
        (2, torch.Size([30, 3]))
    """
    if train_y is None or test_y is None:
        raise DataError("targets are None; fedspa.from_examples takes examples that hold theirs, or that have none")
    pairs = (train_x, train_y), (test_x, test_y)
    return from_examples(*pairs, name=name, classes=classes, owners=owners, persons=persons)


def from_examples(
    train: Any,
    test: Any,
    *,
    name: str,
    target: str | None = None,
    classes: int | None = None,
    owners: Any = None,
    persons: Any = None,
) -> Dataset:
    """Make a Dataset from two sources of examples, each a dict of arrays that includes the targets, a pair (x, y), a
    torch Dataset or a `datasets.Dataset`.

    Args:
        train: The agents' examples.
        test: The test set.
        name: The name of the data in the run's files.
        target: The key of the targets in a dict; by default whichever of labels, label, target, targets and y is
            there. "" means no targets, as for texts whose next token is learned. A module gets the other entries as
            keyword arguments; a custom task gets the whole dict.
        classes: As for `from_arrays`.
        owners: As for `from_arrays`.
        persons: As for `from_arrays`.

    Returns:
        The data, for `run(data=…)`.

    Raises:
        DataError: The records cannot be used as they are; one line says which and what to do.

    Examples:
        >>> import fedspa, torch
        >>> texts = {"input_ids": torch.zeros(8, 5, dtype=torch.int64), "labels": torch.arange(8) % 2}
        >>> fedspa.from_examples(texts, texts, name="texts").key
        'labels'
    """
    what = _named(name)
    held = examples(train, f"{what}, train", target)
    own, names = (None, None) if owners is None else _owners(owners, f"{what}: owners")
    whose = None if persons is None else _numbered(persons, f"{what}: persons")
    return replace(_with_classes(_dataset([held], test, name, own, whose, target, "train"), classes), agents=names)


def from_agents(
    agents: Mapping[str, Any] | Sequence[Any],
    *,
    test: Any = None,
    name: str = "agents",
    target: str | None = None,
    classes: int | None = None,
    persons: Sequence[Any] | None = None,
) -> Dataset:
    """Make a Dataset from one source of records per agent.

    Args:
        agents: An entry per agent: a mapping by their names, or a list. An entry is what `from_examples` takes, or the
            Dataset of a table, as in `{"north": from_table("north.csv", schema), …}`.
        test: One entry more, the test set. Of tables, their own test sets are taken, or a share of all by
            `data.holdout`.
        name: The name of the data in the run's files.
        target: As for `from_examples`.
        classes: As for `from_arrays`.
        persons: An array of ids per agent. The same id at two agents is the same person, and a run refuses that: each
            agent alone could not protect the person. Ids in tables are each agent's own: no two agents share a person.

    Returns:
        The data, for `run(data=…)`; `federation.agents` is the length of the list, and may be left out.

    Raises:
        DataError: The records cannot be used as they are; one line says which and what to do.

    Examples:
        >>> import fedspa, torch
        >>> pairs = [(torch.rand(6, 3), torch.arange(6) % 2) for agent in range(4)]
        >>> data = fedspa.from_agents(pairs, test=pairs[0], name="four agents")
        >>> data.owners.tolist()[:8]
        [0, 0, 0, 0, 0, 0, 1, 1]
    """
    what = _named(name)
    if not isinstance(agents, Sequence | Mapping) or isinstance(agents, str | bytes) or not agents:
        raise DataError(f"from_agents got {quoted(agents, 60)}; a mapping or list with an entry per agent is needed")
    names = None
    if isinstance(agents, Mapping):
        names, agents = tuple(map(str, agents)), list(agents.values())
    assert isinstance(agents, Sequence)
    if any(isinstance(agent, Dataset) for agent in agents):
        if test is not None or persons is not None or classes is not None or target is not None:
            raise DataError("from_agents of data sets takes `name` only: test set, persons and targets are their own")
        return _of_datasets(agents, names, name)
    if test is None:
        raise DataError("from_agents needs `test`, the test set: one more entry of the kind that an agent has")
    entries: list[Entry] = []
    for i, agent in enumerate(agents):
        key = entries[0].key if entries and entries[0].key is not None else target
        entries.append(examples(agent, f"{what}, agent {i}", key))
        require_alike(entries[0].x, entries[-1].x, f"{what}, agent {i}: x", "agent 0")
        require_alike(entries[0].y, entries[-1].y, f"{what}, agent {i}: y", "agent 0")
    counts = [count(entry.y) for entry in entries]
    owners = np.repeat(np.arange(len(entries), dtype=np.int64), counts)
    whose = None if persons is None else _of_agents(persons, counts, f"{what}: persons")
    made = _with_classes(_dataset(entries, test, name, owners, whose, target, "agent 0"), classes)
    return made if names is None else replace(made, agents=names)


def _of_datasets(agents: Sequence[Any], names: tuple[str, ...] | None, name: str) -> Dataset:
    """Join one Dataset per agent. A person's number is an agent's own: at sites nobody could compare ids either."""
    first: Dataset = agents[0]
    persons: list[Numbers] = []
    known = 0
    for i, agent in enumerate(agents):
        called = f"agent {i}" if names is None else f"agent {quoted(names[i])}"
        if not isinstance(agent, Dataset):
            raise DataError(f"data {name!r}, {called} is a {type(agent).__name__}; give a Dataset for each agent")
        alike = (layout(agent.train_x), layout(agent.train_y), agent.schema, agent.classes, agent.key)
        if alike != (layout(first.train_x), layout(first.train_y), first.schema, first.classes, first.key):
            raise DataError(f"data {name!r}, {called} has other columns or classes than the first; take one schema")
        if (agent.persons is None) != (first.persons is None):
            raise DataError(f"data {name!r}, {called}: some agents have persons and some not; name them for all")
        if agent.persons is not None:
            persons.append(agent.persons + known)
            known += 1 + int(agent.persons.max())
    return replace(
        first,
        train_x=joined([agent.train_x for agent in agents]),
        train_y=joined([agent.train_y for agent in agents]),
        test_x=joined([agent.test_x for agent in agents]),
        test_y=joined([agent.test_y for agent in agents]),
        name=name,
        owners=np.repeat(np.arange(len(agents), dtype=np.int64), [count(agent.train_y) for agent in agents]),
        persons=np.concatenate(persons) if persons else None,
        agents=names,
    )


def from_table(table: Any, schema: Schema | Mapping[str, Any] | Path | str, *, name: str | None = None) -> Dataset:
    """Make a Dataset from a table and a schema that describes its columns.

    Scaling and encoding use only the public constants of the schema, never statistics of the records.

    Args:
        table: The path of a .csv or .parquet file, or a pandas frame.
        schema: The path of a TOML file with [data.table], or a mapping with `columns` and, where they are, `agent`,
            `person` and `split`. Without `split` there is no test set, and the run's `data.holdout` says
            which share to hold out.
        name: The name of the data in the run's files; by default, the file's name.

    Returns:
        The data, for `run(data=…)`.

    Raises:
        ConfigError: The schema is wrong; one line names the column and the key.
        DataError: The table cannot be read, or has rows that the schema does not allow.

    Examples:
        >>> import fedspa, pandas
        >>> frame = pandas.DataFrame({"age": [30, 60, 45, 20], "ill": ["no", "yes", "yes", "no"]})
        >>> columns = {"age": {"kind": "number", "range": [0, 120]}, "ill": {"kind": "flag", "target": True}}
        >>> data = fedspa.from_table(frame, {"columns": columns})
        >>> data.train_x.flatten().tolist(), data.train_y.tolist()
        ([-0.5, 0.0, -0.25, -0.6666666865348816], [0, 1, 1, 0])
    """
    if isinstance(schema, str | os.PathLike):
        schema = load_schema(Path(schema))
    elif isinstance(schema, Mapping):
        schema = checked(schema)
    elif not isinstance(schema, Schema):
        raise DataError(f"the schema is {quoted(schema, 60)}; give a mapping, or the path of a TOML file")
    if isinstance(table, str | os.PathLike):
        found, name = read_table(Path(table), schema, strict=True), Path(table).name if name is None else name
    else:
        found, name = from_frame(table, schema), "table" if name is None else name
    test = np.zeros(len(found.y), dtype=np.bool_) if found.test is None else found.test
    train, held_out = torch.from_numpy(~test), torch.from_numpy(test)
    return Dataset(
        found.x[train],
        found.y[train],
        found.x[held_out],
        found.y[held_out],
        classes=schema.classes,
        name=name,
        owners=None if found.owners is None else found.owners[~test],
        persons=None if found.persons is None else found.persons[~test],
        target_scale=found.target_scale,
        target_offset=found.target_offset,
        schema=schema,
        agents=found.agents,
    )


def _with_classes(data: Dataset, classes: int | None) -> Dataset:
    return data if classes is None else replace(data, classes=classes)


def _named(name: object) -> str:
    if not isinstance(name, str):
        raise DataError(f"the name of the data is {quoted(name)}: a text is needed")
    return f"data {name!r}"


def _dataset(
    entries: list[Entry],
    test: Any,
    name: str,
    owners: Numbers | None,
    persons: Numbers | None,
    target: str | None,
    versus: str,
) -> Dataset:
    first, what = entries[0], f"data {name!r}, test"
    held_out = examples(test, what, target if first.key is None else first.key)
    train_x, train_y = joined([entry.x for entry in entries]), joined([entry.y for entry in entries])
    for y, where in ((train_y, "train"), (held_out.y, "test")):  # a NaN makes floats of whole numbers: first of all
        require_finite(y, f"data {name!r}: {where} labels")
    train_y, test_y = _classes_as_whole(train_y, held_out.y)
    for part, mine, other in (("x", train_x, held_out.x), ("y", train_y, test_y)):
        require_alike(mine, other, f"{what}: {part}", versus)
    classes = _classes([train_y, test_y])
    if classes is not None and not any(bool((y == 0).any()) for y in leaves(joined([train_y, test_y]))):
        warn(
            f"data {name!r}: no record has the label 0, and classes are numbered from 0 to {classes - 1}; where yours "
            "begin at 1, subtract 1",
            RunWarning,
        )
    return Dataset(
        train_x,
        train_y,
        _in_order_of(train_x, held_out.x),
        _in_order_of(train_y, test_y),
        classes=classes,
        name=name,
        key=first.key,
        owners=owners,
        persons=persons,
    )


def _in_order_of(first: Tree, other: Tree) -> Tree:
    """Return the same tree with its keys in the order of the first."""
    return joined([taken(first, slice(0)), other])


def _of_agents(persons: Any, counts: list[int], what: str) -> Numbers:
    """Number the ids of all agents."""
    if not isinstance(persons, Sequence) or len(persons) != len(counts):
        raise DataError(f"{what} must be a list with an array of ids per agent, and there are {len(counts)} agents")
    found = [check_ids(ids, f"{what} of agent {i}") for i, ids in enumerate(persons)]
    for i, (ids, records) in enumerate(zip(found, counts)):
        if len(ids) != records:
            raise DataError(f"{what} of agent {i} are {len(ids)}, and it has {records} records: one id for each")
        if (ids.dtype.kind in "iu") != (found[0].dtype.kind in "iu"):  # numpy would take 17 for the text '17'
            raise DataError(f"{what} of agent {i} are {ids.dtype} and those of agent 0 {found[0].dtype}: one kind")
    return _numbered(np.concatenate(found), what)


def _numbered(ids: Any, what: str) -> Numbers:
    """Number ids from 0, in sorted order."""
    return np.unique(check_ids(ids, what), return_inverse=True)[1].astype(np.int64)


def _owners(ids: Any, what: str) -> tuple[Numbers, tuple[str, ...] | None]:
    """Number the agents from 0, in sorted order; texts are their names."""
    known, numbers = np.unique(check_ids(ids, what), return_inverse=True)
    names = tuple(map(str, known.tolist())) if known.dtype.kind == "U" else None
    return numbers.astype(np.int64), names


def _classes_as_whole(*ys: Tree) -> list[Tree]:
    """Return targets as int64 if each of them is one whole number."""
    return [mapped(lambda leaf: leaf.to(torch.int64), y) for y in ys] if all(map(_whole, ys)) else [*ys]


def _whole(y: Tree) -> bool:
    if not isinstance(y, torch.Tensor) or y.ndim != 1 or not y.numel():
        return False
    return not y.is_floating_point() or bool(((y == y.floor()) & (y.abs() < 2**31)).all())


def _classes(ys: Sequence[Tree]) -> int | None:
    labels = [y for y in ys if isinstance(y, torch.Tensor) and y.dtype == torch.int64 and y.ndim == 1 and y.numel()]
    if len(labels) < len(ys) or any(int(y.min()) < 0 for y in labels):
        return None
    classes, records = 1 + max(int(y.max()) for y in labels), sum(map(len, labels))
    # A stray label must not decide the size of a model; numbers far apart are counts or amounts.
    return classes if 2 <= classes <= max(records, 2) else None
