"""`fedspa --version`: which fedspa this is, and what computes in it."""

from __future__ import annotations

from typing import Annotated

import typer


def _told(asked: bool) -> None:
    if not asked:
        return
    from importlib import metadata

    from fedspa import __version__
    from fedspa.engine.native import library

    missing = library.missing()
    native = f"native {library.best_level()}" if missing is None else "native engine: none, see fedspa doctor"
    print(f"fedspa {__version__} (torch {metadata.version('torch')}, {native})")
    raise typer.Exit


def version(
    asked: Annotated[
        bool,
        typer.Option("--version", callback=_told, is_eager=True, help="Print which fedspa this is, and exit."),
    ] = False,
) -> None:
    """Federated learning under record-level local differential privacy, with sparse uploads."""
