"""Fed-SPA as a Flower strategy: the coordinator that the simulator drives, fed by messages.

Each agent of the round's cohort that is online and willing gets θ and its terms; what comes back is validated, each
agent is taken once, and θ moves by the uniform mean if a quorum came. Replies that are none, or not this round's, are
dropped and counted; who does not answer is asked more and more rarely. Masks are dealt by the server: a payload under
any other seed is a replay or a forgery.

Under secure aggregation one cohort is announced to all its members, and the sum needs each of them. A round without a
sum leaves θ where it is; whoever spoilt it is left out while the others are enough.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from logging import INFO, WARNING
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log
from torch import Tensor

from fedspa.agent.participate import CODES, FINAL_CODES
from fedspa.algorithms import Terms
from fedspa.errors import FedspaError, PayloadError
from fedspa.flower.nodes import AskedRounds, Introductions, NodeRegistry, members_of
from fedspa.flower.settings import FlowerSettings
from fedspa.flower.terms import Announcement, to_record
from fedspa.learning.flat import sketch
from fedspa.runs.guarantee import Guarantee
from fedspa.runs.metrics import label, shown_score
from fedspa.runs.run_state import RunState, check_same_noise, noise
from fedspa.runs.summary import measured
from fedspa.secagg.session import Session
from fedspa.secagg.total import Void
from fedspa.server.intake import Intake
from fedspa.server.masked_intake import MaskedIntake

MOST_VOIDS = 3  # rounds without a sum in a row: each costs everybody who was asked


class FedSpa(Strategy):
    """A run's server: everything between two rounds is in `coordinator`, `roster` and the run's folder.

    `start(grid, fedspa.initial_arrays(), num_rounds=fedspa.rounds_left, timeout=…)` trains; then `finish()`.
    """

    def __init__(self, course: RunState, settings: FlowerSettings, kept: Mapping[str, str]) -> None:
        """`kept` is what checkpoints must say of a ledger that the server knows of."""
        self.job = job = course.job
        self.coordinator = course.server
        self.course = course
        begun = course.begun
        extra = begun.extra if begun is not None else {}
        if begun is not None and "asked" not in extra:  # nobody was counted here
            raise FedspaError(
                f"the run in {course.folder.path} was begun by `fedspa run`, whose ledger alone knows what its rounds "
                f"spent: resume it with `fedspa run --resume {course.folder.path}`"
            )
        self.run = begun.run if begun is not None else secrets.token_hex(16)
        self._members = members = members_of(job, settings)
        deployed = settings.records is not None
        self._voids: list[str] = []  # why there was no sum, of the last rounds in a row
        self._named = {} if members is None else {"members": members.digest}
        if members is not None and extra.get("members", members.digest) != members.digest:
            raise FedspaError(
                f"{settings.roster} names other members than when the run began, and what was asked of each is counted "
                "by their order; put that roster back (keys in it may change), or start a new run"
            )
        self.roster = NodeRegistry(job.config.federation.agents, named=members is not None and deployed)
        if "roster" in extra:
            self.roster.restore(extra["roster"])
        self.dropped: Counter[str] = Counter(extra.get("dropped", {}))
        # Valid updates by agent, whether or not they were a quorum: the least that its ledger must hold.
        self.taken = Counter({int(number): times for number, times in extra.get("taken", {}).items()})
        self.guarantee: Guarantee | None = None
        self._settings, self._kept = settings, kept
        self._cohorts = islice(job.cohorts(), self.coordinator.state.round, None)
        self._asked = AskedRounds(course.folder.path / "asked.jsonl")
        self._asked.require(extra.get("asked", {}))
        self._saved_roster = self.roster.known
        self._round: tuple[Terms, dict[int, int], Session | None] | None = None
        # A deployed agent that is asked again for an attempt sends what it sent, and so does seeded noise. What others
        # send has other noise, and is another release.
        self._repeats = deployed or job.plan is None or job.config.privacy.noise == "seeded"
        self._constants = sketch(job.server.model.module)
        self.introductions: Introductions | None = None
        if members is not None and deployed:
            self.introductions = Introductions(members, self._offer, settings.round_timeout)
        if self._asked.counts:  # the first checkpoint was saved before the first question
            if begun is None:
                raise FedspaError(f"{course.folder.path} has asked agents and holds no checkpoint; restore one")
            check_same_noise(begun, job)
        if job.plan is not None:
            self.guarantee = Guarantee(job.plan)
            for number in range(job.config.federation.agents):
                if times := self._asked.count(number):
                    self.guarantee.took_part([number], times)

    @property
    def rounds_left(self) -> int:
        return self.job.config.federation.rounds - self.coordinator.state.round

    @property
    def quorum(self) -> int:
        """How many updates move θ at least. A sum is of all whom it was announced to: so many they must be."""
        if self.job.plan is not None and self.job.plan.aggregation is not None:
            return self.job.plan.aggregation.members
        per_round = self.job.config.federation.per_round
        return self._settings.quorum or -(-per_round // 2)

    def meet(self, grid: Grid) -> int:
        """Note who is online, and who that is; returns how many agents are there."""
        nodes = list(grid.get_node_ids())
        if self.introductions is not None:
            self.introductions.meet(grid, nodes, self.roster)
        return self.roster.meet(nodes)

    def initial_arrays(self) -> ArrayRecord:
        return _arrays(self.coordinator.state.theta)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Announce the round. The spend of everyone asked is written down before the first message leaves."""
        agents = self.job.config.federation.agents
        if agents - len(self.roster.refused) < self.quorum:
            codes = ", ".join(sorted(set(self.roster.refused.values())))
            raise FedspaError(
                f"{len(self.roster.refused)} of {agents} agents refuse this run ({codes}), and the quorum is "
                f"{self.quorum}; offer stricter terms, or lower "
                f"{'flower.quorum' if self._members is None else 'privacy.members'}"
            )
        if len(self._voids) >= MOST_VOIDS:
            raise FedspaError(
                f"{MOST_VOIDS} rounds in a row gave no sum ({self._voids[-1]}), and everyone who was asked paid for "
                "them; fix that, then resume with flower.resume = true"
            )
        terms, cohort = self.coordinator.terms(), next(self._cohorts)
        attempt, asked = self._attempt(grid, terms.round, cohort)
        fresh = self._asked.add(terms.round, list(asked.values()), attempt)
        if self.roster.known != self._saved_roster:  # who is who must outlive a crash in this round
            self.save()
        if self.guarantee is not None:
            self.guarantee.took_part(fresh)
        session = self._session(terms, attempt, asked.values())
        self._round = (terms, asked, session)
        models = self.coordinator.models
        theta = self.initial_arrays() if models is None else _arrays(models)
        return [
            Message(
                content=RecordDict({"theta": theta, "terms": self._announce(terms, number, session)}),
                dst_node_id=node,
                message_type="train",
                ttl=self._settings.round_timeout,
                group_id=str(terms.round),
            )
            for node, number in asked.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take what is valid, move θ if that is a quorum, evaluate, write everything down."""
        assert self._round is not None
        (terms, asked, session), self._round = self._round, None
        intake = self._intake(terms, session, len(asked))
        silent, dropped = dict(asked), Counter[str]()
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error() and node not in asked:
                continue  # Flower's own notice that nobody answered in time: counted as silent below
            if node not in silent:
                dropped["duplicate-reply"] += 1
                continue
            number = silent.pop(node)
            fault = self._take(reply, number, terms, intake)
            if fault is not None:
                dropped[fault] += 1
            if fault is None or session is None:
                self.roster.heard(number)
            else:  # who spoils a sum counts as silent
                self.roster.unheard(number)
        for number in silent.values():
            dropped["silent"] += 1
            turns = self.roster.unheard(number)
            log(WARNING, "agent %d did not answer; while the others are a quorum it misses %d turns", number, turns)
        if isinstance(intake, Intake) and intake.count < self.quorum:
            dropped += Counter({"below-quorum": intake.count})
            intake = None
        void = self.coordinator.close_round(intake)
        if self._members is not None:
            dropped += self._count_void(terms.round, session, void)
        taken, uplink = (0, 0) if intake is None or void is not None else (intake.count, intake.uplink_bytes)
        self._write(terms, taken, uplink, len(asked), dropped)
        return self.initial_arrays(), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody is asked: an accuracy on an agent's records would leave it without noise."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        sizes = self.job.config.federation
        agents = f"{sizes.per_round} of {sizes.agents} agents a round, quorum {self.quorum}"
        log(INFO, "run %s of %s, %s, in %s", self.run, self.job.config.algorithm.name, agents, self.course.folder.path)

    def _may_be_asked(self, t: int, number: int, attempt: int) -> bool:
        """The plan's cap holds for the server too; what is asked again after a crash is no new participation."""
        return self._asked.was(t, number, attempt) or self._asked.count(number) < self.job.cap

    def _attempt(self, grid: Grid, t: int, cohort: list[int]) -> tuple[int, dict[int, int]]:
        """Which attempt at round t this is, and whom it asks: agents by node. A server that died in the round goes on
        with the attempt that it was in, where agents repeat what they sent. Where that was a sum, it needs the same
        cohort, whole; with any other it is a new attempt, for which everybody pays again."""
        attempt, before = self._asked.last(t) or (1, [])
        if before and not self._repeats:
            attempt += 1
        elif before and self._members is not None:
            if len(found := self._reachable(grid, before, len(before))) == len(before):
                return attempt, found
            attempt += 1
        free = [number for number in cohort if self._may_be_asked(t, number, attempt)]
        return attempt, self._reachable(grid, free, self.quorum)

    def _reachable(self, grid: Grid, cohort: list[int], wanted: int) -> dict[int, int]:
        """Wait, for a round's time at most, until so many of the cohort are online. Without a quorum nobody is asked:
        an update that moves nothing would cost its agent all the same. Agents that rest for their silence are asked
        where the others are no quorum."""
        wanted = min(wanted, len(self.roster.willing(cohort)))
        end = time.monotonic() + self._settings.round_timeout
        while True:
            self.meet(grid)
            found = self.roster.reachable(cohort)
            if len(found) >= wanted or time.monotonic() >= end:
                break
            time.sleep(self._settings.poll)
        awake = {node: number for node, number in found.items() if not self.roster.rests(number)}
        if len(awake) < self.quorum:
            return found if len(found) >= self.quorum else {}
        for node in found.keys() - awake.keys():
            self.roster.leave_out(found[node])
        return awake

    def _intake(self, terms: Terms, session: Session | None, most: int) -> Intake | MaskedIntake | None:
        """None where nobody was asked for a sum."""
        if self._members is None:
            return self.coordinator.intake(terms, most)
        return None if session is None else self.coordinator.masked_intake(terms, session)

    def _session(self, terms: Terms, attempt: int, numbers: Iterable[int]) -> Session | None:
        """Return what these agents add up in; None where nobody is asked, or nothing is added up."""
        cohort = {} if self._members is None else self._members.cohort(numbers)
        noise_mode = self.job.config.privacy.noise
        return self.coordinator.session(self.run, attempt, cohort, terms, noise_mode) if cohort else None

    def _count_void(self, t: int, session: Session | None, void: Void | None) -> Counter[str]:
        """Note whether a round gave a sum; return what is counted where it did not."""
        if session is not None and void is None:
            self._voids = []
            return Counter()
        self._voids.append(f"fewer than {self.quorum} agents could be asked" if void is None else str(void))
        log(WARNING, "round %d gave no sum: %s", t, self._voids[-1])
        return Counter(["no-cohort" if void is None else f"void-{void.code}"])

    def _offer(self) -> ConfigRecord:
        """Return the terms that every node gets before it says who it is."""
        assert self._members is not None
        return self._announce(self.coordinator.terms(), 0, None, self._members.names)

    def _announce(
        self, terms: Terms, number: int, session: Session | None, cohort: tuple[str, ...] = ()
    ) -> ConfigRecord:
        """Return what the agent of this number is sent. A session has the cohort of its sum; before there is one,
        `cohort` names whom the run is offered to."""
        config, server, models = self.job.config, self.job.server, self.coordinator.models
        return to_record(
            Announcement(
                run=self.run,
                number=number,
                algorithm=config.algorithm.name,
                model=config.model.name,
                model_seed=config.run.seed.to_bytes(8, "big"),
                constants=self._constants,
                task=config.task,
                classes=server.model.task.width or 0,
                features=config.data.features or "",
                coding=server.coding,
                mask_seed=self.coordinator.mask_seed(terms, number),
                noise=None if terms.plan is None else config.privacy.noise,
                terms=terms,
                attempt=1 if session is None else session.attempt,
                scored=0 if models is None else len(models),
                cohort=cohort if session is None else tuple(session.members),
                binding=b"" if session is None else session.binding,
            )
        )

    def _take(self, reply: Message, number: int, terms: Terms, intake: Intake | MaskedIntake | None) -> str | None:
        """None where the reply's payload was added; else what it is counted as. Its text is never looked at."""
        if reply.has_error():
            return "error"
        found = _only_value(reply.content)
        if isinstance(found, str):
            if found in FINAL_CODES:
                self.roster.refused[number] = found
                log(WARNING, "agent %d refused (%s) and is not asked again", number, found)
            return f"refused-{found}"
        if found is None:
            return "malformed"
        try:
            if isinstance(intake, Intake):
                intake.take(found, seed=self.coordinator.mask_seed(terms, number))
            elif intake is not None and self._members is not None:
                intake.take(self._members.names[number], found)
        except PayloadError as error:
            return f"payload-{error.code}"
        self.taken[number] += 1
        return None

    def _write(self, terms: Terms, taken: int, uplink: int, asked: int, dropped: Counter[str]) -> None:
        metrics = measured(self.job, self.coordinator, self.guarantee, taken, uplink)
        self.dropped += dropped
        self.course.add_round(metrics)
        with (self.course.folder.path / "replies.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": terms.round, "asked": asked, "taken": taken, "dropped": dropped}) + "\n")
        self.save()
        lost = "".join(f", {count} {code}" for code, count in sorted(dropped.items()))
        score = f"{label(metrics.headline)} {shown_score(metrics.headline, metrics.score)}"
        log(INFO, "round %d: %s, %d of %d updates%s", terms.round, score, taken, asked, lost)

    def save(self) -> None:
        self.course.save(
            self.run,
            {
                "roster": self.roster.to_json(),
                "dropped": dict(self.dropped),
                "asked": self._asked.counts,
                "taken": {str(number): times for number, times in sorted(self.taken.items())},
                **noise(self.job),
                **self._named,
                **self._kept,
            },
        )
        self._saved_roster = self.roster.known


def _arrays(theta: Tensor) -> ArrayRecord:
    return ArrayRecord({"theta": Array(theta.cpu().numpy())})


def _only_value(content: RecordDict) -> bytes | str | None:
    """The payload or the code of a well-formed reply; None for anything else."""
    record: Any = content.get("update")
    if set(content) != {"update"} or not isinstance(record, ConfigRecord) or len(record) != 1:
        return None
    payload, code = record.get("payload"), record.get("refusal")
    if isinstance(payload, bytes):
        return payload
    return code if isinstance(code, str) and code in CODES else None
