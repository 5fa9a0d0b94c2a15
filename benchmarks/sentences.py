"""The documentation's sentences that carry measured figures, from the kept results; `tables.py` writes them in."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import accuracy
import engine_gpu
import uploads
from fedspa.mechanisms.gaussian.calibrate import noise_multiplier
from fedspa.runs.config import load

ROOT = Path(__file__).parents[1]
MNIST, CIFAR = "MNIST p=.05 coordinate", "CIFAR p=.1 coordinate"
CASES = ("mnist-p05", "cifar-p10")


def experiment(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "reproduction" / "results" / f"{name}.json").read_text("utf-8"))
    return found


def benchmark(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
    return found


def gpu_jobs() -> dict[str, Any]:
    return {job["job"]: job for job in experiment("engine-gpu")["jobs"]}


def speed_on_a_cpu() -> str:
    cases = benchmark("engine")["cases"]
    (opacus, cifar_opacus), (plain, cifar_plain) = (
        [cases[case]["ratios"]["wall"][f"best {rival} / native"]["median"] for case in CASES]
        for rival in ("Opacus", "plain SGD")
    )
    return (
        f"on the paper's MNIST CNN {opacus:.2g} times as fast as Opacus's fastest mode and {plain:.2g} times as fast "
        f"as plain *non-private* PyTorch, on its CIFAR CNN {cifar_opacus:.2g} and {cifar_plain:.2g} times"
    )


def memory_of_a_private_step() -> str:
    most = 0.0
    for name in ("engine",):
        peak = {who: row["peak_mib"] for who, row in benchmark(name)["cases"]["cifar-p10"]["contenders"].items()}
        for engine in ("native", "generic"):
            most = max(most, *(peak[who] / peak[f"{engine}-plain-sgd"] for who in (engine, f"{engine}-l2")))
    return f"at most {most:.2g} times"


def cost_of_l2_on_a_gpu() -> str:
    jobs = gpu_jobs()
    mnist, cifar = (
        100 * (jobs[job]["ms"]["stacked"]["median"] / jobs[job]["ms"]["stacked, FedAvg"]["median"] - 1)
        for job in ("MNIST p=.05 l2", "CIFAR p=.1 l2")
    )
    return f"{mnist:.0f} % on MNIST and {cifar:.0f} % on CIFAR"


def memory_on_a_gpu() -> str:
    shares = [job["peak_mib"]["stacked"] / job["peak_mib"]["stacked, FedAvg"] for job in gpu_jobs().values()]
    return f"{min(shares):.2f} to {max(shares):.2f} times"


def other_medians_on_a_gpu() -> str:
    return " and ".join(f"{run['stacked_ms'][MNIST]:.4f}" for run in experiment("engine-gpu")["other_runs"]) + " ms"


def whole_jobs_on_a_gpu() -> str:
    jobs, others = gpu_jobs(), experiment("engine-gpu")["other_runs"]
    whole = " and ".join(f"{jobs[job]['whole_job_s']:.1f} s" for job in (MNIST, CIFAR))
    steps = {MNIST: 300 * 45, CIFAR: 50 * 200}
    rounds = " and ".join(f"{jobs[job]['ms']['stacked']['median'] * steps[job] * 10 / 1e3:.1f} s" for job in steps)
    more = ", ".join(" and ".join(f"{run['whole_job_s'][job]:.1f}" for run in others) + " s" for job in steps)
    return f"{whole} of training, where the table's rounds give {rounds}; in the two other runs {more}"


def price_of_half_the_budget() -> str:
    noise = [row["noise_multiplier"] for row in benchmark("choosing")["rows"] if row["key"] == "privacy.epsilon"]
    ratios = [more / less for more, less in pairwise(noise)]
    return f"{min(ratios):.1f} to {max(ratios):.1f} times"


def price_of_a_smaller_delta() -> str:
    config = load(None)
    assert config.privacy.epsilon is not None
    large, small = (
        noise_multiplier(
            config.privacy.epsilon, delta, sampling="poisson", batch=config.algorithm.batch, records=144,
            steps=config.algorithm.local_steps, participations=config.federation.rounds, neighbours="add-remove",
        )
        for delta in (1e-3, 1e-5)
    )  # fmt: skip
    return f"some {round(10 * (small / large - 1)) * 10} %"


def lines(make: Callable[[], str]) -> Callable[[], str]:
    return lambda: make() + "\n"


# Name → the page that has it, and what it says.
SENTENCES: dict[str, tuple[str, Callable[[], str]]] = {
    "accuracy": ("docs/accuracy.md", lines(accuracy.markdown)),
    "audits": ("docs/accuracy.md", lines(accuracy.audits)),
    "sums": ("docs/accuracy.md", lines(accuracy.sums)),
    "central": ("docs/accuracy.md", lines(accuracy.central)),
    "cnns": ("docs/accuracy.md", lines(accuracy.cnns)),
    "others": ("docs/accuracy.md", lines(accuracy.others)),
    "front": ("README.md", lines(accuracy.front)),
    "uploads": ("docs/wire.md", lines(lambda: uploads.markdown(experiment("uploads")))),
    "uploads-coding": ("docs/wire.md", lambda: uploads.cost_of_coding(experiment("uploads"))),
    "uploads-sparsity": ("docs/wire.md", lambda: uploads.cost_of_sparsity(experiment("uploads"))),
    "gpu": ("docs/engine-gpu.md", lines(lambda: engine_gpu.table(experiment("engine-gpu")))),
    "cpu-speed": ("README.md", speed_on_a_cpu),
    "private-memory": ("docs/engine.md", memory_of_a_private_step),
    "gpu-l2": ("docs/engine-gpu.md", cost_of_l2_on_a_gpu),
    "gpu-memory": ("docs/engine-gpu.md", memory_on_a_gpu),
    "gpu-again": ("docs/engine-gpu.md", other_medians_on_a_gpu),
    "gpu-whole": ("docs/engine-gpu.md", whole_jobs_on_a_gpu),
    "half-epsilon": ("docs/choosing.md", price_of_half_the_budget),
    "smaller-delta": ("docs/choosing.md", price_of_a_smaller_delta),
}
