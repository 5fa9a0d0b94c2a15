"""`fedspa audit`: attack the mechanism and hold what was seen against what is claimed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspa.cli.run import Overrides
from fedspa.cli.screen import AsJson, print_json, show_facts, show_table
from fedspa.configs import complete
from fedspa.errors import ConfigError, os_errors_as

if TYPE_CHECKING:
    from fedspa.audit.statistics import Report


def audit(
    config: Annotated[
        str | None,
        typer.Option(help="Audit the mechanism of this config; default: the quickstart's.", autocompletion=complete),
    ] = None,
    overrides: Overrides = None,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Attack three copies with a known fault each: all must be caught."),
    ] = False,
    draws: Annotated[int, typer.Option(min=100, max=10**7, help="Draws of each attack, on either side.")] = 5000,
    seed: Annotated[
        int, typer.Option(min=0, max=2**64 - 1, help="Seed of the audit's data; of the noise too where it is seeded.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|FILE", help="Attach the result to a run's report, whose config is audited; or a file."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lower bounds on privacy loss from attacks on the real code. Exit code 0: all within the claim; 1: not.

    Example: fedspa audit --self-test
    """
    of_run = out is not None and out.is_dir()
    if of_run and (config is not None or overrides or self_test):
        raise ConfigError(f"--out {out}, a run: its own config is audited; leave the other options out, or name a file")

    import torch

    from fedspa import configs
    from fedspa.audit.audited import of_config
    from fedspa.runs.rundir import check_is_run

    torch.set_num_threads(1)
    if of_run and out is not None:
        check_is_run(out)
        config = str(out / "config.toml")
    source = None if config is None else configs.find(config)
    mechanism, target, setting = of_config(source, overrides or [], draws, seed)
    if self_test:
        caught = _self_test(mechanism.self_test(setting, target), as_json)
        raise typer.Exit(0 if caught else 1)
    report = mechanism.audit(setting, target)
    if out is not None:
        _keep(report, out)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    if not report.holds:
        raise typer.Exit(1)


def _keep(report: Report, out: Path) -> None:
    """Write the result to a file, or into a run's folder, whose report is made again with it."""
    from fedspa import durable
    from fedspa.report import write
    from fedspa.report.record import AUDIT

    file = out / AUDIT if out.is_dir() else out
    with os_errors_as(ConfigError, str(file), "name a file that can be written"):
        durable.replace_text(file, json.dumps(report.to_json(), allow_nan=False, indent=1) + "\n")
    if out.is_dir():
        write(out)


def _self_test(reports: dict[str, Report], as_json: bool) -> bool:
    """Say which of the injected faults were caught; return whether all were."""
    failed = {name: [check.name for check in report.checks if not check.holds] for name, report in reports.items()}
    if as_json:
        print_json({name: {"caught": bool(checks), "by": checks} for name, checks in failed.items()})
    else:
        for name, checks in failed.items():
            print(f"fault {name!r}: {'caught by ' + '; '.join(checks) if checks else 'NOT CAUGHT by any check'}")
    return all(failed.values())


def _show(report: Report) -> None:
    """Print the verdict for somebody in a hurry, and every check."""
    failed, count, worst = [check for check in report.checks if not check.holds], len(report.checks), report.headline
    if failed:
        print(f"VIOLATED: {len(failed)} of {count} checks failed.")
    else:
        print(f"HOLDS: all {count} checks stayed within what is claimed.")
    bound = f"at least {worst.lower_bound:.4g} against {worst.claimed:.4g} claimed"
    sure = f"confidence {worst.confidence:.7g}); chance of any false alarm at most {report.false_alarm:g}"
    print(f"{worst.name}: {bound} ({worst.unit}, {sure}\n")
    show_table(
        ["check", "claimed", "seen", "unit", "holds"],
        [
            [each.name, f"{each.claimed:.4g}", f"{each.lower_bound:.4g}", each.unit, "yes" if each.holds else "NO"]
            for each in report.checks
        ],
    )
    for check in failed:
        print(f"{check.name}: {check.detail}")
    show_facts([("Note", note) for note in report.notes])
