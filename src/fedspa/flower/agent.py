"""One participation of an agent: judge the terms, reserve, train, keep, release, answer. Free of Flower's messages.

    terms ─► policy.check ─► records ─► model's d ─► policy.admit ─► ledger.reserve
          ─► train ─► outbox ─► ledger.release ─► payload

Whatever goes wrong ends in a `Refusal` with one of `CODES`. Only the code travels; the text stays here. Before anything
is paid, no refusal depends on the records and on the server's words together: a server could move its words until the
answer turns, and so measure a record without noise and without end. Exceptions are what all neighbouring data share:
the shape of a record and, under fixed-size sampling, the number of records.

An entry of the ledger is trained for at most once, by whoever made it, and has one answer for ever: the payload that
was stored and released before it first left, or `spent` where there is none, for whatever reason. So a server that asks
again, breaks the training or kills the process draws no second noise from an entry (docs/deployment.md has the proof).
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import ExitStack
from typing import Final, get_args

import torch
from torch import Tensor

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.outbox import Outbox, Sent
from fedspa.agent.policy import Code, PolicyRefusal
from fedspa.algorithms import ALGORITHMS, Agent
from fedspa.algorithms.base import Answer, finite
from fedspa.engine.task import Engine
from fedspa.errors import BudgetError, ConfigError, DataError, FedspaError, LedgerError
from fedspa.flower.site import Site
from fedspa.flower.terms import Announcement
from fedspa.mechanisms import Plan
from fedspa.privacy.event import Event
from fedspa.randomness.streams import agent_key, root_key

logger = logging.getLogger("fedspa.agent")

# The policy's own codes, then ours: terms that are none, seeded noise, records that do not fit the terms, a ledger that
# cannot be used, a round that is over, one that was paid for and has no payload to send, and anything else.
CODES: Final = frozenset({*get_args(Code), "terms", "noise", "data", "ledger", "stale", "spent", "internal"})
# An agent that gave one of these would give it again: it is not asked again in the same run.
FINAL_CODES: Final = CODES - {"ledger", "stale", "spent", "internal"}


class Refusal(FedspaError):
    """No update. Only `code` may travel to the server; the text is for the agent."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code: Final = code if code in CODES else "internal"


def participate(site: Site, announcement: Announcement, theta: Tensor) -> bytes:
    """The payload of this agent for this round, paid for; or a Refusal."""
    try:
        return _participate(site, announcement, theta)
    except Refusal:
        raise
    except PolicyRefusal as error:
        raise Refusal(error.code, str(error)) from error
    except BudgetError as error:
        raise Refusal("budget", str(error)) from error
    except LedgerError as error:
        raise Refusal("ledger", str(error)) from error
    except DataError as error:
        raise Refusal("data", str(error)) from error
    except ConfigError as error:
        raise Refusal("terms", str(error)) from error


def _participate(site: Site, announcement: Announcement, theta: Tensor) -> bytes:
    terms, number = announcement.terms, announcement.number
    _judge(site, announcement)
    x, y = site.records(number)
    exact = announcement.noise == "exact"
    engine, dimension = site.engine(announcement.model, tuple(x.shape[1:]), announcement.classes, exact)
    if dimension != terms.dimension or theta.shape != (dimension,):
        raise Refusal("terms", f"the model has {dimension} parameters, the terms {terms.dimension}, θ {len(theta)}")
    plan = terms.plan
    if plan is not None and site.policy is not None:
        site.policy.check(plan)
    if plan is not None and plan.sampling == "fixed" and len(y) < plan.records:
        raise Refusal("data", f"{len(y)} records; with fixed-size batches the plan's ε holds from {plan.records} on")
    agent = Agent(
        number=number,
        x=x,
        y=y,
        mask_seed=announcement.mask_seed,
        key=agent_key(_root(site, announcement), terms.round, number),
        exact=exact,
    )
    if site.simulated:
        return _simulated(site, announcement, theta, agent, engine)
    assert plan is not None  # `_judge` lets nothing else through
    return _paid(site, announcement, plan, theta, agent, engine)


