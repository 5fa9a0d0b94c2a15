"""`fedspa privacy`: what a setting costs, by the paper's theorem and by every sound accountant."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from fedspa.errors import ConfigError

if TYPE_CHECKING:
    from fedspa.mechanisms.gaussian.compare import Comparison


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
    epsilon: Annotated[float | None, typer.Option(help="Target ε: print the noise it takes.")] = None,
    noise: Annotated[float | None, typer.Option(help="σ in units of √p·G/B or C/B: print its ε.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON object.")] = False,
) -> None:
    """Noise for a target ε, or ε for a given noise, by the paper's theorem and by each sound accountant.

    Example: fedspa privacy --batch 10 --records 600 --local-steps 300 --participations 5 --delta 1e-3 --epsilon 1
    """
    if (epsilon is None) == (noise is None):
        raise ConfigError("--epsilon and --noise: exactly one must be given")

    from fedspa.mechanisms.gaussian import compare

    setting = _Setting(
        batch=batch, records=records, local_steps=local_steps, participations=participations, delta=delta
    )
    rows = compare.rows(**setting, epsilon=epsilon, noise=noise)
    if as_json:
        print(json.dumps({"rows": [_plain(row) for row in rows]}, allow_nan=False))
        return

    from rich.console import Console
    from rich.table import Table

    screen = Console()
    table = Table(box=None)
    for column in ("method", "sampling", "neighbours", "accountant"):
        table.add_column(column)
    for column in ("noise", "ε"):
        table.add_column(column, justify="right")
    table.add_column("sound")
    for row in rows:
        sound = "[green]yes[/green]" if row.sound else "[red]NO[/red]"
        table.add_row(
            row.method, row.sampling, row.neighbours, row.accountant, f"{row.noise:.4g}", f"{row.epsilon:.4g}", sound
        )
    screen.print(table)
    screen.print(f"noise: σ in units of √p·G/B (coordinate clip) or C/B (l2 clip); δ = {delta:g}", highlight=False)
    for warning in compare.warnings(rows, **setting):
        screen.print(f"[red]{warning}[/red]", highlight=False)


def _plain(row: Comparison) -> dict[str, Any]:
    """JSON has no infinity: an ε that no accountant bounds is null."""
    return {name: value if value != math.inf else None for name, value in asdict(row).items()}
