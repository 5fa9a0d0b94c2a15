"""`fedspa model`: what to do with the trained model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="The trained model of a run: its card, and the model for other programs.", no_args_is_help=True)


@app.command("card")
def card(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path | None, typer.Option(help="A file for the card, in place of standard output.")] = None,
) -> None:
    """Print the model card as Markdown: the guarantee, what it does not cover, scores, data, settings, versions.

    Example: fedspa model card runs/my-run --out model-card.md

    It says what the run's report says, from the same files.
    """
    from fedspa.report import card as cards

    text = cards.card(run)
    if out is None:
        print(text, end="")
    else:
        cards.write(text, out)
        print(out)


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; the card goes to FILE.md.")],
) -> None:
    """Write the trained model as ONNX, and its model card beside it.

    Example: fedspa model export runs/my-run model.onnx

    The file takes a batch of any size and gives the module's outputs. A module that was given in Python is exported
    there: fedspa.RunResult.load(RUN, module=…).export_onnx(FILE).
    """
    from fedspa.result import RunResult

    print(RunResult.load(run).export_onnx(file))
