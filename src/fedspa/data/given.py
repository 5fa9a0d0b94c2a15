"""Data that is given in Python: arrays, examples with their targets inside, each agent's own, partitions, a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedspa.data import plugin
from fedspa.data.columns import Odd, Schema, checked, identifier, load_schema
from fedspa.data.dataset import Dataset, require_finite
from fedspa.data.foreign import Entry, examples, require_alike
from fedspa.data.persons import id_array
from fedspa.data.table import from_frame, read_table
from fedspa.errors import DataError, quoted
from fedspa.examples import Tree, count, joined, mapped, taken

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
    """Data from four arrays or tensors, or dicts or tuples of them, taken as they are: integers stay integers.

    Args:
        train_x: What the agents' records hold, a row each.
        train_y: What is learned of them. Where each target is one whole number, they are classes.
        test_x: The same of records that are held out for testing.
        test_y: Their targets.
        name: What the run's files call the data.
        classes: How many classes there are. The model's size tells it to everybody, so it should be a number that is
            public anyway. Without it, it is read off the labels, from 0 to the largest, and no ε counts that.
        owners: By an id, a whole number or a text, which agent holds each training record. Without, records are dealt
            out.
        persons: By an id, whose each training record is: each person is then protected, and not each record.

    Returns:
        The data, for `run(data=…)`.

    Examples:
        >>> import fedspa, numpy
        >>> x, y = numpy.random.default_rng(0).normal(size=(40, 3)), numpy.arange(40) % 2
        >>> data = fedspa.from_arrays(x[:30], y[:30], x[30:], y[30:], name="made up")
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
    """Data from two sources of examples, each a dict of arrays that holds its targets, a pair (x, y), a torch Dataset
    or a `datasets.Dataset`.

    Args:
        train: The agents' examples.
        test: Those that are held out for testing.
        name: What the run's files call the data.
        target: The targets' key in a dict, by default the one of labels, label, target, targets and y that is there; ""
            says that there are none, as for texts whose next token is learned. A module gets the rest as keyword
            arguments, and a task of one's own gets the dict whole.
        classes: As for `from_arrays`.
        owners: As for `from_arrays`.
        persons: As for `from_arrays`.

    Returns:
        The data, for `run(data=…)`.

    Examples:
        >>> import fedspa, torch
        >>> texts = {"input_ids": torch.zeros(8, 5, dtype=torch.int64), "labels": torch.arange(8) % 2}
        >>> fedspa.from_examples(texts, texts, name="texts").key
        'labels'
    """
    what = _named(name)
    held = examples(train, f"{what}, train", target)
    own = None if owners is None else _numbered(owners, f"{what}: owners")
    whose = None if persons is None else _numbered(persons, f"{what}: persons")
    return _with_classes(_dataset([held], test, name, own, whose, target, "train"), classes)


def from_agents(
    agents: Sequence[Any],
    *,
    test: Any,
    name: str,
    target: str | None = None,
    classes: int | None = None,
    persons: Sequence[Any] | None = None,
) -> Dataset:
    """Data that comes with its agents: each one's own records.

    Args:
        agents: A list with an entry per agent; an entry is what `from_examples` takes.
        test: One such entry, held out for testing.
        name: What the run's files call the data.
        target: As for `from_examples`.
        classes: As for `from_arrays`.
        persons: An array of ids per agent; the same id at two agents is the same person, whom a run refuses to protect
            at each of them alone.

    Returns:
        The data, for `run(data=…)`, with `federation.agents` as many as the list has.

    Examples:
        >>> import fedspa, torch
        >>> pairs = [(torch.rand(6, 3), torch.arange(6) % 2) for agent in range(4)]
        >>> data = fedspa.from_agents(pairs, test=pairs[0], name="four agents")
        >>> data.owners.tolist()[:8]
        [0, 0, 0, 0, 0, 0, 1, 1]
    """
    what = _named(name)
    if not isinstance(agents, Sequence) or isinstance(agents, str | bytes) or not agents:
        raise DataError(f"from_agents was given {quoted(agents, 60)}; a list with an entry per agent is needed")
    entries: list[Entry] = []
    for i, agent in enumerate(agents):
        key = entries[0].key if entries and entries[0].key is not None else target
        entries.append(examples(agent, f"{what}, agent {i}", key))
        require_alike(entries[0].x, entries[-1].x, f"{what}, agent {i}: x", "agent 0")
        require_alike(entries[0].y, entries[-1].y, f"{what}, agent {i}: y", "agent 0")
    counts = [count(entry.y) for entry in entries]
    owners = np.repeat(np.arange(len(entries), dtype=np.int64), counts)
    whose = None if persons is None else _of_agents(persons, counts, f"{what}: persons")
    return _with_classes(_dataset(entries, test, name, owners, whose, target, "agent 0"), classes)


