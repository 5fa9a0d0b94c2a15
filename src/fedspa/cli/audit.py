"""`fedspa audit`: attack the mechanism and hold what was seen against what is claimed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspa.errors import ConfigError

if TYPE_CHECKING:
    from fedspa.audit.result import Report


def audit(
    config: Annotated[str | None, typer.Option(help="Audit the mechanism of this config, as for fedspa run.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the config.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="An algorithm (fedspa is the default), shares (of sums) or scores, without a config."),
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Attack three copies with a known fault each: all must be caught."),
    ] = False,
    noise: Annotated[float | None, typer.Option(help="Noise multiplier (1).")] = None,
    clip: Annotated[str | None, typer.Option(help="coordinate (default) or l2.")] = None,
    neighbours: Annotated[
        str | None,
        typer.Option(help="add-remove or replace-one; without it, each that the sampling has a claim under."),
    ] = None,
    sampling: Annotated[str | None, typer.Option(help="poisson (default) or fixed.")] = None,
    noise_mode: Annotated[str | None, typer.Option(help="secure (default), exact or seeded.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="auto (default), native, stacked, traced, generic or reference.")
    ] = None,
    draws: Annotated[int, typer.Option(min=100, max=10**7, help="Draws of each attack, on either side.")] = 5000,
    seed: Annotated[
        int, typer.Option(min=0, max=2**64 - 1, help="Seed of the audit's data; of the noise too where it is seeded.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Lower bounds on privacy loss from attacks on the real code. Exit code 0: all within the claim; 1: not.

    Example: fedspa audit --self-test
    """
    if algorithm is not None and config is not None:
        raise ConfigError("--algorithm and --config: the config decides it; give one or the other")
    if overrides and config is None:
        raise ConfigError("--set overrides a key of --config, and there is none; name a config")
    choices = _given(noise=noise, clip=clip, sampling=sampling)
    how = _given(noise_mode=noise_mode, engine=engine)
    if config is not None and (choices or how):
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in choices | how)
        raise ConfigError(f"{flags} and --config: the config decides these; give one or the other")
    choices |= _given(neighbours=neighbours)

    import torch

    from fedspa import configs
    from fedspa.audit.run import Setting, of_config, synthetic

    torch.set_num_threads(1)
    if config is None:
        mechanism, target = synthetic(algorithm or "fedspa", choices)
        setting = Setting(**how, draws=draws, seed=seed)
    else:
        mechanism, target, setting = of_config(configs.find(config), overrides or [], choices, draws, seed)
    if self_test:
        caught = _self_test(mechanism.self_test(setting, target), as_json)
        raise typer.Exit(0 if caught else 1)
    report = mechanism.audit(setting, target)
    if as_json:
        print(json.dumps(report.to_json(), allow_nan=False))
    else:
        _show(report)
    if not report.holds:
        raise typer.Exit(1)


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _self_test(reports: dict[str, Report], as_json: bool) -> bool:
    """Say which of the injected faults were caught; return whether all were."""
    failed = {name: [check.name for check in report.checks if not check.holds] for name, report in reports.items()}
    if as_json:
        print(json.dumps({name: {"caught": bool(checks), "by": checks} for name, checks in failed.items()}))
    else:
        for name, checks in failed.items():
            print(f"fault {name!r}: {'caught by ' + '; '.join(checks) if checks else 'NOT CAUGHT by any check'}")
    return all(failed.values())


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from fedspa.cli.screen import show

    screen = Console(highlight=False)
    screen.print(_verdict(report))
    worst = report.headline
    screen.print(
        f"{worst.name}: at least {worst.lower_bound:.4g} against {worst.claimed:.4g} claimed ({worst.unit}, confidence "
        f"{worst.confidence:.7g}); chance of any false alarm at most {report.false_alarm:g}\n"
    )
    table = Table(box=None)
    table.add_column("check")
    for column in ("claimed", "seen"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    table.add_column("holds")
    for check in report.checks:
        holds = "[green]yes[/green]" if check.holds else "[red]NO[/red]"
        table.add_row(check.name, f"{check.claimed:.4g}", f"{check.lower_bound:.4g}", check.unit, holds)
    show(table, screen)
    for check in report.checks:
        if not check.holds:
            screen.print(f"[red]{check.name}[/red]: {check.detail}")
    for note in report.notes:
        screen.print(f"[red]Note[/red]  {note}")


def _verdict(report: Report) -> str:
    """The one line that somebody in a hurry reads."""
    failed, count = sum(not check.holds for check in report.checks), len(report.checks)
    if failed:
        return f"[red]VIOLATED[/red]: {failed} of {count} checks failed."
    return f"[green]HOLDS[/green]: all {count} checks stayed within what is claimed."
