"""An agent's side of a round: check the terms, pay, train, encode, mark as sent. Every transport calls this.

    terms ─► policy.check ─► records ─► policy.admit ─► ledger.reserve ─► train ─► encode ─► outbox ─► ledger.release

Under secure aggregation an update is masked instead of encoded: nobody may read it alone.

Whatever goes wrong at a site ends in a `Refusal` with one of `CODES`. Only the code travels; the text stays here.

Functions take a list of agents: those of a simulated round pay in one durable write and train as one piece of work.
A deployed agent answers through `participate_once`. Each entry of its ledger authorises exactly one training run, by
the process that made the entry. Retries return the stored payload, which was released before it first left, or `spent`
if there is none. So a server that asks again, breaks the training or kills the process gets no second noise from an
entry, and no second message under one mask (docs/deployment.md has the proof).

Everything that is wrong with a cohort is refused as `aggregation`, before anything is paid. None of it depends on a
record: names, keys and numbers are the server's words and the site's own files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, get_args

from torch import Tensor

from fedspa import durable
from fedspa.agent.ledger.ledger import NUMBERED, Ledger
from fedspa.agent.policy import Code, Policy, PolicyRefusal
from fedspa.algorithms import Agent, Algorithm, Terms
from fedspa.algorithms.base import Answer, score_terms, session_of
from fedspa.engine.local import Engine
from fedspa.errors import (
    BudgetError,
    ConfigError,
    DataError,
    FedspaError,
    LedgerError,
    PayloadError,
    PrivacyError,
    os_errors_as,
)
from fedspa.learning.forward import torch_threads
from fedspa.privacy.budget import PrivacyBudget
from fedspa.privacy.event import shown
from fedspa.randomness.streams import NoiseMode, derive_key
from fedspa.secagg import recovery
from fedspa.secagg.keys import Roster, SecretKey
from fedspa.secagg.masking import decode, upload
from fedspa.secagg.recovery import Progress, Step, answer, survivors_in
from fedspa.secagg.session import Session
from fedspa.wire.payload import Coding

logger = logging.getLogger("fedspa.agent")

# The policy's own codes, then ours; docs/deployment.md says what each means.
_OWN: Final = ("aggregation", "terms", "noise", "data", "ledger", "stale", "spent", "internal")
CODES: Final = frozenset({*get_args(Code), *_OWN})
# An agent that gave one of these would give it again: it is not asked again in the same run.
FINAL_CODES: Final = CODES - {"ledger", "stale", "spent", "internal"}

_CODE_OF = {BudgetError: "budget", LedgerError: "ledger", DataError: "data", ConfigError: "terms"}
_ANSWERED = {"event": "answered", "code": None}  # of a log's line
_HEADER = struct.Struct("<4sII")  # of a file in an outbox: magic, round, attempt
_MAGIC = b"FSPB"


class Refusal(FedspaError):
    """No update. Only `code` may travel to the server; the text is for the agent."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code: Final = code if code in CODES else "internal"


@contextmanager
def refusing() -> Iterator[None]:
    """Turn errors of a site into Refusals."""
    try:
        yield
    except PolicyRefusal as error:
        raise Refusal(error.code, str(error)) from error
    except tuple(_CODE_OF) as error:
        raise Refusal(next(code for kind, code in _CODE_OF.items() if isinstance(error, kind)), str(error)) from error


def agent_name(number: int) -> str:
    """Return the name of a simulated agent in ledgers. A deployed one has a name of its own."""
    return f"{NUMBERED}{number}"


def message_name(t: int, attempt: int = 1) -> str:
    """Return the name of round t in ledgers."""
    return f"round-{t}" if attempt == 1 else f"round-{t}-attempt-{attempt}"


@dataclass(frozen=True, slots=True)
class Request:
    """A round of `run` as its agents see it. `noise` is None where nothing is private. `session` is what updates are
    masked in, where the plan counts on the server seeing their sum only. Where there are `models`, a θ per row, nobody
    trains: agents say by noisy counts how well each meets their records, which is a participation like any other."""

    run: str
    algorithm: Algorithm
    terms: Terms
    theta: Tensor
    coding: Coding
    noise: NoiseMode | None
    attempt: int = 1
    session: Session | None = None
    models: Tensor | None = None

    @property
    def answered(self) -> Terms:
        """The terms that an answer is made and sent under."""
        return self.terms if self.models is None else score_terms(self.terms, len(self.models))

    @property
    def message(self) -> str:
        """The name of the request in the agents' ledgers."""
        return message_name(self.terms.round, self.attempt)


@dataclass(frozen=True, slots=True)
class Sent:
    """A payload that was made for an attempt at `round`."""

    round: int
    payload: bytes
    attempt: int = 1

    @property
    def place(self) -> tuple[int, int]:
        """The position among all messages of the run: a later one is larger."""
        return self.round, self.attempt


