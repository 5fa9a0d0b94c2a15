"""`fedspa table`: every row of a table of the paper, printed figures and ours side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedspa.cli import sweeping


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

    Example: fedspa table mnist --seeds 3 --jobs 2 --data DIR

    Stopped by Ctrl-C or by a crash, the same command goes on: runs that ended are kept.
    """
    from fedspa.paper import rows as specs
    from fedspa.paper import shipped
    from fedspa.paper import table as tables

    path = shipped.table(name)
    spec = specs.read(path)
    chosen = specs.select(spec, rows)
    out = out if out is not None else Path("runs", f"table-{path.stem}{'-quick' if quick else ''}")
    sweeping.refuse_foreign(out, ("table.json", "table.md"))
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

    from rich.console import Console

    screen = Console()
    sweeping.show(screen, spec.title, tables.RUN_COLUMNS, tables.run_lines(found))
    sweeping.show(
        screen, "What an agent uploads in the whole run", tables.COST_HEADS, tables.narrow(tables.cost_lines(found))
    )
    for line in tables.notes(found):
        screen.print(line, highlight=False)
    screen.print(f"Files: {out} (table.json, table.md, runs/)", highlight=False, soft_wrap=True)
