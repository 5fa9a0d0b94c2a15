"""The model card: what the report says of a run, as Markdown that can go along with the model.

Every sentence and figure is the report's own (`parts`), read from the run's folder and held against its ledger in the
same way. Nothing is worded a second time here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedspa import __version__, durable
from fedspa.errors import FedspaError, printable, worded
from fedspa.report.parts import RunParts, page
from fedspa.report.record import read


def card(folder: Path) -> str:
    """The card of the run in `folder`."""
    [run] = page([read(folder)]).runs
    return "\n\n".join(_blocks(run)) + "\n"


def write(text: str, path: Path) -> None:
    """Write a card to `path`, whole or not at all."""
    with worded(FedspaError, lambda why: f"{path} cannot be written: {why}; name another file"):
        durable.replace_text(path, text)


def _blocks(run: RunParts) -> Iterator[str]:
    guarantee, *others = run.cards
    yield f"# Model card: {_text(run.name)}"
    told = f"{guarantee.label}: {guarantee.value}"
    stated = f"**{_text(told)}**" + (f" ({_text(guarantee.detail)})" if guarantee.detail else "")
    yield f"> **NOT PRIVATE.** {stated}" if guarantee.bad else stated
    if run.subtitle:
        yield _text(run.subtitle)
    yield f"This card was made by fedspa {__version__} from the run's own files."
    if notes := [*run.problems, *run.warnings]:
        yield "## Read this first"
        yield "\n".join(f"- {_text(note)}" for note in notes)
    yield "## The guarantee"
    for head, text in run.statement:
        yield f"**{_text(head)}** {_text(text)}"
    if run.epsilons:
        yield _table(["", "ε", "neighbours", "sampling", "accountant", ""], run.epsilons)
    yield "## What it reaches"
    yield "\n".join(f"- **{_text(card.label)}: {_text(card.value)}**: {_text(card.detail)}" for card in others)
    if run.by_class is not None:
        yield _table(*run.by_class)
    if run.search is not None:
        yield _text(f"{run.search.spent} {run.search.test}")
    if run.plan:
        yield "## The plan"
        yield "Everything that decides the guarantee. Sensitivity and noise are derived from the rest."
        yield _table(["", "value", "meaning"], run.plan)
    if run.trained:
        yield "## What was trained"
        yield _table(["", "as the run found it"], run.trained)
    if run.config:
        yield "## Settings"
        yield _table(
            ["key", "value"],
            [(f"{section}.{key}", value) for section, values in run.config for key, value in values],
        )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_text(cell) for cell in line)} |" for line in lines)


def _text(text: str) -> str:
    """Names and values may be anybody's: nothing in them is markup, and none of them ends a line or a cell."""
    return re.sub(r"([\\`<|\[\]])", r"\\\1", printable(text.replace("\u00a0", " ")))
