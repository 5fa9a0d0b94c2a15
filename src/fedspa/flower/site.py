"""An agent's own side: its node-config, records, model, policy and ledger. Nothing that the server sends decides these.

In Flower's simulation engine there is no node-config to write; a process that it started, with a node-config that names
none of an agent's keys, is a simulation by itself.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import (
    Member,
    Question,
    Refusal,
    Request,
    agent_name,
    answer_exchange,
    encode_answer,
    participate_once,
    pay,
    release,
    respond,
    simulated_keys,
)
from fedspa.agent.policy import Policy
from fedspa.algorithms import Agent
from fedspa.algorithms.base import finite
from fedspa.data.dataset import grouped
from fedspa.data.features import Features, transform
from fedspa.data.plugin import is_plugin, is_table
from fedspa.engine import EngineName
from fedspa.engine.choose import RecordIsolation, device_named
from fedspa.engine.local import Engine
from fedspa.errors import ConfigError, DataError, describe_invalid, quoted
from fedspa.examples import Examples, count, taken, zero_examples
from fedspa.flower.settings import read_config
from fedspa.flower.site_records import Records, load, settled
from fedspa.flower.terms import MOST_CLASSES, Announcement, ExchangeRecord
from fedspa.flower.trainer import SiteExamples, Trainer, trainer_for
from fedspa.learning import models
from fedspa.learning.flat import alike
from fedspa.learning.tasks import CustomLoss, Task
from fedspa.learning.tasks.named import NAMES as TASKS
from fedspa.learning.tasks.named import resolve
from fedspa.learning.tasks.totals import Totals
from fedspa.privacy.event import Sampling, Unit
from fedspa.randomness.streams import Stream, derive_key, root_key
from fedspa.runs.config import Config
from fedspa.runs.sections import Data, Section
from fedspa.runs.sections import Task as TaskSection
from fedspa.runs.setup import holdings_of, names_of, records_of, task_of, trained_on, with_own_agents, with_targets
from fedspa.secagg.keys import Roster, SecretKey
from fedspa.secagg.recovery import Progress, answer, survivors_in
from fedspa.secagg.session import Session

logger = logging.getLogger("fedspa.agent")
CPU = torch.device("cpu")
# A node-config that names one of these is an agent with records of its own, whatever process it runs in.
NEEDED = frozenset({"agent", "data", "classes", "policy", "ledger"})

Text = Annotated[str, Field(min_length=1)]


class NodeConfig(Section):
    """The keys of an agent's node-config, which its operator writes.

    `agent` is its name in the ledger, which never changes. `data` is an .npz, a table with a `schema` (docs/data.md),
    or "package.module:function". `classes` is how many its labels may name: a public number, by which it reads its
    records. `task` is what is learned where it is not classes, or "package.module:function", its own loss. `person` is
    the array of an .npz that says whose each record is; a schema and a function say it themselves: each person is then
    protected, and not each record, and at most `person-records` of a person's records count. `policy` has its limits
    (docs/ledger.md), and `ledger` was made once, by `fedspa site new`. `key` is its secret key for runs that add up
    masked updates (`fedspa site keygen`), `roster` the names and public keys of all who may be in a sum with it.
    `model` is "package.module:build" where the model is not one of fedspa's own, `features` the same map as the run's
    data.features. `max_records` is the most examples that this site will ever train on, a public number: under Poisson
    sampling, engines that take records together need it (fedspa/engine/local.py). `device` is what it trains on.
    `statistics` lets a server ask for statistics of its records, too (`fedspa stats`), under the same policy.
    With `simulation` it simulates agents: seeded noise is then allowed, and nothing that it sends is private.
    """

    agent: Text
    data: Text
    policy: Text
    ledger: Text
    classes: Annotated[int, Field(ge=2, le=MOST_CLASSES)] | None = None
    task: Text = "classification"
    table_schema: Annotated[Text | None, Field(alias="schema")] = None
    person: Text | None = None
    person_records: Annotated[int, Field(alias="person-records", ge=1, le=100_000)] = Data.model_fields[
        "person_records"
    ].default
    key: Text | None = None
    roster: Text | None = None
    model: Text | None = None
    features: Features | None = None
    max_records: Annotated[int, Field(ge=1, le=10**9)] | None = None  # each step draws as many numbers
    device: Text = "cpu"
    statistics: bool = False
    simulation: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> NodeConfig:
        if not is_plugin(self.task) and self.task not in TASKS:
            raise ValueError(f"task is {self.task!r}; it must be one of {', '.join(TASKS)}, or package.module:function")
        if self.task == "classification" and self.classes is None:
            raise ValueError(
                f"classes is missing; it must be a whole number from 2 to {MOST_CLASSES}, as classes=2: how many "
                "classes the run has, not how many this site happens to hold; where no classes are learned, name "
                'what is, as task="regression"'
            )
        if self.task != "classification" and self.classes is not None:
            raise ValueError(f"classes is {self.classes}; the task {self.task!r} has none: leave it out")
        if (self.key is None) != (self.roster is None):
            raise ValueError(f"{'key' if self.key is None else 'roster'} is missing; key and roster stand together")
        return self


def read_node(node: Mapping[str, Any]) -> NodeConfig:
    """Check a node-config. A function that makes the records is given all keys, and may have some of its own."""
    known = {field.alias or name for name, field in NodeConfig.model_fields.items()}
    own_keys = is_plugin(str(node.get("data", "")))
    for key, value in node.items():
        if type(value) not in (str, int, float, bool):  # what Flower can hand over
            raise ConfigError(f"node-config: {key} is {quoted(value)}; it must be a text, a number, true or false")
    try:
        return NodeConfig.model_validate({key: value for key, value in node.items() if key in known or not own_keys})
    except ValidationError as error:
        raise ConfigError(f"node-config: {describe_invalid(error, NodeConfig)}") from None


class Federation(NamedTuple):
    """The agents of a simulation and what they hold, which follows from the run's config."""

    train: Examples
    record: Examples
    holdings: list[NDArray[np.int64]]
    persons: NDArray[np.int64] | None
    classes: int | None
    key: str | None
    agents: Sequence[str]


