"""A run seen from outside: running, finished, interrupted, and not a run at all."""

from __future__ import annotations

import fcntl
import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from small_runs import small
from typer.testing import CliRunner

from fedspa.cli import app
from fedspa.cli.watch import screenful
from fedspa.errors import ConfigError
from fedspa.report.progress import snapshot, sparkline
from fedspa.running import Stopped, simulate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watched") / "run"
    simulate(small(path))
    return path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watched") / "stopped"
    asked = iter([False, True])
    with pytest.raises(Stopped):
        simulate(small(path), stop=lambda: next(asked))
    return path


def test_finished_running_and_interrupted(folder: Path, stopped: Path) -> None:
    assert snapshot(folder).state == "finished"
    assert snapshot(stopped).state == "interrupted"
    lock = os.open(stopped, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert snapshot(stopped).state == "running"
    finally:
        os.close(lock)


def test_looking_never_takes_the_lock(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: pytest.fail("a look must not lock"))
    snapshot(stopped)


def test_time_left_is_of_the_rounds_that_were_seen(stopped: Path) -> None:
    from dataclasses import replace

    now = replace(snapshot(stopped), started=0.0, at=10.0)
    assert (len(now.metrics), now.left) == (2, 2)
    assert now.seconds_left() == 10.0
    assert now.seconds_left(now) == 10.0
    earlier = replace(now, metrics=now.metrics[:1], at=7.0)
    assert now.seconds_left(earlier) == 6.0
    assert replace(now, metrics=()).seconds_left() is None


def test_a_screen_fits_80_columns_and_states_the_terms_of_epsilon(stopped: Path) -> None:
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(screenful(stopped, snapshot(stopped), None))
    text = screen.export_text()
    assert "2 of 4, interrupted" in text
    terms = "(NOT PRIVATE: SEEDED NOISE, for each record, δ = 0.001, add-remove, poisson sampling, pld)"
    assert terms in " ".join(text.split())
    assert "seeded noise" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_not_in_a_terminal_it_prints_a_line_a_round(folder: Path, stopped: Path) -> None:
    done = CliRunner().invoke(app, ["watch", str(folder)])
    assert done.exit_code == 0
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [f"round {t} of 4" for t in (1, 2, 3, 4)]
    half = CliRunner().invoke(app, ["watch", str(stopped)])
    assert half.exit_code == 1
    assert "--resume" in half.stdout


def test_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        snapshot(tmp_path)


@given(st.lists(st.floats(0, 1), max_size=80), st.integers(1, 60))
def test_a_sparkline_has_a_block_a_value(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    assert set(line) <= set("▁▂▃▄▅▆▇█")
    shown = values[-width:]
    if len(set(shown)) > 1 and max(shown) - min(shown) > 1e-9:
        assert line[shown.index(max(shown))] == "█"
        assert line[shown.index(min(shown))] == "▁"