class Outbox:
    """The folder `<ledger>.outbox` with the last payload of each run, one file per run and agent.

    A server that was restored from its checkpoint asks again for the round that it was in. Its agents have paid for it
    and may send the same bytes again at no cost; noise drawn anew would be a new spend. The folder holds only
    what was about to leave anyway. Agents that share a ledger share it.
    """

    def __init__(self, ledger: Path, agent: str) -> None:
        self._folder = ledger.with_name(ledger.name + ".outbox")
        self._agent = hashlib.blake2b(agent.encode(), digest_size=8).hexdigest()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process is inside, and keep the others out. The kernel's lock on the folder ends with the
        process, however that ends."""
        with self._explained("use"):
            if not self._folder.exists():
                self._folder.mkdir(exist_ok=True)
                durable.force_folder(self._folder.parent)
        if os.name != "posix":
            yield
            return
        import fcntl

        with self._explained("lock"):
            folder = os.open(self._folder, os.O_RDONLY)
        try:
            with self._explained("lock"):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def last(self, run: str) -> Sent | None:
        """Return the newest payload of `run`, or None if there is none that can be read."""
        with self._explained("read"):
            try:
                return _parse_sent(self._path(run).read_bytes())
            except FileNotFoundError:
                return None

    def places(self) -> dict[str, tuple[int, int]]:
        """Return the place of the newest payload of each run, as far as it can be read."""
        found = {}
        with self._explained("read"):
            for path in sorted(self._folder.glob(f"{self._agent}-*.payload")):
                with path.open("rb") as file:
                    if (sent := _parse_sent(file.read(_HEADER.size))) is not None:
                        found[path.stem.removeprefix(f"{self._agent}-")] = sent.place
        return found

    def put(self, run: str, sent: Sent) -> None:
        """Store a payload: durable on return, and whole or absent at any instant. Only inside `locked`."""
        with self._explained("write"):
            durable.replace_bytes(self._path(run), _HEADER.pack(_MAGIC, *sent.place) + sent.payload)

    def progress(self, run: str) -> tuple[Session, Progress] | None:
        """Return the newest session of `run` that can be recovered, and what was answered in it."""
        with self._explained("read"):
            try:
                text = self._path(run).with_suffix(".session").read_text("utf-8")
            except FileNotFoundError:
                return None
        try:
            found = json.loads(text)
            return Session.of_json(found["session"]), Progress(tuple(found["survivors"]), found["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise LedgerError(f"{self._folder} holds a damaged session of run {run}; it cannot be recovered") from error

    def put_progress(self, session: Session, progress: Progress) -> None:
        """Store what was answered in a session, as `put` stores a payload. Only inside `locked`."""
        found = {"session": session.to_json(), **asdict(progress)}
        with self._explained("write"):
            durable.replace_text(self._path(session.run).with_suffix(".session"), json.dumps(found))

    def _explained(self, do: str) -> AbstractContextManager[None]:
        return os_errors_as(LedgerError, f"cannot {do} {self._folder}", "free disk space or fix permissions")

    def _path(self, run: str) -> Path:
        return self._folder / f"{self._agent}-{run}.payload"


def _parse_sent(data: bytes) -> Sent | None:
    """Return what a file in an outbox begins with; None if it is not one of ours."""
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        return None
    _, round_, attempt = _HEADER.unpack_from(data)
    return Sent(round_, data[_HEADER.size :], attempt)


def check_terms(request: Request, policy: Policy | None, *, simulated: bool) -> None:
    """Refuse what can be refused before a record is read."""
    plan = request.terms.plan
    if simulated and policy is None:
        return
    if plan is None:
        raise PolicyRefusal(
            "not-private", f"algorithm {request.algorithm.name} is not private; this agent runs private algorithms only"
        )
    if request.noise == "seeded" and not simulated:
        raise Refusal("noise", "the server asks for seeded noise, which it could subtract; only simulations have it")
    assert policy is not None
    policy.check(plan)


def participate_once(request: Request, name: str, agent: Agent, engine: Engine, path: Path, policy: Policy) -> bytes:
    """Return a deployed agent's payload, or raise a Refusal: one entry of the ledger at `path`, one training, one
    answer."""
    run, message, t, plan = request.run, request.message, request.terms.round, request.terms.plan
    place = t, request.attempt
    assert plan is not None  # `check_terms` lets nothing else through
    outbox = Outbox(path, name)
    with outbox.locked(), Ledger.open(path, create=False) as ledger:
        # Computing ε takes a fraction of a second and its result is cached: it is not to hold the lock of the ledger.
        ledger.would_exceed(name, plan.event, policy.cap, announced=plan.participations)
        with ledger.transaction():  # other tools spend from this ledger too: check and payment are one step
            check_newest(ledger, outbox, name)
            last = outbox.last(run)
            if last is not None and place < last.place:
                raise Refusal("stale", f"{message} of run {run}; {message_name(*last.place)} was already answered")
            entry = ledger.find(name, run, message)
            if entry is not None:
                if last is not None and last.place == place and entry.digest == digest(last.payload):
                    payload = _again(last.payload, request)
                    logger.info("%s of run %s: the stored answer again, nothing spent", message, run, extra=_ANSWERED)
                    return payload
                raise Refusal("spent", f"{message} of run {run} was paid for, and there is no payload of it to send")
            policy.admit(plan, ledger, name, run, message)
            pay(request, [name], ledger, policy.cap)
        try:
            payload = payloads(request, {name: agent}, engine)[name]
            if request.session is not None and request.session.threshold:
                outbox.put_progress(request.session, Progress(tuple(request.session.members)))
            outbox.put(run, Sent(t, payload, request.attempt))
            release(request, {name: payload}, ledger)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            logger.exception("%s of run %s was paid for and failed; the agent skips it", message, run)
            raise Refusal("spent", f"{message} of run {run} failed after it was paid for") from error
        limit, spent = policy.cap.limits[0], "?"
        with suppress(FedspaError):  # the payload was released, and is to leave
            spent = shown(limit.total(ledger.spent(name), ledger.first_plan(name)).epsilon)
        terms = shown(limit.epsilon), limit.delta, limit.neighbours
        logger.info(
            "%s of run %s: answered, ε = %s of %s (δ = %g, %s) spent", message, run, spent, *terms, extra=_ANSWERED
        )
    return payload


def check_newest(ledger: Ledger, outbox: Outbox, name: str) -> None:
    """Raise if the ledger knows the records by another name, or lacks the round of any update in the outbox: that was
    paid for before it was stored, so that an old copy of the ledger was put back together with its anchor."""
    ledger.require_known(name)
    for run, (t, attempt) in outbox.places().items():
        if ledger.find(name, run, message_name(t, attempt)) is None:
            raise LedgerError(
                f"{ledger.path} lacks round {t} of run {run}, whose update is in its outbox: it is an old copy; put "
                "the newest back (where there is none: count that round as spent, then remove the outbox)"
            )


def pay(request: Request, names: Iterable[str], ledger: Ledger, cap: PrivacyBudget | None) -> None:
    """Write the round into the ledger for each of them, durably before any of them trains."""
    plan = request.terms.plan
    assert plan is not None
    event = plan.event.with_noise(request.noise)
    ledger.reserve_many(
        dict.fromkeys(names, event), request.run, request.message, cap=cap, announced=plan.participations
    )


def respond(request: Request, agents: Mapping[str, Agent], engine: Engine) -> Iterator[tuple[str, Answer]]:
    """Yield each agent's answer by its name, trained as one piece of work. `encode_answer` makes it ready to send."""
    algorithm, terms, models = request.algorithm, request.answered, request.models
    plan = request.terms.plan
    if (plan is not None and plan.aggregation is not None) != (request.session is not None):
        raise PrivacyError("updates are masked, in a session, if and only if the plan's ε is of sums")
    start = request.theta if models is None else models.new_zeros(len(models))
    with torch_threads(1):
        yield from zip(agents, algorithm.respond(start, terms, list(agents.values()), engine))


