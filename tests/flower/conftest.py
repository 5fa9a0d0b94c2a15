"""Federations for the tests. Flower is an extra: it is imported inside, and without it nothing here is collected."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .local_grid import LocalGrid

collect_ignore_glob = [] if find_spec("flwr") else ["test_*.py"]


@pytest.fixture
def simulation(tmp_path: Path) -> LocalGrid:
    """Four nodes that play agents."""
    from .local_grid import SIMULATION, LocalGrid

    run_config = SIMULATION | {"run.out": str(tmp_path / "run")}
    return LocalGrid({100 + i: {"simulation": True} for i in range(4)}, run_config)


@pytest.fixture
def deployment(tmp_path: Path) -> LocalGrid:
    """Four agents with records, policies and ledgers of their own."""
    import numpy as np

    from fedspa.agent.ledger.ledger import Ledger
    from fedspa.data.datasets import load

    from .local_grid import DEPLOYMENT, POLICY, LocalGrid

    digits = load("digits", None)
    nodes = {}
    for i in range(4):
        home = tmp_path / f"site-{i}"
        home.mkdir()
        np.savez(home / "records.npz", x=digits.train_x[i::4].numpy(), y=digits.train_y[i::4].numpy())
        (home / "policy.toml").write_text(POLICY.format(epsilon=8.0))
        Ledger.open(home / "ledger.sqlite").close()
        nodes[100 + i] = {
            "agent": f"site-{i}",
            "data": str(home / "records.npz"),
            "classes": 10,
            "policy": str(home / "policy.toml"),
            "ledger": str(home / "ledger.sqlite"),
        }
    return LocalGrid(nodes, DEPLOYMENT | {"run.out": str(tmp_path / "run")})


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a disk: a site does not start where its ledger is in memory, as `tmp_path` may be."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def train() -> Callable[..., dict[str, Any]]:
    """Run the server over a LocalGrid; keywords override the run config, with __ for the dot."""
    from fedspa.flower.nodes import PollingGrid
    from fedspa.flower.server_app import serve
    from fedspa.flower.settings import read_config

    def run(grid: LocalGrid, **overrides: Any) -> dict[str, Any]:
        grid.run_config |= {key.replace("__", "."): value for key, value in overrides.items()}
        config, settings = read_config(grid.run_config)
        return serve(PollingGrid(grid, settings.poll), config, settings)

    return run


@pytest.fixture
def hospital(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The two scripts of examples/hospital: its processes, and what its people do."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples/hospital")
    import loopback
    import run

    yield loopback, run
    for name in ("loopback", "run", "hospital", "hospital.records"):
        sys.modules.pop(name, None)
