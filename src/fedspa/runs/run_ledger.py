"""The accounts of a simulated federation: one ledger for all agents, written before anything is released.

`run.ledger` names a ledger that outlives the run, so that several runs on the same records add up; `run.policy` gives
every simulated agent the same limits. A run that would not fit is refused before it starts.

Resumed after a crash, a run under seeded noise repeats the interrupted round to the bit: the same update released
twice is one release. Noise that must not repeat makes it another update, so the round gets a new message name, both
are counted, and agents that the first attempt brought to their cap sit out.

The ledger is made before the run's first checkpoint, which keeps its name. From then on it is only ever opened: one
that is missing, or another under its path, ends the run and is never replaced.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from fedspa import durable
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.storage import anchor_path
from fedspa.agent.participate import agent_name, message_name
from fedspa.agent.policy import Policy
from fedspa.errors import BudgetError, FedspaError, LedgerError, worded
from fedspa.mechanisms import Plan
from fedspa.privacy.cap import AGAINST_ALL, Cap, FirstPlan, floor_total, passed, total
from fedspa.privacy.event import Event, noise_modes, seeded_words
from fedspa.runs.checkpoint import Checkpoint
from fedspa.runs.guarantee import Guarantee, shown
from fedspa.runs.setup import Job


def check_budget(job: Job, run: str | None = None) -> None:
    """Raise where the plan breaks the policy, where the ledger cannot be relied on, or where some agent has no room in
    it for the rest of the run.

    `run` is the name of a run that is resumed: what it spent before counts as part of its plan.
    """
    settings = job.config.run
    if job.plan is None:
        return
    policy = None if settings.policy is None else Policy.load(settings.policy)
    if policy is not None:
        policy.check(job.plan)
    if settings.ledger is not None and not (folder := Path(settings.ledger).parent).is_dir():
        raise LedgerError(f"run.ledger is {settings.ledger}: the folder {folder} does not exist; create it first")
    event = job.plan.event.with_noise(job.config.privacy.noise)
    if settings.ledger is None or not Path(settings.ledger).exists():
        if policy is not None:
            plan = FirstPlan(event, job.plan.participations)
            _refuse({event: plan.participations}, policy.cap, plan)
        return
    with Ledger.open(settings.ledger, create=False) as ledger:
        agents = map(agent_name, range(job.config.federation.agents))
        ledger.require_unit(dict.fromkeys(agents, job.plan.event))
        if policy is None:
            return
        for number in range(job.config.federation.agents):
            left = job.plan.participations - (ledger.participations(agent_name(number), run) if run else 0)
            if left > 0:
                ledger.require(agent_name(number), event, policy.cap, participations=left)
        if earlier := ledger.largest(but=run):
            events = Counter(earlier) + Counter({event: job.plan.participations})
            whose = " for a record that each of them deals to its busiest agent"
            _refuse(events, policy.cap, ledger.first_plan(), "with the earlier runs in the ledger ", whose)


def _refuse(events: Mapping[Event, int], cap: Cap, first: FirstPlan | None, beside: str = "", whose: str = "") -> None:
    """Raise where the cap has no room for the whole run; `beside` and `whose` say what else is among the events."""
    limit = passed(events, cap, first)
    if limit is not None:
        cost, by = limit.total(events, first)
        by = "; ".join(filter(None, (by, limit.words, seeded_words(noise_modes(events)))))
        raise BudgetError(
            f"{beside}the run costs ε = {shown(cost)} ({by}){whose}, above the policy's {limit.epsilon:.4g} "
            f"(δ = {cap.delta:g}, {cap.neighbours}); take more noise or fewer rounds"
        )


def check_same_event(then: Event, now: Event) -> None:
    """Raise where a resumed run took part in `then` before and its plan has come to `now`: what it promises is priced
    by one event, and the rounds that are done had the noise of the other."""
    if then != now:
        raise LedgerError(
            f"this run began with {then.to_json()} and would go on with {now.to_json()}: another fedspa calibrates "
            "privacy.epsilon to other noise; finish it with the version that began it, or start a new run"
        )


@dataclass(frozen=True, slots=True)
class LedgerTotal:
    """ε of all runs in a ledger and what priced it; None where none can be stated, and then `note` says why: a trained
    run never fails. `floor` is the same against all others together, where some of it was aggregated and there is
    one."""

    epsilon: float | None
    note: str | None = None
    accountant: str | None = None
    floor: float | None = None


def no_total(error: FedspaError) -> LedgerTotal:
    """Where the ledger cannot be priced now: another process wrote what this version cannot read, or damaged it."""
    return LedgerTotal(None, f"no ε over all runs in the ledger: {error}")


def largest_total(plan: Plan, ledger: Ledger) -> LedgerTotal:
    """What everything that the ledger holds can have cost a record, under the plan's relation. Another seed, another
    partition or another number of agents deals a record to another agent, so that of each run the one counts that took
    part most."""
    held, first = ledger.largest(), ledger.first_plan()  # all agents of that run were told the same
    # Events of fixed-size batches have no ε under add-remove; those of both kinds have one under replace-one.
    mixed = plan.neighbours == "add-remove" and any(event.sampling == "fixed" for event in held)
    relation = "replace-one" if mixed else plan.neighbours
    own = total(held, plan.delta, relation, first)
    largest, by = own
    if math.isinf(largest):
        return LedgerTotal(
            None,
            "no guarantee over all runs in the ledger: it holds participations whose noise, seeded in a "
            "simulation, is too small for any ε",
        )
    floor = floor_total(held, plan.delta, relation, first, own).epsilon
    aggregated = any(event.members for event in held)
    beside = f", and {shown(floor)} {AGAINST_ALL}" if aggregated else ""
    words = seeded_words(noise_modes(held))
    by += "" if words is None else f"; {words}"
    if mixed:
        return LedgerTotal(
            None,
            "no ε over all runs in the ledger under add-remove, since some of them drew batches of a fixed size; under "
            f"replace-one it is {shown(largest)} at δ = {plan.delta:g}, against the server{beside} ({by})",
        )
    if math.isinf(floor):
        note = f"no ε over all runs in the ledger {AGAINST_ALL}: one agent's noise of some of them bounds nothing"
        return LedgerTotal(largest, note, by)
    return LedgerTotal(largest, accountant=by, floor=floor if aggregated else None)


def draw_run_name(folder: Path) -> str:
    """Drawn, not named: two runs of one name would be one run to a ledger, and the second would cost nothing."""
    readable = "".join(letter if letter.isprintable() else "_" for letter in folder.name)
    return f"{readable[:100]}-{secrets.token_hex(8)}"


def open_ledger(path: Path, begun: Checkpoint | None, *, simulated: bool = False) -> Ledger:
    """A run's ledger: made where need be before the run has begun, and afterwards the one that it began with."""
    if begun is None:
        return Ledger.open(path, simulated=simulated)
    if not path.exists():
        raise LedgerError(
            f"the ledger of this run, {path}, is missing, and what was spent is written nowhere else; put it back, "
            f"with {anchor_path(path).name}, or start a new run"
        )
    ledger = Ledger.open(path, create=False, simulated=simulated)
    if begun.extra["ledger"] != ledger.name:
        ledger.close()
        raise LedgerError(f"{path} is another ledger than the one that this run began with; put that one back")
    return ledger


