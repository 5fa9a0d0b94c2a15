"""What an upload costs: bytes by coding, speed of the codec and the mask, and a round of 10,000 agents at the server.

    python benchmarks/wire.py              tables
    python benchmarks/wire.py --json       the same numbers as one JSON object
    python benchmarks/wire.py --agents 500 a smaller round

One core is used. Updates are synthetic: Gaussian noise of standard deviation 1 and a Laplace signal of a tenth of that.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fedspa.randomness.mask import active_coordinates
from fedspa.server.intake import Aggregator
from fedspa.wire.payload import CODINGS, DEFAULT_STEP, Coding, Expected, Update, decode, encode

MODELS = {"MNIST CNN": 21_840, "CIFAR CNN": 537_610}
COMPRESSIONS = (0.05, 0.1, 0.4, 1.0)
STEPS = (0.5, 0.6, 0.75, 1.0)
BOUND = 20.0
# Lengths of coded payloads vary by a percent at k = 1,092: tables give means over this many.
PAYLOADS = 50


def synthetic(rng: np.random.Generator, dimension: int, active: int) -> Update:
    """An update as an agent would release it, in units of its noise."""
    values = rng.normal(0, 1, active) + rng.laplace(0, 0.1 / np.sqrt(2), active)
    return Update(0, dimension, rng.bytes(16), values.astype(np.float32))


def expected(update: Update) -> Expected:
    """The server's side of an honest update."""
    return Expected(update.round, update.dimension, update.active, BOUND, noise_std=1.0)


def fastest(work: Callable[[], object], repeats: int = 7) -> float:
    """Seconds of the quickest of a few tries: the machine may be shared."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def upload(
    rng: np.random.Generator, dimension: int, compression: float, coding: Coding, step: float = DEFAULT_STEP
) -> dict[str, Any]:
    """Bytes of a payload with its header: mean and largest of some, and the mean against FedAvg's dense f32 payload."""
    active = round(compression * dimension)
    lengths = [len(encode(synthetic(rng, dimension, active), coding, 1.0, step)) for _ in range(PAYLOADS)]
    fedavg = len(encode(Update(0, dimension, bytes(16), np.zeros(dimension, dtype=np.float32)), "f32"))
    mean = sum(lengths) / PAYLOADS
    return {"k": active, "bytes": mean, "largest": max(lengths), "times_fewer": fedavg / mean}


def sizes(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Bytes by model, compression and coding."""
    return [
        {"model": model, "d": dimension, "p": compression, "coding": coding}
        | upload(rng, dimension, compression, coding)
        for model, dimension in MODELS.items()
        for compression in COMPRESSIONS
        for coding in CODINGS
    ]


def steps(rng: np.random.Generator) -> list[dict[str, Any]]:
    """What the step of `int` buys and costs: bits and error at k = 1,000,000, bytes at p = 0.05."""
    rows = []
    for step in STEPS:
        update = synthetic(rng, 1_000_000, 1_000_000)
        data = encode(update, "int", 1.0, step)
        error = decode(data, expected(update)).values.astype(np.float64) - update.values
        row: dict[str, Any] = {"step": step, "bits_a_value": 8 * len(data) / update.active}
        row |= {"added_variance": float(np.mean(error**2)), "error_mean": float(np.mean(error))}
        rows.append(row | {model: upload(rng, dimension, 0.05, "int", step) for model, dimension in MODELS.items()})
    return rows


def speeds(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Megabytes of float32 values per second, in and out."""
    return [
        speed(synthetic(rng, 20 * active, active), coding)
        for active in (1_092, 26_880, 1_000_000)
        for coding in CODINGS
    ]


def speed(update: Update, coding: Coding) -> dict[str, Any]:
    """One update, one coding."""
    data, expect, megabytes = encode(update, coding, 1.0), expected(update), 4 * update.active / 1e6
    into, back = fastest(lambda: encode(update, coding, 1.0)), fastest(lambda: decode(data, expect))
    row = {"k": update.active, "coding": coding, "encode_MB_s": megabytes / into, "decode_MB_s": megabytes / back}
    return row | {"encode_ms": 1e3 * into, "decode_ms": 1e3 * back}


def masks() -> list[dict[str, Any]]:
    """Time and peak memory of a mask."""
    rows = []
    for dimension, active in ((21_840, 1_092), (537_610, 26_880), (1_000_000, 50_000), (100_000_000, 1_000_000)):
        seconds = fastest(partial(active_coordinates, bytes(range(16)), dimension, active))
        tracemalloc.start()
        active_coordinates(bytes(range(16)), dimension, active)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append({"d": dimension, "k": active, "ms": 1e3 * seconds, "peak_MB": peak / 1e6})
    return rows


def rounds(rng: np.random.Generator, agents: int) -> list[dict[str, Any]]:
    """A round at the server, streamed: sparse `int` and `f32` payloads, then dense `f32` ones, into d = 1,000,000."""
    return [
        one_round(rng, 1_000_000, 50_000, "int", agents),
        one_round(rng, 1_000_000, 50_000, "f32", agents),
        one_round(rng, 1_000_000, 1_000_000, "f32", max(agents // 20, 1)),
    ]


def one_round(rng: np.random.Generator, dimension: int, active: int, coding: Coding, agents: int) -> dict[str, Any]:
    """Processor seconds and peak memory at the server; agents' work and the plain average beside it do not count."""
    pool = [synthetic(rng, dimension, active).values for _ in range(8)]
    plain = np.zeros(dimension)
    expect = Expected(0, dimension, active, BOUND, noise_std=1.0)
    spent = {"decode_s": 0.0, "mask_s": 0.0, "add_s": 0.0}
    uplink = peak = 0
    tracemalloc.start()
    aggregator = Aggregator(dimension, BOUND, agents)
    for agent in range(agents):
        data = encode(Update(0, dimension, rng.bytes(16), pool[agent % len(pool)]), coding, 1.0)
        uplink += len(data)
        tracemalloc.reset_peak()
        t0 = time.process_time()
        update = decode(data, expect)
        t1 = time.process_time()
        coordinates = active_coordinates(update.mask_seed, dimension, active) if active < dimension else None
        t2 = time.process_time()
        aggregator.add(update, coordinates)
        t3 = time.process_time()
        peak = max(peak, tracemalloc.get_traced_memory()[1])
        for name, seconds in zip(spent, (t1 - t0, t2 - t1, t3 - t2)):
            spent[name] += seconds
        plain[slice(None) if coordinates is None else coordinates] += update.values
    tracemalloc.stop()
    total = sum(spent.values())
    row = {"d": dimension, "k": active, "coding": coding, "agents": agents, "uplink_MB": uplink / 1e6, "cpu_s": total}
    row |= spent | {"cpu_ms_a_payload": 1e3 * total / agents, "peak_MB": peak / 1e6}
    return row | {"off_float64_average": float(np.max(np.abs(aggregator.mean() - plain / agents)))}


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A Markdown table."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(_cell(value) for value in row.values()) + " |")


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(entry)}" for key, entry in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--agents", type=int, default=10_000, help="payloads in the sparse rounds (default 10000)")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    results = {
        "sizes": sizes(rng),
        "steps": steps(rng),
        "speeds": speeds(rng),
        "masks": masks(),
        "rounds": rounds(rng, arguments.agents),
    }
    if arguments.json:
        machine = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
        print(json.dumps({"machine": machine, "default_step": DEFAULT_STEP, **results}))
    else:
        for title, rows in results.items():
            show(title, rows)


if __name__ == "__main__":
    main()
