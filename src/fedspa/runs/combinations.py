"""Which keys of a config go together: config.py allows each by itself, this says what may not stand beside another.

What a mechanism asks of the keys, its own room says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedspa.algorithms import ALGORITHMS
from fedspa.learning.tasks.named import OF
from fedspa.runs.plans import flat

if TYPE_CHECKING:
    from fedspa.runs.config import Config, Task


def check(config: Config) -> None:
    """Raise a ValueError of one line that names the keys."""
    federation, algorithm, privacy = config.federation, config.algorithm, config.privacy
    if federation.per_round > federation.agents:
        raise ValueError(
            f"federation.per_round is {federation.per_round}; it must not exceed federation.agents = "
            f"{federation.agents}"
        )
    _refuse_foreign_options(config.task)
    known = ALGORITHMS[algorithm.name]
    mechanism = known.mechanism
    reads = () if mechanism is None else mechanism.options
    if "privacy.trials" not in reads and (privacy.trials is not None or privacy.adversary != "local"):
        raise ValueError(f"privacy.trials and privacy.adversary belong to cpsgd; {algorithm.name} takes neither")
    if not known.sparse and "algorithm.compression" not in reads and algorithm.compression != 1:
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


def _refuse_foreign_options(task: Task) -> None:
    """Raise a ValueError where an option stands beside a task that does not read it."""
    for key, names in OF.items():
        if getattr(task, key) != type(task).model_fields[key].default and task.name not in names:
            raise ValueError(f"task.{key} is for {', '.join(names)}; task.name is {task.name!r}: leave it out")
    if task.huber != 1 and task.loss != "huber":
        raise ValueError(f"task.huber is {task.huber:g}, which is for task.loss = 'huber'; task.loss is {task.loss!r}")
