"""`fedspa audit`: attack the mechanism and hold what was seen against what is claimed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fedspa.errors import ConfigError

if TYPE_CHECKING:
    from fedspa.audit.result import Report
    from fedspa.audit.setting import Setting


def audit(
    config: Annotated[Path | None, typer.Option(help="Audit the mechanism of this TOML config.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the config.")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="fedspa (default) or cpsgd, without a config.")] = None,
    plant: Annotated[
        str | None,
        typer.Option(help="Break it first: sensitivity, noise, clip, mean, seed or sampling. Must be caught."),
    ] = None,
    noise: Annotated[float | None, typer.Option(help="Noise multiplier (1).")] = None,
    clip: Annotated[str | None, typer.Option(help="coordinate (default) or l2.")] = None,
    neighbours: Annotated[
        str | None, typer.Option(help="add-remove or replace-one; without it, all that the sampling has a claim for.")
    ] = None,
    sampling: Annotated[str | None, typer.Option(help="poisson (default) or fixed.")] = None,
    noise_mode: Annotated[str | None, typer.Option(help="secure (default), exact or seeded.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto (default), native, stacked, generic or reference.")] = None,
    draws: Annotated[int, typer.Option(min=100, max=10**7, help="Draws of each attack, on either side.")] = 5000,
    seed: Annotated[
        int, typer.Option(min=0, max=2**64 - 1, help="Seed of the audit's data; of the noise too where it is seeded.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Lower bounds on privacy loss from attacks on the real code. Exit code 0: all within the claim; 1: not.

    Example: fedspa audit --plant sensitivity
    """
    if algorithm not in (None, "fedspa", "cpsgd"):
        raise ConfigError(f"--algorithm is {algorithm!r}; allowed: fedspa, cpsgd")
    if algorithm is not None and config is not None:
        raise ConfigError("--algorithm and --config: the config decides it; give one or the other")
    if overrides and config is None:
        raise ConfigError("--set overrides a key of --config, and there is none; name a config")
    choices = {
        "noise": noise,
        "clip": clip,
        "sampling": sampling,
        "noise_mode": noise_mode,
        "engine": engine,
    }
    given = {key: value for key, value in choices.items() if value is not None}
    if given and config is not None:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in given)
        raise ConfigError(f"{flags} and --config: the config decides these; give one or the other")
    others = given if neighbours is None else given | {"neighbours": neighbours}
    sets = overrides or []
    report = _cpsgd(config, sets, algorithm, plant, others, draws, seed)
    if report is None:
        report = _gaussian(_setting(config, sets, given, neighbours, draws, seed), plant)
    if as_json:
        print(json.dumps({"plant": plant, **report.to_json()}, allow_nan=False))
    else:
        _show(report, plant)
    if not report.holds:
        raise typer.Exit(1)


def _cpsgd(
    config: Path | None,
    sets: list[str],
    algorithm: str | None,
    plant: str | None,
    given: dict[str, Any],
    draws: int,
    seed: int,
) -> Report | None:
    """The audit of cpSGD where that is what was asked for."""
    if algorithm != "cpsgd" and config is None:
        return None

    import torch

    from fedspa.audit.cpsgd import audit
    from fedspa.audit.cpsgd_plants import plant as planted
    from fedspa.audit.cpsgd_setting import CpsgdTarget, from_config, synthetic

    torch.set_num_threads(1)
    if config is None:
        mode: Any = given.pop("noise_mode", "secure")
        setting = synthetic(noise_mode=mode, draws=draws, seed=seed)
    elif (found := from_config(config, overrides=sets, draws=draws, seed=seed)) is not None:
        setting = found
    else:
        return None
    if given:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in given)
        raise ConfigError(f"{flags}: cpsgd's audit tries every clipping and has no such choice")
    target = CpsgdTarget()
    return audit(setting, target if plant is None else planted(plant, target))


def _gaussian(setting: Setting, plant: str | None) -> Report:
    import torch

    from fedspa.audit.plants import plant as planted
    from fedspa.audit.run import audit as attack
    from fedspa.audit.target import production

    torch.set_num_threads(1)
    target = production(setting.engine, exact=setting.exact)
    if plant is not None:
        if plant == "sensitivity" and "replace-one" not in setting.relations:
            raise ConfigError(
                "--plant sensitivity is a mistake about replace-one; leave --neighbours out, or set it so"
            )
        if plant == "sampling-fixed" and setting.plan.sampling == "fixed":
            raise ConfigError("--plant sampling-fixed is no mistake under --sampling fixed; use --plant sampling")
        target = planted(plant, target)
    return attack(setting, target)


def _setting(
    config: Path | None, sets: list[str], choices: dict[str, Any], neighbours: str | None, draws: int, seed: int
) -> Setting:
    from fedspa.audit.setting import from_config, synthetic
    from fedspa.engine.choose import EngineName
    from fedspa.mechanism.streams import NoiseMode
    from fedspa.privacy.event import Neighbours, Sampling
    from fedspa.privacy.plan import Clipping

    allowed = {"clip": Clipping, "sampling": Sampling, "noise_mode": NoiseMode, "engine": EngineName}
    for key, value in {**choices, "neighbours": neighbours}.items():
        values = get_args({**allowed, "neighbours": Neighbours}.get(key))
        if values and value is not None and value not in values:
            raise ConfigError(f"--{key.replace('_', '-')} is {value!r}; allowed: {', '.join(values)}")
    relation: Any = neighbours
    if config is None:
        return synthetic(**choices, neighbours=relation, draws=draws, seed=seed)
    return from_config(config, overrides=sets, neighbours=relation, draws=draws, seed=seed)


def _show(report: Report, plant: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    screen = Console()
    table = Table(box=None)
    table.add_column("check")
    for column in ("claimed", "seen"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    table.add_column("holds")
    for check in report.checks:
        verdict = "[green]yes[/green]" if check.holds else "[red]NO[/red]"
        table.add_row(check.name, f"{check.claimed:.4g}", f"{check.lower_bound:.4g}", check.unit, verdict)
    screen.print(table)
    for check in report.checks:
        if not check.holds:
            screen.print(f"[red]{check.name}[/red]: {check.detail}", highlight=False)
    worst = report.headline
    sentence = (
        f"{worst.name}: at least {worst.lower_bound:.4g} against {worst.claimed:.4g} claimed ({worst.unit}, confidence "
        f"{worst.confidence:.7g}); chance of any false alarm at most {report.false_alarm:g}"
    )
    verdict = "[green]Holds[/green]" if report.holds else "[red]Does not hold[/red]"
    screen.print(f"{verdict}{'' if plant is None else f' with {plant!r} planted'}: {sentence}", highlight=False)
    for note in report.notes:
        screen.print(f"[red]Note[/red]  {note}", highlight=False)
