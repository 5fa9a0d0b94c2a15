"""The guarantee in plain words, from a run's summary. No ε is ever shown without what it is relative to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def shown(epsilon: float) -> str:
    """ε to three digits, rounded up: a figure on a page may overstate a cost, never understate it."""
    return "∞" if math.isinf(epsilon) else f"{math.ceil(epsilon * 1000) / 1000:.3f}"


def statement(summary: Mapping[str, Any]) -> str:
    if summary["epsilon"] is None and summary["delta"] is None:
        return "none: this algorithm has no differential privacy"
    if summary["epsilon"] is None:
        return "NONE: these settings are outside the algorithm's theorem (see the notes)"
    other = ""
    if summary["neighbours"] != "replace-one":
        other = f"; ε = {shown(summary['epsilon_replace_one'])} under replace-one (pld)"
    if summary["epsilon_total"] is not None:
        other += f"; ε = {shown(summary['epsilon_total'])} with all runs in the ledger (pld)"
    flaw = "" if summary["private"] else "NOT PRIVATE (see the notes); were the clip value given, "
    against = "against the server and all others"
    if summary["adversary"] != "local":
        flaw = "NOT PRIVATE against the server (see the notes); under secure aggregation, which was not run, "
        against = "against who sees only the sum over all agents"
    return (
        f"{flaw}(ε = {shown(summary['epsilon'])}, δ = {summary['delta']:g}) for each record of each agent, {against}: "
        f"{summary['neighbours']}, {summary['sampling']} sampling, "
        f"accountant {summary['accountant']}, at most {summary['participations_max']} participations{other}"
    )
