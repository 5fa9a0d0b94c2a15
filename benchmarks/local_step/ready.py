"""A contender made ready for its turns: in the split of the cores that suits it, with as many steps as fill a turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fedspa.errors import FedspaError
from local_step.cases import Case, own_engine
from local_step.gpu import finished, peak_mib
from local_step.ours import Ours
from local_step.processes import Refused, Worker, a_process_a_core, peak_memory, prepare, reason, torch_threads
from local_step.turns import Turn, in_process

TURN_S = 1.0
MOST_STEPS = 300  # the paper's τ


@dataclass(frozen=True)
class Ready:
    """`facts` say how: the engine that was chosen, the split, the seconds of the first call, steps, memory."""

    turn: Turn
    facts: dict[str, Any]


def ours(name: str, case: Case, agents: int, cores: int, steps: int | None) -> Ready:
    """All agents in one call, as in a round: the engine has the cores."""
    try:
        made = Ours(name, case, agents, cores)
        return measured(name, case, made, steps, {"engine": made.engine.name, "agents": agents})
    except FedspaError as error:
        raise Refused(reason(error)) from error


def rival_on_gpu(name: str, case: Case, steps: int | None) -> Ready:
    """One agent after another, in this process."""
    try:
        run = prepare(name, case, 0)

        def with_tf32(steps: int) -> int:
            with tf32():
                return run(steps)

        return measured(name, case, with_tf32, steps, {})
    except Exception as error:  # a library that cannot take a model may say so in any way
        raise Refused(reason(error)) from error


def measured(name: str, case: Case, run: Callable[[int], int], steps: int | None, facts: dict[str, Any]) -> Ready:
    """The first call by itself: it compiles, captures graphs and runs frozen bodies on the records."""
    if case.device != "cpu":
        run = finished(run)
    times: list[float] = []
    warm = lambda: times.extend([seconds(in_process(run, 1)), seconds(in_process(run, 1))])  # noqa: E731
    if case.device == "cpu":
        warm()
        facts["peak_mib"] = peak_memory(name, case)
    else:
        facts["peak_mib"], facts["reserved_mib"] = peak_mib(warm)
    first, once = times
    chosen = steps or fitting(in_process(run, 8), 8, once)
    return Ready(in_process(run, chosen), {**facts, "first_call_s": first, "steps": chosen})


def rival_on_cpu(name: str, case: Case, workers: Sequence[Worker], steps: int | None) -> Ready:
    """In the better of two splits: a process a core, or one process with a torch thread a core."""
    splits = {"processes": a_process_a_core, "torch threads": torch_threads}
    found: dict[str, tuple[float, int]] = {}
    for split, turn in splits.items():
        seconds(turn(workers, name, 1))  # warms up
        once = seconds(turn(workers, name, 1))
        several = steps or fitting(turn(workers, name, 8), 8, once)
        taken, done = elapsed(turn(workers, name, several))
        found[split] = taken / done, several
    best = min(found, key=lambda split: found[split][0])
    chosen = found[best][1]
    facts = {"split": best, "steps": chosen, "trial_ms": {split: 1e3 * each for split, (each, _) in found.items()}}
    return Ready(splits[best](workers, name, chosen), facts | {"peak_mib": peak_memory(name, case)})


def fitting(several: Turn, of: int, once: float) -> int:
    """How many steps fill a turn. One step by itself says little where they are short."""
    each = once if of * once > TURN_S else seconds(several) / of
    return max(1, min(MOST_STEPS, round(TURN_S / each)))


def seconds(turn: Turn) -> float:
    return elapsed(turn)[0]


def elapsed(turn: Turn) -> tuple[float, int]:
    """Wall seconds and agent-steps."""
    start = time.perf_counter()
    _, done = turn()
    return time.perf_counter() - start, done


def ready(name: str, case: Case, agents: int, workers: Sequence[Worker], cores: int, steps: int | None) -> Ready:
    """Raises `Refused` where the contender cannot take this case."""
    if own_engine(name) is not None:
        return ours(name, case, agents, cores, steps)
    return rival_on_cpu(name, case, workers, steps) if case.device == "cpu" else rival_on_gpu(name, case, steps)


@contextmanager
def tf32() -> Iterator[None]:
    """For rivals on a GPU: our engines have it by `run.tf32`, and torch's switches are for the whole process."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
