"""The guarantee in plain words, from a run's summary. No ε is ever shown without what it is relative to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def statement(summary: Mapping[str, Any]) -> str:
    if summary["epsilon"] is None:
        return "none: this algorithm has no differential privacy"
    other = ""
    if summary["neighbours"] != "replace-one":
        other = f"; ε = {summary['epsilon_replace_one']:.3f} under replace-one (pld)"
    return (
        f"(ε = {summary['epsilon']:.3f}, δ = {summary['delta']:g}) for each record of each agent, against the server "
        f"and all others: {summary['neighbours']}, {summary['sampling']} sampling, accountant {summary['accountant']}, "
        f"at most {summary['participations_max']} participations{other}"
    )