def _paid(site: Site, announcement: Announcement, plan: Plan, theta: Tensor, agent: Agent, engine: Engine) -> bytes:
    """One entry, one training, one answer."""
    assert site.ledger is not None
    assert site.policy is not None
    run, t, name = announcement.run, announcement.terms.round, site.agent
    message, outbox = f"round-{t}", Outbox(site.ledger, name)
    with outbox.alone(), Ledger.open(site.ledger, create=False) as ledger:
        last = outbox.last(run)
        if last is not None and t < last.round:
            raise Refusal("stale", f"round {t} of run {run}; round {last.round} was already answered")
        entry = ledger.find(name, run, message)
        if entry is not None:
            if last is not None and last.round == t and entry.digest == _digest(last.payload):
                return last.payload
            raise Refusal("spent", f"round {t} of run {run} was paid for, and there is no payload of it to send")
        site.policy.admit(plan, ledger, name, run, message)
        event, cap = _event(plan, announcement), site.policy.cap
        if not ledger.reserve(name, event, run, message, cap=cap, announced=plan.participations).fresh:
            # Only where the outbox could not be locked: another process trains for this entry.
            raise Refusal("spent", f"round {t} of run {run} is paid for by another process")
        try:
            payload = _encoded(announcement, _trained(announcement, theta, agent, engine))
            outbox.put(run, Sent(t, payload))
            ledger.release(name, run, message, _digest(payload))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            logger.exception("round %d of run %s was paid for and failed; the agent sits it out", t, run)
            raise Refusal("spent", f"round {t} of run {run} failed after it was paid for") from error
    return payload


def _simulated(site: Site, announcement: Announcement, theta: Tensor, agent: Agent, engine: Engine) -> bytes:
    """Many agents share a ledger, where there is one, and their run is not resumed: nothing leaves a simulation."""
    plan, run, message = announcement.terms.plan, announcement.run, f"round-{announcement.terms.round}"
    name, policy = site.name(agent.number), site.policy
    with ExitStack() as stack:
        ledger: Ledger | None = None
        if plan is not None and site.ledger is not None:
            ledger = stack.enter_context(Ledger.open(site.ledger, create=True, simulated=True))
            if policy is not None:
                policy.admit(plan, ledger, name, run, message)
            cap = None if policy is None else policy.cap
            event = _event(plan, announcement)
            ledger.reserve(name, event, run, message, cap=cap, announced=plan.participations)
        payload = _encoded(announcement, finite(_trained(announcement, theta, agent, engine)))
        if ledger is not None:
            ledger.release(name, run, message, _digest(payload))
    return payload


def _trained(announcement: Announcement, theta: Tensor, agent: Agent, engine: Engine) -> Answer:
    algorithm = ALGORITHMS[announcement.algorithm]
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the simulator: results must not depend on the number of threads
    try:
        [update] = algorithm.respond(theta, announcement.terms, [agent], engine)
    finally:
        torch.set_num_threads(before)
    return update


def _encoded(announcement: Announcement, update: Answer) -> bytes:
    return ALGORITHMS[announcement.algorithm].encode(update, announcement.terms, announcement.coding)


def _judge(site: Site, announcement: Announcement) -> None:
    """Everything that can be refused before a record is looked at."""
    _judge_plan(site, announcement)
    if announcement.classes != site.classes:
        raise Refusal("terms", f"the run has {announcement.classes} classes, this site {site.classes}")
    if announcement.features != site.features:
        ours, theirs = (f'"{name}"' if name else "none" for name in (site.features, announcement.features))
        raise Refusal(
            "terms", f"the run's data.features are {theirs}, this site's {ours}: set features in the node-config"
        )


def _judge_plan(site: Site, announcement: Announcement) -> None:
    plan = announcement.terms.plan
    if site.simulated and site.policy is None:
        return
    if plan is None:
        raise PolicyRefusal("not-private", f"{announcement.algorithm} promises no privacy")
    if announcement.noise == "seeded" and not site.simulated:
        raise Refusal("noise", "the server asks for seeded noise, which it could subtract; only simulations have it")
    assert site.policy is not None
    site.policy.check_words(plan)  # what takes long at a dimension that is made up waits until the model's is known


def _root(site: Site, announcement: Announcement) -> bytes:
    """The operating system's entropy; in a simulation, what its config says."""
    if site.config is None:
        return root_key("secure", 0)
    return root_key(announcement.noise or site.config.privacy.noise, site.config.run.seed)


def _event(plan: Plan, announcement: Announcement) -> Event:
    return plan.event.with_noise(announcement.noise)


def _digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()
