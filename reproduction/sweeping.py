"""What the commands `table` and `tradeoff` share: options, the data, the device, and the wait for many runs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspa.cli.screen import INTERRUPTED, interruptible
from fedspa.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from reproduction.sweep import Outcome, Planned


DataFolder = Annotated[
    Path | None, typer.Option(envvar="FEDSPA_DATA", metavar="DIR", help="Folder with the data's files (data/).")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Jobs = Annotated[int, typer.Option(min=1, max=1024, help="Runs at once, each in its own process.")]
Seeds = Annotated[
    int, typer.Option(min=1, max=1000, help="Runs of each setting, with run.seed 2000, 2001 …; with --set 900, 901 …")
]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key in every run.")]


def first_seed(overrides: Sequence[str] | None) -> int:
    """Of the runs' seeds. What is printed counts from one on that no setting was tried with. Whoever sets a key that
    decides a result tries another setting, with seeds that are for trials."""
    from reproduction.rows import FIRST_SEED, TRIED_SEED

    keys = [word.partition("=")[0].strip() for word in overrides or ()]
    if "run.seed" in keys:
        raise ConfigError("--set run.seed: every setting runs with its own seeds, --seeds of them; leave it out")
    return TRIED_SEED if any(key.partition(".")[0] != "run" and key != "data.dir" for key in keys) else FIRST_SEED


def machine_overrides(device: str, jobs: int) -> list[str]:
    """The keys of [run] for this machine: a GPU if there is one, and the cores shared out among the jobs."""
    import torch

    from fedspa.runs.sections import MOST_THREADS
    from provenance import cores

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return [f"run.device={json.dumps(device)}", f"run.threads={min(max(1, cores() // jobs), MOST_THREADS)}"]


def data_overrides(name: str, folder: Path | None, stand_in: str | None) -> list[str]:
    """The keys of [data], after a look whether the files are there; where not, `stand_in` serves, which is said."""
    from fedspa.data.datasets import files

    where = folder if folder is not None else Path("data")
    try:
        match name:
            case "mnist" | "fashion-mnist" | "cifar10":
                files(name, where)
    except DataError as error:
        if stand_in is not None:
            print(f"reproduction: no files of {name} in {where}: stand-in records serve", file=sys.stderr)
            return [f"data.name={stand_in}"]
        raise DataError(f"{error}; put them there, or name their folder by --data or FEDSPA_DATA") from None
    return [f"data.dir={json.dumps(str(where))}"]


def command(words: Sequence[str], quick: bool, overrides: Sequence[str] | None) -> str:
    """What was called, without where it writes to."""
    given = [word for key in overrides or () for word in ("--set", key)]
    return shlex.join(["python", "-m", "reproduction", *words, *(["--quick"] if quick else []), *given])


def again(command: str, data: Path | None, device: str, jobs: int, out: Path) -> str:
    """What goes on with a sweep that was stopped: the same, on the same files."""
    folder = [] if data is None else ["--data", str(data)]
    return f"{command} {shlex.join([*folder, '--device', device, '--jobs', str(jobs), '--out', str(out)])}"


def perform(
    planned: Sequence[Planned],
    jobs: int,
    again: str,
    out: Path,
    assemble: Callable[[Mapping[str, Outcome]], dict[str, Any]],
    files: Callable[[dict[str, Any]], Mapping[str, str]],
) -> dict[str, Any]:
    """Every run to its end. What they give together is whole on the disk after each: `files` has names and texts. Where
    it is stopped, `again` is the command that goes on."""
    from fedspa import durable

    ended: dict[str, Outcome] = {}

    def keep(run: Planned, outcome: Outcome) -> None:
        ended[run.name] = outcome
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files(assemble(ended)).items():
            durable.replace_text(out / name, text)

    _run_all(planned, jobs, again, keep)
    return assemble(ended)


def as_text(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _run_all(planned: Sequence[Planned], jobs: int, again: str, on_end: Callable[[Planned, Outcome], None]) -> None:
    """Every run to its end, one line each; Ctrl-C leaves them so that the same command (`again`) goes on."""
    from rich.console import Console

    from reproduction.sweep import Interrupted, sweep

    screen = Console(stderr=True)

    def stopping() -> None:
        screen.print("Stopping after the round that is running; Ctrl-C again stops at once.")

    width = max(len(run.name) for run in planned)
    with interruptible(stopping) as asked:
        try:
            for count, (run, outcome) in enumerate(sweep(planned, jobs, asked), 1):
                on_end(run, outcome)
                screen.print(f"{count:>3}/{len(planned)}  {run.name:<{width}}  {_words(outcome)}", highlight=False)
        except Interrupted:
            print(f"reproduction: stopped; to resume: {again}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def _words(outcome: Outcome) -> str:
    if outcome.summary is None:
        return f"{outcome.status}: {outcome.reason}"
    return f"{outcome.summary['accuracy_last']:.2%} at the end  {outcome.summary['seconds']:.0f} s"


def show(screen: Console, title: str | None, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from fedspa.cli.screen import show_table

    show_table(columns, lines, screen, title=title, right=True)
