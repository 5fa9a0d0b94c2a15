"""An agent's own side: who it is, its records, its model, its policy and its ledger, from its node-config.

    agent="clinic-a"               its name in the ledger; names the data, never changes
    data="clinic.npz"              or "package.module:function"
    classes=2                      for classification: how many classes its labels may name, a public number by which it
                                   reads its records
    policy="policy.toml"           its limits (docs/ledger.md)
    ledger="ledger.sqlite"         made once, by `python -m fedspa.flower.site --create-ledger '<node-config>'`
    task="regression"              what is learned, where it is not classification: binary, multi-label, regression, or
                                   "package.module:function"; options as in [task], as loss="mae"
    model="package.module:build"   needed where the model is not one of fedspa's own
    features="orientations"        where the run names data.features: the same map, on this site's own records
    simulation=true                plays agents of a simulation: seeded noise is then allowed, policy and ledger are not
                                   needed, and nothing that it sends is private

The server's words decide none of these. In Flower's simulation engine there is no node-config to write; a process that
it started, with a node-config that names none of an agent's keys, is a simulation by itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import agent_name
from fedspa.agent.policy import Policy
from fedspa.data.datasets import Dataset
from fedspa.data.features import NAMES, Features, transform
from fedspa.data.persons import blank_person
from fedspa.engine.choose import EngineName, choose
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError, DataError
from fedspa.examples import Examples, Tree, blanks, count, layout, leaves, mapped, taken
from fedspa.flower.records import Records, load
from fedspa.flower.settings import listed, read_config
from fedspa.learning import models
from fedspa.learning.fit import require_fit
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import PerPerson
from fedspa.learning.tasks.named import resolve
from fedspa.privacy.event import Unit, noise_modes, seeded_words
from fedspa.runs.config import Config, Task, read_task
from fedspa.runs.setup import dealt, learned_from, records_of, trained_on, with_targets
from fedspa.runs.statement import shown

logger = logging.getLogger("fedspa.agent")

# Whoever names one of these is an agent with records of its own, whatever process it runs in.
_NEEDED = frozenset({"agent", "data", "classes", "policy", "ledger"})
_OF_ARRAYS = ("classification", "binary", "multi-label", "regression")


@dataclass(frozen=True)
class Site:
    """A node's configuration, read and checked. `config` is the simulated run's; None in a deployment."""

    agent: str
    data: str
    model: str | None
    policy: Policy | None
    ledger: Path | None
    config: Config | None
    node: Mapping[str, Any]
    own_classes: int | None
    task: Task = field(default_factory=Task)

    @property
    def classes(self) -> int:
        """The public number of classes: the node-config's, in a simulation that of its data; 0 for no classes."""
        if self.config is None:
            return self.own_classes or 0
        return _federation(self.config.model_dump_json())[0].classes or 0

    @property
    def features(self) -> str:
        """The map that its records go through before training; "" for none."""
        return str(self.node.get("features") or "") if self.config is None else self.config.data.features or ""

    @property
    def simulated(self) -> bool:
        return self.config is not None

    @property
    def unit(self) -> Unit:
        """What its examples are: records; in a simulation persons, where its data says whose the records are."""
        if self.config is None:
            return "record"
        return "record" if _federation(self.config.model_dump_json())[0].persons is None else "person"

    def records(self, number: int) -> tuple[Tree, Tree]:
        """The agent's x and y; in a simulation those of agent `number`."""
        if self.config is not None:
            return _share(self.config.model_dump_json(), number)
        assert self.policy is not None
        own = self.own_records()
        x, y = own.x, own.y
        if self.policy.delta * len(y) >= 1:
            raise DataError(
                f"the policy's δ = {self.policy.delta:g} promises nothing to {len(y)} records; "
                f"set it below 1/{len(y)} = {1 / len(y):.3g}"
            )
        return x, y

    def own_records(self) -> Records:
        """A deployed agent's records, bad ones marked."""
        return _own_records(self.data, tuple(sorted(self.node.items())), self.classes, self.task.name)

    def name(self, number: int) -> str:
        return agent_name(number) if self.simulated else self.agent

    def engine(self, model: str, examples: Examples, exact: bool) -> tuple[Engine, int]:
        """What trains the model on such examples, and its number of parameters. The server may name fedspa's own
        models only."""
        if self.model is None and self.config is None and model not in models.NAMES:
            raise ConfigError(
                f"the server trains the model {model[:100]!r}, which is its own code; review it, install it here and "
                'name it in the node-config: model="package.module:function"'
            )
        run = self.config.run if self.config is not None else None
        like = Examples(*map(blanks, examples))
        return _engine(
            self.model or model,
            _Kind(f"{layout(like.x)}; {layout(like.y)}", like),
            self.unit,
            self.task.model_dump_json(),
            self.classes or None,
            None if self.config is None else _federation(self.config.model_dump_json())[0].key,
            run.engine if run is not None else "auto",
            run.threads if run is not None else 1,
            exact,
        )


