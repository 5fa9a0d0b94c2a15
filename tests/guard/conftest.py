"""A ledger, guards of it, and private loops: stock Opacus where it is installed, and a small twin of it everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fedspa.guard
from fedspa.guard import Guard

from .loops import Loop, real, twin


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    fedspa.guard.create(path)
    return path


@pytest.fixture
def guarded(path: Path) -> Callable[..., Guard]:
    """Guards of the one ledger, each as another tool would open it."""

    def opened(epsilon: float = 3.0, delta: float = 1e-3, **more: object) -> Guard:
        return fedspa.guard.open(path, **{"agent": "north", "epsilon": epsilon, "delta": delta} | more)  # type: ignore[arg-type]

    return opened


@pytest.fixture(params=["twin", "opacus"])
def loop(request: pytest.FixtureRequest) -> Callable[..., Loop]:
    """What makes a private loop of 200 records in batches of 20, on average, with noise 2."""
    if request.param == "opacus":
        pytest.importorskip("opacus")
        return real
    return twin
