"""Which keys of a config go together: config.py allows each by itself, this says what may not stand beside another.

What a mechanism asks of the keys, its own room says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedspa.algorithms import Algorithm
from fedspa.data.columns import is_table
from fedspa.errors import ConfigError, quoted
from fedspa.learning.options import OF
from fedspa.runs.plans import algorithm_of, flat

if TYPE_CHECKING:
    from fedspa.runs.config import Config
    from fedspa.runs.sections import Data, Federation, Privacy, Run, Task
    from fedspa.runs.tuning_section import Tuning

# What only a table has.
TABLE_KEYS = ("columns", "agent", "split", "test")


def check(config: Config) -> None:
    """Raise a ValueError of one line that names the keys."""
    federation, algorithm, privacy = config.federation, config.algorithm, config.privacy
    if federation.per_round > federation.agents:
        raise ValueError(
            f"federation.per_round is {federation.per_round}; it must not exceed federation.agents = "
            f"{federation.agents}"
        )
    _refuse_foreign_options(config.task)
    _refuse_foreign_data(config.data)
    _refuse_lone_workers(config.run)
    _refuse_trials_of_nothing(config.tuning)
    try:
        known = algorithm_of(config)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    _refuse_lone_members(federation, privacy)
    mechanism = known.mechanism
    check_options(algorithm.options, known)
    if not known.sparse and algorithm.compression != 1:
        raise ValueError(
            f"algorithm.compression is {algorithm.compression}; {algorithm.name} uploads every coordinate: only 1.0"
        )
    if algorithm.layer_shares is not None and (
        not known.sparse or algorithm.mask != "fixed" or algorithm.compression != 1
    ):
        raise ValueError(
            "algorithm.layer_shares is for fedspa with algorithm.mask 'fixed', and sets the compression itself: "
            "leave algorithm.compression out"
        )
    if mechanism is not None:
        mechanism.check(flat(config))
        return
    if algorithm.coding == "int":
        raise ValueError(
            f"algorithm.coding is 'int', whose step is a share of the noise; {algorithm.name} has none: f32, f16"
        )
    for key, path in (("ledger", config.run.ledger), ("policy", config.run.policy)):
        if path is not None:
            raise ValueError(
                f"run.{key} is {path!r}; {algorithm.name} releases what no ledger can count and no policy allows: "
                f"leave it out (--set run.{key}=none)"
            )


def check_options(options: dict[str, Any], algorithm: Algorithm) -> None:
    """Raise a ValueError where `[algorithm.options]` is not what the algorithm reads; fill in its defaults."""
    if algorithm.options is None:
        if options:
            raise ValueError(
                f"algorithm.options has {', '.join(options)}; {algorithm.name} has no options: leave it out"
            )
        return
    try:
        checked = algorithm.options.model_validate(options)
    except ValidationError as error:
        raise ValueError("; ".join(_describe(item, algorithm.options) for item in error.errors())) from None
    options.update(checked.model_dump(exclude_none=True))


def _describe(item: ErrorDetails, options: type[BaseModel]) -> str:
    key = ".".join(map(str, ("algorithm.options", *item["loc"])))
    if item["type"] == "extra_forbidden":
        return f"unknown key {key}; allowed: {', '.join(sorted(options.model_fields))}"
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "it must be", 1)
    return f"{key} is {quoted(item['input'])}; {message}"


def _refuse_foreign_options(task: Task) -> None:
    """Raise a ValueError where an option stands beside a task that does not read it."""
    for key, names in OF.items():
        if getattr(task, key) != type(task).model_fields[key].default and task.name not in names:
            raise ValueError(f"task.{key} is for {', '.join(names)}; task.name is {task.name!r}: leave it out")
    if task.huber != 1 and task.loss != "huber":
        raise ValueError(f"task.huber is {task.huber:g}, which is for task.loss = 'huber'; task.loss is {task.loss!r}")


def _refuse_lone_members(federation: Federation, privacy: Privacy) -> None:
    """Raise a ValueError where sums over a round's agents would hide none of them, or nobody sees sums."""
    if privacy.adversary == "local":
        for key, unset in (("members", None), ("colluders", 0)):
            if getattr(privacy, key) != unset:
                raise ValueError(
                    f"privacy.{key} is {getattr(privacy, key)}, which is for privacy.adversary 'secure-aggregation'; "
                    "it is 'local': leave it out"
                )
        return
    if federation.per_round < 2:
        raise ValueError(
            f"federation.per_round is {federation.per_round}; privacy.adversary 'secure-aggregation' hides an agent in "
            "a sum over 2 or more"
        )
    if privacy.members is not None and privacy.members > federation.per_round:
        raise ValueError(
            f"privacy.members is {privacy.members}; it must not exceed federation.per_round = {federation.per_round}"
        )
    members = federation.per_round if privacy.members is None else privacy.members
    if privacy.colluders >= members:
        raise ValueError(
            f"privacy.colluders is {privacy.colluders}; it must be below the fewest agents that are added up, "
            f"{members} (privacy.members, or federation.per_round): the noise of the others is what counts"
        )


def _refuse_lone_workers(run: Run) -> None:
    """Raise a ValueError where a cluster would have nobody on it, or one GPU several workers."""
    if run.cluster is not None and run.workers == 1:
        raise ValueError(
            f"run.cluster is {run.cluster!r} and run.workers is 1, which is this process: say how many workers, or "
            "leave the cluster out"
        )
    if run.workers > 1 and run.device.startswith("cuda:"):
        raise ValueError(
            f"run.device is {run.device!r}; each of run.workers = {run.workers} has a GPU of its own: 'cuda'"
        )


def _refuse_trials_of_nothing(tuning: Tuning) -> None:
    for key in ("rounds", "ahead"):
        if tuning.candidates is None and getattr(tuning, key) is not None:
            raise ValueError(f"tuning.{key} is for tuning.candidates, and there are none: name some, or leave it out")


def _refuse_foreign_data(data: Data) -> None:
    """Raise a ValueError where a table's keys stand beside other data, or other data's beside a table."""
    if not is_table(data.name):
        for key in TABLE_KEYS:
            if getattr(data, key) != type(data).model_fields[key].default:
                raise ValueError(
                    f"data.{key} is for a table (.csv, .parquet); data.name is {data.name!r}: leave it out"
                )
        return
    if data.table is None:
        raise ValueError(
            f"data.name is {data.name!r}, a table; what its columns are must stand in [data.columns] (docs/data.md)"
        )
    if data.features is not None:
        raise ValueError(f"data.features is {data.features!r}, which is for images; data.name is a table: leave it out")
    if data.test != type(data).model_fields["test"].default and data.split is None:
        raise ValueError(f"data.test is {data.test!r}, which stands in the column data.split; that is unset: set it")
    if data.agent is not None and data.partition != "iid":
        raise ValueError(
            f"data.partition is {data.partition!r}; the column {data.agent!r} of data.agent says who holds a record: "
            "leave one of them out"
        )
