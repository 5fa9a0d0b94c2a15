"""What the agents of a simulation send: what deployed ones do, but for the pads of secure aggregation.

Pads cancel in the sum, cost a keystream per pair of members, and hide nothing in a process that has everybody's
records. The message is as long, and is checked as strictly; a deployed agent has no way here (`participate_once`).
"""

from __future__ import annotations

from collections.abc import Mapping

from fedspa.agent.participate import Invitation, payloads
from fedspa.algorithms import Agent
from fedspa.algorithms.base import Answer, finite
from fedspa.engine.task import Engine
from fedspa.secagg.message import encode
from fedspa.secagg.pads import residues
from fedspa.secagg.session import Session


def played(invitation: Invitation, agents: Mapping[str, Agent], engine: Engine) -> dict[str, bytes]:
    """Payloads by name. A PayloadError where a value is not finite, by which divergence is noticed."""
    return payloads(invitation, agents, engine, finite, unpadded)


def unpadded(session: Session, name: str, agent: Agent, answer: Answer) -> bytes:
    return encode(residues(answer.values, session), session)
