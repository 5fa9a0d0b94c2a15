"""What comes of a run: `fedspa report` (page, model card, annex) and `evaluate` (scores at the agents)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from fedspa.cli.screen import AsJson
from fedspa.errors import ConfigError, FedspaWarning

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not.")]


def report(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="The file (report.html, card.md or dpia.md in RUN).")] = None,
    card: Annotated[bool, typer.Option("--card", help="Write the model card instead, as Markdown.")] = False,
    dpia: Annotated[
        bool, typer.Option("--dpia", help="Write the annex to an impact assessment instead, as Markdown.")
    ] = False,
) -> None:
    """Write a self-contained HTML page: scores, ε by agent, bytes, the guarantee in plain words, the plan.

    Example: fedspa report runs/my-run
    """
    from fedspa.report import write, write_annex, write_card

    if card and dpia:
        raise ConfigError("--card and --dpia: give one of them")
    print((write_card if card else write_annex if dpia else write)(run, out))


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run, or of an evaluation to show again.")],
    epsilon: Annotated[float | None, typer.Option(help="ε of the release, for each record or person.")] = None,
    bins: Annotated[int, typer.Option(min=2, help="Parts of the scores' range, an even number.")] = 16,
    error_bound: Annotated[
        float | None, typer.Option(help="Largest error of a regression that counts (the target's range).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the release's files (a new one under runs/).")] = None,
    details: Annotated[bool, typer.Option("--details", help="Show confusion matrix and calibration too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on records that its agents kept out of training, under a privacy guarantee.

    Example: fedspa evaluate runs/mine --epsilon 0.2

    The run must have been trained with data.agent_holdout. Each agent pays once, in the ledger of the run.
    """
    from fedspa.analytics import evaluation
    from fedspa.analytics.estimates import DETAILS
    from fedspa.cli.data import show
    from fedspa.runs.rundir import read_summary

    summary = read_summary(run)
    if summary is not None and summary["task"] == "statistics":
        found = evaluation.Evaluation.load(run)
    elif epsilon is None:
        raise ConfigError("--epsilon is missing: what the release may cost each record, as in --epsilon 0.2")
    else:
        warnings.simplefilter("ignore", FedspaWarning)  # the notes below say the same
        found = evaluation.evaluate(run, epsilon=epsilon, bins=bins, error_bound=error_bound, out=out)
    if as_json:
        print(found.to_json())
    else:
        show(found, found.sites, () if details else DETAILS)
