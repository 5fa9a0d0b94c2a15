"""A run, and the same run killed by kill -9 at a drawn step, stopped after another round as Ctrl-C does, and resumed to
its end: everything it leaves behind must be equal to the bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from small_runs import ended, outcome, start

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify
from fedspa.data import patches
from fedspa.running import run as simulate
from fedspa.runs.config import Config
from fedspa.runs.rundir import RunFolder, Stopped

STEPS = ((os, "fsync"), (os, "replace"), (Ledger, "reserve_many"), (Ledger, "release_many"))
Make = Callable[[Path], Config | dict[str, Any]]


@pytest.fixture(autouse=True, scope="module")
def few_pictures() -> Iterator[None]:
    """The constants of `patches` come from fewer pictures than those of tests/data/test_patches.py, and stay here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patches, "PICTURES", 50)
        for name in ("_pictures", "constants"):
            patched.setattr(patches, name, cache(getattr(patches, name).__wrapped__))
        yield


def counted(run: Callable[[], object], fatal: int = 0) -> int:
    """How many durable steps `run` takes; before the one numbered `fatal`, the process dies."""
    taken, originals = 0, [(owner, name, getattr(owner, name)) for owner, name in STEPS]

    def mortal(step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **options: Any) -> Any:
            nonlocal taken
            taken += 1
            if taken == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments, **options)

        return stepped

    for owner, name, step in originals:
        setattr(owner, name, mortal(step))
    try:
        run()
    finally:
        for owner, name, step in originals:
            setattr(owner, name, step)
    return taken


class Crash(Exception):
    """What ends a run in `crash`."""


def crash(config: dict[str, Any], t: int, monkeypatch: pytest.MonkeyPatch, resume: Path | None = None) -> Path:
    """Run until round t has been released to the server, and die before anything of it is saved; the run's folder."""
    add_round = RunFolder.add_round

    def dying(self: RunFolder, metrics: dict[str, Any]) -> None:
        if metrics["round"] == t:
            raise Crash
        add_round(self, metrics)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "add_round", dying)
        with pytest.raises(Crash):
            simulate(config, resume=resume)
    return Path(config["run"]["out"])


def resume(make: Make, folder: Path, **options: Any) -> None:
    """What an operator does: go on where there is a run, else start it."""
    simulate(make(folder), resume=folder if (folder / "config.toml").exists() else None, **options)


def whole_and_broken(make: Make, folder: Path, chance: Random) -> tuple[Path, Path]:
    """The folders of both. `make` gives the config of a run in a folder."""
    torch.set_num_threads(1)  # a forked child must not count on threads that its parent had
    whole, broken = folder / "whole", folder / "broken"
    steps = counted(lambda: simulate(make(whole)))
    fatal = chance.randint(1, steps)
    assert ended(start(lambda: counted(lambda: simulate(make(broken)), fatal))) == -signal.SIGKILL, f"step {fatal}"
    try:
        resume(make, broken, stop=lambda: True)
    except Stopped:
        resume(make, broken)
    return whole, broken


def refuse_a_difference(make: Make, folder: Path, chance: Random) -> None:
    whole, broken = (outcome(each) for each in whole_and_broken(make, folder, chance))
    assert broken.keys() == whole.keys()
    for part, value in whole.items():
        assert broken[part] == value, part
    ledger = folder / "broken" / "ledger.sqlite"
    assert not ledger.exists() or verify(ledger) == []
