"""`fedspa privacy`: the noise that an ε takes, or the ε of a noise, under each sampling and relation."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from fedspa.cli.screen import AsJson, print_json, show_facts, show_table
from fedspa.errors import ConfigError

if TYPE_CHECKING:
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
    as_json: AsJson = False,
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
        print_json({"rows": [_plain(row) for row in rows]})
        return

    _show(rows, setting, asked=epsilon)


def _show(rows: list[Comparison], setting: _Setting, *, asked: float | None) -> None:
    from fedspa.privacy.event import shown_digits

    first, delta = rows[0], f"δ = {setting['delta']:g}"
    if asked is None:
        print(f"Noise {first.noise:.4g} costs ε = {shown_digits(first.epsilon)} at {delta}.")
    else:
        print(f"ε = {asked:g} at {delta} takes noise multiplier {first.noise:.4g}.")
    print(f"That is with {first.sampling} sampling, under {first.neighbours}, by accountant {first.accountant}.")
    print("Noise is the noise multiplier: σ of a step's sum over its sensitivity, that is")
    print("σ of the mean gradient in units of √p·G/B (coordinate clip) or C/B (l2 clip).")
    cells = [
        [row.sampling, row.neighbours, row.accountant, f"{row.noise:.4g}", shown_digits(row.epsilon)] for row in rows
    ]
    show_table(["sampling", "neighbours", "accountant", "noise", "ε"], cells)
    if setting["delta"] >= 1 / setting["records"]:
        show_facts([("Note", f"{delta} is not below 1/records: a mechanism that publishes a record would satisfy it")])


def _plain(row: Comparison) -> dict[str, Any]:
    """JSON has no infinity: an ε that no accountant bounds is null."""
    return {name: value if value != math.inf else None for name, value in asdict(row).items()}
