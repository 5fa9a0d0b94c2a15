"""`fedspa privacy`: the noise that an ε takes, or the ε of a noise, under each sampling and relation."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_args

import typer

from fedspa.errors import ConfigError
from fedspa.privacy.event import Neighbours

if TYPE_CHECKING:
    from rich.table import Table

    from fedspa.mechanisms.gaussian.calibrate import Comparison


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
    members: Annotated[
        int | None, typer.Option(help="Under secure aggregation of so many agents: noise is an agent's own share.")
    ] = None,
    colluders: Annotated[int, typer.Option(help="With --members: how many of them may be with the server.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON object.")] = False,
) -> None:
    """Noise for a target ε, or ε for a given noise, under each sampling and neighbouring relation.

    Example: fedspa privacy --batch 10 --records 600 --local-steps 300 --participations 5 --delta 1e-3 --epsilon 1

    With --members, an agent's share of the noise, and two ε: against the server with the colluders, and the worst case
    in which all others collude.
    """
    if (epsilon is None) == (noise is None):
        raise ConfigError("--epsilon and --noise: exactly one must be given")
    if members is None and colluders:
        raise ConfigError(f"--colluders is {colluders}, of the --members that are added up: give these")
    setting = _Setting(
        batch=batch, records=records, local_steps=local_steps, participations=participations, delta=delta
    )
    if members is not None:
        _show_shares(setting, as_json, epsilon=epsilon, noise=noise, members=members, colluders=colluders)
        return

    from fedspa.mechanisms.gaussian.calibrate import compare

    rows = compare(**setting, epsilon=epsilon, noise=noise)
    if as_json:
        print(json.dumps({"rows": [_plain(row) for row in rows]}, allow_nan=False))
        return

    _show(rows, setting, asked=epsilon)


def _show(rows: list[Comparison], setting: _Setting, *, asked: float | None) -> None:
    from rich.console import Console

    from fedspa.cli.screen import show
    from fedspa.privacy.cap import shown_digits

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
        screen.print(f"[red]{delta} is not below 1/records: it allows a record to be published[/red]")


def _table(rows: list[Comparison]) -> Table:
    from rich.table import Table

    from fedspa.privacy.cap import shown_digits

    table = Table(box=None)
    for column, width in (("sampling", 8), ("neighbours", 11), ("accountant", 10)):
        table.add_column(column, min_width=width)
    for column in ("noise", "ε"):
        table.add_column(column, justify="right", min_width=6)
    for row in rows:
        table.add_row(row.sampling, row.neighbours, row.accountant, f"{row.noise:.4g}", shown_digits(row.epsilon))
    return table


def _show_shares(
    setting: _Setting, as_json: bool, *, epsilon: float | None, noise: float | None, members: int, colluders: int
) -> None:
    rows = shares(setting, epsilon=epsilon, noise=noise, members=members, colluders=colluders)
    if as_json:
        print(json.dumps({"rows": rows}, allow_nan=False))
        return

    from rich.console import Console
    from rich.table import Table

    from fedspa.cli.screen import show
    from fedspa.privacy.cap import AGAINST_ALL, shown, shown_digits
    from fedspa.runs.guarantee import observer

    screen, whom = Console(), observer({"members": members, "colluders": colluders})
    table = Table("neighbours", "accountant", box=None)
    for column in ("own share", "noise that counts", "ε", "floor"):
        table.add_column(column, justify="right")
    for row in rows:
        # What a share takes, typed as it stands here, must be enough.
        noises = [shown_digits(row["noise"]), f"{row['noise_counted']:.4g}"]
        costs = [shown(row[key]) for key in ("epsilon", "epsilon_floor")]
        table.add_row(row["neighbours"], row["accountant"], *noises, *costs)
    show(table, screen)
    screen.print(
        f"noise: σ in units of C/B, of discrete Gaussian shares; δ = {setting['delta']:g}; ε against {whom}, the floor "
        f"{AGAINST_ALL}",
        highlight=False,
    )


def shares(
    setting: _Setting, *, epsilon: float | None, noise: float | None, members: int, colluders: int
) -> list[dict[str, Any]]:
    """Of Fed-SPA under secure aggregation: an agent's share of the noise for `epsilon`, or what `noise` is worth, to
    the server with the colluders and to all others together; by relation."""
    from fedspa.algorithms import chosen
    from fedspa.mechanisms import Asked
    from fedspa.mechanisms.base import Cohort
    from fedspa.privacy.event import check_cohort
    from fedspa.runs.guarantee import Guarantee, finite

    check_cohort(members, colluders)
    if setting["local_steps"] != 1:
        raise ConfigError(f"--local-steps is {setting['local_steps']}; under secure aggregation it must be 1")
    mechanism = chosen("fedspa", "secure-aggregation").mechanism
    assert mechanism is not None
    rows = []
    for neighbours in get_args(Neighbours):
        asked = Asked(
            **setting,
            dimension=1,  # of no account, as is the clip value
            active=1,
            clip_value=1.0,
            agents=members,
            sampling="poisson",
            neighbours=neighbours,
            clip="l2",
            clip_rule="given",
            epsilon=epsilon,
            options={"privacy.noise_multiplier": noise},
            cohort=Cohort(members, members, colluders),
        )
        plan = mechanism.calibrated(asked)
        spent = Guarantee(plan)
        spent.took_part([0], plan.participations)
        rows.append(
            {
                "members": members,
                "colluders": colluders,
                "neighbours": neighbours,
                "accountant": spent.accountant,
                "noise": plan.noise_multiplier,
                "noise_counted": plan.noise_multiplier * math.sqrt(members - colluders),
                "epsilon": finite(spent.epsilon_max(neighbours)),
                "epsilon_floor": finite(spent.epsilon_floor()),
            }
        )
    return rows


def _plain(row: Comparison) -> dict[str, Any]:
    """JSON has no infinity: an ε that no accountant bounds is null."""
    return {name: value if value != math.inf else None for name, value in asdict(row).items()}