def read_site(node: Mapping[str, Any], run_config: Mapping[str, Any]) -> Site:
    """The site of a node-config. `run_config` is the server's: it is looked at in simulations only."""
    if node.get("simulation") is True or (in_simulation_engine() and not _NEEDED & node.keys()):
        config, _ = read_config(run_config)
        policy = node.get("policy", config.run.policy)
        ledger = node.get("ledger", config.run.ledger)
        return Site(
            agent="",
            data=config.data.name,
            model=config.model.name,
            policy=None if policy is None else Policy.load(str(policy)),
            ledger=None if ledger is None else Path(str(ledger)),
            config=config,
            node=node,
            own_classes=None,
            task=config.task,
        )
    for key in ("agent", "data", "policy", "ledger"):
        if not isinstance(node.get(key), str) or not node[key]:
            raise ConfigError(
                f'node-config: {key} is missing; an agent needs agent, data, classes, policy and ledger, as {key}="…"'
            )
    task = _task(node)
    classes = node.get("classes")
    if (classes is not None or task.name == "classification") and (type(classes) is not int or classes < 2):
        raise ConfigError(
            f"node-config: classes is {'missing' if classes is None else repr(classes)}; it must be a whole number "
            "from 2 on, as classes=2: how many classes the run has, not how many this site happens to hold"
        )
    model = node.get("model")
    if model is not None and not isinstance(model, str):
        raise ConfigError(f'node-config: model is {model!r}; it must be a text, as model="package.module:function"')
    policy, ledger = Policy.load(node["policy"]), Path(node["ledger"])
    return Site(node["agent"], node["data"], model, policy, ledger, None, dict(node), classes, task)


def in_simulation_engine() -> bool:
    """Whether this process is a worker of Flower's simulation engine (a Ray actor): a fact that no message can fake."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized()) and ray.get_runtime_context().get_actor_id() is not None


def _task(node: Mapping[str, Any]) -> Task:
    values = {key: node[key] for key in Task.model_fields if key in node and key != "name"}
    if isinstance(values.get("weights"), str):
        values["weights"] = listed("weights", values["weights"])
    task = read_task({**values, "name": node.get("task", "classification")})
    if ":" not in task.name and task.name not in _OF_ARRAYS:
        raise ConfigError(
            f"node-config: task is {task.name!r}; a site's records are one array of numbers each: "
            f'{", ".join(_OF_ARRAYS)}, or "package.module:function"'
        )
    return task


def _features(name: object) -> Features:
    for known in NAMES:
        if name == known:
            return known
    raise ConfigError(f"node-config: features is {name!r}; allowed: {', '.join(NAMES)}")


# Processes that serve several messages load records and build models once.
@lru_cache(maxsize=4)
def _own_records(name: str, node: tuple[tuple[str, Any], ...], classes: int, task: str) -> Records:
    features = dict(node).get("features")
    map_ = None if features is None else partial(transform, _features(features), alone=True)
    own = load(name, dict(node), classes, map_, zero_or_one=task in ("binary", "multi-label"))
    if own.bad:
        logger.warning("%s", _bad_records(own, classes))
    return own


def _bad_records(own: Records, classes: int) -> str:
    """For the operator's eyes: it tells of records."""
    first = ", ".join(map(str, own.bad[:10])) + (", …" if len(own.bad) > 10 else "")
    label = f"label outside 0 to {classes - 1}" if classes else "target that the task cannot take"
    return (
        f"{len(own.bad)} of {len(own.y)} records are bad (features that are not finite, or a {label}) and count as "
        f"zero in training: number {first} from 0 on; mend them"
    )


