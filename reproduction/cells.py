"""The runs of one setting over its seeds, as one cell: means, spreads, and what they cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from fedspa.runs.config import Config
from fedspa.runs.guarantee import SEEDED
from intervals import largest, spread
from reproduction.sweep import Outcome

# Taken over from the summaries as they are: the same for every seed, or of the first where they may differ a little.
_SAME = (
    *("delta", "neighbours", "sampling", "accountant", "unit", "noise", "noise_multiplier", "coding", "compression"),
    *("dimension", "rounds", "agents", "engine", "tf32", "adversary", "members", "colluders"),
)
# What may differ from seed to seed, and is stated as it was for the one that paid most.
_LARGEST = ("epsilon", "epsilon_replace_one", "epsilon_published", "participations_max")


# Of a cell none of whose runs is over.
NOT_RUN = "not run"


def cell(config: Config, outcomes: Sequence[Outcome], seeds: int) -> dict[str, Any]:
    """JSON for `outcomes`, of `seeds` that were asked for. Accuracies in %; `status` is the worst of the seeds.

    `sound` says whether the ε beside it is a guarantee; where `noise` is `seeded`, whether it would be one with secure
    noise. ε is the largest over agents and seeds.
    """
    done = [outcome.summary for outcome in outcomes if outcome.summary is not None]
    failed = [outcome for outcome in outcomes if outcome.status != "done"]
    found: dict[str, Any] = {
        "status": failed[0].status if failed else "done" if len(done) == seeds else "running",
        "reason": failed[0].reason if failed else "",
        "seeds": len(done),
        "sound": config.private and all(run["private"] or run.get("not_private_because") == SEEDED for run in done),
    }
    if not done:
        return found
    return found | {
        "accuracy_best": spread([100 * run["accuracy_best"] for run in done]),
        "accuracy_last": spread([100 * run["accuracy_last"] for run in done]),
        **{key: done[0].get(key) for key in _SAME},
        **{key: largest([run.get(key) for run in done]) for key in (*_LARGEST, "epsilon_worst_case")},
        "private": all(run["private"] for run in done),
        "payload_bytes": statistics.mean(run["payload_bytes"] for run in done),
        "uplink_bytes": statistics.mean(run["uplink_bytes"] for run in done),
        "per_round": config.federation.per_round,
        "first_seed": config.run.seed,
        "seconds": round(statistics.mean(run["seconds"] for run in done), 1),
    }


def origin(outcomes: Iterable[Outcome]) -> dict[str, list[str]]:
    """The commits and machines that made these runs."""
    ended = list(outcomes)
    return {
        "commits": sorted({commit or "unknown" for outcome in ended for commit in outcome.commits}),
        "hardware": sorted({words for outcome in ended for words in outcome.hardware}),
    }


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, ["---"] * len(columns), *lines))
