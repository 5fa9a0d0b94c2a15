"""A site's answer to one message: what the announcement says and what the site holds become one participation.

Before anything is paid, no refusal depends on the records and on the server's words together: a server could move its
words until the answer turns, and so measure a record without noise and without end. Exceptions are what all
neighbouring data share: the shape of a record and, under fixed-size sampling, the number of records. That number is
held against the site's own settings, too, its δ and its room: then the answer is the same whatever the words.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
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
from fedspa.flower.site import Site
from fedspa.flower.terms import Announcement
from fedspa.randomness.streams import agent_key, root_key
from fedspa.secagg.roster import Roster


def participate(site: Site, announcement: Announcement, theta: Tensor) -> bytes:
    """The payload of this agent for this round, paid for; or a Refusal."""
    with refusing():
        return _participate(site, announcement, theta)


def _participate(site: Site, announcement: Announcement, theta: Tensor) -> bytes:
    terms, number = announcement.terms, announcement.number
    invitation = _invitation(announcement, theta)
    judge(invitation, site.policy, simulated=site.simulated)
    _refuse_another_task(site, announcement)
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


def introduced(site: Site, announcement: Announcement) -> str:
    """The name that this agent has in the roster, where it would take part in such a run; or a Refusal. No record, no
    ledger and no θ has a part in the answer."""
    with refusing():
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


def _refuse_another_task(site: Site, announcement: Announcement) -> None:
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
