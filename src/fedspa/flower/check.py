"""`python -m fedspa.flower.site`: a node-config is checked before a SuperNode is started with it."""

from __future__ import annotations

import logging
import sys

from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import ConfigError, LedgerError
from fedspa.examples import count, layout, leaves
from fedspa.flower import node_config
from fedspa.flower.played import Held
from fedspa.flower.site import Site, bad_records, read_site
from fedspa.flower.trainer import Trainer, trainer_for
from fedspa.learning.tasks.named import resolve
from fedspa.privacy.event import noise_modes, seeded_words
from fedspa.runs.statement import shown
from fedspa.secagg.keys import fingerprint

logger = logging.getLogger("fedspa.agent")


def main(arguments: list[str]) -> int:
    """Check a node-config before a SuperNode is started with it; with --create-ledger, make its ledger."""
    create = "--create-ledger" in arguments
    texts = [argument for argument in arguments if argument != "--create-ledger"]
    asked = texts in (["--help"], ["-h"])
    if len(texts) != 1 or texts[0].startswith("-"):
        usage = "usage: python -m fedspa.flower.site [--create-ledger] '<node-config>'"
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    logger.addHandler(logging.NullHandler())  # bad records are told below, once
    site = read_site(node_config.parse(texts[0]), {})
    held = site.held(0)
    assert site.ledger is not None
    assert site.policy is not None
    trainer = _require_use(site, held)
    if not create and not site.ledger.exists():
        raise LedgerError(f"{site.ledger} is missing; --create-ledger makes a new one: restore it where there was one")
    with Ledger.open(site.ledger, create=create) as ledger:
        events, first = ledger.spent(site.agent), ledger.first_plan(site.agent)
        spent = [(limit, limit.total(events, first)) for limit in site.policy.cap.limits]
    for unit in {event.unit for event in events} - {site.unit}:
        raise LedgerError(
            f"{site.ledger}: what {site.agent!r} spent there is for each {unit}, and this node-config protects each "
            f"{site.unit}; an agent's entries have one unit"
        )
    if (own := site.own_records()).bad:
        print(f"fedspa: {bad_records(own, site.own_classes, site.node['data'])}", file=sys.stderr)
    print(f"agent    {site.agent}")
    learned = f"classes 0 to {site.own_classes - 1}" if site.own_classes is not None else f"task {site.task}"
    print(f"records  {count(own.y)} of shape {layout(held.record.x)}, {learned}")
    if site.unit == "person":
        print(f"persons  {count(held.examples.y)}, of each at most {_most(held)} records")
    print(f"room     {_room(site)}")
    print(f"device   {site.device}")
    if trainer is not None:
        print(f"engine   {trainer.engine.name} ({trainer.choice.why})")
        for hint in trainer.choice.hints:
            print(f"faster   {hint}")
    if site.member is not None:
        roster = site.member.roster
        print(f"key      {fingerprint(site.member.secret.public)}, for sums with others")
        print(f"roster   {len(roster.members)} members, digest {roster.digest[:16]}…")
    for limit, total in spent:
        terms = ", ".join(filter(None, (f"δ = {limit.delta:g}", limit.neighbours, total.by, limit.words)))
        print(f"ledger   {site.ledger}: ε = {shown(total.epsilon)} spent of {limit.epsilon:g} ({terms})")
    if (words := seeded_words(noise_modes(events))) is not None:  # a simulation's ledger
        print(f"note     {words}")
    return 0


def _room(site: Site) -> str:
    if site.room is not None:
        return f"{site.room} places for {site.unit}s, a public number that is meant to stay"
    return "not named: under Poisson sampling, records are never taken together"


def _require_use(site: Site, held: Held) -> Trainer | None:
    """An error where no run could be served: each of them would be refused. What trains the site's own model, where it
    names one, under the sampling that its policy allows or prefers."""
    assert site.policy is not None
    if site.policy.unit not in (None, site.unit):
        raise ConfigError(
            f"the policy asks for unit = {site.policy.unit!r}, and the records of this node-config are protected for "
            f"each {site.unit}: every run would be refused"
        )
    if site.model is None:
        return None
    task = resolve(site.task, held.record.y, site.own_classes, held.key)
    most = None if site.unit == "record" else _most(held)
    apart = site.apart("poisson" if site.policy.neighbours == "add-remove" else "fixed")
    return trainer_for(site.model, held.record, task, most, "auto", 1, False, 0, site.device, apart)


def _most(held: Held) -> int:
    """How many records the person with the most has, of those that count."""
    return next(leaves(held.examples.y)).shape[1]
