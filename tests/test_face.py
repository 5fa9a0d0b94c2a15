"""What a user of the package meets first: its names, its help, its examples, its warnings."""

from __future__ import annotations

import doctest
import io
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import ALGORITHMS, small
from torch import nn

import fedspa
from fedspa import running
from fedspa.errors import FedspaWarning
from fedspa.runs.config import load
from fedspa.runs.rundir import RoundMetrics


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    import fedspa.runs.config  # which becomes an attribute of the package

    assert dir(fedspa) == sorted(fedspa.__all__)
    for name in fedspa.__all__:
        assert getattr(fedspa, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match=r"has no attribute 'rnu'; it has Config, Dataset, .*, statistics, tune"):
        _ = fedspa.rnu


def _documented() -> Iterator[Any]:
    finder = doctest.DocTestFinder()
    names = {name: getattr(fedspa, name) for name in fedspa.__all__}
    names |= {f"guard.{name}": getattr(fedspa.guard, name) for name in fedspa.guard.__all__}
    for name, thing in names.items():
        for found in finder.find(thing, name, globs={}):
            if found.examples:
                yield pytest.param(found, id=found.name)


@pytest.mark.parametrize("example", list(_documented()))
def test_its_example_runs(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedspaWarning)  # two rounds learn little
        ended = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert ended.failed == 0, "".join(said)


def test_importing_it_is_quick() -> None:
    code = "import fedspa, sys; dir(fedspa); sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_warnings_stand_at_the_callers_line_once_each(tmp_path: Path) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            return self.head(x - x.mean(0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        fedspa.run(small(tmp_path / "run", model={"name": "logistic"}), module=Mixing())  # this very line
    ours = [warning for warning in caught if issubclass(warning.category, FedspaWarning)]
    kinds = [warning.category.__name__ for warning in ours]
    assert set(kinds) >= {"SeededNoiseWarning", "MixingWarning"}
    assert len({str(warning.message) for warning in ours}) == len(ours)
    for warning in ours:
        line = Path(warning.filename).read_text("utf-8").splitlines()[warning.lineno - 1]
        assert line.endswith("# this very line"), warning


def test_what_a_summary_notes_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(fedspa.RunWarning, match="fedavg promises no privacy"):
        result = fedspa.run(small(tmp_path / "run", **ALGORITHMS["fedavg"]))
    with pytest.warns(fedspa.RunWarning) as again:  # of a finished run that is opened again
        fedspa.run(resume=result.folder)
    assert [str(warning.message) for warning in again] == result.summary["warnings"]


# The README's Python runs as it stands.

ROOT = Path(__file__).parents[1]


README = (ROOT / "README.md").read_text("utf-8")


def test_its_python_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    result = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    accuracy, epsilon, folder = result.stdout.split()
    assert float(accuracy) > 0.7
    assert float(epsilon) <= 4
    assert (tmp_path / folder / "summary.json").exists()


# The line that shows a run as it goes on: where it is shown, what it says, and that it is silent elsewhere.


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


def _terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, force_jupyter=False)


def test_a_terminal_shows_a_bar() -> None:
    screen = _terminal()
    with running.watching(load(None, ["federation.rounds=3"]), None, screen) as bar:
        bar.advance(line(0))
        bar.advance(line(1))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "2/3" in text
    assert "50.00%  ε 0.250  2 kB" in text
