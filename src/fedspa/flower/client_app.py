"""The agent's app: `clientapp = "fedspa.flower.client_app:app"`.

A reply holds one record with one value: the payload's bytes, or a refusal's code. To a query it is the agent's name in
its roster, or a code. No metric, no count and no other text ever leaves; what went wrong is in its own log.

Before anything is paid, no refusal depends on the records and on the server's message together: a server could change
its message until the answer turns, and so measure a record without noise and without end. Exceptions are what all
neighbouring data share: the shape of a record and, under fixed-size sampling, the number of records. That number is
compared with the site's own settings, too, its δ and its room: then the answer is the same whatever the message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.member import Member, played_keys
from fedspa.agent.participate import Invitation, Refusal, agent_name, judge, participate_once, payloads, refusing
from fedspa.agent.participate import participate as participate_all
from fedspa.algorithms import Agent, chosen
from fedspa.algorithms.base import finite
from fedspa.engine.task import Engine
from fedspa.errors import DataError
from fedspa.examples import count
from fedspa.flower import logs, monitor
from fedspa.flower.site import Site, read_site
from fedspa.flower.terms import Announcement, TermsError, from_record
from fedspa.randomness.streams import agent_key, root_key
from fedspa.secagg.roster import Roster

logger = logging.getLogger("fedspa.agent")
logs.set_up()
_LONGEST = 2000  # letters of a refusal's text: it may quote the server, who could fill the disk with it

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a round, whatever it holds."""
    return _answered(message, context, "update", "payload", lambda: _payload(message, context))


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say which member of a cohort this is, to a server that offers a run in which updates are added up."""
    return _answered(message, context, "member", "name", lambda: _name(message, context))


def _answered(message: Message, context: Context, kind: str, key: str, answer: Callable[[], bytes | str]) -> Message:
    found: bytes | str = b""
    code: str | None = None
    try:
        found = answer()
        logger.info("answered", extra=logs.event("answered"))
    except Refusal as refusal:
        code = refusal.code
        words = str(refusal)[:_LONGEST]
        logger.warning("refused (%s): %s", code, words, extra=logs.event("refused", code))
    except KeyboardInterrupt:
        raise
    except BaseException:  # one that escaped, a SystemExit too, would carry its text to the server
        code = "internal"
        logger.exception("the round failed", extra=logs.event("refused", code))
    if kind == "update" or code is not None:
        monitor.count_answer(context.node_config, code or found)
    record = ConfigRecord({key: found} if code is None else {"refusal": code})
    return Message(RecordDict({kind: record}), reply_to=message)


def _name(message: Message, context: Context) -> str:
    record = message.content.get("terms")
    if set(message.content) != {"terms"} or not isinstance(record, ConfigRecord):
        raise Refusal("terms", "a query holds the terms of a run and nothing else")
    return introduce(read_site(context.node_config, context.run_config), _announced(record))


def _payload(message: Message, context: Context) -> bytes:
    metadata = message.metadata
    if time.time() > metadata.created_at + metadata.ttl:
        raise Refusal(
            "stale", f"the message of {metadata.created_at:.0f} was to be answered within {metadata.ttl:.0f} s"
        )
    announcement, theta = _read(message.content)
    return answer_round(read_site(context.node_config, context.run_config), announcement, theta)


def _read(content: RecordDict) -> tuple[Announcement, Tensor]:
    """Terms and θ, or a Refusal: the server's message is input like any other."""
    if set(content) != {"theta", "terms"}:
        raise Refusal(
            "terms", f"the message holds {', '.join(sorted(map(str, content)))[:100]}; theta and terms were expected"
        )
    terms, arrays = content["terms"], content["theta"]
    if not isinstance(terms, ConfigRecord) or not isinstance(arrays, ArrayRecord) or set(arrays) != {"theta"}:
        raise Refusal("terms", "the message's records are of other kinds than a round's")
    announcement = _announced(terms)
    array, dimension, scored = arrays["theta"], announcement.terms.dimension, announcement.scored
    if len(array.data) > 4 * dimension * max(1, scored) + 1024:
        raise Refusal("terms", f"θ comes as {len(array.data)} bytes; 4 per parameter were expected")
    try:
        theta = array.numpy()
    except Exception as error:  # whatever numpy makes of foreign bytes
        raise Refusal("terms", f"θ cannot be read: {error}") from error
    wanted = (scored, dimension) if scored else (dimension,)  # a model per row, where several are to be scored
    if theta.dtype != np.float32 or theta.shape != wanted or not np.isfinite(theta).all():
        raise Refusal("terms", f"θ is {theta.dtype} of shape {theta.shape}; {wanted} finite float32 were expected")
    return announcement, torch.from_numpy(theta.copy())


def _announced(record: ConfigRecord) -> Announcement:
    try:
        return from_record(record)
    except TermsError as error:
        raise Refusal("terms", str(error)) from error