@lru_cache(maxsize=2)
def _federation(config_json: str) -> tuple[Dataset, Examples, list[NDArray[np.int64]]]:
    config = Config.model_validate_json(config_json)
    found = records_of(config)
    data = with_targets(found, learned_from(config, found))
    return data, trained_on(config, data), dealt(config, found)


def _share(config_json: str, number: int) -> Examples:
    _, train, holdings = _federation(config_json)
    if not 0 <= number < len(holdings):
        raise DataError(f"agent {number} of a federation of {len(holdings)}; the server's config is another one")
    held = torch.from_numpy(holdings[number])
    return Examples(taken(train.x, held), taken(train.y, held))


@dataclass(frozen=True)
class _Kind:
    """How examples are made: those made alike are the same to a cache."""

    described: str
    like: Examples = field(compare=False)


@lru_cache(maxsize=4)
def _engine(
    name: str,
    kind: _Kind,
    unit: Unit,
    task: str,
    classes: int | None,
    key: str | None,
    engine: EngineName,
    threads: int,
    exact: bool,
) -> tuple[Engine, int]:
    """`task` is a [task] as JSON."""
    section, like = Task.model_validate_json(task), kind.like
    if unit == "person":  # of whom one record says all
        assert isinstance(like.x, dict)
        like = Examples(*(mapped(lambda leaf: leaf[:, 0], tree) for tree in (like.x["records"], like.y)))
    learned = resolve(section.name, like.y, classes, key, section.options)
    shape = tuple(like.x.shape[1:]) if isinstance(like.x, Tensor) else None
    module = models.build(name, shape, learned.width, seed=0)  # θ comes from the server: these values are not used
    require_fit(FlatModel(module, learned), like, f"model.name = {name!r}")
    if unit == "person":
        like, learned = blank_person(like, next(leaves(kind.like.y)).shape[1]), PerPerson(learned)
    chosen = choose(engine, module, like, "cpu", threads, exact, task=learned)
    if not chosen.separates_records:  # a server's θ could then move a sum by more than the bound
        raise ConfigError(f"run.engine = {chosen.name!r} does not keep records apart; a site needs one that does")
    return chosen, FlatModel(module).dimension


def main(arguments: list[str]) -> int:
    """Check a node-config before a SuperNode is started with it; with --create-ledger, make its ledger."""
    from flwr.common.config import parse_config_args

    create = "--create-ledger" in arguments
    texts = [argument for argument in arguments if argument != "--create-ledger"]
    if len(texts) != 1:
        print("usage: python -m fedspa.flower.site [--create-ledger] '<node-config>'", file=sys.stderr)
        return 2
    site = read_site(parse_config_args(texts), {})
    x, y = site.records(0)
    assert site.ledger is not None
    assert site.policy is not None
    with Ledger.open(site.ledger, create=create) as ledger:
        spent = ledger.total(site.agent, site.policy.delta, site.policy.neighbours)
        words = seeded_words(noise_modes(ledger.spent(site.agent)))
    if (own := site.own_records()).bad:
        print(f"fedspa: {_bad_records(own, site.classes)}", file=sys.stderr)
    print(f"agent    {site.agent}")
    targets = f"classes 0 to {site.classes - 1}" if site.classes else f"targets {layout(y)} for {site.task.words}"
    print(f"records  {count(y)} of shape {layout(x)}, {targets}")
    terms = f"δ = {site.policy.delta:g}, {site.policy.neighbours}, {spent.by}"
    print(f"ledger   {site.ledger}: ε = {shown(spent.epsilon)} spent of {site.policy.epsilon:g} ({terms})")
    if words is not None:  # a simulation's ledger
        print(f"note     {words}")
    return 0


if __name__ == "__main__":
    from fedspa.errors import FedspaError

    try:
        sys.exit(main(sys.argv[1:]))
    except FedspaError as error:
        print(f"fedspa: {error}", file=sys.stderr)
        sys.exit(2)
