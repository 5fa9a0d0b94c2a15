"""The line that shows a run as it goes on: where it is shown, what it says, and that it is silent elsewhere."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import small

import fedspa
from fedspa import progress
from fedspa.runs.config import load
from fedspa.runs.metrics import RoundMetrics


def line(round_: int, **changes: Any) -> RoundMetrics:
    values = {"accuracy": 0.5, "loss": 1.0, "agents": 3, "uplink_bytes": 1000, "epsilon": 0.25, "private": True}
    return RoundMetrics(**{"round": round_, **values, "clip_value": 0.3, "scores": {"accuracy": 0.5}, **changes})


def test_nothing_is_printed_where_nobody_looks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fedspa.run(small(tmp_path / "run"))
    assert capfd.readouterr() == ("", "")


def test_whoever_asks_gets_a_line_per_round(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fedspa.run(small(tmp_path / "run"), progress=True)
    out, err = capfd.readouterr()
    rounds = err.splitlines()
    assert out == ""
    assert [text.partition("  ")[0] for text in rounds] == [f"round {done} of 4" for done in (1, 2, 3, 4)]
    assert "ε " in rounds[0]
    assert "(SEEDED NOISE: not private)" in rounds[0]
    assert rounds[-1].endswith("kB")


def test_a_resumed_run_counts_what_was_sent_before() -> None:
    shown: list[tuple[int, str]] = []
    told = progress.Progress(load({"privacy": {"epsilon": 1.0}}), lambda done, words: shown.append((done, words)))
    told.resumed([line(0), line(1)])
    told.advance(line(2))
    assert shown == [(3, "50.00%  ε 0.250  3 kB")]


def _terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, force_jupyter=False)


def test_a_terminal_shows_a_bar() -> None:
    screen = _terminal()
    with progress.watching(load(None, ["federation.rounds=3"]), None, screen) as bar:
        bar.advance(line(0))
        bar.advance(line(1))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "2/3" in text
    assert "50.00%  ε 0.250  2 kB" in text


def test_false_silences_a_terminal_too() -> None:
    screen = _terminal()
    with progress.watching(load(None), False, screen) as bar:
        bar.advance(line(0))
    assert screen.file.getvalue() == ""  # type: ignore[attr-defined]


def test_a_notebook_shows_a_bar_without_further_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handle:
        shown: list[str] = []  # noqa: RUF012

        def update(self, page: str) -> None:
            self.shown.append(page)

    display = types.ModuleType("IPython.display")
    display.HTML = str  # type: ignore[attr-defined]
    display.display = lambda page, display_id: Handle()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    screen = Console(file=io.StringIO(), force_jupyter=True)
    with progress.watching(load(None, ["federation.rounds=3"]), None, screen) as bar:
        bar.advance(line(0))
        bar.say("<script>")
    assert Handle.shown == [
        '<progress value="1" max="3"></progress> round 1 of 3 &nbsp; 50.00%  ε 0.250  1 kB',
        '<progress value="1" max="3"></progress> round 1 of 3 &nbsp; &lt;script&gt;',
    ]
