"""The documentation's sentences that carry measured figures, from the kept results; `tables.py` writes them in."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import accuracy
import uploads
from fedspa.mechanisms.gaussian.plan import noise_multiplier
from fedspa.runs.config import load

ROOT = Path(__file__).parents[1]
CASES = ("mnist-p05", "cifar-p10")


def experiment(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "reproduction" / "results" / f"{name}.json").read_text("utf-8"))
    return found


def benchmark(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
    return found


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
    "trust": ("docs/accuracy.md", lines(lambda: accuracy.trust("epsilon"))),
    "trust-agents": ("docs/accuracy.md", lines(lambda: accuracy.trust("agents"))),
    "trust-bytes": ("docs/accuracy.md", lines(lambda: accuracy.trust("bytes"))),
    "audits": ("docs/accuracy.md", lines(accuracy.audits)),
    "sums": ("docs/accuracy.md", lines(accuracy.sums)),
    "central": ("docs/accuracy.md", lines(accuracy.central)),
    "cnns": ("docs/accuracy.md", lines(accuracy.cnns)),
    "others": ("docs/accuracy.md", lines(accuracy.others)),
    "front": ("README.md", lines(accuracy.front)),
    "uploads": ("docs/wire.md", lines(lambda: uploads.markdown(experiment("uploads")))),
    "uploads-coding": ("docs/wire.md", lambda: uploads.cost_of_coding(experiment("uploads"))),
    "uploads-sparsity": ("docs/wire.md", lambda: uploads.cost_of_sparsity(experiment("uploads"))),
    "cpu-speed": ("README.md", speed_on_a_cpu),
    "private-memory": ("benchmarks/speed.md", memory_of_a_private_step),
    "half-epsilon": ("docs/tuning.md", price_of_half_the_budget),
    "smaller-delta": ("docs/tuning.md", price_of_a_smaller_delta),
}
