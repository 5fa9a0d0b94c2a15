"""A process a core, each with one torch thread, and fresh processes to measure memory in.

They come from a server that has torch loaded already: a start costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from local_step.cases import Case, own_engine
from local_step.ours import Ours
from local_step.rival_jax import JaxRun
from local_step.rivals import rival
from local_step.turns import Turn

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "opacus.grad_sample", "fedspa.engine.native", "fedspa.engine.per_example"])


class Refused(Exception):
    """A contender cannot take this case; the text says why."""


def prepare(name: str, case: Case, seed: int) -> Callable[[int], int]:
    """Takes so many steps in this process, on one thread, when called; returns the number of agent-steps."""
    if own_engine(name) is not None:
        return Ours(name, case, agents=1, threads=1)
    if name == "jax-l2":
        return JaxRun(case, seed)
    step = rival(name, case, seed)
    return lambda steps: sum(step() for _ in range(steps))


class Worker:
    """Runs turns when told to."""

    def __init__(self, case: Case, seed: int) -> None:
        self._pipe, other = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(other, case, seed), daemon=True)
        self._process.start()
        other.close()

    def begin(self, name: str, steps: int, torch_threads: int) -> None:
        self._pipe.send((name, steps, torch_threads))

    def wait(self) -> tuple[float, int]:
        """The CPU seconds of the turn and its agent-steps."""
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise Refused(answer)
        seconds, steps = answer
        return float(seconds), int(steps)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, case: Case, seed: int) -> None:
    runs: dict[str, Callable[[int], int]] = {}
    while (asked := pipe.recv()) is not None:
        name, steps, torch_threads = asked
        torch.set_num_threads(torch_threads)
        try:
            run = runs[name] if name in runs else runs.setdefault(name, prepare(name, case, seed))
            start = time.process_time()
            done = run(steps)
            pipe.send((time.process_time() - start, done))
        except Exception as error:  # a library that cannot take a model may say so in any way
            pipe.send(reason(error))


def reason(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def a_process_a_core(workers: Sequence[Worker], name: str, steps: int) -> Turn:
    return lambda: together(workers, name, steps, 1)


def torch_threads(workers: Sequence[Worker], name: str, steps: int) -> Turn:
    """One process, and the cores as torch's threads."""
    return lambda: together(workers[:1], name, steps, len(workers))


def together(workers: Sequence[Worker], name: str, steps: int, threads: int) -> tuple[float, int]:
    """CPU seconds and agent-steps of all these workers."""
    for worker in workers:
        worker.begin(name, steps, threads)
    done: list[tuple[float, int]] = []
    refused: Refused | None = None
    for worker in workers:  # each has an answer to fetch, whatever another says
        try:
            done.append(worker.wait())
        except Refused as why:
            refused = why
    if refused is not None:
        raise refused
    return sum(used for used, _ in done), sum(steps for _, steps in done)


def peak_memory(name: str, case: Case) -> float:
    """MiB that one process grows by at its peak over two steps."""
    return in_fresh_process(_two_steps, name, case)


def _two_steps(name: str, case: Case) -> float:
    torch.set_num_threads(1)
    run = prepare(name, case, 0)
    return resident_growth(lambda: run(2))


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
