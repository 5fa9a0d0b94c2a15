"""The model card: what the report says of a run, as Markdown that can go along with the model.

Every sentence and figure is the report's own (`parts`), read from the run's folder and held against its ledger in the
same way. It has no wording of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedspa import __version__, durable
from fedspa.data.columns import Category, Date, Flag, Number
from fedspa.errors import FedspaError, os_errors_as, printable
from fedspa.report.parts import RunParts, describe
from fedspa.report.record import RunRecord, read
from fedspa.runs.guarantee import shown_bytes


def card(folder: Path) -> str:
    """Return the card of the run in `folder`."""
    return "\n\n".join(_blocks(describe(read(folder)))) + "\n"


def write(text: str, path: Path) -> Path:
    """Write a card to `path`, whole or not at all; return the path."""
    with os_errors_as(FedspaError, f"{path} cannot be written", "name another file"):
        durable.replace_text(path, text)
    return path


def _blocks(run: RunParts) -> Iterator[str]:
    guarantee, *others = run.cards
    yield f"# Model card: {as_text(run.name)}"
    headline = f"{guarantee.label}: {guarantee.value}"
    stated = f"**{as_text(headline)}**" + (f" ({as_text(guarantee.detail)})" if guarantee.detail else "")
    yield f"> **NOT PRIVATE.** {stated}" if guarantee.bad else stated
    if run.subtitle:
        yield as_text(run.subtitle)
    yield f"This card was made by fedspa {__version__} from the run's own files."
    if notes := [*run.problems, *run.warnings]:
        yield "## Read this first"
        yield "\n".join(f"- {as_text(note)}" for note in notes)
    yield "## The guarantee"
    for head, text in run.statement:
        yield f"**{as_text(head)}** {as_text(text)}"
    yield "## What it reaches"
    yield "\n".join(f"- **{as_text(card.label)}: {as_text(card.value)}**: {as_text(card.detail)}" for card in others)
    if run.by_class is not None:
        yield table(*run.by_class)
    if run.search is not None:
        yield as_text(f"{run.search.spent} {run.search.test}")
    if run.plan:
        yield "## The plan"
        yield "Everything that decides the guarantee. Sensitivity and noise are derived from the rest."
        yield table(["", "value", "meaning"], run.plan)
    if run.trained:
        yield "## What was trained"
        yield table(["", "as the run found it"], run.trained)
    if run.config:
        yield "## Settings"
        yield table(
            ["key", "value"],
            [(f"{section}.{key}", value) for section, values in run.config for key, value in values],
        )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], empty: str = "") -> str:
    """Return a table in Markdown; `empty` stands in for cells without text."""
    lines = [header, ["---"] * len(header)]
    cells = [[as_text(cell) or empty for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *cells])


def as_text(text: str) -> str:
    """Names and values may be anybody's: nothing in them is markup, and none of them ends a line or a cell."""
    return re.sub(r"([\\`<|\[\]])", r"\\\1", printable(text.replace("\u00a0", " ")))


# An annex to a data protection impact assessment (Article 35 GDPR), as Markdown.
#
# It has what the run's own files know of data, parties, measures and residual risk, and fields for what they cannot
# know.

TO_FILL_IN = "*to be filled in by the controller*"


def annex(folder: Path) -> str:
    """Return the annex of the run in `folder`."""
    run = read(folder)
    return "\n\n".join(_annex_blocks(run, describe(run))) + "\n"


def _annex_blocks(run: RunRecord, parts: RunParts) -> Iterator[str]:
    config, guarantee = run.config, parts.cards[0]
    yield f"# Annex to the impact assessment: {as_text(run.name)}"
    yield f"Made by fedspa {__version__} from the run's own files. It is about this run only, and is no legal advice."
    if notes := [*parts.problems, *parts.warnings]:
        yield "\n".join(f"- **{as_text(note)}**" for note in notes)
    yield "## 1. The processing"
    yield table(["", ""], [*parts.approval[:3], ("Legal basis", ""), ("Retention", "")], empty=TO_FILL_IN)
    yield as_text(f"{parts.subtitle}.")
    yield "## 2. Data"
    unit = "person, with all records that an agent holds of them," if config.data.person else "record"
    yield f"Protected is each {unit} of each agent. Records stay at their agents; what leaves is listed in section 3."
    if config.data.table is not None:
        yield table(["column", "kind", "range or categories", "use"], list(_columns(run)))
    yield "## 3. Parties, and what each receives"
    sums = config.privacy.adversary == "secure-aggregation"
    seen = "sums of masked updates over all agents of a round" if sums else "each agent's noisy update"
    _, uploads, each = run.sent
    yield table(
        ["party", "receives"],
        [
            (parts.approval[3][1], "the model of each round; its own records stay with it"),
            ("server", f"{seen}: {uploads:,} in all, {shown_bytes(each)} each; and its own held-out records"),
            ("anyone who gets the model", "its parameters, which the same guarantee covers"),
        ],
    )
    yield "## 4. Measures"
    for head, text in parts.statement:
        yield f"**{as_text(head)}** {as_text(text)}"
    yield (
        "An agent writes the cost to its ledger before a record is read for training, and refuses what its budget or "
        f"policy does not allow. {as_text(parts.ledger_note)}"
    )
    if parts.plan:
        yield table(["", "value", "meaning"], parts.plan)
    yield "## 5. Residual risk"
    yield f"**{as_text(guarantee.label)}: {as_text(guarantee.value)}.** {as_text(guarantee.detail)}"
    if parts.history:
        yield "All runs of these agents in the same ledger:"
        yield table(["run", "agents", "participations", "first", "last"], parts.history)
    yield "Not covered: see “What is not covered” in section 4. Further risks and their treatment: " + TO_FILL_IN
    yield "## 6. Necessity and proportionality"
    yield "\n".join(
        f"- {as_text(card.label)}: {as_text(card.value)} ({as_text(card.detail)})" for card in parts.cards[1:]
    )
    yield f"Why less data, or a smaller ε, would not serve the purpose: {TO_FILL_IN}"
    yield "## 7. Opinion and decision"
    roles = ("Data protection officer", "Controller", "Views of those concerned, or why they were not asked")
    yield table(["", "name, date, signature"], [(role, "") for role in roles], empty=TO_FILL_IN)


def _columns(run: RunRecord) -> Iterator[tuple[str, str, str, str]]:
    assert run.config.data.table is not None
    for name, column in run.config.data.table.columns.items():
        values = ""
        if isinstance(column, Number):
            values = f"{column.range[0]:g} to {column.range[1]:g}"
        elif isinstance(column, Category):
            values = ", ".join(column.categories)
        elif isinstance(column, Date):
            values = " to ".join(column.range)
        elif isinstance(column, Flag):
            values = "yes or no"
        use = "learned" if getattr(column, "target", False) else "left out" if column.kind == "ignore" else "input"
        yield name, column.kind, values or "–", use
