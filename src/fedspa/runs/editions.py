"""What two fedspas must have in common to take part in one run. The version of the package is none of it.

Each edition is one more with every change after which two ends would misunderstand each other: a server that adds up
other coordinates than an agent sent, or states an ε that the agent's ledger does not have. Terms carry them, so that an
agent refuses before it pays, and checkpoints carry them, so that a run goes on only with what it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fedspa.secagg import message
from fedspa.wire import payload

# Which coordinates a seed means: the test vectors of docs/wire.md.
MASK: Final = 1
# What an event costs. The server states ε, and each agent's ledger counts it: both by the same prices.
PRICING: Final = 2

EDITIONS: Final[Mapping[str, int]] = {
    "mask": MASK,
    "payload": payload.VERSION,
    "pricing": PRICING,
    "sum": message.VERSION,
}


def written() -> str:
    """As terms and checkpoints carry them."""
    return ", ".join(f"{name} {number}" for name, number in sorted(EDITIONS.items()))


def differences(theirs: str) -> list[str]:
    """What another end has in another edition, in words; empty where the two understand each other."""
    told = dict(part.strip().rpartition(" ")[::2] for part in theirs.split(","))
    ours = {name: str(number) for name, number in EDITIONS.items()}
    return [
        f"{name} {told.get(name, 'none')[:20]} there and {ours.get(name, 'none')} here"
        for name in sorted(told.keys() | ours.keys())
        if told.get(name) != ours.get(name)
    ]
