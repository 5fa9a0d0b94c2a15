"""The records of a run: which they are, what of them is protected, and who holds them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspa.data.dataset import Dataset
from fedspa.data.datasets import load
from fedspa.data.features import Features
from fedspa.data.partition import partition, split_scheme
from fedspa.data.persons import grouped, labels_of, owners_of
from fedspa.data.view import view, with_floats
from fedspa.errors import ConfigError, DataError
from fedspa.examples import Examples, Tree, count
from fedspa.learning import models
from fedspa.learning.threads import torch_threads
from fedspa.privacy.event import Unit
from fedspa.randomness.streams import Stream, derive_key, root_key
from fedspa.runs.config import Config


def records_of(config: Config, data: Dataset | None = None, module: nn.Module | None = None) -> Dataset:
    """The records that the config names, or those given, as its features and with its share held out."""
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
    data = view(data, named.features, named.holdout, alone=alone)
    if not count(data.test_y):
        raise DataError(
            f"data {data.name!r} has no records for testing; hold some out by data.holdout, as in 0.2, or name the "
            "column of a table that marks them (data.table.split)"
        )
    return with_floats(data) if module is None and config.model.name in models.NAMES else data


def unit_of(config: Config, data: Dataset) -> Unit:
    """What is protected. A deployed server knows no persons, and is told by `data.person` that its agents do."""
    return "record" if data.persons is None and config.data.person is None else "person"


def dealt(config: Config, data: Dataset) -> list[NDArray[np.int64]]:
    """Which training records each simulated agent holds; which persons, where those are protected."""
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
        return _held(config, owners)
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
        return view(load(name, Path(folder), person, code=code), features, holdout, alone=alone)


def _held(config: Config, owners: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Records that came with their agents."""
    agents, own = config.federation.agents, int(owners.max()) + 1
    if agents != own:
        raise ConfigError(
            f"federation.agents is {agents}; the data comes with {own} agents of its own: set it to {own}"
        )
    holdings = [np.flatnonzero(owners == number) for number in range(agents)]
    for number, held in enumerate(holdings):
        if not len(held):
            raise DataError(
                f"agent {number} of the data, counted from 0, holds no training records; give it some, or hold out "
                f"fewer (data.holdout is {config.data.holdout:g})"
            )
    return holdings


def _labels(y: Tree) -> NDArray[np.int64]:
    """By which records can be dealt out unevenly: their classes; where they have none, all are alike."""
    if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
        return np.asarray(y.numpy(), dtype=np.int64)
    return np.zeros(count(y), dtype=np.int64)
