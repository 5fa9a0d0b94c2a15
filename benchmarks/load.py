"""How a run's time and memory grow: with the agents of a round, and not with the federation; and a server with d = 10⁸.

    python benchmarks/load.py [--json]                    # everything, a few minutes
    python benchmarks/load.py --only federation|round|server|checkpoint

Every case is measured in a process of its own. Time is the processor's, so that a busy machine does not blur it; memory
is what a round takes at its peak above what was there before it (Linux only: the kernel's high-water mark is reset).
The simulator trains a small linear model on agents of ten records, so that what is measured is the machinery around
the training. Ratios are to the smallest case of each table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ending import ends_with_children, ran

RECORDS = 10
CASES: dict[str, list[dict[str, int]]] = {
    # The federation grows, the round stays.
    "federation": [{"agents": agents, "per_round": 1_000} for agents in (1_000, 10_000, 100_000)],
    # The round grows, the federation stays.
    "round": [{"agents": 100_000, "per_round": per_round} for per_round in (100, 1_000, 10_000)],
    "server": [{"dimension": dimension, "per_mille": 1} for dimension in (1_000_000, 10_000_000, 100_000_000)],
    "checkpoint": [{"dimension": dimension} for dimension in (650, 21_840, 537_610)],
}
RATIOS = ("seconds_a_round", "megabytes_a_round", "milliseconds_to_save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, in its own process
    arguments = parser.parse_args()
    if arguments.case is not None:
        table, case = json.loads(arguments.case)
        special: dict[str, Callable[..., object]] = {"server": server, "checkpoint": checkpoint}
        measure = special.get(table, simulator)
        print(json.dumps(measure(**case)))
        return
    tables = {name: measured(name) for name in CASES if arguments.only in (None, name)}
    print(json.dumps(tables, indent=2) if arguments.json else "\n\n".join(shown(*item) for item in tables.items()))


def measured(table: str) -> list[dict[str, Any]]:
    """Each case with its ratios to the first."""
    rows = []
    for case in CASES[table]:
        command = [sys.executable, __file__, "--case", json.dumps([table, case])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        result = ran(command, env=environment)
        result.check_returncode()
        rows.append({**case, **json.loads(result.stdout)})
    first = rows[0]
    return [{**row, **{f"{name}_ratio": row[name] / first[name] for name in RATIOS if name in row}} for row in rows]


def simulator(agents: int, per_round: int) -> dict[str, float]:
    """Whole simulated rounds, ledger and checkpoint included, after a tiny run that loads all there is to load."""
    simulate(10, 10, 2)
    return simulate(agents, per_round, 6)


def simulate(agents: int, per_round: int, rounds: int) -> dict[str, float]:
    import numpy as np
    import torch

    import fedspa

    chance = np.random.default_rng(0)
    x = chance.standard_normal(size=(agents * RECORDS, 20), dtype=np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    data = fedspa.from_arrays(x, y, x[:100], y[:100], name="load")
    ends: list[float] = []
    resting: list[float] = []

    def on_start(job: object, path: object) -> None:
        ends.append(time.process_time())
        resting.append(reset_peak())

    with tempfile.TemporaryDirectory() as folder:
        config = {
            "federation": {"agents": agents, "rounds": rounds, "per_round": per_round},
            "algorithm": {"compression": 0.5, "local_steps": 1, "batch": 5, "local_lr": 0.1},
            "privacy": {"noise_multiplier": 2.0},
            "run": {"out": str(Path(folder, "run")), "threads": 1},
        }
        start = time.process_time()
        fedspa.run(
            config,
            data=data,
            module=torch.nn.Sequential(torch.nn.Linear(20, 2)),
            on_start=on_start,
            on_round=lambda metrics: ends.append(time.process_time()),
        )
    return {
        "seconds_to_start": ends[0] - start,
        "seconds_a_round": statistics.median(later - earlier for earlier, later in itertools.pairwise(ends)),
        "megabytes_a_round": megabytes("VmHWM") - resting[0],
        "megabytes_in_all": megabytes("VmHWM"),
    }


def server(dimension: int, per_mille: int, payloads: int = 10) -> dict[str, float]:
    """A round of the server: decode, add, mean, Adam; then a checkpoint. Payloads are `int`-coded, k = d/1000."""
    import numpy as np
    import torch

    from fedspa.runs.checkpoint import Checkpoint, save
    from fedspa.runs.config import load
    from fedspa.server.intake import Aggregator
    from fedspa.server.optimizers import ServerOptimizer
    from fedspa.wire.payload import Expected, Update, decode, encode

    torch.set_num_threads(1)
    active = dimension * per_mille // 1000
    chance = np.random.default_rng(0)
    sent = [
        encode(Update(0, dimension, chance.bytes(16), chance.normal(size=active).astype(np.float32)), "int", 1.0)
        for _ in range(payloads)
    ]
    optimizer = ServerOptimizer("adam", 1.0, 0.9, 0.99, 1e-3)
    state = optimizer.start(torch.zeros(dimension))
    state.theta.add_(1.0)  # so that its memory is really there
    took = []
    for _ in range(3):
        resting = reset_peak()
        start = time.process_time()
        total = Aggregator(dimension, 100.0, payloads)
        for payload in sent:
            total.add(decode(payload, Expected(0, dimension, active, 100.0, 1.0)))
        mean = torch.from_numpy(total.mean()).to(state.theta)
        del total
        state = optimizer.apply(state, mean)
        took.append(time.process_time() - start)
    peak, in_all = megabytes("VmHWM") - resting, megabytes("VmHWM")
    with tempfile.TemporaryDirectory() as folder:
        resting = reset_peak()
        start = time.perf_counter()
        save(Path(folder), Checkpoint(state, "load", load()))
        saving = time.perf_counter() - start
    return {
        "seconds_a_round": statistics.median(took),
        "megabytes_a_round": peak,
        "megabytes_in_all": in_all,
        "seconds_to_save": saving,
        "megabytes_to_save": megabytes("VmHWM") - resting,
        "bytes_a_payload": len(sent[0]),
    }


def checkpoint(dimension: int) -> dict[str, float]:
    """Saving θ, u and v, by the clock on the wall: most of it is waiting for the disk."""
    import torch

    from fedspa.runs.checkpoint import Checkpoint, save
    from fedspa.runs.config import load
    from fedspa.server.optimizers import ServerState

    state = ServerState(torch.rand(dimension), 100, {name: torch.rand(dimension) for name in "uv"})
    took = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(30):
            start = time.perf_counter()
            save(Path(folder), Checkpoint(state, "load", load()))
            took.append(time.perf_counter() - start)
    return {"milliseconds_to_save": 1000 * statistics.median(took)}


def reset_peak() -> float:
    """Start the high-water mark anew; returns what is in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return megabytes("VmRSS")


def megabytes(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(f"{key}:"))


def shown(table: str, rows: list[dict[str, Any]]) -> str:
    head = "  ".join(f"{name:>18}" for name in rows[0])
    return "\n".join([table, head, *("  ".join(f"{value:>18.4g}" for value in row.values()) for row in rows)])


if __name__ == "__main__":
    ends_with_children()
    main()
