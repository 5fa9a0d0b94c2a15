"""`fedspa privacy`: the noise that an ε takes, or the ε of a noise. `fedspa suggest`: a first setting by arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from fedspa.cli.screen import AsJson, print_json, show_facts, show_table
from fedspa.configs import complete
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


# `fedspa suggest`: a first setting by arithmetic, before any data is touched.


def suggest(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A config: agents, records, model and ε are read from it, and no record.", autocompletion=complete
        ),
    ] = None,
    agents: Annotated[int | None, typer.Option(help="How many agents hold records.")] = None,
    records: Annotated[int | None, typer.Option(help="The fewest records that an agent holds.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε for each record over the whole run.")] = None,
    parameters: Annotated[
        int | None, typer.Option(help="d, parameters of the model (`fedspa doctor --model`).")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ (at most a tenth of 1 over the records).")] = None,
    per_round: Annotated[int | None, typer.Option(help="Agents in a round (a tenth, at least 10).")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds (40 or more, each agent in 5).")] = None,
    compression: Annotated[float, typer.Option(help="p, the share of coordinates in an upload.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Batch, steps, clip, rate and rounds for a federation, with the noise and the bytes to expect.

    Example: fedspa suggest --agents 100 --records 600 --parameters 7850 --epsilon 1

    From these numbers alone, or from those of CONFIG; no budget is spent. A run takes the same settings where its
    config leaves them out.
    """
    from fedspa import configs
    from fedspa.runs.config import load
    from fedspa.tuning.suggest import suggest, suggest_for

    if config is not None:
        numbers = {"--agents": agents, "--records": records, "--parameters": parameters}
        if given := [name for name, value in numbers.items() if value is not None]:
            raise ConfigError(f"{', '.join(given)} and CONFIG: the config says it; give one or the other")
        asked = [] if epsilon is None else [f"privacy.epsilon={epsilon}", "privacy.noise_multiplier=none"]
        found = suggest_for(load(configs.find(config), asked))
    elif agents is None or records is None or parameters is None or epsilon is None:
        needed = {"--agents": agents, "--records": records, "--parameters": parameters, "--epsilon": epsilon}
        missing = [name for name, value in needed.items() if value is None]
        raise ConfigError(f"{', '.join(missing)} missing: give all of {', '.join(needed)}, or a config")
    else:
        found = suggest(agents, records, parameters, epsilon, delta, per_round, rounds, compression)
    if as_json:
        print_json({**asdict(found), "run_bytes": found.run_bytes})
        return

    from fedspa.runs.guarantee import shown_bytes

    section = ""
    for key, value in found.settings.items():
        if (named := key.partition(".")[0]) != section:
            section = named
            print(f"[{section}]")
        print(f"{key.partition('.')[2]} = {json.dumps(value)}")
    print()
    ratio = f"noise-to-signal ratio over the run {found.noise_to_signal:.2g} (best case)"
    show_facts(
        [
            ("Parameters", f"{found.dimension:,}; each agent takes part in {found.participations} rounds at most"),
            ("Noise", f"multiplier {found.noise_multiplier:.4g} in each local step"),
            ("", ratio),
            ("Uploads", f"{shown_bytes(found.upload_bytes)} each, {shown_bytes(found.run_bytes)} per agent in all"),
            *([] if found.smallest is None else [("Smallest", found.smallest)]),
            ("Data", "no budget was spent; `fedspa tune` finds rate, clip and averaging within ε"),
            *(("Note", warning) for warning in found.warnings),
        ]
    )
