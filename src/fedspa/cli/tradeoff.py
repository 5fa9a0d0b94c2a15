"""`fedspa tradeoff`: accuracy against ε for several compression ratios, the paper's Figure 1."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspa.cli import sweeping
from fedspa.errors import ConfigError

if TYPE_CHECKING:
    from fedspa.paper.sweep import Outcome, Planned

EPSILONS, COMPRESSIONS = "0.5,1,2,4,8", "0.05,0.1,0.4,1"


def tradeoff(
    source: Annotated[str, typer.Argument(metavar="mnist|cifar10|CONFIG", help="Data of the paper, or a TOML config.")],
    epsilon: Annotated[str, typer.Option(metavar="ε,…", help="Target ε of the runs.")] = EPSILONS,
    compression: Annotated[str, typer.Option(metavar="P,…", help="Compression ratios, a line each.")] = COMPRESSIONS,
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
    """Accuracy against ε, a line a compression ratio; as JSON, CSV, SVG and PNG.

    Example: fedspa tradeoff mnist --epsilon 0.5,1,2 --compression 0.05,1 --data DIR

    Stopped by Ctrl-C or by a crash, the same command goes on: runs that ended are kept.
    """
    epsilons, compressions = _numbers("--epsilon", epsilon), _numbers("--compression", compression)
    from fedspa.paper import rows, tradeoff
    from fedspa.runs.config import load

    spec = None if source.endswith(".toml") else rows.read(path := rows.find(source))
    config = Path(source) if spec is None else path.parent / spec.curve
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
    planned = tradeoff.plan(config, compressions, epsilons, seeds, out, settings)
    runs = [run for point in planned.values() for run in point]
    words = ["fedspa", "tradeoff", source, "--epsilon", epsilon, "--compression", compression, "--seeds", str(seeds)]
    words += [*(["--quick"] if quick else []), *(word for key in overrides or () for word in ("--set", key))]
    command = shlex.join(words)
    title = f"{config.stem}: accuracy against ε{', quick' if quick else ''}"
    about = {"title": title, "command": command, "config": config.name, "quick": quick, "seeds": seeds}
    about["data"] = runs[0].config.data.name
    ended: dict[str, Outcome] = {}
    found = tradeoff.assemble(planned, ended, about)

    def keep(run: Planned, outcome: Outcome) -> None:
        nonlocal found
        ended[run.name] = outcome
        found = tradeoff.assemble(planned, ended, about)
        _write(out, found)

    sweeping.run_all(runs, jobs, f"{command} --out {shlex.quote(str(out))}", keep)
    _draw(out, found)
    if as_json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
        return

    from rich.console import Console

    screen = Console()
    screen.print(f"{title}, % after the last round", highlight=False)
    sweeping.show(screen, None, *tradeoff.lines(found))
    screen.print(f"Files: {out} (tradeoff.json, .csv, .svg, .png, runs/)", highlight=False, soft_wrap=True)


def _write(out: Path, found: Mapping[str, Any]) -> None:
    """The curves are whole on the disk after every run."""
    from fedspa import durable
    from fedspa.paper import tradeoff

    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)
    durable.replace_text(out / "tradeoff.json", text + "\n")
    durable.replace_text(out / "tradeoff.csv", tradeoff.as_csv(found))


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