@lru_cache(maxsize=2)
def federation(config_json: str) -> Federation:
    config = Config.model_validate_json(config_json)
    data = records_of(config)
    config = with_own_agents(config, data)
    ready = with_targets(data, task_of(config, data))
    return Federation(
        trained_on(config, ready),
        ready.example_spec,
        holdings_of(config, data),
        data.persons,
        data.classes,
        data.key,
        names_of(config, data),
    )


@dataclass(frozen=True)
class Site:
    """A deployed agent's node-config, read and checked.

    `own_classes` is the public number of classes where the site's task is classification, else None. `max_records`
    is the public number of slots of its examples, where its operator names one. `person_records` is the most
    records of a person that may count: a public number, where what a site holds may be fewer. `member` is what it
    is in a cohort, where it has a key and a roster. `SimulatedSite` overrides everything in which a simulation
    differs.
    """

    simulated: ClassVar[bool] = False

    agent: str
    model: str | None
    task: str
    policy: Policy
    ledger: Path
    node: Mapping[str, Any]
    own_classes: int | None
    max_records: int | None = None
    device: torch.device = CPU
    member: Member | None = None
    person_records: int = 1
    statistics: bool = False

    @property
    def features(self) -> str:
        """Return the map that its records go through before training; "" for none."""
        return str(self.node.get("features") or "")

    @property
    def unit(self) -> Unit:
        """Return what its examples are: persons, where its data says whose the records are."""
        return "record" if self.own_records().persons is None else "person"

    def held(self, number: int) -> SiteExamples:
        """Return the agent's examples. `number` is the server's, and is ignored."""
        own = self._persons() if self.unit == "person" else self._records()
        examples = count(own.examples.y)
        if self.policy.delta * examples >= 1:
            raise DataError(
                f"the policy's δ = {self.policy.delta:g} promises nothing to {examples} {self.unit}s; "
                f"set it below 1/{examples} = {1 / examples:.3g}"
            )
        if self.max_records is not None and self.max_records < examples:  # whatever a server asks for
            raise DataError(
                f"node-config: max_records is {self.max_records}, and this site holds {examples} {self.unit}s; "
                "raise max_records, which is "
                "public, to the most that it will ever hold, with some to spare: it is meant to stay"
            )
        return own

    def slot_count(self, sampling: Sampling, examples: int) -> int | None:
        """Return the number of slots for its examples, which neighbours share; None where there are no slots."""
        return examples if sampling == "fixed" else self.max_records

    def isolation_for(self, sampling: Sampling) -> RecordIsolation:
        """Return the record isolation that an engine needs here."""
        return "fixed-slot" if sampling == "fixed" or self.max_records is not None else "per-example"

    def own_records(self) -> Records:
        """Return its records, bad ones marked."""
        return _own_records(tuple(sorted(self.node.items())), self.own_classes)

    def _records(self) -> SiteExamples:
        own = self.own_records()
        return SiteExamples(Examples(own.x, own.y), None, Examples(zero_examples(own.x), zero_examples(own.y)), own.key)

    def _persons(self) -> SiteExamples:
        """Draw afresh in each process which records of a person count, from the operating system's entropy."""
        pool = _grouped(tuple(sorted(self.node.items())), self.own_classes, self.person_records)
        return self._records()._replace(pool=pool)

    def trainer(self, announced: Announcement, held: SiteExamples) -> Trainer:
        """Return what trains the announced model for the task. The server may name fedspa's own models and tasks only;
        what is a site's own is named in its node-config."""
        if self.model is None and announced.model not in models.NAMES:
            raise ConfigError(
                f"the server trains the model {announced.model[:100]!r}, which is its own code; review it, install it "
                'here and name it in the node-config: model="package.module:function"'
            )
        return self._trainer(announced, held, self._task(announced.task, held), "auto", 1)

    def _trainer(
        self, announced: Announcement, held: SiteExamples, task: Task, engine: EngineName, threads: int
    ) -> Trainer:
        model = announced.model if isinstance(task, Totals) else self.model or announced.model
        if not isinstance(task, CustomLoss) and (task.width or 0) != announced.classes:
            raise ConfigError(f"the run wants {announced.classes} outputs per example, this site {task.width or 0}")
        found = trainer_for(
            model,
            held.record,
            task,
            None if self.unit == "record" else self.person_records,
            engine,
            threads,
            announced.noise == "exact",
            int.from_bytes(announced.model_seed, "big"),
            self.device,
            self.isolation_for(announced.terms.steps.sampling),
            announced.terms.optimizer.name,
        )
        if not alike(found.constants, announced.constants):
            raise ConfigError(
                f"what the model {model!r} has and does not learn (frozen parameters, buffers) is not the same here as "
                "at the server; load it from the same file at both, or draw it with torch's generator"
            )
        return found

    def _task(self, asked: TaskSection, held: SiteExamples) -> Task:
        if asked.name == Totals.name:
            if not self.statistics:
                raise ConfigError(
                    "the run asks for statistics of the records, which this site has not allowed: set statistics = "
                    "true in the node-config"
                )
            return resolve(asked.name, held.record.y, None, held.key, asked.options)
        if is_plugin(self.task):
            return resolve(self.task, held.record.y, None, held.key)
        if asked.name != self.task:
            raise ConfigError(
                f"the run learns {asked.name[:100]!r}, this site {self.task!r}: set task in the node-config"
            )
        return resolve(self.task, held.record.y, self.own_classes, held.key, asked.options)

    def member_for(self, announced: Announcement) -> Member:
        """Return what this agent is in the cohort of a sum, or raise a Refusal."""
        return self._member(recovery=announced.recovery)

    def _member(self, *, recovery: bool) -> Member:
        if self.member is None:
            raise Refusal("aggregation", "this run adds up masked updates: name key and roster in the node-config")
        if recovery and not self.policy.recovery:
            raise Refusal(
                "aggregation", "this run recovers sums from silence; to allow it, set recovery = true in the policy"
            )
        return self.member

    def recover(self, asked: ExchangeRecord) -> bytes:
        """Answer a question about the sum that this agent's last update is in, or raise a Refusal."""
        question = Question(asked.run, asked.binding, asked.step, asked.body)
        return answer_exchange(question, self._member(recovery=True), self.agent, self.ledger)

    def private_root(self, announced: Announcement) -> bytes:
        """Return what the agent's private randomness follows from: the operating system's entropy."""
        return root_key("secure", 0)

    def answer(self, request: Request, agent: Agent, engine: Engine) -> bytes:
        """Pay, train and return the payload, once; or raise a Refusal."""
        return participate_once(request, self.agent, agent, engine, self.ledger, self.policy)


