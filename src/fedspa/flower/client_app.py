"""The agent's app: `clientapp = "fedspa.flower.client_app:app"`.

A reply holds one record with one value: the payload's bytes, or a refusal's code. To a query it is the agent's name in
its roster, or a code. No metric, no count and no other text ever leaves; what went wrong is in its own log.

Before anything is paid, no refusal depends on the records and on the server's message together: a server could change
its message until the answer turns, and so measure a record without noise and without end. Exceptions are what all
neighbouring data share: the shape of a record and, under fixed-size sampling, the number of records. That number is
compared with the site's own settings, too, its δ and its max_records: then the answer is the same whatever the message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedspa.agent.participate import (
    Refusal,
    Request,
    check_terms,
    refusing,
)
from fedspa.algorithms import Agent, chosen
from fedspa.examples import count
from fedspa.flower import monitor
from fedspa.flower.site import Site, read_site
from fedspa.flower.terms import Announcement, TermsError, exchange_of, from_record
from fedspa.learning.tasks.totals import Totals
from fedspa.randomness.streams import agent_key

logger = logging.getLogger("fedspa.agent")
monitor.set_up()
_LONGEST = 2000  # letters of a refusal's text: it may quote the server, who could fill the disk with it

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a round, whatever it holds."""
    return _answered(message, context, "update", "payload", lambda: _payload(message, context))


@app.query("recover")
def recover(message: Message, context: Context) -> Message:
    """Answer a question about a sum that is recovered, in which this agent's update is."""
    return _answered(message, context, "recovery", "answer", lambda: _recovered(message, context))


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say which member of a cohort this is, to a server that offers a run in which updates are added up."""
    return _answered(message, context, "member", "name", lambda: _name(message, context))


def _answered(message: Message, context: Context, kind: str, key: str, answer: Callable[[], bytes | str]) -> Message:
    found: bytes | str = b""
    code: str | None = None
    try:
        found = answer()
        if kind != "update":  # of which `participate_once` says what was spent
            logger.info("%s: answered", kind, extra=monitor.event("answered"))
    except Refusal as refusal:
        code = refusal.code
        words = str(refusal)[:_LONGEST]
        logger.warning("refused (%s): %s", code, words, extra=monitor.event("refused", code))
    except KeyboardInterrupt:
        raise
    except BaseException:  # one that escaped, a SystemExit too, would carry its text to the server
        code = "internal"
        logger.exception("the round failed", extra=monitor.event("refused", code))
    record = ConfigRecord({key: found} if code is None else {"refusal": code})
    return Message(RecordDict({kind: record}), reply_to=message)


def _name(message: Message, context: Context) -> str:
    record = message.content.get("terms")
    if set(message.content) != {"terms"} or not isinstance(record, ConfigRecord):
        raise Refusal("terms", "a query holds the terms of a run and nothing else")
    return introduce(read_site(context.node_config, context.run_config), _announced(record))


@refusing()
def _recovered(message: Message, context: Context) -> bytes:
    record = message.content.get("recovery")
    if set(message.content) != {"recovery"} or not isinstance(record, ConfigRecord):
        raise Refusal("terms", "a question about a sum must hold the record 'recovery' only")
    try:
        asked = exchange_of(record)
    except TermsError as error:
        raise Refusal("terms", str(error)) from error
    return read_site(context.node_config, context.run_config).recover(asked)


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
        raise Refusal("terms", "'theta' must be an ArrayRecord and 'terms' a ConfigRecord")
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
    request = _request(announcement, theta)
    check_terms(request, site.policy, simulated=site.simulated)
    _check_task(site, announcement)
    member = None if announcement.adversary == "local" else site.member_for(announcement)
    if member is not None:
        cohort, binding = announcement.cohort, announcement.binding
        request = member.with_session(request, cohort, binding, recovery=announcement.recovery)
    held = site.held(number)
    trainer = site.trainer(announcement, held)
    dimension, records = trainer.dimension, count(held.pool.y) if held.rows is None else len(held.rows)
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
        pool_x=x,
        pool_y=y,
        mask_seed=announcement.mask_seed,
        key=agent_key(site.private_root(announcement), terms.round, number),
        exact=announcement.noise == "exact",
        max_records=site.slot_count(terms.steps.sampling, count(y)),
        secret=None if member is None else member.secret,
    )
    theta, engine = theta.to(site.device), trainer.engine
    request = replace(request, theta=theta)
    if announcement.scored:
        request, engine = replace(request, models=theta), trainer.scores(theta)
    return site.answer(request, agent, engine)


@refusing()
def introduce(site: Site, announcement: Announcement) -> str:
    """Return the name that this agent has in the roster, where it would take part in such a run; or raise a Refusal. No
    record, no ledger and no θ has a part in the answer."""
    check_terms(_request(announcement, torch.empty(0)), site.policy, simulated=site.simulated)
    if announcement.adversary == "local":
        raise Refusal("terms", "the server asks for this agent's name, but its run does not sum updates")
    member = site.member_for(announcement)
    member.require_cohort(announcement.cohort)
    return member.name


def _request(announcement: Announcement, theta: Tensor) -> Request:
    return Request(
        run=announcement.run,
        algorithm=chosen(announcement.algorithm, announcement.adversary),
        terms=announcement.terms,
        theta=theta,
        coding=announcement.coding,
        noise=announcement.noise,
        attempt=announcement.attempt,
    )


def _check_task(site: Site, announcement: Announcement) -> None:
    learns = announcement.task.name != Totals.name
    if learns and site.own_classes is not None and announcement.classes != site.own_classes:
        raise Refusal("terms", f"the run has {announcement.classes} classes, this site {site.own_classes}")
    plan = announcement.terms.plan
    if plan is not None and plan.unit != site.unit:
        raise Refusal("terms", f"the run protects each {plan.unit}, and an example of this site is a {site.unit}")
    if announcement.features != site.features:
        ours, theirs = (f'"{name}"' if name else "none" for name in (site.features, announcement.features))
        raise Refusal(
            "terms", f"the run's data.features are {theirs}, this site's {ours}: set features in the node-config"
        )
