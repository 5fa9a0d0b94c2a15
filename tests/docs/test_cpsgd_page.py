"""The page on cpSGD: its table is what the accountant says."""

from __future__ import annotations

from pathlib import Path

from fedspa.privacy.binomial import composed_epsilon
from fedspa.privacy.binomial_plan import trials_for_compression
from fedspa.privacy.event import BinomialEvent
from fedspa.runs.statement import shown

PAGE = Path(__file__).parents[2] / "docs" / "cpsgd.md"
START, END = "<!-- table: made by tests/docs/test_cpsgd_page.py -->\n", "<!-- end -->"


def table() -> str:
    lines = ["| p | b | trials m | local: ε | local, rotated: ε | as printed: ε | only under secure aggregation: ε |"]
    lines.append("|---|---|---|---|---|---|---|")
    for compression in (0.1, 0.2, 0.3, 0.4, 0.5):
        for bits in (1, 4):
            if 2 ** (32 * compression) < 2**bits + 1:
                continue
            trials = trials_for_compression(compression, bits)
            costs = [
                composed_epsilon(
                    {BinomialEvent(10, 600, 1, 21840, bits, trials, rotation, agents): 45}, 1e-3, published=published
                )
                for rotation, agents, published in (
                    (False, 1, False),
                    (True, 1, False),
                    (False, 1, True),
                    (False, 100, False),
                )
            ]
            lines.append(f"| {compression} | {bits} | {trials:,} | {' | '.join(map(shown, costs))} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_what_the_accountant_says() -> None:
    text = PAGE.read_text("utf-8")
    found = text.split(START)[1].split(END)[0]
    assert found == table(), f"write this into {PAGE.name}:\n{table()}"
