"""Whole runs on a GPU, where there is one: every algorithm on each engine that a GPU can have, beside a CPU's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedspa

pytestmark = pytest.mark.gpu

BASE: dict[str, dict[str, Any]] = {
    "federation": {"agents": 6, "rounds": 8, "per_round": 3},
    "algorithm": {"compression": 0.2, "local_steps": 3, "batch": 30, "local_lr": 0.5, "server": "average"},
    "privacy": {"noise_multiplier": 0.2, "clip_value": 0.3, "noise": "seeded"},
}
FEDAVG: dict[str, dict[str, Any]] = {
    "algorithm": {"name": "fedavg", "compression": 1.0},
    "privacy": {"noise_multiplier": None},
}
CPSGD: dict[str, dict[str, Any]] = {
    "federation": {"per_round": 6},
    "algorithm": {"name": "cpsgd", "compression": 1.0, "local_steps": 1, "local_lr": 20.0, "options": {"trials": 5}},
    "privacy": {"noise_multiplier": None, "clip": "coordinate", "clip_value": 0.03, "sampling": "fixed"},
}
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "fedspa": {},
    "coordinate": {"algorithm": {"local_lr": 20.0}, "privacy": {"clip": "coordinate", "clip_value": 0.03}},
    "dp-fed": {"algorithm": {"name": "dp-fed", "compression": 1.0, "local_lr": 2.0}},
    "fedavg": FEDAVG,
    "cpsgd": CPSGD,
    # Drawn anew by the operating system in every run: enough rounds that chance does not decide what is asserted.
    "exact": {"federation": {"rounds": 24}, "algorithm": {"batch": 60}, "privacy": {"noise": "exact"}},
}


def sections(folder: Path, device: str, engine: str, kind: str) -> dict[str, dict[str, Any]]:
    changes = KINDS[kind]
    merged = {name: {**BASE.get(name, {}), **changes.get(name, {})} for name in {*BASE, *changes}}
    merged["run"] = {"device": device, "engine": engine, "out": str(folder)}
    return {name: {key: value for key, value in keys.items() if value is not None} for name, keys in merged.items()}


def parameters(folder: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for _, value in sorted(load_file(folder / "model.safetensors").items())])


def run(folder: Path, device: str, engine: str, kind: str) -> tuple[Mapping[str, Any], torch.Tensor]:
    return fedspa.run(sections(folder, device, engine, kind)).summary, parameters(folder)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"exact"}))
def test_generic_gives_on_a_gpu_what_it_gives_on_a_cpu(tmp_path: Path, kind: str) -> None:
    """Batches and noise are the CPU's, so only rounding is left; a number may cross a rounding of cpSGD or the wire."""
    _, here = run(tmp_path / "cpu", "cpu", "generic", kind)
    found, there = run(tmp_path / "cuda", "cuda", "generic", kind)
    assert found["engine"] == "generic"
    assert float((here - there).norm()) < 0.02 * float(here.norm())


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"exact"}))
def test_traced_trains_every_algorithm(tmp_path: Path, kind: str) -> None:
    """Its Gaussian noise is another, and small here; a class by guessing has 10 %."""
    found, theta = run(tmp_path / "cuda", "cuda", "traced", kind)
    assert found["engine"] == "traced"
    assert torch.isfinite(theta).all()
    assert found["accuracy_last"] > 0.3
    assert len(found["accuracy_by_class"]) == 10


def test_auto_takes_traced_for_exact_noise_too(tmp_path: Path) -> None:
    assert run(tmp_path / "plain", "cuda", "auto", "fedspa")[0]["engine"] == "traced"
    found = run(tmp_path / "exact", "cuda", "auto", "exact")[0]
    assert found["engine"] == "traced"
    assert found["accuracy_last"] > 0.3


KILLED = """
import json, os, signal, sys
import fedspa
config = json.loads(sys.argv[1])
fedspa.run(config, on_round=lambda metrics: metrics.round == 3 and os.kill(os.getpid(), signal.SIGKILL))
"""


def test_killed_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    """In a process of its own: one that is forked cannot use a GPU."""
    config = sections(tmp_path / "killed", "cuda", "traced", "fedspa")
    child = subprocess.run([sys.executable, "-c", KILLED, json.dumps(config)], check=False, capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    fedspa.run(resume=tmp_path / "killed")
    _, whole = run(tmp_path / "whole", "cuda", "traced", "fedspa")
    assert torch.equal(parameters(tmp_path / "killed"), whole)