@refusing()
def answer_round(site: Site, announcement: Announcement, theta: Tensor) -> bytes:
    """Return the payload of this agent for this round, paid for; or raise a Refusal."""
    terms, number = announcement.terms, announcement.number
    invitation = _invitation(announcement, theta)
    judge(invitation, site.policy, simulated=site.simulated)
    _check_task(site, announcement)
    member = None if announcement.adversary == "local" else member_of(site, announcement)
    if member is not None:
        invitation = member.joined(invitation, announcement.cohort, announcement.binding)
    held = site.held(number)
    trainer = site.trainer(announcement, held)
    dimension, records = trainer.dimension, count(held.among.y) if held.rows is None else len(held.rows)
    if dimension != terms.dimension or theta.shape[-1:] != (dimension,):
        raise Refusal(
            "terms", f"the model has {dimension} parameters, the terms {terms.dimension}, θ {tuple(theta.shape)}"
        )
    plan = terms.plan
    if plan is not None and plan.sampling == "fixed" and records < plan.records:
        raise Refusal(
            "data", f"{records} {plan.unit}s; with fixed-size batches the plan's ε holds from {plan.records} on"
        )
    x, y = trainer.examples(held, strict=plan is None)
    agent = Agent(
        number=number,
        x=x,
        y=y,
        mask_seed=announcement.mask_seed,
        key=agent_key(_root(site, announcement), terms.round, number),
        exact=announcement.noise == "exact",
        room=site.places(terms.steps.sampling, count(y)),
        secret=None if member is None else member.secret,
    )
    theta, engine = theta.to(site.device), trainer.engine
    invitation = replace(invitation, theta=theta)
    if announcement.scored:
        invitation, engine = replace(invitation, models=theta), trainer.scores(theta)
    if site.simulated:
        return _simulated(site, invitation, agent, engine)
    assert site.ledger is not None
    assert site.policy is not None
    return participate_once(invitation, site.agent, agent, engine, site.ledger, site.policy)


@refusing()
def introduce(site: Site, announcement: Announcement) -> str:
    """Return the name that this agent has in the roster, where it would take part in such a run; or raise a Refusal. No
    record, no ledger and no θ has a part in the answer."""
    judge(_invitation(announcement, torch.empty(0)), site.policy, simulated=site.simulated)
    if announcement.adversary == "local":
        raise Refusal("terms", "the server asks for this agent's name, and its run adds nothing up")
    member = member_of(site, announcement)
    member.require_cohort(announcement.cohort)
    return member.name


def member_of(site: Site, announcement: Announcement) -> Member:
    """Who this agent is among others; in a simulation, keys follow from the seed."""
    if site.config is None:
        if site.member is None:
            raise Refusal("aggregation", "this run adds up masked updates: name key and roster in the node-config")
        return site.member
    keys = played_keys(root_key("seeded", site.config.run.seed), range(site.config.federation.agents))
    name = agent_name(announcement.number)
    if name not in keys:
        raise DataError(f"agent {announcement.number} of a federation of {len(keys)}; the server's config is another")
    return Member(name, keys[name], Roster({other: key.public for other, key in keys.items()}))


def _invitation(announcement: Announcement, theta: Tensor) -> Invitation:
    return Invitation(
        run=announcement.run,
        algorithm=chosen(announcement.algorithm, announcement.adversary),
        terms=announcement.terms,
        theta=theta,
        coding=announcement.coding,
        noise=announcement.noise,
        attempt=announcement.attempt,
    )


def _simulated(site: Site, invitation: Invitation, agent: Agent, engine: Engine) -> bytes:
    """Many agents share a ledger, where there is one, and their run is not resumed."""
    plan, name, policy = invitation.terms.plan, site.name(agent.number), site.policy
    with ExitStack() as stack:
        ledger: Ledger | None = None
        if plan is not None and site.ledger is not None:
            # The run's own was made by its server, before its first checkpoint; a node's is its own to make.
            ledger = stack.enter_context(Ledger.open(site.ledger, create="ledger" in site.node))
            if policy is not None:
                policy.admit(plan, ledger, name, invitation.run, invitation.message)
        cap = None if policy is None else policy.cap
        make = partial(payloads, engine=engine, checked=finite)
        return participate_all(invitation, {name: agent}, make, ledger, cap)[name]


def _check_task(site: Site, announcement: Announcement) -> None:
    if site.own_classes is not None and announcement.classes != site.own_classes:
        raise Refusal("terms", f"the run has {announcement.classes} classes, this site {site.own_classes}")
    plan = announcement.terms.plan
    if plan is not None and plan.unit != site.unit:
        raise Refusal("terms", f"the run protects each {plan.unit}, and an example of this site is a {site.unit}")
    if announcement.features != site.features:
        ours, theirs = (f'"{name}"' if name else "none" for name in (site.features, announcement.features))
        raise Refusal(
            "terms", f"the run's data.features are {theirs}, this site's {ours}: set features in the node-config"
        )


def _root(site: Site, announcement: Announcement) -> bytes:
    """The operating system's entropy; in a simulation, what its config says."""
    if site.config is None:
        return root_key("secure", 0)
    return root_key(announcement.noise or site.config.privacy.noise, site.config.run.seed)
