"""A contender made ready for its turns: in the split of the cores that suits it, with as many steps as fill a turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from local_step.cases import Case, own_engine
from local_step.gpu import finished, peak_mib
from local_step.ours import Ours
from local_step.processes import Refused, Worker, a_process_a_core, peak_memory, prepare, reason, torch_threads
from local_step.turns import Turn, in_process

TURN_S = 0.5
MOST_STEPS = 300  # the paper's τ


@dataclass(frozen=True)
class Ready:
    """`facts` say how: the engine that was chosen, the split, the seconds of the first call, steps, memory."""

    turn: Turn
    facts: dict[str, Any]


def ready(name: str, case: Case, agents: int, workers: Sequence[Worker], cores: int, steps: int | None) -> Ready:
    """Raises `Refused` where the contender cannot take this case."""
    try:
        if own_engine(name) is not None:
            made = Ours(name, case, agents, cores)  # all agents in one call, as in a round: the engine has the cores
            return in_this_process(name, case, made, steps, {"engine": made.engine.name, "agents": agents})
        if case.device == "cpu":
            return in_better_split(name, case, workers, steps)
        return in_this_process(name, case, with_tf32(prepare(name, case, 0)), steps, {})
    except Refused:
        raise
    except Exception as error:  # whoever cannot take a model may say so in any way; the others go on
        raise Refused(reason(error)) from error


def in_this_process(
    name: str, case: Case, run: Callable[[int], int], steps: int | None, facts: dict[str, Any]
) -> Ready:
    """The first call is timed by itself: it compiles, captures graphs and runs frozen bodies on the records."""
    gpu = case.device != "cpu"
    if gpu:
        run = finished(run)
    once = in_process(run, 1)
    times: list[float] = []

    def begin() -> None:
        times.extend([seconds(once), seconds(once)])

    if gpu:
        facts["peak_mib"], facts["reserved_mib"] = peak_mib(begin)
    else:
        begin()
        facts["peak_mib"] = peak_memory(name, case)
    chosen = steps or fitting(in_process(run, 8), 8, times[1])
    return Ready(in_process(run, chosen), {**facts, "first_call_s": times[0], "steps": chosen})


def in_better_split(name: str, case: Case, workers: Sequence[Worker], steps: int | None) -> Ready:
    """A process a core, or one process with a torch thread a core."""
    splits = {"processes": a_process_a_core, "torch threads": torch_threads}
    found: dict[str, tuple[float, int]] = {}
    seconds(a_process_a_core(workers, name, 1))  # warms all of them up
    for split, turn in splits.items():
        taken, done = elapsed(turn(workers, name, 1))
        chosen = steps or fitting(turn(workers, name, 8), 8, taken)
        if chosen > 1:
            taken, done = elapsed(turn(workers, name, chosen))
        found[split] = taken / done, chosen
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


def with_tf32(run: Callable[[int], int]) -> Callable[[int], int]:
    """For rivals on a GPU: our engines have it by `run.tf32`, and torch's switches are for the whole process."""

    def switched(steps: int) -> int:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, cudnn.allow_tf32
        matmul.allow_tf32 = cudnn.allow_tf32 = True
        try:
            return run(steps)
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before

    return switched
