"""The accounts of a simulated federation: one ledger for all agents, written before anything is released.

`run.ledger` names a ledger that outlives the run, so that several runs on the same records add up: by default the one
beside the run's folder. `run.policy` gives every simulated agent the same limits. A run that would not fit is refused
before it starts.

Resumed after a crash, a run under seeded noise repeats the interrupted round to the bit: the same update released
twice is one release. Noise that must not repeat makes it another update, so the round gets a new message name, both
are counted, and agents that the first attempt brought to their cap sit out.

The ledger is made before the run's first checkpoint, which keeps its name. From then on it is only ever opened: one
that is missing, or another under its path, ends the run and is never replaced.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from fedspa import durable
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.storage import anchor_path
from fedspa.agent.participate import message_name
from fedspa.agent.policy import Policy
from fedspa.data.datasets import NAMES
from fedspa.errors import BudgetError, FedspaError, LedgerError, os_errors_as
from fedspa.privacy.budget import FirstPlan, PrivacyBudget, exceeded_limit
from fedspa.privacy.event import Event, noise_modes, seeded_warning, shown
from fedspa.runs.checkpoint import Checkpoint
from fedspa.runs.config import Config, load
from fedspa.runs.guarantee import Guarantee, LedgerTotal, no_total, total_in
from fedspa.runs.rundir import runs_folder
from fedspa.runs.setup import Job


def with_ledger(config: Config, resume: Path | None) -> Config:
    """Return the config with the ledger that its run shares with the others beside its folder. Which records these had
    is not compared: an agent's name stands for its records, and numbered agents may hold any (`Ledger.runs_with`).

    Seeded noise and public data spend nobody's budget: such a run has a ledger of its own. One that resumes keeps
    what it began with.
    """
    if config.run.ledger is not None or not config.private:
        return config
    if resume is not None:
        path = load(resume / "config.toml", own_code=False).run.ledger
    elif config.privacy.noise == "seeded" or config.data.name in NAMES:
        return config
    else:
        path = str(runs_folder(config).absolute() / "ledger.sqlite")
    return config.model_copy(update={"run": config.run.model_copy(update={"ledger": path})})


def check_budget(job: Job, run: str | None = None) -> None:
    """Raise where the plan breaks the policy, where the ledger cannot be relied on, or where it leaves some agent
    too little for the rest of the run.

    `run` is the name of a run that is resumed: what it spent before counts as part of its plan.
    """
    settings = job.config.run
    if job.plan is None:
        return
    policy = None if settings.policy is None else Policy.load(settings.policy)
    if policy is not None:
        policy.check(job.plan)
    folder = None if settings.ledger is None else Path(settings.ledger).parent
    if folder is not None and not folder.is_dir() and folder != runs_folder(job.config).absolute():
        raise LedgerError(f"run.ledger is {settings.ledger}: the folder {folder} does not exist; create it first")
    event = job.plan.event.with_noise(job.config.privacy.noise)
    if settings.ledger is None or not Path(settings.ledger).exists():
        if policy is not None:
            plan = FirstPlan(event, job.plan.participations)
            _check_cap({event: plan.participations}, policy.cap, plan)
        return
    with Ledger.open(settings.ledger, create=False) as ledger:
        ledger.require_unit(dict.fromkeys(job.agents, job.plan.event))
        if policy is None:
            return
        done = Counter() if run is None else ledger.participations_by_agent(run)
        left = {agent: job.plan.participations - done[agent] for agent in job.agents}
        ledger.require_all({agent: count for agent, count in left.items() if count > 0}, event, policy.cap)
        runs = ledger.runs_with(job.agents)
        if earlier := ledger.largest(each for each in runs if each != run):
            events = Counter(earlier) + Counter({event: job.plan.participations})
            whose = " for a record that each of them deals to its busiest agent"
            _check_cap(events, policy.cap, ledger.first_plan_of(runs), "with the earlier runs in the ledger ", whose)


def _check_cap(
    events: Mapping[Event, int], cap: PrivacyBudget, first: FirstPlan | None, beside: str = "", whose: str = ""
) -> None:
    """Raise where the whole run would exceed the cap; `beside` and `whose` say what else is among the events."""
    limit = exceeded_limit(events, cap, first)
    if limit is not None:
        cost, by = limit.total(events, first)
        by = "; ".join(filter(None, (by, limit.words, seeded_warning(noise_modes(events)))))
        raise BudgetError(
            f"{beside}the run costs ε = {shown(cost)} ({by}){whose}, above the policy's {limit.epsilon:.4g} "
            f"(δ = {cap.delta:g}, {cap.neighbours}); take more noise or fewer rounds"
        )


def check_same_event(then: Event, now: Event) -> None:
    """Raise where a resumed run took part in `then` before and its plan has come to `now`: what it promises is priced
    by one event, and the rounds that are done had the noise of the other."""
    if then != now:
        raise LedgerError(
            f"this run began with {then.to_json()} and would continue with {now.to_json()}: another fedspa calibrates "
            "privacy.epsilon to other noise; finish it with the version that began it, or start a new run"
        )


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

    `run` is the run's name in the ledger. A run that resumes from the checkpoint `begun` keeps the one it was started
    under and calls `catch_up`. `kept` is what the run's checkpoints must say of the ledger. `skipped` counts the
    participations that did not take place because interrupted rounds had used up the agents' cap.
    """

    def __init__(self, job: Job, folder: Path, begun: Checkpoint | None = None) -> None:
        super().__init__()
        self._job = job
        self.run = begun.run if begun is not None else draw_run_name(folder)
        self.skipped: int = 0 if begun is None else begun.extra.get("skipped", 0)
        self.resumed = begun is not None
        self._resumed_with_new_noise = False
        self.guarantee: Guarantee | None = None
        self.ledger: Ledger | None = None
        self.cap: PrivacyBudget | None = None
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
        entries = self.ledger.participations_by_agent(self.run)
        spent = {number: entries[name] for number, name in enumerate(self._job.agents)}
        if sum(spent.values()) < uploads:
            raise LedgerError(
                f"{self.ledger.path} holds {sum(spent.values())} entries of this run, whose checkpoint counts "
                f"{uploads}: it is an old copy or another ledger; put the newest one back"
            )
        for event in self.ledger.events(self.run):
            check_same_event(event, self._event)
        if self._job.config.privacy.noise == "seeded":
            for cohort in cohorts:
                self.guarantee.count_participation(cohort)
            return
        self._resumed_with_new_noise = True
        for number, times in spent.items():
            if times:
                self.guarantee.count_participation([number], times)

    def turns(self, t: int, cohort: Sequence[int]) -> tuple[int, list[int]]:
        """Return which attempt at the round this is, and who takes part: after a resume, those with a turn left."""
        if self.guarantee is None or self.ledger is None or not self._resumed_with_new_noise:
            return 1, list(cohort)
        present = [number for number in cohort if self.guarantee.participations(number) < self._job.cap]
        self.skipped += len(cohort) - len(present)
        # The first under whose name none of them has an entry.
        for attempt in count(1):
            message = message_name(t, attempt)
            if not any(self.ledger.find(self._job.agents[number], self.run, message) for number in present):
                break
        return attempt, present

    def count_participation(self, agents: Sequence[int]) -> None:
        if self.guarantee is not None:
            self.guarantee.count_participation(agents)

    def settle(self) -> None:
        """Before a checkpoint that counts on its entries. A ledger of the run's own waits for no disk otherwise."""
        if self.ledger is None or self._job.config.run.ledger is not None:
            return
        path = self.ledger.path
        log = path.with_name(f"{path.name}-wal")
        with os_errors_as(LedgerError, f"{log} cannot be written", "fix that, then resume"):
            durable.force(log if log.exists() else path)
            durable.force(anchor_path(path))
            durable.force_folder(log.parent)

    def total(self) -> LedgerTotal | None:
        """What all runs cost in a ledger that outlives this one (`run.ledger`), against the server with up to the
        colluders of each."""
        if self._job.plan is None or self.ledger is None or self._job.config.run.ledger is None:
            return None
        try:
            return total_in(self.ledger, self._job.plan, self._job.agents)
        except FedspaError as error:
            return no_total(error)
