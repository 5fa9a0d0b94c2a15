"""`fedspa suggest`: a first setting by arithmetic, before any data is touched."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated, Any

import typer

from fedspa.cli.screen import AsJson, print_json, show_facts
from fedspa.configs import complete
from fedspa.errors import ConfigError, quoted

# What the paper's CNNs are made for.
_SHAPES = {"mnist-cnn": "1,28,28", "cifar10-cnn": "3,32,32"}


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
    model: Annotated[str, typer.Option(help="A model's name, as model.name takes it.")] = "logistic",
    shape: Annotated[
        str | None, typer.Option(metavar="N,…", help="The shape of a record, as in 1,28,28 or 30.")
    ] = None,
    classes: Annotated[int, typer.Option(min=1, help="Outputs of the model: the classes.")] = 10,
    parameters: Annotated[int | None, typer.Option(help="d, in place of model, shape and classes.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ (at most a tenth of 1 over the records).")] = None,
    per_round: Annotated[int | None, typer.Option(help="Agents in a round (a tenth, at least 10).")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds (40 or more, each agent in 5).")] = None,
    compression: Annotated[float, typer.Option(help="p, the share of coordinates in an upload.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Batch, steps, clip, rate and rounds for a federation, with the noise and the bytes to expect.

    Example: fedspa suggest --agents 100 --records 600 --shape 784 --classes 10 --epsilon 1

    From these numbers alone, or from those of CONFIG; no budget is spent. A run takes the same settings where its
    config leaves them out.
    """
    from fedspa import configs
    from fedspa.runs.config import load
    from fedspa.tuning.suggest import suggest, suggest_for

    if config is not None:
        numbers = {"--agents": agents, "--records": records, "--parameters": parameters, "--shape": shape}
        if given := [name for name, value in numbers.items() if value is not None]:
            raise ConfigError(f"{', '.join(given)} and CONFIG: the config says it; give one or the other")
        asked = [] if epsilon is None else [f"privacy.epsilon={epsilon}", "privacy.noise_multiplier=none"]
        found = suggest_for(load(configs.find(config), asked))
    elif agents is None or records is None or epsilon is None:
        needed = {"--agents": agents, "--records": records, "--epsilon": epsilon}
        missing = [name for name, value in needed.items() if value is None]
        raise ConfigError(f"{', '.join(missing)} missing: give all of {', '.join(needed)}, or a config")
    else:
        dimension = parameters if parameters is not None else _parameters(model, shape, classes)
        found = suggest(agents, records, dimension, epsilon, delta, per_round, rounds, compression)
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


def _parameters(model: str, shape: str | None, classes: int) -> int:
    from fedspa.learning import models

    shape = shape if shape is not None else _SHAPES.get(model)
    if shape is None:
        raise ConfigError(
            f"--shape is missing: the size of {model} depends on the records; give --shape, as in --shape 30 or "
            "--shape 1,28,28, or --parameters"
        )
    module: Any = models.build(model, sides_of(shape), classes, 0)
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def sides_of(shape: str) -> tuple[int, ...]:
    """Parse `--shape`."""
    from fedspa.randomness.mask import DIMENSION_LIMIT

    words = [side.strip() for side in shape.split(",")]
    sides = [int(word) if word.isdecimal() and len(word) <= 10 else 0 for word in words]
    if not 0 < math.prod(sides) < DIMENSION_LIMIT:
        raise ConfigError(
            f"--shape is {quoted(shape)}; give the sides of one record, as in 1,28,28 or 30: whole numbers whose "
            f"product is below {DIMENSION_LIMIT}"
        )
    return tuple(sides)
