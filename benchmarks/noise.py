"""What noise costs on one core: bits, Gaussians by several methods, and a step's release, plain against exact.

Also how far an example's gradient moves when it shares its batch: the exact path's proof wants that to be 0.

    python benchmarks/noise.py [--json] [--repeats N]

Every figure is the best of N repeats, in CPU time (other processes on the machine count less), with one torch thread.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedspa.mechanisms.gaussian import exact, release
from fedspa.mechanisms.gaussian.exact import make_grid
from fedspa.mechanisms.gaussian.release import add_noise
from fedspa.randomness.streams import Stream, derive_key, root_key

VALUES = 1 << 20
STEPS = [(10, 1_300), (10, 26_000), (50, 50_000), (10, 500_000)]  # examples in a batch, active coordinates
SIGMA = 1.83


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def box_muller_numpy(stream: Stream) -> NDArray[np.float64]:
    first, second = stream.uniform(VALUES).reshape(2, -1)
    radius = np.sqrt(-2 * np.log(1 - first))
    return np.concatenate([radius * np.cos(2 * math.pi * second), radius * np.sin(2 * math.pi * second)])


def draws(stream: Stream, repeats: int) -> dict[str, float]:
    """Nanoseconds per value, over a million values."""
    generator = np.random.default_rng(0)
    methods: dict[str, Callable[[], object]] = {
        "AES-CTR words (8 bytes)": lambda: stream.uint64(VALUES),
        "uniform": lambda: stream.uniform(VALUES),
        "gaussian (ours)": lambda: stream.gaussian(VALUES),
        "rounded gaussian, exact (ours)": lambda: exact.rounded_gaussian(VALUES, 30, stream),
        "AES + numpy Box-Muller": lambda: box_muller_numpy(stream),
        "AES + scipy ndtri": lambda: ndtri(stream.uniform(VALUES)),
        "AES + torch ndtri": lambda: torch.special.ndtri(torch.from_numpy(stream.uniform(VALUES))),
        "torch.randn float64 (not cryptographic)": lambda: torch.randn(VALUES, dtype=torch.float64),
        "numpy standard_normal (not cryptographic)": lambda: generator.standard_normal(VALUES),
    }
    return {name: 1e9 * best_seconds(work, repeats) / VALUES for name, work in methods.items()}


def steps(stream: Stream, repeats: int) -> list[dict[str, float]]:
    """Milliseconds from clipped gradients [b, k] (float32) to the noisy sum [k]."""
    rows = []
    for batch, active in STEPS:
        clipped = torch.from_numpy(stream.gaussian(batch * active).reshape(batch, active))
        clipped = (clipped / clipped.norm(dim=1, keepdim=True)).float()
        row: dict[str, float] = {"batch": batch, "active": active}
        row["sum"] = 1e3 * best_seconds(lambda c=clipped: c.sum(0), repeats)  # type: ignore[misc]
        row["secure"] = 1e3 * best_seconds(lambda c=clipped: add_noise(c.sum(0), SIGMA, stream), repeats)  # type: ignore[misc]
        for clip, value in (("l2", 1.0), ("coordinate", active**-0.5)):
            grid = make_grid(clip, value, active, SIGMA)  # type: ignore[arg-type]
            row[f"exact {clip}"] = 1e3 * best_seconds(
                lambda c=clipped, g=grid: release.release_on_grid(release.integer_sum(c, g), g, stream),  # type: ignore[misc]
                repeats,
            )
        rows.append(row)
    return rows


def batch_mates() -> dict[str, float]:
    """L2 change, in units of the clip norm, of a clipped gradient computed in a batch of 10 and in another batch."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )
    parameters = {name: value.detach() for name, value in net.named_parameters()}
    x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))

    def loss(at: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(net, at, (image[None],)), label[None])

    def clipped(size: int) -> Tensor:
        gradients = vmap(grad(loss), (None, 0, 0))(parameters, x[:size], y[:size])
        rows = torch.cat([value.flatten(1) for value in gradients.values()], dim=1)
        unit: Tensor = rows / rows.norm(dim=1, keepdim=True)
        return unit[:10].double()

    ten = clipped(10)
    return {str(size): float((clipped(size) - ten[:size]).norm(dim=1).max()) for size in (1, 9, 11, 64)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)

    root = root_key("seeded", 0)
    stream = Stream(derive_key(root, "benchmark"))
    start = time.process_time()
    exact.rounded_gaussian(1, 30, stream)
    table_ms = 1e3 * (time.process_time() - start)
    per_value = draws(stream, options.repeats)
    per_step = steps(stream, options.repeats)
    stream_us = 1e6 * best_seconds(lambda: Stream(derive_key(root, "noise", 1)), options.repeats)
    mates = batch_mates()
    if options.json:
        costs = {"ns_per_value": per_value, "step_ms": per_step, "new_stream_us": stream_us, "table_ms": table_ms}
        print(json.dumps({**costs, "batch_mates": mates}))
        return
    for name, cost in per_value.items():
        print(f"{cost:8.2f} ns  {name}")
    print(f"{stream_us:8.2f} µs  a new key and stream")
    print(f"{table_ms:8.2f} ms  the first exact draw (builds its table)")
    for row in per_step:
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()), "(ms)")
    print("  ".join(f"batch of {size}: {change:.2g}" for size, change in mates.items()), "(change of a gradient, in C)")


if __name__ == "__main__":
    main()
