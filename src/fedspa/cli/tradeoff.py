"""`fedspa tradeoff`: accuracy against ε for several compression ratios, the paper's Figure 1."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedspa.cli import sweeping
from fedspa.errors import ConfigError

EPSILONS, COMPRESSIONS = "0.5,1,2,4,8", "0.05,0.1,0.4,1"


def tradeoff(
    source: Annotated[str, typer.Argument(metavar="mnist|cifar10|CONFIG", help="The paper's data, or a config.")],
    epsilon: Annotated[str, typer.Option(metavar="ε,…", help="Target ε of the runs.")] = EPSILONS,
    compression: Annotated[str, typer.Option(metavar="P,…", help="Compression ratios, one line each.")] = COMPRESSIONS,
    seeds: sweeping.Seeds = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Every point, small: no result. Needs no files.")] = False,
    data: sweeping.DataFolder = None,
    device: sweeping.Device = "auto",
    jobs: sweeping.Jobs = 1,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where runs and curves go, and are looked for (runs/tradeoff-NAME)."),
    ] = None,
    overrides: sweeping.Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the curves as one JSON object, nothing else.")] = False,
) -> None:
    """Accuracy against ε, one line per compression ratio; as JSON, CSV, SVG and PNG.

    Example: fedspa tradeoff mnist --epsilon 0.5,1,2 --compression 0.05,1 --data DIR

    Stopped by Ctrl-C or by a crash, the same command goes on: runs that ended are kept.
    """
    epsilons, compressions = _numbers("--epsilon", epsilon), _numbers("--compression", compression)
    from fedspa.paper import rows, shipped, tradeoff
    from fedspa.runs.config import load

    spec = rows.read(path := shipped.table(source)) if source in shipped.names("tables") else None
    config = shipped.config(source) if spec is None else path.parent / spec.curve
    if quick and spec is None:
        raise ConfigError("--quick is for mnist and cifar10; for a config, --set federation.rounds=2 and the like")
    out = out if out is not None else Path("runs", f"tradeoff-{Path(source).stem}{'-quick' if quick else ''}")
    sweeping.refuse_foreign(out, [f"tradeoff.{kind}" for kind in ("json", "csv", "svg", "png")])
    settings = [
        *(spec.quick if spec is not None and quick else ()),
        *sweeping.data_overrides(load(config).data.name, data, spec.stand_in if spec is not None and quick else None),
        *sweeping.machine_overrides(device, jobs),
        *(overrides or ()),
    ]
    planned = tradeoff.plan(config, compressions, epsilons, seeds, out, settings, sweeping.first_seed(overrides))
    runs = [run for point in planned.values() for run in point]
    words = ["tradeoff", source, "--epsilon", epsilon, "--compression", compression, "--seeds", str(seeds)]
    command = sweeping.command(words, quick, overrides)
    title = f"{config.stem}: accuracy against ε{', quick' if quick else ''}"
    about = {"title": title, "command": command, "config": config.name, "quick": quick, "seeds": seeds}
    about["data"] = runs[0].config.data.name
    found = sweeping.perform(
        runs,
        jobs,
        sweeping.again(command, data, device, jobs, out),
        out,
        lambda ended: tradeoff.assemble(planned, ended, about),
        lambda found: {"tradeoff.json": sweeping.as_text(found), "tradeoff.csv": tradeoff.as_csv(found)},
    )
    _draw(out, found)
    if as_json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
        return

    from rich.console import Console

    from fedspa.paper.plot import epsilon_label

    screen = Console()
    screen.print(f"{title}, % after the last round; {epsilon_label(found['points'])}", highlight=False)
    sweeping.show(screen, None, *tradeoff.lines(found))
    screen.print(f"Files: {out} (tradeoff.json, .csv, .svg, .png, runs/)", highlight=False, soft_wrap=True)


def _draw(out: Path, found: Mapping[str, Any]) -> None:
    from fedspa.paper.plot import NoPlots, draw

    try:
        for kind in ("svg", "png"):
            draw(found, out / f"tradeoff.{kind}")
    except NoPlots as missing:
        print(f"fedspa: {missing}", file=sys.stderr)


def _numbers(option: str, text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",") if word.strip()]
    except ValueError:
        values = []
    if not values or len(values) != len(set(values)):
        raise ConfigError(f"{option} is {text!r}; it must be different numbers with commas between, as in 0.5,1,2")
    return values
