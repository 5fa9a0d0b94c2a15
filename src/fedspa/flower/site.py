"""An agent's own side: its node-config, records, model, policy and ledger. Nothing that the server sends decides these.

In Flower's simulation engine there is no node-config to write; a process that it started, with a node-config that names
none of an agent's keys, is a simulation by itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from fedspa.agent.member import Member
from fedspa.agent.participate import agent_name
from fedspa.agent.policy import Policy
from fedspa.data.columns import is_table
from fedspa.data.features import Features, transform
from fedspa.data.persons import grouped
from fedspa.data.plugin import is_plugin
from fedspa.engine.choose import RecordIsolation, device_named
from fedspa.errors import ConfigError, DataError, describe_invalid, quoted
from fedspa.examples import Examples, blanks, count, taken
from fedspa.flower.records import Records, load, settled
from fedspa.flower.settings import read_config
from fedspa.flower.terms import MOST_CLASSES, Announcement
from fedspa.flower.trainer import Held, Trainer, trainer_for
from fedspa.learning import models
from fedspa.learning.flat import alike
from fedspa.learning.options import Options
from fedspa.learning.tasks import CustomLoss, Task
from fedspa.learning.tasks.named import NAMES as TASKS
from fedspa.learning.tasks.named import resolve
from fedspa.learning.tasks.wrappers import TRIED
from fedspa.privacy.event import Sampling, Unit
from fedspa.randomness.streams import Stream, derive_key, root_key
from fedspa.runs.config import Config
from fedspa.runs.records import dealt, records_of, trained_on
from fedspa.runs.sections import Data, Section
from fedspa.runs.sections import Task as TaskSection
from fedspa.runs.setup import task_of, with_targets

logger = logging.getLogger("fedspa.agent")
CPU = torch.device("cpu")
# Whoever names one of these is an agent with records of its own, whatever process it runs in.
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
    data.features. `room` is the most examples that this site will ever train on, a public number: under Poisson
    sampling, engines that take records together need it (fedspa/engine/local.py). `device` is what it trains on.
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
    room: Annotated[int, Field(ge=1, le=10**9)] | None = None  # each step draws as many numbers
    device: Text = "cpu"
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


@lru_cache(maxsize=2)
def federation(config_json: str) -> Federation:
    config = Config.model_validate_json(config_json)
    data = records_of(config)
    ready = with_targets(data, task_of(config, data))
    return Federation(trained_on(config, ready), ready.like, dealt(config, data), data.persons, data.classes, data.key)


@dataclass(frozen=True)
class Site:
    """A node's configuration, read and checked. `config` is the simulated run's; None in a deployment.

    `classes` is the public number of classes where the site's task is classification, else None. `room` is the public
    number of places of a deployed agent's examples, where its operator names one. `person_records` is the most records
    of a person that may count: a public number, where what a site holds may be fewer. `member` is what it is in a
    cohort, where it has a key and a roster.
    """

    agent: str
    model: str | None
    task: str
    policy: Policy | None
    ledger: Path | None
    config: Config | None
    node: Mapping[str, Any]
    own_classes: int | None
    room: int | None = None
    device: torch.device = CPU
    member: Member | None = None
    person_records: int = 1

    @property
    def features(self) -> str:
        """The map that its records go through before training; "" for none."""
        return str(self.node.get("features") or "") if self.config is None else self.config.data.features or ""

    @property
    def simulated(self) -> bool:
        return self.config is not None

    @property
    def unit(self) -> Unit:
        """What its examples are: persons, where its data says whose the records are."""
        if self.config is not None:
            return "record" if federation(self.config.model_dump_json()).persons is None else "person"
        return "record" if self.own_records().persons is None else "person"

    def held(self, number: int) -> Held:
        """The agent's examples; in a simulation those of agent `number`."""
        if self.config is not None:
            train, record, holdings, _, _, key = federation(self.config.model_dump_json())
            if not 0 <= number < len(holdings):
                raise DataError(f"agent {number} of a federation of {len(holdings)}; the server's config is another")
            return Held(train, torch.from_numpy(holdings[number]), record, key)
        assert self.policy is not None
        own = self._persons() if self.unit == "person" else self._records()
        examples = count(own.examples.y)
        if self.policy.delta * examples >= 1:
            raise DataError(
                f"the policy's δ = {self.policy.delta:g} promises nothing to {examples} {self.unit}s; "
                f"set it below 1/{examples} = {1 / examples:.3g}"
            )
        if self.room is not None and self.room < examples:  # whatever a server asks for
            raise DataError(
                f"node-config: room is {self.room}, and this site holds {examples} {self.unit}s; raise room, which is "
                "public, to the most that it will ever hold, with some to spare: it is meant to stay"
            )
        return own

    def places(self, sampling: Sampling, examples: int) -> int | None:
        """How many places a deployed agent's examples are dealt to: a number that neighbours share. None where there is
        none, and in a simulation, whose agents' numbers of records are public."""
        return None if self.simulated else examples if sampling == "fixed" else self.room

    def own_records(self) -> Records:
        """A deployed agent's records, bad ones marked."""
        return _own_records(tuple(sorted(self.node.items())), self.own_classes)

    def _records(self) -> Held:
        own = self.own_records()
        return Held(Examples(own.x, own.y), None, Examples(blanks(own.x), blanks(own.y)), own.key)

    def _persons(self) -> Held:
        """Which records of a person count is drawn afresh by each process, from the operating system's entropy."""
        among = _grouped(tuple(sorted(self.node.items())), self.own_classes, self.person_records)
        return self._records()._replace(among=among)

    def name(self, number: int) -> str:
        return agent_name(number) if self.simulated else self.agent

    def trainer(self, announced: Announcement, held: Held) -> Trainer:
        """What trains the announced model for the task. The server may name fedspa's own models and tasks only; what is
        a site's own is named in its node-config."""
        model, exact = announced.model, announced.noise == "exact"
        if self.model is None and self.config is None and model not in models.NAMES:
            raise ConfigError(
                f"the server trains the model {model[:100]!r}, which is its own code; review it, install it here and "
                'name it in the node-config: model="package.module:function"'
            )
        task = self._task(announced.task, held)
        if not isinstance(task, CustomLoss) and (task.width or 0) != announced.classes:
            raise ConfigError(f"the run wants {announced.classes} outputs per example, this site {task.width or 0}")
        run = self.config.run if self.config is not None else None
        found = trainer_for(
            self.model or model,
            held.record,
            task,
            None if self.unit == "record" else min(TRIED, self.person_records),
            run.engine if run is not None else "auto",
            run.threads if run is not None else 1,
            exact,
            int.from_bytes(announced.model_seed, "big"),
            self.device,
            self.apart(announced.terms.steps.sampling),
        )
        if not alike(found.constants, announced.constants):
            raise ConfigError(
                f"what the model {self.model or model!r} has and does not learn (frozen parameters, buffers) is not "
                "the same here as at the server; load it from the same file at both, or draw it with torch's generator"
            )
        return found

    def apart(self, sampling: Sampling) -> RecordIsolation:
        """How an engine must keep records apart here. A simulation's agents have a place per record."""
        return "fixed-slot" if self.simulated or sampling == "fixed" or self.room is not None else "per-example"

    def _task(self, asked: TaskSection, held: Held) -> Task:
        if self.config is not None:
            asked, classes = self.config.task, federation(self.config.model_dump_json()).classes
            return resolve(asked.name, held.record.y, classes, held.key, Options.of(asked.options))
        if is_plugin(self.task):
            return resolve(self.task, held.record.y, None, held.key)
        if asked.name != self.task:
            raise ConfigError(
                f"the run learns {asked.name[:100]!r}, this site {self.task!r}: set task in the node-config"
            )
        return resolve(self.task, held.record.y, self.own_classes, held.key, Options.of(asked.options))


