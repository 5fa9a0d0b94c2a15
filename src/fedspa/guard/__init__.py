"""A guard for anybody's private training: what it spends is written into a ledger before it runs, or it does not run.

    import fedspa

    fedspa.guard.create("ledger.sqlite")     # once, for these records
    guard = fedspa.guard.open("ledger.sqlite", agent="clinic", epsilon=3.0, delta=1e-5)
    with guard.spend(event):                 # fedspa's events, or dp_accounting's
        train()

An Opacus optimiser and a Flower app can be guarded too (docs/guard.md).
"""

from __future__ import annotations

from fedspa.guard.flower import flower_mod
from fedspa.guard.guard import Guard, create, open

__all__ = ["Guard", "create", "flower_mod", "open"]
