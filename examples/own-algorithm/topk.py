"""Fed-SPA with top-k uploads: an algorithm from outside the package.

An agent trains as in Fed-SPA and sends only the largest of its noisy values; the others become 0, which the entropy
coder writes in few bits. The choice is made after the noise. It is post-processing: the ledger holds Fed-SPA's event,
and ε is the same. A choice before the noise would tell of the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedspa.algorithms import Agent, Algorithm, Engine, Terms, Update, chosen

FED_SPA = chosen("fedspa", "local")


class Options(BaseModel):
    """The config's `[algorithm.options]`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    keep: Annotated[float, Field(gt=0, le=1)] = 0.1


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
    """Return each agent's update with all but the largest share `keep` of its values set to 0."""
    for update in FED_SPA.respond(theta, terms, agents, engine):
        values = update.values.copy()
        kept = max(1, round(terms.options["keep"] * len(values)))
        values[np.argpartition(np.abs(values), -kept)[:-kept]] = 0
        yield replace(update, values=values)


TOP_K = Algorithm(respond, FED_SPA.mechanism, sparse=True, options=Options)
