"""`python -m reproduction table|tradeoff|trust`: the paper's tables, its Figure 1, and accuracy by trust."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedspa.cli import main
from fedspa.errors import ConfigError
from fedspa.runs.config import load
from reproduction import rows as specs
from reproduction import sweeping
from reproduction import table as tables
from reproduction import tradeoff as curves
from reproduction.plot import NoPlots, draw, epsilon_label

app = typer.Typer(
    name="python -m reproduction",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run the tables and the figure of Fed-SPA (Hu, Gong, Guo, IJCAI 2021) again.",
)


@app.command()
def table(
    name: Annotated[str, typer.Argument(metavar="mnist|cifar10", help="Table 1 or 2; or the path of a table's TOML.")],
    seeds: sweeping.Seeds = 1,
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="ROW,…",
            help="Only these: an algorithm (fedspa), a row (fedspa-0.05) or a cell of it (fedspa-0.05-tuned).",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every row, small: two minutes on two cores, no result. Needs no files.")
    ] = False,
    data: sweeping.DataFolder = None,
    device: sweeping.Device = "auto",
    jobs: sweeping.Jobs = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where runs and table go, and are looked for (runs/table-NAME).")
    ] = None,
    overrides: sweeping.Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as one JSON object, nothing else.")] = False,
) -> None:
    """Run a table of the paper: each row at the published noise and under a sound guarantee.

    Example: python -m reproduction table mnist --seeds 3 --jobs 2 --data DIR

    Stopped by Ctrl-C or by a crash, the same command goes on: runs that ended are kept.
    """
    from reproduction import rows as specs

    path = specs.find_table(name)
    spec = specs.read(path)
    chosen = specs.select(spec, rows)
    out = out if out is not None else Path("runs", f"table-{path.stem}{'-quick' if quick else ''}")
    settings = [
        *sweeping.data_overrides(spec.data, data, spec.stand_in if quick else None),
        *sweeping.machine_overrides(device, jobs),
        *(overrides or ()),
    ]
    planned = tables.plan(path, spec, chosen, seeds, out, quick, settings, sweeping.first_seed(overrides))
    runs = [run for cell in planned.values() for run in cell]
    words = ["table", name, "--seeds", str(seeds), *(["--rows", rows] if rows is not None else [])]
    command = sweeping.command(words, quick, overrides)
    about = {"command": command, "quick": quick, "seeds": seeds, "data": runs[0].config.data.name}
    found = sweeping.perform(
        runs,
        jobs,
        sweeping.again(command, data, device, jobs, out),
        out,
        lambda ended: tables.assemble(spec, chosen, planned, ended, about),
        lambda found: {
            "table.json": sweeping.as_text(found),
            "table.md": f"# {spec.title}\n\n{tables.markdown(found)}\n",
        },
    )
    if as_json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
        return

    screen = Console()
    sweeping.show(screen, spec.title, tables.RUN_COLUMNS, tables.run_lines(found))
    sweeping.show(
        screen, "What an agent uploads in the whole run", tables.COST_HEADS, tables.narrow(tables.cost_lines(found))
    )
    for line in tables.notes(found):
        screen.print(line, highlight=False)
    screen.print(f"Files: {out} (table.json, table.md, runs/)", highlight=False, soft_wrap=True)


EPSILONS, COMPRESSIONS = "0.5,1,2,4,8", "0.05,0.1,0.4,1"


@app.command()
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

    Example: python -m reproduction tradeoff mnist --epsilon 0.5,1,2 --compression 0.05,1 --data DIR

    Stopped by Ctrl-C or by a crash, the same command goes on: runs that ended are kept.
    """
    epsilons, compressions = _numbers("--epsilon", epsilon), _numbers("--compression", compression)

    spec = specs.read(path := specs.find_table(source)) if source in specs.table_names() else None
    config = specs.find_config(source) if spec is None else specs.config_of(path, spec.curve)
    if quick and spec is None:
        raise ConfigError("--quick is for mnist and cifar10; for a config, --set federation.rounds=2 and the like")
    out = out if out is not None else Path("runs", f"tradeoff-{Path(source).stem}{'-quick' if quick else ''}")
    settings = [
        *(spec.quick if spec is not None and quick else ()),
        *sweeping.data_overrides(load(config).data.name, data, spec.stand_in if spec is not None and quick else None),
        *sweeping.machine_overrides(device, jobs),
        *(overrides or ()),
    ]
    planned = curves.plan(config, compressions, epsilons, seeds, out, settings, sweeping.first_seed(overrides))
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
        lambda ended: curves.assemble(planned, ended, about),
        lambda found: {"tradeoff.json": sweeping.as_text(found), "tradeoff.csv": curves.as_csv(found)},
    )
    _draw(out, found)
    if as_json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
        return

    screen = Console()
    screen.print(f"{title}, % after the last round; {epsilon_label(found['points'])}", highlight=False)
    sweeping.show(screen, None, *curves.lines(found))
    screen.print(f"Files: {out} (tradeoff.json, .csv, .svg, .png, runs/)", highlight=False, soft_wrap=True)


@app.command()
def trust(
    against: Annotated[str, typer.Option(metavar="epsilon|agents|bytes", help="What accuracy is drawn against.")] = (
        "epsilon"
    ),
    values: Annotated[
        str | None, typer.Option(metavar="X,…", help="Its values: of ε, of the number of agents, of p.")
    ] = None,
    seeds: sweeping.Seeds = 1,
    data: sweeping.DataFolder = None,
    jobs: sweeping.Jobs = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where runs and curves go, and are looked for (runs/trust-…).")
    ] = None,
    overrides: sweeping.Overrides = None,
) -> None:
    """Accuracy on MNIST, one line per kind of trust (local, sums, central), as JSON, SVG and PNG.

    Example: python -m reproduction trust --against agents --seeds 3 --data DIR

    Stopped by Ctrl-C or by a crash, the same command resumes: runs that ended are kept.
    """
    from reproduction import trust as lines

    if against not in lines.AXES:
        raise ConfigError(f"--against is {against!r}; allowed: {', '.join(lines.AXES)}")
    axis = lines.AXES[against]
    chosen = axis.values if values is None else _numbers("--values", values)
    out = out if out is not None else Path("runs", f"trust-{against}")
    settings = [
        *sweeping.data_overrides("mnist", data, None),
        *sweeping.machine_overrides("cpu", jobs),
        *(overrides or ()),
    ]
    planned = lines.plan(axis, chosen, seeds, out, settings)
    words = ["trust", "--against", against, *(["--values", values] if values else []), "--seeds", str(seeds)]
    command = sweeping.command(words, False, overrides)
    about = {"title": f"MNIST: accuracy by trust and {axis.label}", "command": command, "seeds": seeds}
    about |= {"data": "mnist", "against": against, "axis": axis.label}
    found = sweeping.perform(
        [run for point in planned.values() for run in point],
        jobs,
        sweeping.again(command, data, "cpu", jobs, out),
        out,
        lambda ended: lines.assemble(planned, ended, about),
        lambda found: {"trust.json": sweeping.as_text(found)},
    )
    _draw(out, found, "trust")
    print(lines.markdown(found))


def _draw(out: Path, found: Mapping[str, Any], name: str = "tradeoff") -> None:
    try:
        for kind in ("svg", "png"):
            draw(found, out / f"{name}.{kind}")
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


if __name__ == "__main__":
    main(app)
