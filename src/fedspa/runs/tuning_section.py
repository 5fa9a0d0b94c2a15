"""The section [tuning] of a config: trials within the run. Its keys are described as those of `sections`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedspa.runs.section import Bounded, Section, Setting, Times

MOST_CANDIDATES = 64

ScoredBy = Literal["server", "agents"]


class Tuning(Section):
    """Trials within the run: its first rounds try settings, and the best of them go on. `fedspa tune` fills it in."""

    candidates: Annotated[list[dict[str, Setting]], Field(min_length=1, max_length=MOST_CANDIDATES)] | None = Field(
        None,
        description='Settings to try, as in `[{ "algorithm.server_lr" = 30.0 }, { "algorithm.server_lr" = 90.0 }]`: '
        "keys that leave the cost of a participation as it is. Unset, the run has no trials.",
    )
    rounds: Times | None = Field(
        None,
        description="The most of `federation.rounds` that are for trials; unset, the fewest that halving the "
        "candidates takes.",
    )
    ahead: Annotated[list[list[Bounded]], Field(max_length=MOST_CANDIDATES)] | None = Field(
        None,
        description="For each candidate, what its score is expected to gain from its first, second, … round to the "
        "end. Trials are compared by their score plus that: what learns slowly at first is not held against it.",
    )
    scored_by: ScoredBy | None = Field(
        None,
        description="Who scores trials: the `server`, by `data.holdout`, or the `agents`, each by a noisy count over "
        "its own records, in rounds of their own that cost what a round of training does. Unset, the server where it "
        "holds records out.",
    )
