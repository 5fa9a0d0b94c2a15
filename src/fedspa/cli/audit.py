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
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the result to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Lower bounds on privacy loss from attacks on the real code. Exit code 0: all within the claim; 1: not.

    Example: fedspa audit --self-test
    """
    import torch

    from fedspa import configs, durable
    from fedspa.audit.audited import of_config

    torch.set_num_threads(1)
    source = None if config is None else configs.find(config)
    mechanism, target, setting = of_config(source, overrides or [], draws, seed)
    if self_test:
        caught = _self_test(mechanism.self_test(setting, target), as_json)
        raise typer.Exit(0 if caught else 1)
    report = mechanism.audit(setting, target)
    if out is not None:
        with os_errors_as(ConfigError, str(out), "name a file that can be written"):
            durable.replace_text(out, json.dumps(report.to_json(), allow_nan=False, indent=1) + "\n")
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    if not report.holds:
        raise typer.Exit(1)


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