def read_site(node: Mapping[str, Any], run_config: Mapping[str, Any]) -> Site:
    """The site of a node-config. `run_config` is the server's: it is looked at in simulations only."""
    if node.get("simulation") is True or (in_simulation_engine() and not NEEDED & node.keys()):
        config, _ = read_config(run_config)
        policy = node.get("policy", config.run.policy)
        ledger = node.get("ledger", config.run.ledger)
        return Site(
            agent="",
            model=config.model.name,
            task=config.task.name,
            policy=None if policy is None else Policy.load(str(policy)),
            ledger=None if ledger is None else Path(str(ledger)),
            config=config,
            node=node,
            own_classes=None,
            person_records=config.data.person_records,
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
        config=None,
        node=dict(node),
        own_classes=own.classes,
        room=own.room,
        device=device_named(own.device, "node-config: device"),
        member=member,
        person_records=own.person_records,
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
    map_ = None if features is None else partial(transform, features, alone=True)
    own = load(values, classes, map_, integers="model" in values)
    name = values.get("task", "classification")
    own = settled(own, resolve(name, blanks(own.y), classes, own.key), f"data = {values['data']!r}")
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
    """For the operator's eyes: it tells of records."""
    first = ", ".join(map(str, own.bad[:10])) + (", …" if len(own.bad) > 10 else "")
    label = "" if classes is None else f", or a label outside 0 to {classes - 1}"
    why = f"a number or a person's id that is missing, a number that is not finite{label}"
    if is_table(data):
        why = "cells that the schema does not take: `fedspa data check` lists them"
    return (
        f"{len(own.bad)} of {count(own.y)} records are bad ({why}) and count as zero in training: number {first} from "
        "0 on; fix them"
    )
