"""`fedspa run`: simulate a federation, show it live, end with what it reached and what it promises."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspa.cli.screen import INTERRUPTED, complete_key, interruptible, print_json, show_facts, show_table
from fedspa.configs import complete
from fedspa.errors import ConfigError, RunWarning, SeededNoiseWarning

if TYPE_CHECKING:
    from rich.console import Console

    from fedspa.result import RunResult
    from fedspa.runs.config import Config

Source = Annotated[
    str | None,
    typer.Argument(
        help="A TOML config, or a shipped one by name (mnist-best); default: scikit-learn's digits.",
        autocompletion=complete,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as often as needed.", autocompletion=complete_key),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the run's files (a new one under runs/).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object, nothing else.")]


def run(
    config: Source = None,
    overrides: Overrides = None,
    epsilon: Annotated[float | None, typer.Option(help="ε of the guarantee; as --set privacy.epsilon=VALUE.")] = None,
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Resume the interrupted run in this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a federation in this process, under a stated privacy guarantee.

    Example: fedspa run --epsilon 2 --set algorithm.compression=0.1

    Press Ctrl-C once to stop after this round, twice to stop at once. Then, as after a crash, --resume continues it.
    """
    from fedspa import configs
    from fedspa.runs.config import load
    from fedspa.runs.rundir import check_is_run

    if resume is not None:
        if out is not None:
            raise ConfigError("--out and --resume: both given; a resumed run stays in its folder")
        check_is_run(resume)
        config = config or str(resume / "config.toml")
    flags = {"privacy.epsilon": epsilon, "run.out": None if out is None else str(out)}
    given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    settings = load(None if config is None else configs.find(config), [*(overrides or ()), *given])

    from rich.console import Console

    screen = Console(stderr=True)
    result = _run_with_progress(settings, resume, screen)
    if as_json:
        print_json(result.summary)
    else:
        show(result, Console())


def _run_with_progress(settings: Config, resume: Path | None, screen: Console) -> RunResult:
    from fedspa.running import run, watching

    with stoppable(screen, "after this round") as asked, watching(settings, None, screen) as bar:
        return run(settings, resume=resume, progress=bar, stop=asked)


@contextmanager
def stoppable(screen: Console, when: str) -> Iterator[Callable[[], bool]]:
    """Within it, the yielded function tells whether Ctrl-C asked a run to stop. A run that did ends the command."""
    from fedspa.runs.rundir import Stopping

    def stopping() -> None:
        screen.show_cursor(True)  # the bar hid it, and a second Ctrl-C leaves no time to show it
        screen.print(f"Stopping {when}; Ctrl-C again stops at once.")

    for shown_below in (SeededNoiseWarning, RunWarning):
        warnings.simplefilter("ignore", shown_below)
    try:
        with interruptible(stopping) as asked:
            yield asked
    except Stopping as stopped:
        print(f"fedspa: {stopped}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def show(result: RunResult, screen: Console) -> None:
    """The end of a run in a screenful."""
    from fedspa.privacy.event import shown
    from fedspa.running import not_private
    from fedspa.runs.config import load
    from fedspa.runs.defaults import chosen
    from fedspa.runs.guarantee import shown_bytes, statement
    from fedspa.runs.rundir import heading, label, ledger_of, shown_score

    summary, config = result.summary, load(result.folder / "config.toml", own_code=False)
    name = summary["score"]
    why = "" if summary["private"] else f" ({not_private(summary['noise'])})"
    cost = f"ε so far{' per person' * (summary['unit'] == 'person')}{why}"
    worst = ["worst-case ε"] if summary["members"] else []
    rows = [
        [
            str(metrics.round + 1),
            *([] if name == "loss" else [shown_score(name, metrics.score)]),
            f"{metrics.loss:.3f}",
            "–" if metrics.epsilon is None else shown(metrics.epsilon),
            *[shown(metrics.epsilon_worst_case) for _ in worst],
            shown_bytes(metrics.uplink_bytes),
        ]
        for metrics in _thinned(result.metrics)
    ]
    header = ["round", *([] if name == "loss" else [label(name)]), "loss", cost, *worst, "uploaded"]
    show_table(header, rows, screen, title=f"{heading(name)} by round", right=True)
    last, best, without = (shown_score(name, summary[key]) for key in ("score_last", "score_best", "baseline"))
    others = [f"{label(other)} {shown_score(other, value)}" for other, value in summary["scores"].items()][1:]
    sent = f"{shown_bytes(summary['uplink_bytes'])} per agent in the whole run"
    workers = f", {summary['workers']} workers" * ((summary["workers"] or 1) > 1)
    answer, ledger = summary["baseline_answer"], []
    if config.private:
        whose = "of this run alone" if config.run.ledger is None else "shared by all runs that name it or lie beside it"
        ledger = [("Ledger", f"{ledger_of(result.folder, config)} ({whose})")]
    show_facts(
        [
            (heading(name), f"{last} at the end, {best} at best, on held-out records"),
            *([] if answer is None else [("Baseline", f"{without} by {answer} of the same records, without a model")]),
            *([("Also", ", ".join(others))] if others else []),
            ("Guarantee", statement(summary)),
            ("Uploads", f"{sent}, {shown_bytes(summary['payload_bytes'])} per upload ({_upload(summary)})"),
            *(("Chosen", f"{key} = {value}: {why}") for key, value, why in chosen(config)),
            ("Time", f"{summary['seconds']:.1f} s, engine {summary['engine']} ({summary['engine_reason']}){workers}"),
            *(("Faster", hint) for hint in summary["engine_hints"]),
            *(("Note", warning) for warning in summary["warnings"]),
            ("Files", str(result.folder)),
            *ledger,
            ("Report", str(result.folder / "report.html")),
        ],
        screen,
    )


def _upload(summary: Mapping[str, Any]) -> str:
    from fedspa.algorithms import chosen
    from fedspa.mechanisms.base import upload

    mechanism = chosen(summary["algorithm"], summary["adversary"]).mechanism
    how = upload(summary) if mechanism is None else mechanism.upload(summary)
    return f"{summary['coding']}, {how}"


def _thinned(metrics: list[Any], most: int = 12) -> list[Any]:
    """Evenly spaced rounds, the last one always."""
    step = max(1, -(-len(metrics) // most))
    return [m for i, m in enumerate(metrics) if (len(metrics) - 1 - i) % step == 0]
