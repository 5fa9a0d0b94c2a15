"""`fedspa report`: one page about one run, or about several beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, finished or not.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The page (report.html in the run's folder; for several runs, in the current folder)."),
    ] = None,
) -> None:
    """Write a self-contained HTML page: scores, ε by agent, bytes, the guarantee in plain words, the plan.

    Example: fedspa report runs/my-run runs/another --out comparison.html
    """
    from fedspa.report import write

    path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    write(runs, path)
    print(path)
