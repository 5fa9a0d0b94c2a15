"""docs/engine-gpu.md shows the kept measurements, and they say where they come from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import engine_gpu

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engine-gpu.md").read_text("utf-8")
TEXT = " ".join(PAGE.split())
FOUND = json.loads((ROOT / "experiments" / "results" / "engine-gpu.json").read_text("utf-8"))


def test_the_table_is_what_the_results_say() -> None:
    assert engine_gpu.table(FOUND) in PAGE
    assert FOUND["command"] in PAGE


def test_the_sentences_below_it_are_what_the_results_say() -> None:
    jobs = {job["job"]: job for job in FOUND["jobs"]}
    mnist, cifar = jobs["MNIST p=.05 coordinate"], jobs["CIFAR p=.1 coordinate"]
    assert f"took {mnist['whole_job_s']:.1f} s and {cifar['whole_job_s']:.1f} s of training" in TEXT
    rounds = [
        job["ms"]["stacked"]["median"] * steps * 10 / 1e3 for job, steps in ((mnist, 300 * 45), (cifar, 50 * 200))
    ]
    assert f"give {rounds[0]:.1f} s and {rounds[1]:.1f} s" in TEXT
    others = [run["whole_job_s"] for run in FOUND["other_runs"]]
    (first, second), (third, fourth) = ([run[job["job"]] for run in others] for job in (mnist, cifar))
    assert f"other runs {first:.1f} and {second:.1f} s, {third:.1f} and {fourth:.1f} s" in TEXT
    first, second = (run["stacked_ms"][mnist["job"]] for run in FOUND["other_runs"])
    assert f"gave medians of {first:.4f} and {second:.4f} ms" in TEXT
    for name, more in (("MNIST p=.05 l2", 25), ("CIFAR p=.1 l2", 73)):
        ms = jobs[name]["ms"]
        assert more == round(100 * (ms["stacked"]["median"] / ms["stacked, FedAvg"]["median"] - 1)), name
    for job in jobs.values():
        assert job["peak_mib"]["stacked"] < 2 * job["peak_mib"]["stacked, FedAvg"]
    kernels = FOUND["cifar_kernels_us"]
    back, sums = (sum(us for name, us in kernels.items() if what in name) for what in ("backward", "sums"))
    assert f"({back:.0f} of 843 µs) and its convolutions' sums ({sums:.0f} µs)" in TEXT
    assert "a step took 843 µs" in FOUND["provenance"]["cifar_kernels_us"]
    split = list(FOUND["round_split_ms"].values())
    assert f"took {split[0]['round']:.0f} ms: {split[0]['train']:.0f} of training" in TEXT
    assert f"took {split[1]['round']:.0f} ms, of which {split[1]['train']:.0f} were training" in TEXT