@dataclass(frozen=True)
class SimulatedSite(Site):
    """One of the agents of Flower's simulation: its records, keys and noise follow from the run's config. Many of them
    share a ledger, where there is one. A policy is optional, and nothing that a simulation sends is private."""

    simulated: ClassVar[bool] = True

    policy: Policy | None  # type: ignore[assignment]  # a simulation needs none
    ledger: Path | None  # type: ignore[assignment]
    config: Config = field(kw_only=True)

    @property
    def features(self) -> str:
        return self.config.data.features or ""

    @property
    def unit(self) -> Unit:
        return "record" if self._federation.persons is None else "person"

    @property
    def _federation(self) -> Federation:
        return federation(self.config.model_dump_json(exclude_unset=True))

    def held(self, number: int) -> SiteExamples:
        """Return the examples of agent `number`."""
        federation = self._federation
        holdings = federation.holdings
        self._require(number)
        return SiteExamples(federation.train, torch.from_numpy(holdings[number]), federation.record, federation.key)

    def _require(self, number: int) -> None:
        agents = len(self._federation.agents)
        if not 0 <= number < agents:
            raise DataError(f"agent {number} of a federation of {agents}; the server's config is another")

    def slot_count(self, sampling: Sampling, examples: int) -> int | None:
        """Return None: how many records a simulation's agents hold is public."""
        return None

    def isolation_for(self, sampling: Sampling) -> RecordIsolation:
        return "fixed-slot"

    def trainer(self, announced: Announcement, held: SiteExamples) -> Trainer:
        run, options = self.config.run, announced.task.options
        task = resolve(self.config.task.name, held.record.y, self._federation.classes, held.key, options)
        return self._trainer(announced, held, task, run.engine, run.threads)

    def member_for(self, announced: Announcement) -> Member:
        self._require(announced.number)
        keys = self._keys
        name = agent_name(announced.number)
        return Member(name, keys[name], Roster({other: key.public for other, key in keys.items()}))

    @property
    def _keys(self) -> dict[str, SecretKey]:
        """Return the keys of all members, by name."""
        return simulated_keys(root_key("seeded", self.config.run.seed), range(len(self._federation.agents)))

    def recover(self, asked: ExchangeRecord) -> bytes:
        """Answer as a site does, but keep nothing: the server says which session it is."""
        self._require(asked.number)
        name = agent_name(asked.number)
        secret = self._keys[name]
        session = Session.of_json(json.loads(asked.session))
        progress = Progress(survivors_in(session, asked.step, asked.body))
        return answer(session, name, secret, progress, asked.step, asked.body)

    def private_root(self, announced: Announcement) -> bytes:
        return root_key(announced.noise or self.config.privacy.noise, self.config.run.seed)

    def answer(self, request: Request, agent: Agent, engine: Engine) -> bytes:
        plan, name, policy = request.terms.plan, self._federation.agents[agent.number], self.policy
        with ExitStack() as stack:
            ledger: Ledger | None = None
            if plan is not None and self.ledger is not None:
                # The run's own was made by its server, before its first checkpoint; a node's is its own to make.
                ledger = stack.enter_context(Ledger.open(self.ledger, create="ledger" in self.node))
                if policy is not None:
                    policy.admit(plan, ledger, name, request.run, request.message)
                pay(request, [name], ledger, None if policy is None else policy.cap)
            ((_, answer),) = respond(request, {name: agent}, engine)
            payload = encode_answer(request, agent_name(agent.number), agent, finite(answer))
            if ledger is not None:
                release(request, {name: payload}, ledger)
            return payload


