"""The transport over Flower: a run's agents are nodes of a grid.

Each agent of the round's cohort that is online and willing gets θ and its terms. Each is heard once; replies that are
not well-formed, or not this round's, are dropped and counted; agents that do not answer are asked more and more rarely.
The server draws the masks: a payload under any other seed is a replay or a forgery.

Under secure aggregation one cohort is announced to all its members, and the sum needs each of them. A round without a
sum leaves θ where it is; agents that spoilt it are left out while the others are enough.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore import log

from fedspa import durable
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import CODES, FINAL_CODES, Request
from fedspa.algorithms import Terms
from fedspa.errors import FedspaError, PayloadError
from fedspa.flower.nodes import Introductions, NodeRegistry, PollingGrid, RequestLog, members_of
from fedspa.flower.settings import FlowerSettings
from fedspa.flower.terms import Announcement, to_record
from fedspa.learning.flat import sketch
from fedspa.runs.guarantee import Guarantee, LedgerTotal, no_total, total_in
from fedspa.runs.loop import RunState, check_same_noise, noise
from fedspa.runs.run_ledger import open_ledger
from fedspa.runs.rundir import ASKED, RoundMetrics, label, shown_score
from fedspa.secagg.masking import Void
from fedspa.secagg.recovery import Step
from fedspa.secagg.session import Session
from fedspa.server.intake import MaskedIntake

EXCHANGE_SECONDS = 60.0  # to answer a question about a sum, for which nobody trains
MOST_VOIDS = 3  # rounds without a sum in a row: each costs everybody who was asked


class FlowerTransport:
    """The agents of a run over `grid`. What outlives a round is in the server's state, `nodes` and the run's folder."""

    def __init__(self, state: RunState, settings: FlowerSettings, grid: PollingGrid) -> None:
        self.job = job = state.job
        self._state, self._settings, self._grid = state, settings, grid
        begun = state.begun
        extra = begun.extra if begun is not None else {}
        if begun is not None and "asked" not in extra:  # nobody was counted here
            raise FedspaError(
                f"the run in {state.folder.path} was begun by `fedspa run`, whose ledger alone knows what its rounds "
                f"spent: resume it with `fedspa run --resume {state.folder.path}`"
            )
        self._kept: dict[str, str] = {}
        if job.plan is not None and job.config.run.ledger is not None:  # made before anyone trains
            with open_ledger(Path(job.config.run.ledger), begun) as ledger:
                self._kept = {"ledger": ledger.name}
        self.run = begun.run if begun is not None else secrets.token_hex(16)
        self._members = members = members_of(job, settings)
        deployed = settings.records is not None
        self._voids: list[str] = []  # why there was no sum, of the last rounds in a row
        if members is not None:
            self._kept["members"] = members.digest
            if extra.get("members", members.digest) != members.digest:
                raise FedspaError(
                    f"{settings.roster} names other members than when the run began, and participations are counted by "
                    "their order; restore that roster (keys in it may change), or start a new run"
                )
        self.nodes = NodeRegistry(job.config.federation.agents, named=members is not None and deployed)
        if "roster" in extra:
            self.nodes.restore(extra["roster"])
        self.dropped: Counter[str] = Counter(extra.get("dropped", {}))
        # Valid updates by agent, whether or not they were a quorum: the least that its ledger must hold.
        self.taken = Counter({int(number): times for number, times in extra.get("taken", {}).items()})
        self._asked = RequestLog(state.folder.path / ASKED)
        self._asked.require(extra.get("asked", {}))
        self._saved_nodes = self.nodes.known
        self._round = _Round()
        # A deployed agent that is asked again for an attempt sends what it sent, and so does seeded noise. What others
        # send has other noise, and is another release.
        self._repeats = deployed or job.plan is None or job.config.privacy.noise == "seeded"
        self._constants = sketch(job.server.model.module)
        self.introductions: Introductions | None = None
        if members is not None and deployed:
            self.introductions = Introductions(members, self._offer, settings.round_timeout)
        if self._asked.counts:  # the first checkpoint was saved before the first question
            if begun is None:
                raise FedspaError(
                    f"{state.folder.path} has sent requests but holds no checkpoint; restore one from a backup"
                )
            check_same_noise(begun, job)
        self.guarantee: Guarantee | None = None
        if job.plan is not None:
            self.guarantee = Guarantee(job.plan)
            for number in range(job.config.federation.agents):
                if times := self._asked.count(number):
                    self.guarantee.count_participation([number], times)

    @property
    def quorum(self) -> int:
        """Return how many updates move θ at least. A sum is of all agents to whom it was announced: so many they must
        be."""
        if self.job.plan is not None and self.job.plan.aggregation is not None:
            return self.job.plan.aggregation.members
        per_round = self.job.config.federation.per_round
        return self._settings.quorum or -(-per_round // 2)

    def begin(self, history: Sequence[RoundMetrics]) -> None:
        """Wait for the agents: all of them, or a quorum when the time is over. A resumed run may miss a site that is
        gone for good; one that is over needs nobody."""
        if self._state.over:
            return
        settings, wanted = self._settings, self.job.config.federation.agents
        timeout = settings.start_timeout
        if settings.resume:
            timeout = min(timeout, settings.round_timeout)
        end = time.monotonic() + timeout
        while (present := self.meet()) < wanted and time.monotonic() < end:
            time.sleep(0.2)
        if present < self.quorum:
            refused = {} if self.introductions is None else self.introductions.refused
            codes = (
                f" ({len(refused)} nodes are no members: {', '.join(sorted(set(refused.values())))})" if refused else ""
            )
            raise FedspaError(
                f"{present} agents of this run are online after {timeout:g} s{codes}, and the quorum is {self.quorum}; "
                "start SuperNodes (a resumed run knows its nodes by their keys), or raise flower.start_timeout"
            )
        log(INFO, "%d of %d agents are online", present, wanted)
        sizes = self.job.config.federation
        agents = f"{sizes.per_round} of {sizes.agents} agents a round, quorum {self.quorum}"
        log(INFO, "run %s of %s, %s, in %s", self.run, self.job.config.algorithm.name, agents, self._state.folder.path)

    def meet(self) -> int:
        """Note who is online, and who that is; return how many agents are there."""
        nodes = list(self._grid.get_node_ids())
        if self.introductions is not None:
            self.introductions.meet(self._grid, nodes, self.nodes)
        return self.nodes.meet(nodes)

    def select(self, t: int, cohort: Sequence[int]) -> tuple[int, list[int]]:
        """Wait for the agents of the cohort that are online, willing and below their participation cap."""
        agents = self.job.config.federation.agents
        if agents - len(self.nodes.refused) < self.quorum:
            codes = ", ".join(sorted(set(self.nodes.refused.values())))
            raise FedspaError(
                f"{len(self.nodes.refused)} of {agents} agents refuse this run ({codes}), and the quorum is "
                f"{self.quorum}; offer stricter terms, or lower "
                f"{'flower.quorum' if self._members is None else 'privacy.members'}"
            )
        if len(self._voids) >= MOST_VOIDS:
            raise FedspaError(
                f"{MOST_VOIDS} rounds in a row gave no sum ({self._voids[-1]}), and everyone who was asked paid for "
                "them; fix that, then resume with flower.resume = true"
            )
        attempt, asked = self._attempt(t, list(cohort))
        self._round = _Round(asked)
        return attempt, list(asked.values())

    def name(self, number: int) -> str:
        assert self._members is not None
        return self._members.names[number]

    def public_key(self, number: int) -> bytes:
        return b"" if self._members is None else self._members[self.name(number)]

    def collect(self, request: Request, mask_seeds: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Send each agent its terms and θ, and wait for the replies. The spend of everyone who is asked is written down
        before the first message leaves."""
        asked, terms = self._round.asked, request.terms
        fresh = self._asked.add(terms.round, list(mask_seeds), request.attempt)
        if self.nodes.known != self._saved_nodes:  # who is who must outlive a crash in this round
            self._state.save(self.run, self.checkpoint())
        if self.guarantee is not None:
            self.guarantee.count_participation(fresh)
        sent = request.theta if request.models is None else request.models
        theta = ArrayRecord({"theta": Array(sent.cpu().numpy())})
        messages = [
            Message(
                content=RecordDict({"theta": theta, "terms": self._announce(terms, number, request.session)}),
                dst_node_id=node,
                message_type="train",
                ttl=self._settings.round_timeout,
                group_id=str(terms.round),
            )
            for node, number in asked.items()
        ]
        for reply in self._grid.send_and_receive(messages, timeout=self._settings.round_timeout):
            node = reply.metadata.src_node_id
            if reply.has_error() and node not in asked:
                continue  # Flower's own notice that nobody answered in time: counted as silent
            if node not in asked or asked[node] in self._round.answered:
                self._round.dropped["duplicate-reply"] += 1
                continue
            self._round.answered.add(asked[node])
            payload = self._payload(reply, asked[node])
            if payload is not None:
                yield asked[node], payload

    def recover(self, request: Request, intake: MaskedIntake) -> None:
        """Carry out the exchanges of a recovered sum, with the members who answered."""
        session = request.session
        assert session is not None
        nodes = {self.name(number): (node, number) for node, number in self._round.asked.items()}
        # A simulated agent keeps no session, so the server says which it is.
        kept = "" if self._settings.records is not None else json.dumps(session.to_json())
        timeout = min(self._settings.round_timeout, EXCHANGE_SECONDS)
        # A member answers for one set of survivors: after a crash of the server it must be asked for no other.
        path = self._state.folder.path / "survivors.json"
        place = {"run": self.run, "round": session.round, "attempt": session.attempt}
        named = json.loads(path.read_text("utf-8")) if path.exists() else {}
        among = named["survivors"] if place.items() <= named.items() else None

        def ask(step: Step, questions: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
            durable.replace_text(path, json.dumps({**place, "survivors": list(questions)}))
            messages = []
            for name, body in questions.items():
                node, number = nodes[name]
                of: dict[str, int | str | bytes] = {"run": self.run, "number": number, "binding": session.binding}
                question = ConfigRecord({**of, "step": step, "body": body, "session": kept})
                messages.append(Message(RecordDict({"recovery": question}), node, "query.recover", ttl=timeout))
            waiting = {nodes[name][0]: name for name in questions}
            for reply in self._grid.send_and_receive(messages, timeout=timeout):
                name = waiting.pop(reply.metadata.src_node_id, "")
                answer = None if reply.has_error() else _only_value(reply.content, "recovery", "answer")
                if name and isinstance(answer, bytes):
                    yield name, answer
            for name in waiting.values():
                log(WARNING, "round %d: %s fell silent before the sum was recovered (%s)", session.round, name, step)

        intake.recover(ask, among)

    def _payload(self, reply: Message, number: int) -> bytes | None:
        """Return the payload of a reply; None where it has none, which is counted. Its text is never looked at."""
        found = None if reply.has_error() else _only_value(reply.content, "update", "payload")
        if isinstance(found, bytes):
            return found
        if isinstance(found, str):
            self._round.dropped[f"refused-{found}"] += 1
            if found in FINAL_CODES:
                self.nodes.refused[number] = found
                log(WARNING, "agent %d refused (%s) and is not asked again", number, found)
        else:
            self._round.dropped["error" if reply.has_error() else "malformed"] += 1
        return None

    def reject(self, request: Request, number: int, error: PayloadError) -> None:
        self._round.dropped[f"payload-{error.code}"] += 1

    def close(self, request: Request, taken: Sequence[int], void: Void | None) -> None:
        """Note who fell silent or spoilt a sum, and write the round's replies down."""
        dropped, t = self._round.dropped, request.terms.round
        self.taken.update(taken)
        for number in self._round.answered:
            if number in taken or request.session is None:
                self.nodes.mark_responsive(number)
            else:  # an agent that spoils a sum counts as silent
                self.nodes.mark_silent(number)
        for number in self._round.asked.values():
            if number not in self._round.answered:
                dropped["silent"] += 1
                turns = self.nodes.mark_silent(number)
                log(WARNING, "agent %d did not answer; while the others are a quorum it misses %d turns", number, turns)
        moved = 0 if void is not None else len(taken)
        if self._members is not None:
            self._note_sum(t, request.session, void)
        elif len(taken) < self.quorum:
            dropped += Counter({"below-quorum": len(taken)})
            moved = 0
        self._round.moved = moved
        self.dropped += dropped
        line = {"round": t, "asked": len(self._round.asked), "taken": moved, "dropped": dropped}
        with (self._state.folder.path / "replies.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _note_sum(self, t: int, session: Session | None, void: Void | None) -> None:
        """Note whether a round gave a sum, and count it where it did not."""
        if session is not None and void is None:
            self._voids = []
            return
        self._voids.append(f"fewer than {self.quorum} agents could be asked" if void is None else str(void))
        log(WARNING, "round %d gave no sum: %s", t, self._voids[-1])
        self._round.dropped["no-cohort" if void is None else f"void-{void.code}"] += 1

    def log_round(self, metrics: RoundMetrics) -> None:
        """Log score and replies of the round that was closed last."""
        lost = "".join(f", {count} {code}" for code, count in sorted(self._round.dropped.items()))
        score = f"{label(metrics.headline)} {shown_score(metrics.headline, metrics.score)}"
        asked = len(self._round.asked)
        log(INFO, "round %d: %s, %d of %d updates%s", metrics.round, score, self._round.moved, asked, lost)

    def checkpoint(self) -> dict[str, Any]:
        self._saved_nodes = self.nodes.known
        return {
            "roster": self.nodes.to_json(),
            "dropped": dict(self.dropped),
            "asked": self._asked.counts,
            "taken": {str(number): times for number, times in sorted(self.taken.items())},
            **noise(self.job),
            **self._kept,
        }

    def total(self) -> LedgerTotal | None:
        """Return what the simulator would, where the agents of a simulation share a ledger that outlives the run.

        A node may write another one, by its node-config or on another machine: nothing is stated that leaves this run
        out.
        """
        job = self.job
        if job.plan is None or job.config.run.ledger is None:
            return None
        try:
            with Ledger.open(job.config.run.ledger, create=False) as ledger:
                for number, uploads in sorted(self.taken.items()):
                    found = ledger.participations(job.agents[number], self.run)
                    if found < uploads:
                        return LedgerTotal(
                            None,
                            f"no ε over all runs: {ledger.path} (run.ledger) holds {found} entries of this run by "
                            f"{job.agents[number]}, which sent {uploads} updates; let its node write the same file, "
                            "which no ledger in its node-config and a whole path in run.ledger see to",
                        )
                return total_in(ledger, job.plan, job.agents)
        except FedspaError as error:
            return no_total(error)

    def complete(self, summary: dict[str, Any]) -> None:
        self.dropped += self._grid.unused
        summary["dropped"] = dict(sorted(self.dropped.items()))
        if voids := sum(times for code, times in self.dropped.items() if code.startswith("void-")):
            summary["warnings"].append(f"{voids} rounds gave no sum; the participations in them were paid for")

    def _may_be_asked(self, t: int, number: int, attempt: int) -> bool:
        """Return whether the agent is below the plan's cap; a repeated request is no new participation."""
        return self._asked.was(t, number, attempt) or self._asked.count(number) < self.job.cap

    def _attempt(self, t: int, cohort: list[int]) -> tuple[int, dict[int, int]]:
        """Return which attempt at round t this is, and the agents that it asks, by node. A server that died in the
        round resumes the attempt that it was in, if agents repeat what they sent. A sum needs the same whole cohort;
        with any other it is a new attempt, for which everybody pays again."""
        attempt, before = self._asked.last(t) or (1, [])
        if before and not self._repeats:
            attempt += 1
        elif before and self._members is not None:
            if len(found := self._reachable(before, len(before))) == len(before):
                return attempt, found
            attempt += 1
        free = [number for number in cohort if self._may_be_asked(t, number, attempt)]
        return attempt, self._reachable(free, self.quorum)

    def _reachable(self, cohort: list[int], wanted: int) -> dict[int, int]:
        """Wait, for a round's time at most, until so many of the cohort are online. Without a quorum nobody is asked:
        an update that moves nothing would cost its agent all the same. Agents that rest for their silence are asked
        where the others are no quorum."""
        wanted = min(wanted, len(self.nodes.not_refused(cohort)))
        end = time.monotonic() + self._settings.round_timeout
        while True:
            self.meet()
            found = self.nodes.reachable(cohort)
            if len(found) >= wanted or time.monotonic() >= end:
                break
            time.sleep(self._settings.poll)
        awake = {node: number for node, number in found.items() if not self.nodes.is_backing_off(number)}
        if len(awake) < self.quorum:
            return found if len(found) >= self.quorum else {}
        for node in found.keys() - awake.keys():
            self.nodes.skip_turn(found[node])
        return awake

    def _offer(self) -> ConfigRecord:
        """Return the terms that every node gets before it says who it is."""
        assert self._members is not None
        return self._announce(self._state.server.terms(), 0, None, self._members.names)

    def _announce(
        self, terms: Terms, number: int, session: Session | None, cohort: tuple[str, ...] = ()
    ) -> ConfigRecord:
        """Return what the agent of this number is sent. A session has the cohort of its sum; before there is one,
        `cohort` names whom the run is offered to."""
        config, server, models = self.job.config, self.job.server, self._state.server.models
        return to_record(
            Announcement(
                run=self.run,
                number=number,
                algorithm=config.algorithm.name,
                model=config.model.name,
                model_seed=config.run.seed.to_bytes(8, "big"),
                constants=self._constants,
                task=self.job.task,
                classes=server.model.task.width or 0,
                features=config.data.features or "",
                coding=server.coding,
                mask_seed=self._state.server.mask_seed(terms, number),
                noise=None if terms.plan is None else config.privacy.noise,
                terms=terms,
                attempt=1 if session is None else session.attempt,
                scored=0 if models is None else len(models),
                cohort=cohort if session is None else tuple(session.members),
                binding=b"" if session is None else session.binding,
                recovery=config.privacy.recovery,
            )
        )


class _Round:
    """The round that was selected last: agents by node, who answered, and replies that were not used, by reason."""

    def __init__(self, asked: Mapping[int, int] | None = None) -> None:
        self.asked = dict(asked or {})
        self.answered: set[int] = set()
        self.dropped: Counter[str] = Counter()
        self.moved = 0  # updates that moved θ


def _only_value(content: RecordDict, kind: str, key: str) -> bytes | str | None:
    """Return the payload or the code of a well-formed reply; None for anything else."""
    record: Any = content.get(kind)
    if set(content) != {kind} or not isinstance(record, ConfigRecord) or len(record) != 1:
        return None
    payload, code = record.get(key), record.get("refusal")
    if isinstance(payload, bytes):
        return payload
    return code if isinstance(code, str) and code in CODES else None
