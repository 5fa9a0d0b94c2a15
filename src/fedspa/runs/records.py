"""The records of a run: which they are, what of them is protected, and who holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspa.agent.participate import agent_name
from fedspa.data.dataset import Dataset, grouped, labels_of, numbered, owners_of, view, with_floats
from fedspa.data.datasets import load
from fedspa.data.features import Features
from fedspa.data.partition import partition, split_scheme
from fedspa.errors import ConfigError, DataError
from fedspa.examples import Examples, Tree, count, leaves
from fedspa.learning import models
from fedspa.learning.forward import torch_threads
from fedspa.privacy.event import Unit
from fedspa.randomness.streams import Stream, derive_key, root_key
from fedspa.runs.config import Config, with_agents


def records_of(config: Config, data: Dataset | None = None, module: nn.Module | None = None) -> Dataset:
    """Return the records that the config names, or those given, as its features and with its share held out."""
    if data is not None and not isinstance(data, Dataset):
        raise DataError(
            f"data is a {type(data).__name__}; make it by fedspa.from_arrays(train_x, train_y, test_x, test_y, "
            "name=…), from_examples, from_agents or from_table"
        )
    named, alone = config.data, config.privacy.noise == "exact"
    if data is None and named.features is not None:
        return _mapped(named.name, named.dir, named.person, named.features, named.holdout, alone, config.run.code)
    if data is None:
        data = load(named.name, Path(named.dir), named.person, named.schema_of_table, config.run.code)
    data = view(data, named.features, named.holdout, per_example=alone)
    if not count(data.test_y):
        raise DataError(
            f"data {data.name!r} has no records for testing; hold some out by data.holdout, as in 0.2, or name the "
            "column of a table that marks them (data.table.split)"
        )
    return with_floats(data) if module is None and config.model.name in models.NAMES else data


def unit_of(config: Config, data: Dataset) -> Unit:
    """Return what is protected. A deployed server knows no persons; `data.person` says that its agents do."""
    return "record" if data.persons is None and config.data.person is None else "person"


def holdings_of(config: Config, data: Dataset, *, held_out: bool = False) -> list[NDArray[np.int64]]:
    """Return which training records each simulated agent trains on; which persons, where those are protected. With
    `held_out`, those that it keeps out of training (`data.agent_holdout`)."""
    found = _all_holdings(config, data)
    if config.data.agent_holdout == 0:
        return found
    out = _kept_out(config, data)
    parts = [held[out[held] == held_out] for held in found]
    for number, part in enumerate(parts):
        if not len(part):
            raise DataError(
                f"{names_of(config, data)[number]} has no {'person' if data.persons is not None else 'record'} "
                f"{'outside' if held_out else 'left for'} training: data.agent_holdout is "
                f"{config.data.agent_holdout:g}, and it holds {len(found[number])}"
            )
    return parts


def with_own_agents(config: Config, data: Dataset) -> Config:
    """Return the config with the number of agents that the data brings, where it names none."""
    return config if data.owners is None else with_agents(config, int(data.owners.max()) + 1)


def names_of(config: Config, data: Dataset) -> Sequence[str]:
    """Return the names of the agents, in the order of their numbers."""
    return data.agents or [agent_name(number) for number in range(config.federation.agents)]


def _kept_out(config: Config, data: Dataset) -> NDArray[np.bool_]:
    """Return which records, or persons, their agents keep out of training. Each decides for itself, by its own content
    and a public key, so that with one more or less all others stay where they are."""
    key = derive_key(root_key("seeded", config.run.seed), "agent holdout")
    rows = [
        leaf.contiguous().view(count(data.train_y), -1).numpy()
        for tree in (data.train_x, data.train_y)
        for leaf in leaves(tree)
    ]
    digests = np.array(
        [
            int.from_bytes(hashlib.blake2b(b"".join(row.tobytes() for row in record), key=key, digest_size=8).digest())
            for record in zip(*rows)
        ],
        dtype=np.uint64,
    )
    if data.persons is not None:
        persons = numbered(data.persons)
        sums = np.zeros(int(persons.max()) + 1, dtype=np.uint64)
        np.add.at(sums, persons, digests)  # of all a person's records, in any order, modulo 2^64
        digests = sums
    kept: NDArray[np.bool_] = digests / 2**64 < config.data.agent_holdout
    return kept


def _all_holdings(config: Config, data: Dataset) -> list[NDArray[np.int64]]:
    labels, owners = _labels(data.train_y), data.owners
    if data.persons is not None:
        labels = labels_of(data.persons, labels)
        owners = None if owners is None else owners_of(data.persons, owners)
    elif config.data.person is not None:
        raise ConfigError(
            f"data.person is {config.data.person!r}; the data {data.name!r} does not say whose its records are: leave "
            "it out, or bring persons along (fedspa.from_arrays(…, persons=ids))"
        )
    if owners is not None:
        return _held(config, data, owners)
    scheme, alpha = split_scheme(config.data.partition)
    held = "records" if data.persons is None else "persons"
    return partition(labels, config.federation.agents, scheme, alpha=alpha, seed=config.run.seed, held=held)


def root_of(config: Config) -> bytes:
    """The key that a simulation's private randomness starts from. Without privacy there is nothing to hide: the seed
    decides which records are drawn, and a run can be repeated."""
    return root_key(config.privacy.noise if config.private else "seeded", config.run.seed)


def trained_on(config: Config, data: Dataset) -> Examples:
    """The training records, or the persons whose they are. What counts of a person is drawn from the run's private
    randomness: `data.persons` says why."""
    train = Examples(data.train_x, data.train_y)
    if data.persons is None:
        return train
    draws = Stream(derive_key(root_of(config), "records of persons"))
    return grouped(*train, data.persons, config.data.person_records, draws.uint64(len(data.persons)))


@lru_cache(maxsize=1)  # a sweep runs many configs on the same features, which take longer to make than some runs
def _mapped(
    name: str, folder: str, person: str | None, features: Features, holdout: float, alone: bool, code: str | None
) -> Dataset:
    with torch_threads(1):
        return view(load(name, Path(folder), person, code=code), features, holdout, per_example=alone)


def _held(config: Config, data: Dataset, owners: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Records that came with their agents."""
    agents, own = config.federation.agents, int(owners.max()) + 1
    if agents != own:
        raise ConfigError(
            f"federation.agents is {agents}; the data comes with {own} agents of its own: set it to {own}"
        )
    holdings = [np.flatnonzero(owners == number) for number in range(agents)]
    for name, held in zip(names_of(config, data), holdings):
        if not len(held):
            raise DataError(
                f"{name} holds no training records; give it some, or hold out "
                f"fewer (data.holdout is {config.data.holdout:g})"
            )
    return holdings


def _labels(y: Tree) -> NDArray[np.int64]:
    """Return the classes by which records can be assigned unevenly; without classes, all are alike."""
    if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
        return np.asarray(y.numpy(), dtype=np.int64)
    return np.zeros(count(y), dtype=np.int64)
