"""Where a private local step of the models of `models.py` goes on one GPU: time, memory, and its kernels.

    python benchmarks/gpu_steps.py [--rows vit,text] [--batch 32] [--records 500] [--kernels 12] [--out FILE]

B = 32 of 500 records by Poisson sampling, p = .1, `l2`, ten agents in one call, TF32. Milliseconds per agent-step of
three turns of half a second, the drawing of batches and the loading of records included; the GPU's busy time and its
kernels are those of one step of all agents with as many places as the first that was captured. With `--runs`,
`in_a_run_ms` is an agent-step of `fedspa.run` with the same agents: a round of 220 steps less one of 20, over 200;
`round_s` is the latter.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fedspa
from brought.rows import ROWS
from fedspa.engine.traced import TracedEngine
from local_step.cases import Case
from local_step.gpu import finished, peak_mib
from local_step.ours import Ours
from provenance import stamp

AGENTS, TURN_S, MOST_STEPS = 10, 0.4, 300
FEW, MANY = 20, 220


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--records", type=int, default=500)
    parser.add_argument("--runs", action="store_true", help="also measure steps within `fedspa.run`")
    parser.add_argument("--kernels", type=int, default=12, help="of each row, those that take the most time")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = {"device": torch.cuda.get_device_name(), "agents": AGENTS, "batch": arguments.batch}
    document: dict[str, Any] = {"provenance": stamp("triton"), "settings": settings, "rows": {}}
    for name in arguments.rows.split(","):
        row = measured(name, arguments.batch, arguments.records, arguments.kernels)
        in_a_run = ""
        if arguments.runs:
            few, many = (seconds_of_a_round(name, arguments.batch, arguments.records, steps) for steps in (FEW, MANY))
            row |= {"in_a_run_ms": 1e3 * (many - few) / (AGENTS * (MANY - FEW)), "round_s": few}
            in_a_run = f"{row['in_a_run_ms']:.4f} in a run, a round of {FEW} steps {few:.3f} s, "
        document["rows"][name] = row
        print(f"{name}: {row['median_ms']:.4f} ms ({row['lowest_ms']:.4f} … {row['highest_ms']:.4f}), {in_a_run}"
              f"{row['peak_mib']:.0f} MiB, {row['kernels']} kernels, busy {row['busy_us']:.0f} µs")  # fmt: skip
        for kernel in row["longest"]:
            print(f"    {kernel['us']:9.1f} µs in {kernel['starts']:4.0f}  {kernel['name']}")
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        gc.collect()
        torch.cuda.empty_cache()


def measured(name: str, batch: int, records: int, kernels: int) -> dict[str, Any]:
    ours = Ours("auto-l2", Case(name, ROWS[name], batch, records, 0.1, device="cuda"), AGENTS, 1)
    assert isinstance(ours.engine, TracedEngine)
    run = finished(ours)
    start = time.perf_counter()
    peak, reserved = peak_mib(lambda: run(1))  # the first call makes the buffers that later ones keep
    first = time.perf_counter() - start
    run(8)
    steps = max(8, min(MOST_STEPS, round(TURN_S / (seconds(lambda: run(8)) / 8))))
    run(steps)
    turns = sorted(1e3 * seconds(lambda: run(steps)) / (AGENTS * steps) for _ in range(3))
    found = {"title": ROWS[name].title, "dimension": ROWS[name].dimension, "median_ms": turns[1],
             "lowest_ms": turns[0], "highest_ms": turns[2], "steps": steps, "first_call_s": first,
             "peak_mib": peak, "reserved_mib": reserved}  # fmt: skip
    return found | of_a_step(ours.engine, kernels)


def of_a_step(engine: TracedEngine, kernels: int) -> dict[str, Any]:
    assert engine._rounds is not None
    stack = next(iter(engine._rounds._stacks.values()))
    places, graph = next(iter(stack._graphs.items()))
    stack.round.step.zero_()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    starts: Counter[str] = Counter()
    for event in profiled.events() or ():
        if event.device_type.name == "CUDA":
            spent[event.name[:80]] += event.device_time_total
            starts[event.name[:80]] += 1
    longest = [{"name": each, "us": us, "starts": starts[each]} for each, us in spent.most_common(kernels)]
    about = {"places": places, "agents": stack.shape.agents}
    return about | {"kernels": starts.total(), "busy_us": spent.total(), "longest": longest}


def seconds_of_a_round(name: str, batch: int, records: int, steps: int) -> float:
    """Return the median time of a round of `fedspa.run`, without the first two."""
    row, ends = ROWS[name], list[float]()
    (x, y), (test_x, test_y) = row.examples(AGENTS * records, 1), row.examples(64, 2)
    settings: dict[str, Any] = {
        "federation": {"agents": AGENTS, "per_round": AGENTS, "rounds": 6},
        "algorithm": {"compression": 0.1, "local_steps": steps, "batch": batch, "local_lr": 0.01, "server": "average"},
        "privacy": {"noise_multiplier": 8.0, "epsilon": None, "delta": 1e-5, "clip": "l2", "clip_value": 1.0},
        "run": {"device": "cuda", "tf32": True},
    }
    data = fedspa.from_arrays(x, y, test_x, test_y, name="synthetic", classes=row.classes)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings["run"]["out"] = folder
        fedspa.run(settings, data=data, module=row.build(), on_round=lambda _: ends.append(time.perf_counter()))
    return statistics.median(after - before for before, after in pairwise(ends[1:]))


def seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
