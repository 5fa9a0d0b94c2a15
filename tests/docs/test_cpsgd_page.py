"""The page on cpSGD: its table is what the accountant says."""

from __future__ import annotations

from pathlib import Path

from fedspa.algorithms.cpsgd.accounting import composed_epsilon
from fedspa.algorithms.cpsgd.event import BinomialEvent
from fedspa.algorithms.cpsgd.plan import trials_for_compression
from fedspa.privacy.accounting import epsilon
from fedspa.runs.statement import shown
from reproduction.cpsgd_theorem import published_epsilon

PAGE = Path(__file__).parents[2] / "docs" / "cpsgd.md"
START, END = "<!-- table: made by tests/docs/test_cpsgd_page.py -->\n", "<!-- end -->"


def table() -> str:
    lines = ["| p | b | trials m | ε | rotated: ε | by the bound | as printed | only under secure aggregation: ε |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for compression in (0.1, 0.2, 0.3, 0.4, 0.5):
        for bits in (1, 4):
            if 2 ** (32 * compression) < 2**bits + 1:
                continue
            trials = trials_for_compression(compression, bits)
            local, rotated, summed = (
                BinomialEvent(10, 600, 1, 21840, bits, trials, rotation, agents)
                for rotation, agents in ((False, 1), (True, 1), (False, 100))
            )
            costs = [
                epsilon({local: 45}, 1e-3, neighbours="replace-one"),
                epsilon({rotated: 45}, 1e-3, neighbours="replace-one"),
                composed_epsilon({local: 45}, 1e-3),
                published_epsilon(local, 45, 1e-3),
                epsilon({summed: 45}, 1e-3, neighbours="replace-one"),
            ]
            lines.append(f"| {compression} | {bits} | {trials:,} | {' | '.join(map(shown, costs))} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_what_the_accountant_says() -> None:
    text = PAGE.read_text("utf-8")
    found = text.split(START)[1].split(END)[0]
    assert found == table(), f"write this into {PAGE.name}:\n{table()}"
