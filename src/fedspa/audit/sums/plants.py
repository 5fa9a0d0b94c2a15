"""Mistakes that any mechanism can make under secure aggregation. They are never used to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from fedspa.agent.participate import Invitation
from fedspa.algorithms import Agent, Terms
from fedspa.algorithms.base import Answer
from fedspa.audit.sums.cohort import Summed, answering
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.secagg.message import decode, encode, upload


def _keystream(target: Summed) -> Summed:
    """One mask for all rounds: its key is bound to the members alone."""

    def send(invitation: Invitation, agents: Mapping[str, Agent], engine: Engine) -> dict[str, bytes]:
        session = invitation.session
        assert session is not None
        first = replace(session, run="any", round=0, attempt=1, terms=bytes(len(session.terms)))
        made = target.send(replace(invitation, session=first), agents, engine)
        return {name: encode(decode(payload, first), session) for name, payload in made.items()}

    return replace(target, send=send)


def _retry(target: Summed) -> Summed:
    """An agent that keeps the key of a round, and takes it again for the next attempt."""
    kept: dict[tuple[int, int], bytes] = {}
    true = target.algorithm.respond

    def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        same = [replace(a, key=kept.setdefault((terms.round, a.number), a.key)) for a in agents]
        return true(theta, terms, same, engine)

    return answering(target, respond)


def _missing(target: Summed) -> Summed:
    """A sum over n − 1 members, counted as n: the masks of one who is silent are lifted, and its noise is not there."""

    def send(invitation: Invitation, agents: Mapping[str, Agent], engine: Engine) -> dict[str, bytes]:
        made = target.send(invitation, agents, engine)
        silent, session = max(agents), invitation.session
        secret = agents[silent].secret
        assert session is not None
        assert secret is not None
        nothing = np.full(session.count, round(target.law(1).mean()), np.int64)
        return made | {silent: upload(nothing, session, silent, secret)}

    return replace(target, send=send)


def _colluders(target: Summed) -> Summed:
    """One more member colludes than the plan says."""
    if target.colluders >= target.aggregation.members - 1:
        raise ConfigError("--plant colluders: the plan lets all others collude already; there is no mistake in it")
    return replace(target, beyond=target.beyond + 1)


PLANTS: dict[str, Callable[[Summed], Summed]] = {
    "keystream": _keystream,
    "retry": _retry,
    "missing": _missing,
    "colluders": _colluders,
}