def payloads(request: Request, agents: Mapping[str, Agent], engine: Engine) -> dict[str, bytes]:
    """Return what each of the agents sends, by its name."""
    answers = respond(request, agents, engine)
    return {name: encode_answer(request, name, agents[name], answer) for name, answer in answers}


def encode_answer(request: Request, name: str, agent: Agent, answer: Answer) -> bytes:
    """Return what the agent sends: its update, encoded; or masked, where the plan counts on the noise of others. The
    pairwise masks cancel only in the sum over the cohort."""
    if request.session is None:
        return request.algorithm.encode(answer, request.answered, request.coding)
    if agent.secret is None:
        raise PrivacyError(f"{name} has no key to mask its update with")
    if request.session.threshold:
        return recovery.upload(answer.values, request.session, name, agent.secret, agent.key)
    return upload(answer.values, request.session, name, agent.secret)


def _again(payload: bytes, request: Request) -> bytes:
    """Return a payload that was sent before. It was masked in one session, and is valid in no other."""
    if request.session is not None:
        try:
            decode(payload, request.session)
        except PayloadError as error:
            raise Refusal("spent", f"{request.message} was answered in another session: {error}") from error
    return payload


def release(request: Request, sent: Mapping[str, bytes], ledger: Ledger) -> None:
    """Write into the ledger what each agent is about to send, by the digest of its bytes."""
    ledger.release_many({name: digest(payload) for name, payload in sent.items()}, request.run, request.message)


def digest(payload: bytes) -> str:
    """Return the digest of a payload that its ledger entry holds."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


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