class RunLedger(ExitStack[None]):
    """Ledger and guarantee of one run. Does nothing where the algorithm is not private.

    `run` is the run's name in the ledger. A run that goes on from the checkpoint `begun` keeps the one it was started
    under and calls `catch_up`. `kept` is what the run's checkpoints must say of the ledger. `skipped` counts the
    participations that did not take place because interrupted rounds had used up the agents' cap.
    """

    def __init__(self, job: Job, folder: Path, begun: Checkpoint | None = None) -> None:
        super().__init__()
        self._job = job
        self.run = begun.run if begun is not None else draw_run_name(folder)
        self.skipped: int = 0 if begun is None else begun.extra.get("skipped", 0)
        self._resumed_with_new_noise = False
        self.guarantee: Guarantee | None = None
        self.ledger: Ledger | None = None
        self.cap: Cap | None = None
        if job.plan is None:
            return
        self._event = job.plan.event.with_noise(job.config.privacy.noise)
        self.guarantee = Guarantee(job.plan)
        self.cap = Policy.load(job.config.run.policy).cap if job.config.run.policy is not None else None
        shared = job.config.run.ledger
        path = folder / "ledger.sqlite" if shared is None else Path(shared)
        self.ledger = self.enter_context(open_ledger(path, begun, simulated=shared is None))

    @property
    def kept(self) -> Mapping[str, str | int]:
        return {} if self.ledger is None else {"ledger": self.ledger.name, "skipped": self.skipped}

    def catch_up(self, cohorts: Iterable[Sequence[int]], uploads: int) -> None:
        """Count what was done before the checkpoint (`cohorts`, with so many uploads), and in vain after it."""
        if self.guarantee is None or self.ledger is None:
            return
        agents = range(self._job.config.federation.agents)
        spent = {number: self.ledger.participations(agent_name(number), self.run) for number in agents}
        if sum(spent.values()) < uploads:
            raise LedgerError(
                f"{self.ledger.path} holds {sum(spent.values())} entries of this run, whose checkpoint counts "
                f"{uploads}: it is an old copy or another ledger; put the newest one back"
            )
        for event in self.ledger.events(self.run):
            check_same_event(event, self._event)
        if self._job.config.privacy.noise == "seeded":
            for cohort in cohorts:
                self.guarantee.took_part(cohort)
            return
        self._resumed_with_new_noise = True
        for number, times in spent.items():
            if times:
                self.guarantee.took_part([number], times)

    def turns(self, t: int, cohort: Sequence[int]) -> tuple[int, list[int]]:
        """Which attempt at the round this is, and who takes part: after a resume, those with a turn left."""
        if self.guarantee is None or self.ledger is None or not self._resumed_with_new_noise:
            return 1, list(cohort)
        present = [number for number in cohort if self.guarantee.participations(number) < self._job.cap]
        self.skipped += len(cohort) - len(present)
        # The first under whose name none of them has an entry.
        for attempt in count(1):
            message = message_name(t, attempt)
            if not any(self.ledger.find(agent_name(number), self.run, message) for number in present):
                break
        return attempt, present

    def took_part(self, agents: Sequence[int]) -> None:
        if self.guarantee is not None:
            self.guarantee.took_part(agents)

    def settle(self) -> None:
        """Before a checkpoint that counts on its entries. A ledger of the run's own waits for no disk otherwise."""
        if self.ledger is None or self._job.config.run.ledger is not None:
            return
        path = self.ledger.path
        log = path.with_name(f"{path.name}-wal")
        with worded(LedgerError, lambda why: f"{log} cannot be written: {why}; mend that, then resume"):
            durable.force(log if log.exists() else path)
            durable.force(anchor_path(path))
            durable.force_folder(log.parent)

    def total(self) -> LedgerTotal | None:
        """What all runs cost in a ledger that outlives this one (`run.ledger`), against the server with up to the
        colluders of each."""
        if self._job.plan is None or self.ledger is None or self._job.config.run.ledger is None:
            return None
        try:
            return largest_total(self._job.plan, self.ledger)
        except FedspaError as error:
            return no_total(error)
