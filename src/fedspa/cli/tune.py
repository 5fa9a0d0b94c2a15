"""`fedspa tune`: find settings and train with them, within one budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspa.cli import run as running
from fedspa.cli.screen import print_json, show_facts, show_table
from fedspa.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fedspa.result import RunResult


SHARE = 0.2


def tune(
    config: running.Source = None,
    epsilon: Annotated[
        float | None, typer.Option(help="ε of search and final training together (the config's).")
    ] = None,
    share: Annotated[float, typer.Option(help="The most of the rounds that trials may take.")] = SHARE,
    proxy: Annotated[
        bool | None,
        typer.Option(
            "--proxy/--no-proxy",
            help="Compare settings in proxy runs on the server's held-out records first, at no privacy cost (if there "
            "are any).",
        ),
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2", help="Values of a key to try as well, as in algorithm.server=average,momentum."
        ),
    ] = None,
    overrides: running.Overrides = None,
    out: running.Out = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Resume the interrupted tuning run in this folder.")
    ] = None,
    as_json: running.AsJson = False,
) -> None:
    """Find rate, clip and averaging, then train with them; search and training together cost the ε that is printed.

    Example: fedspa tune --set data.holdout=0.2 --epsilon 2 --share 0.2

    First come proxy runs on records that are not the agents', at no privacy cost; then trials in the run's own first
    rounds, each in the ledger before it runs. Ctrl-C stops after the round; --resume continues, also after a crash.
    """
    from fedspa import configs
    from fedspa.runs.config import load
    from fedspa.runs.rundir import check_is_run

    if resume is not None:
        other = (config, epsilon, proxy, space, out)
        elsewhere = all(word.partition("=")[0].strip() == "data.dir" for word in overrides or ())
        if any(given not in (None, []) for given in other) or share != SHARE or not elsewhere:
            raise ConfigError(
                "--resume continues the run as it began: give it alone, or with --json, or with --set data.dir=DIR "
                "if its data files have moved"
            )
        check_is_run(resume)
        settings = load(resume / "config.toml", overrides or ())
    else:
        given = [] if out is None else [f"run.out={json.dumps(str(out))}"]
        given += [] if epsilon is None else [f"privacy.epsilon={epsilon}", "privacy.noise_multiplier=none"]
        settings = load(None if config is None else configs.find(config), [*(overrides or ()), *given])

    from rich.console import Console

    from fedspa.report.parts import format_settings
    from fedspa.tuning.tune import ProxyRun, tune

    screen = Console(stderr=True)
    count = 0

    def compared(found: ProxyRun) -> None:
        nonlocal count
        count += 1
        if screen.is_terminal:
            score = "diverged" if found.score is None else f"{found.score:.4f}"
            screen.print(f"proxy run {count:>3}  {score}  {format_settings(found.settings)}", highlight=False)

    with running.stoppable(screen, "after this round, or this round of a proxy run") as asked:
        if resume is not None:
            result = tune(settings, resume=resume, stop=asked)
        else:
            wanted = _space(space or ())
            result = tune(settings, share=share, proxy=proxy, space=wanted, on_proxy=compared, stop=asked)
    if as_json:
        print_json(result.summary)
    else:
        show(result, Console())


def show(result: RunResult, screen: Console) -> None:
    """What a run shows, then the search within it, as the report has it."""
    from fedspa.report.parts import search
    from fedspa.report.record import read
    from fedspa.tuning.tune import BEST

    running.show(result, screen)
    found = search(read(result.folder))
    assert found is not None  # there are trials
    show_table(found.header, found.trials, screen, title="The search for settings")
    best = f"{result.folder / BEST} (`fedspa run` trains with them, without a search)"
    facts = (("Search", found.spent), ("Proxy runs", found.free), ("Test", found.test), ("Settings", best))
    show_facts([fact for fact in facts if fact[1]], screen)


def _space(words: list[str] | tuple[()]) -> dict[str, list[Any]]:
    from fedspa import toml

    found = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not equals or not values:
            raise ConfigError(f"--space {word}: it must read section.key=value,value, as in algorithm.ema=0,0.8")
        parsed = []
        for value in values.split(","):
            try:
                parsed.append(toml.parse(f"value = {value.strip()}")["value"])
            except ConfigError:
                parsed.append(value.strip())
        found[key.strip()] = parsed
    return found
