"""What a round of `fedspa.run` costs beyond its local steps, by d, p and agents, in nanoseconds per uploaded value.

    python benchmarks/rounds.py [--rounds 8] [--out benchmarks/results/rounds.json]

The time of a whole round (select, pay, draw masks, train, encode, decode, add, move θ, evaluate, checkpoint), less the
time inside the engine's `train`. A linear model on synthetic records, one local step on two records, one thread, and a
checkpoint in every round (the default). Times are of the process's CPU, the median over rounds after the first two.
`fixed` is what a round costs that uploads next to nothing (k = 1): θ-sized work such as checkpoint and evaluation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedspa
from provenance import stamp

CLASSES, RECORDS = 10, 4
CASES = [(2**d // 1000 * 1000, p, agents) for d, p, agents in ((14, 0.1, 100), (17, 0.1, 10), (20, 0.1, 10))]
CASES += [(11_173_960, 0.1, 10), (11_173_960, 0.1, 2), (11_173_960, 0.01, 10), (11_173_960, 1.0, 4)]


def seconds_beyond_steps(d: int, p: float, agents: int, rounds: int) -> float:
    """Return the median CPU time of a round without what its engine took."""
    inputs = d // CLASSES - 1
    x, y = torch.randn(RECORDS * agents + 2, inputs), torch.arange(RECORDS * agents + 2) % CLASSES
    data = fedspa.from_arrays(x[2:], y[2:], x[:2], y[:2], name="synthetic")
    settings: dict[str, Any] = {
        "federation": {"agents": agents, "per_round": agents, "rounds": rounds},
        "algorithm": {"compression": p, "local_steps": 1, "batch": 2, "local_lr": 0.01, "server": "average"},
        "privacy": {"noise_multiplier": 8.0, "epsilon": None, "delta": 1e-5, "clip_value": 0.1},
        "run": {"threads": 1},
    }
    spent, trained = [0.0], [0.0]

    def watch(job: Any, _: Path) -> None:
        train = job.engine.train

        def timed(*arguments: Any) -> Any:
            begun = time.process_time()
            try:
                return train(*arguments)
            finally:
                trained[-1] += time.process_time() - begun

        object.__setattr__(job.engine, "train", timed)
        spent[-1] = time.process_time()

    def next_round(_: Any) -> None:
        spent.append(time.process_time())
        trained.append(0.0)

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings["run"]["out"] = folder
        fedspa.run(settings, data=data, module=nn.Linear(inputs, CLASSES), on_start=watch, on_round=next_round)
    rounds_alone = [after - before - steps for before, after, steps in zip(spent, spent[1:], trained)]
    return statistics.median(rounds_alone[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for d, p, agents in CASES:
        each = seconds_beyond_steps(d, p, agents, arguments.rounds)
        fixed = seconds_beyond_steps(d, 1.4 / d, agents, arguments.rounds)
        values = agents * round(p * d)
        rows.append(
            {"d": d, "p": p, "agents": agents, "round_s": each, "fixed_s": fixed, "ns": (each - fixed) / values * 1e9}
        )
        print(f"d {d:,}  p {p}  agents {agents}: {each:.4f} s, fixed {fixed:.4f} s, {rows[-1]['ns']:.0f} ns a value")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"provenance": stamp(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
