"""The agents of a simulation, which nodes play: what each of them holds follows from the run's config."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.errors import DataError
from fedspa.examples import Examples, taken
from fedspa.runs.config import Config
from fedspa.runs.records import dealt, records_of, trained_on
from fedspa.runs.setup import task_of, with_targets


class Held(NamedTuple):
    """What an agent trains on: records or persons. They are those `rows` of `among`, or all of it. `key` says where in
    a dict the targets lay, `record` is the layout of one record and its target, made of zeros."""

    among: Examples
    rows: Tensor | None
    record: Examples
    key: str | None

    @property
    def examples(self) -> Examples:
        return self.own(self.among)

    def own(self, among: Examples) -> Examples:
        """The agent's, of `among` or of what was made of that, row by row."""
        return among if self.rows is None else Examples(taken(among.x, self.rows), taken(among.y, self.rows))


class Federation(NamedTuple):
    """A simulation's agents and what they hold."""

    train: Examples
    record: Examples
    holdings: list[NDArray[np.int64]]
    persons: NDArray[np.int64] | None
    classes: int | None
    key: str | None


@lru_cache(maxsize=2)
def federation(config_json: str) -> Federation:
    config = Config.model_validate_json(config_json)
    data = records_of(config)
    ready = with_targets(data, task_of(config, data))
    return Federation(trained_on(config, ready), ready.like, dealt(config, data), data.persons, data.classes, data.key)


def share(config_json: str, number: int) -> Held:
    train, record, holdings, _, _, key = federation(config_json)
    if not 0 <= number < len(holdings):
        raise DataError(f"agent {number} of a federation of {len(holdings)}; the server's config is another one")
    return Held(train, torch.from_numpy(holdings[number]), record, key)