def from_partitioner(partitioner: Any, *, test: Any, name: str, target: str | None = None) -> Dataset:
    """Data from a partitioner of flwr-datasets, each partition an agent's.

    Args:
        partitioner: An object with `num_partitions` and `load_partition(number)`, which has been given its dataset.
        test: What `from_examples` takes, held out for testing.
        name: What the run's files call the data.
        target: As for `from_examples`.

    Returns:
        The data, for `run(data=…)`.
    """
    try:
        partitions = [partitioner.load_partition(i) for i in range(int(partitioner.num_partitions))]
    except Exception as cause:  # its own code, which may raise anything
        raise DataError(f"the partitioner failed ({plugin.one_line(cause)}); has it been given its dataset?") from cause
    if not partitions:
        raise DataError("the partitioner has no partitions; one per agent is needed")
    return from_agents(partitions, test=test, name=name, target=target)


def from_table(table: Any, schema: Schema | Mapping[str, Any] | Path | str, *, name: str | None = None) -> Dataset:
    """Data from a table, by a schema that says what each column is.

    Scaling and encoding use the constants of the schema, which are public, and nothing that was read off the records.

    Args:
        table: The path of a .csv or .parquet file, or a pandas frame.
        schema: The path of a TOML file with [data.table], or a mapping with `columns` and, where they are, `agent`,
            `person`, `split` and `test`. Without `split` there are no held-out records: the run's `data.holdout` says
            how many to hold out.
        name: What the run's files call the data; by default, the file's name.

    Returns:
        The data, for `run(data=…)`.

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
    return Dataset(
        train_x,
        train_y,
        _in_order_of(train_x, held_out.x),
        _in_order_of(train_y, test_y),
        classes=_classes([train_y, test_y]),
        name=name,
        key=first.key,
        owners=owners,
        persons=persons,
    )


def _in_order_of(first: Tree, other: Tree) -> Tree:
    """The same tree, with its keys in that order."""
    return joined([taken(first, slice(0)), other])


def _of_agents(persons: Any, counts: list[int], what: str) -> Numbers:
    """The ids of all agents as numbers."""
    if not isinstance(persons, Sequence) or len(persons) != len(counts):
        raise DataError(f"{what} must be a list with an array of ids per agent, and there are {len(counts)} agents")
    found = [_ids(ids, f"{what} of agent {i}") for i, ids in enumerate(persons)]
    for i, (ids, records) in enumerate(zip(found, counts)):
        if len(ids) != records:
            raise DataError(f"{what} of agent {i} are {len(ids)}, and it has {records} records: one id for each")
        if (ids.dtype.kind in "iu") != (found[0].dtype.kind in "iu"):  # numpy would take 17 for the text '17'
            raise DataError(f"{what} of agent {i} are {ids.dtype} and those of agent 0 {found[0].dtype}: one kind")
    return _numbered(np.concatenate(found), what)


def _numbered(ids: Any, what: str) -> Numbers:
    """Ids as numbers from 0 on."""
    return np.unique(_ids(ids, what), return_inverse=True)[1].astype(np.int64)


def _ids(ids: Any, what: str) -> NDArray[Any]:
    """A record without an id is nobody's and could be anybody's: it is refused, since a person in two places would be
    protected in neither."""
    try:
        array = id_array(ids)
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


def _is_missing(one: object) -> bool:
    try:
        return identifier(one.decode("utf-8", "surrogateescape") if isinstance(one, bytes) else one) is None
    except Odd:  # something, though no id
        return False


def _classes_as_whole(*ys: Tree) -> list[Tree]:
    """As int64 where each target is one whole number."""
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
