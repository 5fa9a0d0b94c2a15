"""`fedspa privacy`: the noise that an ε takes, or the ε of a noise, under each sampling and relation."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from fedspa.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from fedspa.mechanisms.gaussian.plan import Comparison


class _Setting(TypedDict):
    batch: int
    records: int
    local_steps: int
    participations: int
    delta: float


def privacy(
    batch: Annotated[int, typer.Option(help="B, the (expected) batch of a local step.")],
    records: Annotated[int, typer.Option(help="m, the records of an agent.")],
    local_steps: Annotated[int, typer.Option(help="τ, local steps in a round.")],
    participations: Annotated[int, typer.Option(help="I, rounds that an agent takes part in.")],
    delta: Annotated[float, typer.Option(help="δ.")],
    epsilon: Annotated[float | None, typer.Option(help="Target ε: print the noise that it needs.")] = None,
    noise: Annotated[float | None, typer.Option(help="σ in units of √p·G/B or C/B: print its ε.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON object.")] = False,
) -> None:
    """Noise for a target ε, or ε for a given noise, under each sampling and neighbouring relation.

    Example: fedspa privacy --batch 10 --records 600 --local-steps 300 --participations 5 --delta 1e-3 --epsilon 1
    """
    if (epsilon is None) == (noise is None):
        raise ConfigError("--epsilon and --noise: exactly one must be given")
    setting = _Setting(
        batch=batch, records=records, local_steps=local_steps, participations=participations, delta=delta
    )

    from fedspa.mechanisms.gaussian.plan import compare

    rows = compare(**setting, epsilon=epsilon, noise=noise)
    if as_json:
        print(json.dumps({"rows": [_plain(row) for row in rows]}, allow_nan=False))
        return

    _show(rows, setting, asked=epsilon)


def _show(rows: list[Comparison], setting: _Setting, *, asked: float | None) -> None:
    from rich.console import Console

    from fedspa.cli.screen import show
    from fedspa.privacy.event import shown_digits

    screen = Console(highlight=False)
    first = rows[0]
    delta = f"δ = {setting['delta']:g}"
    if asked is None:
        screen.print(f"Noise {first.noise:.4g} costs ε = {shown_digits(first.epsilon)} at {delta}.")
    else:
        screen.print(f"ε = {asked:g} at {delta} takes noise multiplier {first.noise:.4g}.")
    screen.print(f"That is with {first.sampling} sampling, under {first.neighbours}, by accountant {first.accountant}.")
    screen.print("Noise is the noise multiplier: σ of a step's sum over its sensitivity, that is")
    screen.print("σ of the mean gradient in units of √p·G/B (coordinate clip) or C/B (l2 clip).")
    show(_table(rows), screen)
    if setting["delta"] >= 1 / setting["records"]:
        screen.print(f"[red]{delta} is not below 1/records: a mechanism that publishes a record would satisfy it[/red]")


def _table(rows: list[Comparison]) -> Table:
    from rich.table import Table

    from fedspa.privacy.event import shown_digits

    table = Table(box=None)
    for column, width in (("sampling", 8), ("neighbours", 11), ("accountant", 10)):
        table.add_column(column, min_width=width)
    for column in ("noise", "ε"):
        table.add_column(column, justify="right", min_width=6)
    for row in rows:
        table.add_row(row.sampling, row.neighbours, row.accountant, f"{row.noise:.4g}", shown_digits(row.epsilon))
    return table


def _plain(row: Comparison) -> dict[str, Any]:
    """JSON has no infinity: an ε that no accountant bounds is null."""
    return {name: value if value != math.inf else None for name, value in asdict(row).items()}
