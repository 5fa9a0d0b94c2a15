"""cpSGD (Agarwal, Suresh, Yu, Kumar, McMahan, NeurIPS 2018): whole numbers with Binomial noise. A plug-in: everything
that knows of it is in this folder, behind the interface that anybody's algorithm has.

    plan.py             the mechanism: a plan
    accounting.py       what a participation does, and what that costs (docs/how-it-works.md)
    respond.py          rounding, noise and payload of an agent's answer; the server's estimate
    audit.py            attacks on all of it
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedspa.algorithms.algorithm import Algorithm, Imported, for_sums
from fedspa.algorithms.cpsgd.plan import BINOMIAL, MOST_TRIALS


class CpsgdOptions(BaseModel):
    """The config's `[algorithm.options]`. Of `trials`, `compression` and `privacy.epsilon` exactly one is given."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    bits: Annotated[int, Field(ge=1, le=16)] = Field(4, description="b: gradients are rounded onto 2^b levels.")
    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = Field(
        None, description="m: Binomial(m, 1/2) noise in each value."
    )
    compression: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="p = log2(m + 2^b)/32, which decides the trials m."
    )


_RESPOND = "fedspa.algorithms.cpsgd.respond"
CPSGD = for_sums(
    Algorithm(
        Imported(f"{_RESPOND}:respond"),
        BINOMIAL,
        encode=Imported(f"{_RESPOND}:encode"),
        decode=Imported(f"{_RESPOND}:decode"),
        mask="shared",  # none is drawn: all coordinates travel
        options=CpsgdOptions,
        audit="fedspa.algorithms.cpsgd.audit:AUDIT",
    ),
    Imported(f"{_RESPOND}:mean"),
)
