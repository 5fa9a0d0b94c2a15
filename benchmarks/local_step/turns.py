"""Contenders in turns, so that a busy machine hits them alike, and what their times come to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Turn = Callable[[], tuple[float, int]]  # → CPU seconds and agent-steps
Times = dict[str, list[float]]  # milliseconds per agent-step, repeat by repeat


def in_turns(turns: Mapping[str, Turn], repeats: int, cores: int) -> tuple[Times, Times]:
    """Wall time, and CPU time over the number of cores."""
    wall: Times = {name: [] for name in turns}
    cpu: Times = {name: [] for name in turns}
    for _ in range(repeats):
        for name, turn in turns.items():
            start = time.perf_counter()
            used, steps = turn()
            wall[name].append(1e3 * (time.perf_counter() - start) / steps)
            cpu[name].append(1e3 * used / steps / cores)
    return wall, cpu


def summary(wall: Sequence[float], cpu: Sequence[float]) -> dict[str, float]:
    return {
        "median_ms": statistics.median(wall),
        "lowest_ms": min(wall),
        "highest_ms": max(wall),
        "cpu_ms": statistics.median(cpu),
    }


def ratios(times: Times, rivals: Mapping[str, tuple[Sequence[str], str]]) -> dict[str, dict[str, Any]]:
    """`rivals` says what is divided by what: the best of several contenders by one. A ratio is the median of the
    repeats' own ratios, with the lowest and highest."""
    found: dict[str, dict[str, Any]] = {}
    for what, (over, under) in rivals.items():
        there = [name for name in over if name in times]
        if there and under in times:
            best = min(there, key=lambda name: statistics.median(times[name]))
            each = [a / b for a, b in zip(times[best], times[under])]
            found[what] = {
                "best": best,
                "median": statistics.median(each),
                "lowest": min(each),
                "highest": max(each),
            }
    return found


def in_process(run: Callable[[int], int], steps: int) -> Turn:
    """A turn of this process, on whatever threads it has."""

    def turn() -> tuple[float, int]:
        start = time.process_time()
        done = run(steps)
        return time.process_time() - start, done

    return turn
