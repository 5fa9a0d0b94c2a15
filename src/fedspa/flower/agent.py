"""A site's answer to one message: what the announcement says and what the site holds become one participation.

Before anything is paid, no refusal depends on the records and on the server's words together: a server could move its
words until the answer turns, and so measure a record without noise and without end. Exceptions are what all
neighbouring data share: the shape of a record and, under fixed-size sampling, the number of records. That number is
held against the site's own settings, too, its δ and its room: then the answer is the same whatever the words.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import Invitation, Refusal, judge, message_name, participate_once, refusing
from fedspa.agent.participate import participate as participate_all
from fedspa.algorithms import ALGORITHMS, Agent
from fedspa.engine.task import Engine
from fedspa.examples import count
from fedspa.flower.site import Site
from fedspa.flower.terms import Announcement
from fedspa.randomness.streams import agent_key, root_key


def participate(site: Site, announcement: Announcement, theta: Tensor) -> bytes:
    """The payload of this agent for this round, paid for; or a Refusal."""
    with refusing():
        return _participate(site, announcement, theta)


def _participate(site: Site, announcement: Announcement, theta: Tensor) -> bytes:
    terms, number = announcement.terms, announcement.number
    invitation = Invitation(
        run=announcement.run,
        message=message_name(terms.round),
        algorithm=ALGORITHMS[announcement.algorithm],
        terms=terms,
        theta=theta,
        coding=announcement.coding,
        noise=announcement.noise,
    )
    judge(invitation, site.policy, simulated=site.simulated)
    _refuse_another_task(site, announcement)
    held = site.held(number)
    trainer = site.trainer(announcement, held)
    dimension, records = trainer.dimension, count(held.among.y) if held.rows is None else len(held.rows)
    if dimension != terms.dimension or theta.shape != (dimension,):
        raise Refusal("terms", f"the model has {dimension} parameters, the terms {terms.dimension}, θ {len(theta)}")
    plan = terms.plan
    if plan is not None and site.policy is not None:
        site.policy.check(plan)
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
    )
    invitation = replace(invitation, theta=theta.to(site.device))
    if site.simulated:
        return _simulated(site, invitation, agent, trainer.engine)
    assert site.ledger is not None
    assert site.policy is not None
    return participate_once(invitation, site.agent, agent, trainer.engine, site.ledger, site.policy)


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
        return participate_all(invitation, {name: agent}, engine, ledger, cap)[name]


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
