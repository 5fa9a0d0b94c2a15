"""A worker process: an engine of its own, the records of its agents, and the round that it is in."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from fedspa.agent.participate import Invitation
from fedspa.algorithms import Agent
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError, first_line
from fedspa.runs.checkpoint import Fact
from fedspa.runs.identity import of_machine
from fedspa.runs.played import played
from fedspa.runs.workers.messages import Made, Records, Share, Trained, answer


class Worker:
    """Every answer is bytes, errors included (`messages.answered`): they reach the user as from one process."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._device = "cpu"
        self._round: Invitation | None = None
        self._held: Records = {}

    def start(self, made: bytes) -> bytes:
        return answer(lambda: self._start(made))

    def work(self, announced: bytes | None, share: bytes, records: bytes) -> bytes:
        return answer(lambda: self._work(announced, pickle.loads(share), pickle.loads(records)))

    def _start(self, made: bytes) -> dict[str, Fact]:
        """What of this machine may change a bit of the results."""
        torch.set_num_threads(1)
        content: Made = pickle.loads(made)
        sys.path += [folder for folder in content.path if folder not in sys.path]
        try:
            make: Callable[[], Engine] = pickle.loads(content.engine)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"a worker cannot load the model or its task: {first_line(error)}; install the code on every machine "
                "of the cluster"
            ) from error
        self._device, self._engine = content.device, make()
        return {"engine": self._engine.name, **of_machine(content.device)}

    def _work(self, announced: bytes | None, share: Share, records: Records) -> Trained:
        if announced is not None:
            self._round = pickle.loads(announced)
            self._round = replace(self._round, theta=self._round.theta.to(self._device))
        assert self._engine is not None
        assert self._round is not None
        for name in share.forget:
            self._held.pop(name, None)
        self._held |= records
        agents = {
            name: Agent(turn.number, *self._held[name], turn.mask_seed, turn.key, turn.exact)
            for name, turn in share.turns.items()
        }
        with _listening() as said:
            return Trained(played(self._round, agents, self._engine), said)


@contextmanager
def _listening() -> Iterator[list[tuple[str, int, str]]]:
    """What is logged meanwhile, for the driver to log."""
    said: list[tuple[str, int, str]] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((record.name, record.levelno, record.getMessage()))

    ear, logger = Ear(logging.WARNING), logging.getLogger("fedspa")
    logger.addHandler(ear)
    try:
        yield said
    finally:
        logger.removeHandler(ear)
