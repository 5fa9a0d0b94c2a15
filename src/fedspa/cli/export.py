"""`fedspa export`: the trained model of a run for other programs, or its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedspa.errors import ConfigError


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An .onnx file for the model, or an .md file.")],
) -> None:
    """Write the trained model as ONNX with its model card beside it (FILE.md), or the model card alone (an .md file).

    The ONNX model takes a batch of any size and returns the module's outputs. A module that was passed in Python is
    exported there: fedspa.RunResult.load(RUN, module=…).export_onnx(FILE). The card states the guarantee and what it
    does not cover, scores, data, settings and versions.

    Example: fedspa export runs/my-run model.onnx
    """
    if file.suffix == ".md":
        from fedspa.report import card

        card.write(card.card(run), file)
        print(file)
    elif file.suffix == ".onnx":
        from fedspa.result import RunResult

        print(RunResult.load(run).export_onnx(file))
    else:
        raise ConfigError(f"{file}: the name must end in .onnx (the model) or .md (its model card)")
