"""A process a core, each with one torch thread, and fresh processes to measure memory in.

They come from a server that has torch loaded already: a start costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from local_step import ours
from local_step.cases import THREAD_SPLIT, Case
from local_step.rivals import rival

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "opacus.grad_sample", "fedspa.engine.native", "fedspa.engine.generic"])


def prepare(name: str, case: Case, seed: int, steps: int) -> Callable[[], int]:
    """A turn of `steps` steps in this process; it returns the number of agent-steps."""
    if name in THREAD_SPLIT or name.startswith("generic"):
        return ours.turn(name, case, 1, steps, threads=1)
    step = rival(name, case, seed)
    return lambda: sum(step() for _ in range(steps))


class Worker:
    """Runs turns when told to."""

    def __init__(self, case: Case, seed: int, cores: int) -> None:
        self._pipe, other = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(other, case, seed, cores), daemon=True)
        self._process.start()

    def begin(self, name: str) -> None:
        self._pipe.send(name)

    def wait(self) -> tuple[float, int]:
        """The CPU seconds of the turn and its agent-steps."""
        seconds, steps = self._pipe.recv()
        return float(seconds), int(steps)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, case: Case, seed: int, cores: int) -> None:
    turns: dict[str, Callable[[], int]] = {}
    while (name := pipe.recv()) is not None:
        several = name == "sgd-threads"
        torch.set_num_threads(cores if several else 1)
        if name not in turns:
            # Torch's threads wait for each other in every layer: beside other work a step can take a tenth of a second.
            turns[name] = prepare(name, case, seed, max(1, case.slow_steps // 5) if several else case.slow_steps)
        start = time.process_time()
        steps = turns[name]()
        pipe.send((time.process_time() - start, steps))


def peak_memory(name: str, case: Case) -> float:
    """MiB that one process grows by at its peak over three steps."""
    return in_fresh_process(_three_steps, name, case)


def _three_steps(name: str, case: Case) -> float:
    torch.set_num_threads(1)
    return resident_growth(prepare(name, case, 0, 3))


def in_fresh_process(measure: Callable[..., float], *arguments: Any) -> float:
    """What `measure` returns in a process that did nothing before."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_answer, args=(sender, measure, arguments))
    process.start()
    sender.close()  # so that a child that dies is an EOFError and not a wait for ever
    found: float = receiver.recv()
    process.join()
    return found


def _answer(sender: Connection, measure: Callable[..., float], arguments: tuple[Any, ...]) -> None:
    sender.send(measure(*arguments))


def resident_growth(run: Callable[[], object]) -> float:
    """MiB of this process's peak during `run` over what it held before."""
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset:  # Linux: the peak starts again from here
        reset.write("5")
    run()
    return (_resident("VmHWM") - before) / 1024


def _resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))
