"""Every screen fits 80 columns: no line is wider, and nothing is cut to an ellipsis."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console
from test_shipped_configs import EXPERIMENTS, QUICKSTART, smaller
from typer.main import get_command

from fedspa.agent.ledger.ledger import Ledger
from fedspa.cli import app, main, run, tune
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.running import RunResult, simulate

Call = Callable[..., str]
RESULTS = Path(__file__).parents[2] / "reproduction" / "results"


def fits(text: str) -> None:
    wide = [line for line in text.splitlines() if len(line) > 80]
    assert not wide, wide
    assert "…" not in text.replace("… and", "").replace(",…", ""), text


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """What `fedspa <words>` prints in a window of 80 columns, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")  # typer's help asks for it

    def said(words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["fedspa", *words.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert int(stop.value.code or 0) == code, err
        assert out
        return out

    return said


def on_screen(show: Callable[[Console], None], width: int = 80) -> str:
    screen = Console(width=width, record=True, file=io.StringIO())
    show(screen)
    return screen.export_text()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.long] if "cifar10" in path.stem else [])
        for path in (QUICKSTART, *EXPERIMENTS)
    ],
)
def test_a_run_of_a_shipped_config(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the figures of a long and bad one."""
    monkeypatch.chdir(tmp_path)
    done = simulate(smaller(path, Path("out")))
    long = [
        replace(
            metrics,
            round=9_998 + metrics.round,
            loss=123_456.7,
            epsilon=None if metrics.epsilon is None else 1_234.567,
            epsilon_floor=None if metrics.epsilon_floor is None else 12_345.678,
            uplink_bytes=123_456_789_012,
        )
        for metrics in done.metrics
    ]
    for result in (done, replace(done, metrics=long)):
        fits(on_screen(partial(run.show, result)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("screens") / "run"
    simulate(smaller(QUICKSTART, folder))
    return folder


def test_ledgers(call: Call, finished: Path, tmp_path: Path) -> None:
    Path("run").symlink_to(finished)
    capped = call("ledger show run/ledger.sqlite --cap 5")
    fits(capped)
    above, below, *_ = capped.splitlines()
    assert (above.split(), below.split()[-3:]) == (["ε", "rounds"], ["ε", "left", "left"])
    assert "left: under a cap of ε = 5, and how many more rounds like the agent's last one fit" in " ".join(
        capped.split()
    )
    fits(call("ledger show run/ledger.sqlite --all"))
    fits(call("ledger show run/ledger.sqlite --agent agent-0"))
    sound = call("ledger verify run/ledger.sqlite")
    assert sound.startswith("SOUND: run/ledger.sqlite\n- THE NOISE WAS SEEDED")
    fits(sound)


def test_a_narrow_screen_leaves_nothing_out(
    call: Call, finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A table that was squeezed to it would lose its last columns, which are ε and whether it holds."""
    Path("run").symlink_to(finished)
    setting = "--batch 600 --records 600 --local-steps 1 --participations 5 --delta 1e-3 --epsilon 1"
    result = RunResult.load(finished)
    for words in (
        f"privacy {setting}",
        f"privacy {setting} --members 10 --colluders 2",
        "ledger show run/ledger.sqlite --cap 5",
    ):
        wide = call(words).split()
        monkeypatch.setenv("COLUMNS", "40")
        assert call(words).split() == wide
        monkeypatch.setenv("COLUMNS", "80")
    wide, narrow = (on_screen(partial(run.show, result), width).split() for width in (80, 40))
    assert narrow == wide


def test_a_table(call: Call) -> None:
    """With names and cells as long as people have them."""
    columns = '"how old the patient was" = {kind = "number", range = [0, 110]}\nill = {kind = "flag", target = true}'
    Path("schema.toml").write_text(f'[data.table]\nagent = "hospital"\n[data.table.columns]\n{columns}\n')
    rows = "".join(f"the hospital of {town},{9 * n},maybe {town}\n" for n, town in enumerate(("Ahlen", "Brilon") * 9))
    Path("visits.csv").write_text(f"hospital,how old the patient was,ill\n{rows}")
    fits(call("data check visits.csv --schema schema.toml", code=1))


def test_a_run_with_a_long_name_in_a_ledger(call: Call) -> None:
    with Ledger.open(Path("ledger.sqlite")) as ledger:
        ledger.reserve("north", GaussianEvent("poisson", 50, 500, 50, 8.2), "a-name-[much]-too-long-" * 4, "round-0")
    fits(said := call("ledger show ledger.sqlite --cap 5"))
    assert "[much]" in said


def test_a_roster(call: Call) -> None:
    """As three sites make theirs; a digest and a key are on lines of their own."""
    keys = [call(f"site keygen {name}.key") for name in "abc"]
    members = [f'clinic-{name} = "{said.split()[2]}"' for name, said in zip("abc", keys)]
    Path("roster.toml").write_text("\n".join(["[members]", *members]) + "\n")
    for said in (*keys, call("site roster roster.toml --key a.key --name clinic-b", code=1)):
        fits(said)


def test_a_damaged_ledger_is_a_verdict_first(call: Call, finished: Path) -> None:
    shutil.copy(finished / "ledger.sqlite", "ledger.sqlite")
    Path("ledger.sqlite.anchor").write_text("of nothing")
    damaged = call("ledger verify ledger.sqlite", code=1)
    verdict, *problems = damaged.splitlines()
    assert verdict.startswith("DAMAGED: ledger.sqlite, ")
    assert problems[0].startswith("- ")
    fits(damaged)


@pytest.mark.parametrize(
    "words",
    [
        "privacy --batch 10 --records 600 --local-steps 300 --participations 5 --delta 1e-3 --epsilon 1",
        "privacy --batch 10 --records 600 --local-steps 300 --participations 5 --delta 1e-3 --noise 0.123456",
        "privacy --batch 99 --records 99 --local-steps 1 --participations 5 --delta 1e-3 --epsilon 1 --members 10 "
        "--colluders 2",
        "suggest --agents 100 --records 600 --shape 784 --epsilon 1",
        "suggest --agents 3 --records 50 --shape 3,64,64 --epsilon 0.1",
        "audit --draws 100 --neighbours add-remove",
        "doctor --model mlp",
    ],
)
def test_arithmetic_an_audit_and_a_doctor(call: Call, words: str) -> None:
    said = call(words)
    fits(said)
    assert said.startswith("HOLDS: all ") is words.startswith("audit")


def test_privacy_begins_with_the_answer(call: Call) -> None:
    said = call("privacy --batch 10 --records 600 --local-steps 300 --participations 5 --delta 1e-3 --epsilon 1")
    first, second, *_ = said.splitlines()
    assert first == "ε = 1 at δ = 0.001 takes noise multiplier 1.825."
    assert second.startswith("That is with poisson sampling, under add-remove, by")


def test_tuning(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary: dict[str, Any] = json.loads((finished / "summary.json").read_text("utf-8"))
    settings = {"algorithm.local_lr": 0.123456789, "privacy.clip_value": 0.0123456, "algorithm.ema": 0.8}
    trial = {"rounds": list(range(100)), "scores": [0.9876], "settings": settings}
    summary["tuning"] = {
        "rounds": 1_000,
        "scored_by": "server",
        "scoring": {"rounds": list(range(30)), "deviation": [0.0123456, None]},
        "trials": [trial, trial | {"scores": [], "settings": {}}],
        "choice": 0,
        "proxy": {"public": "holdout", "study": None, "found": [1] * 200},
        "test": {summary["score"]: 0.5},
    }
    done = RunResult(summary, [], None, Path("run"))  # type: ignore[arg-type]
    fits(on_screen(lambda screen: tune.show(done, screen)))


def commands(command: click.Command, *path: str) -> Iterator[str]:
    yield " ".join(path)
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *path, name)


@pytest.mark.parametrize("path", list(commands(get_command(app))))
def test_help(call: Call, path: str) -> None:
    assert max(map(len, call(f"{path} --help").splitlines())) <= 80