def read_site(node: Mapping[str, Any], run_config: Mapping[str, Any]) -> Site:
    """Return the site of a node-config. `run_config` is the server's: it is looked at in simulations only."""
    if node.get("simulation") is True or (in_simulation_engine() and not NEEDED & node.keys()):
        config, _ = read_config(run_config)
        policy = node.get("policy", config.run.policy)
        ledger = node.get("ledger", config.run.ledger)
        return SimulatedSite(
            agent="",
            model=config.model.name,
            task=config.task.name,
            policy=None if policy is None else Policy.load(str(policy)),
            ledger=None if ledger is None else Path(str(ledger)),
            node=node,
            own_classes=None,
            person_records=config.data.person_records,
            config=config,
        )
    own = read_node(node)
    member = None
    if own.key is not None and own.roster is not None:
        member = Member.load(own.agent, Path(own.key), Path(own.roster))
    return Site(
        agent=own.agent,
        model=own.model,
        task=own.task,
        policy=Policy.load(own.policy),
        ledger=Path(own.ledger),
        node=dict(node),
        own_classes=own.classes,
        max_records=own.max_records,
        device=device_named(own.device, "node-config: device"),
        member=member,
        person_records=own.person_records,
        statistics=own.statistics,
    )


def in_simulation_engine() -> bool:
    """Whether this process is a worker of Flower's simulation engine (a Ray actor): a fact that no message can fake."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized()) and ray.get_runtime_context().get_actor_id() is not None


# Processes that serve several messages load records and build models once.
@lru_cache(maxsize=4)
def _own_records(node: tuple[tuple[str, Any], ...], classes: int | None) -> Records:
    values = dict(node)
    features = values.get("features")
    map_ = None if features is None else partial(transform, features, per_example=True)
    own = load(values, classes, map_, integers="model" in values)
    name = values.get("task", "classification")
    own = settled(own, resolve(name, zero_examples(own.y), classes, own.key), f"data = {values['data']!r}")
    if own.bad:
        logger.warning("%s", bad_records(own, classes, values["data"]))
    return own


@lru_cache(maxsize=4)
def _grouped(node: tuple[tuple[str, Any], ...], classes: int | None, most: int) -> Examples:
    own = _own_records(node, classes)
    assert own.persons is not None
    named = np.flatnonzero(own.persons >= 0)
    if not len(named):
        raise DataError(f"data = {dict(node)['data']!r}: no record says whose it is; name persons, or leave them out")
    x, y = (taken(tree, torch.from_numpy(named)) for tree in (own.x, own.y))
    draws = Stream(derive_key(root_key("secure", 0), "records of persons")).uint64(len(named))
    return grouped(x, y, own.persons[named], most, draws)


def bad_records(own: Records, classes: int | None, data: str) -> str:
    """Return a line for the operator only: it describes records."""
    first = ", ".join(map(str, own.bad[:10])) + (", …" if len(own.bad) > 10 else "")
    label = "" if classes is None else f", or a label outside 0 to {classes - 1}"
    why = f"a number or a person's id that is missing, a number that is not finite{label}"
    if is_table(data):
        why = "cells that the schema does not take: `fedspa data check` lists them"
    return (
        f"{len(own.bad)} of {count(own.y)} records are bad ({why}) and count as zero in training: number {first} from "
        "0 on; fix them"
    )
