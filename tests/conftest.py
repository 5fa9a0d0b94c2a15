"""Shared by all tests: one torch thread (the suite runs tests in parallel processes), and small agents."""

from __future__ import annotations

import functools
import gc
import os
import shutil
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer.main
import typer.testing
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Tests write thousands of files that must reach the disk before the next step: in memory they are there at once.
_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# Deterministic in CI: a failure there is a failure everywhere. `make test-long` draws new examples, and more of them.
_QUICK = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", _QUICK, derandomize=True)
settings.register_profile("dev", _QUICK)
settings.register_profile("long", _QUICK, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# Typer makes all commands anew for each call, from signatures that do not change: 30 ms for each of thousands of calls.
typer.main.get_command = functools.cache(typer.main.get_command)
typer.testing._get_command = typer.main.get_command


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end: looking through it for garbage takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none. Run slow tests first, so that no core is idle at the end."""
    if not (torch.cuda.is_available() and find_spec("triton")):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and Triton"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)
