"""A member of a cohort: its name, its secret key and its pinned roster, and what it asks of a round before it masks.

Everything that is wrong with a cohort is refused as `aggregation`, before anything is paid. None of it depends on a
record: names, keys and numbers are the server's words and the site's own files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import Outbox, Refusal, Request, agent_name, digest, message_name
from fedspa.algorithms.base import session_of
from fedspa.errors import ConfigError, PrivacyError
from fedspa.randomness.streams import derive_key
from fedspa.secagg.keys import Roster, SecretKey
from fedspa.secagg.recovery import Step, answer, survivors_in


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a cohort: its own line of the roster has the key that it holds."""

    name: str
    secret: SecretKey
    roster: Roster

    def __post_init__(self) -> None:
        if self.roster.members.get(self.name) != self.secret.public:
            raise ConfigError(
                f"the roster has {'another key' if self.name in self.roster.members else 'no line'} for "
                f'{self.name!r}; this site\'s is {self.name} = "{self.secret.public.hex()}"'
            )

    @staticmethod
    def load(name: str, key: Path, roster: Path) -> Member:
        """Read the files that a site's operator keeps."""
        return Member(name, SecretKey.load(key), Roster.load(roster))

    def require_cohort(self, cohort: Sequence[str]) -> dict[str, bytes]:
        """Return names and public keys of the cohort, as this site knows them; or raise a Refusal."""
        if self.name not in cohort:
            raise Refusal("aggregation", f"the announced cohort of {len(cohort)} does not include {self.name}")
        try:
            return self.roster.cohort(cohort)
        except ConfigError as error:
            raise Refusal("aggregation", str(error)) from error

    def with_session(
        self, request: Request, cohort: Sequence[str], binding: bytes, *, recovery: bool = False
    ) -> Request:
        """Return the request with the session that this member masks in. The server must sum in the same session:
        with another roster, θ or terms at either end there would be no sum, and all would have paid for it."""
        members = self.require_cohort(cohort)
        try:
            session = session_of(
                *(request.run, request.attempt, members, request.algorithm, request.terms),
                *(request.theta, request.coding, request.noise),
                recovery=recovery,
            )
        except (ConfigError, PrivacyError) as error:
            raise Refusal("aggregation", str(error)) from error
        if session.binding != binding:
            raise Refusal(
                "aggregation",
                "the server's session is another than this site's: compare the digests of the rosters (`fedspa site "
                "roster`) and the versions of fedspa",
            )
        return replace(request, session=session)


def simulated_key(root: bytes, number: int) -> SecretKey:
    """Return the key of a simulated agent, for a simulation that has `root`."""
    return SecretKey(derive_key(root, "member", number))


def simulated_keys(root: bytes, numbers: Sequence[int]) -> dict[str, SecretKey]:
    """Return the keys of simulated agents, by name."""
    return {agent_name(number): simulated_key(root, number) for number in numbers}


# An agent's answers when a sum is recovered (secagg/recovery.py): one more question of a round that it answered.
#
# The round was paid for, and its ledger entry holds the digest of the one message that left. What is answered here is
# bound to that entry, is written down before it leaves, and is the same whenever it is asked again.

logger = logging.getLogger("fedspa.agent")


@dataclass(frozen=True, slots=True)
class Question:
    """What a server asks the member of a session, by the session's run and binding."""

    run: str
    binding: bytes
    step: Step
    body: bytes


def answer_exchange(question: Question, member: Member, agent: str, path: Path) -> bytes:
    """Return the answer of the agent whose ledger is at `path`, or raise a Refusal."""
    outbox = Outbox(path, agent)
    with outbox.locked(), Ledger.open(path, create=False) as ledger:
        found, sent = outbox.progress(question.run), outbox.last(question.run)
        if found is None or sent is None or found[0].binding != question.binding:
            raise Refusal("stale", "the question is about another session than the last that this agent answered in")
        session, progress = found
        if member.require_cohort(tuple(session.members)) != session.members:
            raise Refusal("aggregation", "the roster has changed since this agent masked its update for the session")
        message = message_name(session.round, session.attempt)
        entry = ledger.find(agent, question.run, message)
        if sent.place != (session.round, session.attempt) or entry is None or entry.digest != digest(sent.payload):
            raise Refusal("stale", f"{message} of run {question.run} has no released message, or a newer one has")
        try:
            survivors = survivors_in(session, question.step, question.body)
            advanced = progress.advanced(session, member.name, question.step, survivors)
            reply = answer(session, member.name, member.secret, advanced, question.step, question.body)
        except ConfigError as error:
            raise Refusal("aggregation", f"{message} of run {question.run}: {error}") from error
        if advanced != progress:
            outbox.put_progress(session, advanced)
    logger.info("%s of run %s: %s, %d survivors", message, question.run, question.step, len(survivors))
    return reply
