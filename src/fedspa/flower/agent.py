"""One participation of an agent: judge the terms, reserve, train, keep, release, answer. Free of Flower's messages.

    terms ─► policy.check ─► records ─► model's d ─► policy.admit ─► ledger.reserve
          ─► train ─► outbox ─► ledger.release ─► payload

Whatever goes wrong ends in a `Refusal` with one of `CODES`. Only the code travels; the text stays here. Before anything
is paid, no refusal depends on the records and on the server's words together: a server could move its words until the
answer turns, and so measure a record without noise and without end. Exceptions are what all neighbouring data share:
the shape of a record and, under fixed-size sampling, the number of records.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, get_args

import torch
from torch import Tensor

from fedspa.algorithms import ALGORITHMS, Agent
from fedspa.errors import BudgetError, ConfigError, DataError, FedspaError, LedgerError
from fedspa.flower.outbox import Outbox, Sent
from fedspa.flower.site import Site
from fedspa.flower.terms import Announcement
from fedspa.mechanism.streams import agent_key, root_key
from fedspa.privacy.binomial_plan import BinomialPlan
from fedspa.privacy.ledger import Ledger
from fedspa.privacy.policy import Code, PolicyRefusal

# The policy's own codes, then ours: terms that are none, seeded noise, records that do not fit the terms, a ledger that
# cannot be used, a round that is over, one that was already answered, and anything else.
CODES: Final = frozenset({*get_args(Code), "terms", "noise", "data", "ledger", "stale", "duplicate", "internal"})
# An agent that gave one of these would give it again: it is not asked again in the same run.
FINAL_CODES: Final = CODES - {"ledger", "stale", "duplicate", "internal"}


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
    terms, number, algorithm = announcement.terms, announcement.number, ALGORITHMS[announcement.algorithm]
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
    run, message, name = announcement.run, f"round-{terms.round}", site.name(number)

    with ExitStack() as stack:
        ledger: Ledger | None = None
        outbox: Outbox | None = None
        if plan is not None and site.ledger is not None:
            ledger = stack.enter_context(
                Ledger.open(site.ledger, create=site.simulated, simulated=site.simulated),
            )
            # In a simulation many agents share a ledger, and the run is not resumed.
            if not site.simulated:
                outbox = Outbox(site.ledger, name)
                again = _again(ledger, outbox, name, announcement)
                if again is not None:
                    return again
            if site.policy is not None:
                site.policy.admit(plan, ledger, name, run, message)
            event = replace(plan.event, noise=announcement.noise)
            ledger.reserve(name, event, run, message, cap=None if site.policy is None else site.policy.cap)
        agent = Agent(
            number=number,
            x=x,
            y=y,
            mask_seed=announcement.mask_seed,
            key=agent_key(_root(site, announcement), terms.round, number),
            exact=exact,
        )
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the simulator: results must not depend on the number of threads
        try:
            [update] = algorithm.respond(theta, terms, [agent], engine)
        finally:
            torch.set_num_threads(before)
        payload = algorithm.encode(update, terms, announcement.coding)
        if ledger is not None:
            if outbox is not None:
                outbox.put(run, Sent(terms.round, payload))
            ledger.release(name, run, message, _digest(payload))
    return payload


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
    # cpSGD's plan is priced for that, which takes long at a dimension that is made up: not before the model's is known.
    if not isinstance(plan, BinomialPlan):
        site.policy.check(plan)


def _again(ledger: Ledger, outbox: Outbox, name: str, announcement: Announcement) -> bytes | None:
    """The payload that was made for this round before, if it was; None where it is still to be made."""
    run, t = announcement.run, announcement.terms.round
    last = outbox.last(run)
    if last is not None and t < last.round:
        raise Refusal("stale", f"round {t} of run {run}; round {last.round} was already answered")
    entry = ledger.find(name, run, f"round-{t}")
    if entry is None:
        return None
    if last is not None and last.round == t and entry.digest in (None, _digest(last.payload)):
        ledger.release(name, run, f"round-{t}", _digest(last.payload))
        return last.payload
    if entry.digest is not None:
        raise Refusal("duplicate", f"round {t} of run {run} was answered, and what was sent is no longer here")
    return None  # reserved, and the process died while it trained: the entry still pays for one release


def _root(site: Site, announcement: Announcement) -> bytes:
    """The operating system's entropy; in a simulation, what its config says."""
    if site.config is None:
        return root_key("secure", 0)
    return root_key(announcement.noise or site.config.privacy.noise, site.config.run.seed)


def _digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()
