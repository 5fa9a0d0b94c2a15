"""From a config to everything a run needs, checked before anything is written: its records, what of them is
protected and who holds them; model, task, plan and engine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspa.agent.participate import agent_name
from fedspa.algorithms import Terms
from fedspa.data.columns import Schema
from fedspa.data.dataset import Dataset, blank_person, grouped, labels_of, numbered, owners_of, view, with_floats
from fedspa.data.datasets import load
from fedspa.data.features import Features as ImageFeatures
from fedspa.data.partition import partition, schedule, split_scheme
from fedspa.data.plugin import GIVEN
from fedspa.engine.choose import Choice, EngineRequest, choose, decide, device_named
from fedspa.engine.local import Engine
from fedspa.engine.optimizer import LocalOptimizer
from fedspa.errors import ConfigError, DataError
from fedspa.examples import Examples, Tree, count, joined, layout, leaves
from fedspa.learning import models
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features, space_lacking
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.forward import evaluating, torch_threads
from fedspa.learning.layers import require_module
from fedspa.learning.models import require_fit, require_known
from fedspa.learning.options import BALANCED
from fedspa.learning.tasks import Binary, Classification, Loss, Metric, MultiLabel, PerPerson, Task
from fedspa.learning.tasks.base import tried
from fedspa.learning.tasks.named import judged_by, resolve
from fedspa.learning.tasks.totals import Totals
from fedspa.learning.validate import try_gradients
from fedspa.mechanisms import Plan
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.discrete_gaussian.plan import reach_share
from fedspa.privacy.event import Unit
from fedspa.randomness.mask import MaskMode
from fedspa.randomness.streams import Stream, derive_key, mask_seed, root_key
from fedspa.runs.config import Config, algorithm_of, calibrated_plan, cap_of, with_agents
from fedspa.runs.defaults import with_rates, with_steps
from fedspa.runs.guarantee import check_finite
from fedspa.runs.sections import Task as TaskSection
from fedspa.server.coordinator import ServerJob
from fedspa.server.optimizers import Schedule, ServerOptimizer


def records_of(config: Config, data: Dataset | None = None, module: nn.Module | None = None) -> Dataset:
    """Return the records that the config names, or those given, as its features and with its share held out."""
    if data is not None and not isinstance(data, Dataset):
        raise DataError(
            f"data is a {type(data).__name__}; make it by fedspa.from_arrays(train_x, train_y, test_x, test_y, "
            "name=…), from_examples, from_agents or from_table"
        )
    named, alone = config.data, config.privacy.noise == "exact"
    if data is None and named.features is not None:
        return _mapped(named.name, named.dir, named.person, named.features, named.holdout, alone, config.run.code)
    if data is None:
        data = load(named.name, Path(named.dir), named.person, named.schema_of_table, config.run.code)
    data = view(data, named.features, named.holdout, per_example=alone)
    if not count(data.test_y):
        raise DataError(
            f"data {data.name!r} has no records for testing; hold some out by data.holdout, as in 0.2, or name the "
            "column of a table that marks them (data.table.split)"
        )
    return with_floats(data) if module is None and config.model.name in models.NAMES else data


def unit_of(config: Config, data: Dataset) -> Unit:
    """Return what is protected. A deployed server knows no persons; `data.person` says that its agents do."""
    return "record" if data.persons is None and config.data.person is None else "person"


def holdings_of(config: Config, data: Dataset, *, held_out: bool = False) -> list[NDArray[np.int64]]:
    """Return which training records each simulated agent trains on; which persons, where those are protected. With
    `held_out`, those that it keeps out of training (`data.agent_holdout`)."""
    found = _all_holdings(config, data)
    if config.data.agent_holdout == 0:
        return found
    out = _kept_out(config, data)
    parts = [held[out[held] == held_out] for held in found]
    for number, part in enumerate(parts):
        if not len(part):
            raise DataError(
                f"{names_of(config, data)[number]} has no {'person' if data.persons is not None else 'record'} "
                f"{'outside' if held_out else 'left for'} training: data.agent_holdout is "
                f"{config.data.agent_holdout:g}, and it holds {len(found[number])}"
            )
    return parts


def with_own_agents(config: Config, data: Dataset) -> Config:
    """Return the config with the number of agents that the data brings, where it names none."""
    return config if data.owners is None else with_agents(config, int(data.owners.max()) + 1)


def names_of(config: Config, data: Dataset) -> Sequence[str]:
    """Return the names of the agents, in the order of their numbers."""
    return data.agents or [agent_name(number) for number in range(config.federation.agents)]


def _kept_out(config: Config, data: Dataset) -> NDArray[np.bool_]:
    """Return which records, or persons, their agents keep out of training. Each decides for itself, by its own content
    and a public key, so that with one more or less all others stay where they are."""
    key = derive_key(root_key("seeded", config.run.seed), "agent holdout")
    rows = [
        leaf.contiguous().view(count(data.train_y), -1).numpy()
        for tree in (data.train_x, data.train_y)
        for leaf in leaves(tree)
    ]
    digests = np.array(
        [
            int.from_bytes(hashlib.blake2b(b"".join(row.tobytes() for row in record), key=key, digest_size=8).digest())
            for record in zip(*rows)
        ],
        dtype=np.uint64,
    )
    if data.persons is not None:
        persons = numbered(data.persons)
        sums = np.zeros(int(persons.max()) + 1, dtype=np.uint64)
        np.add.at(sums, persons, digests)  # of all a person's records, in any order, modulo 2^64
        digests = sums
    kept: NDArray[np.bool_] = digests / 2**64 < config.data.agent_holdout
    return kept


def _all_holdings(config: Config, data: Dataset) -> list[NDArray[np.int64]]:
    labels, owners = _labels(data.train_y), data.owners
    if data.persons is not None:
        labels = labels_of(data.persons, labels)
        owners = None if owners is None else owners_of(data.persons, owners)
    elif config.data.person is not None:
        raise ConfigError(
            f"data.person is {config.data.person!r}; the data {data.name!r} does not say whose its records are: leave "
            "it out, or bring persons along (fedspa.from_arrays(…, persons=ids))"
        )
    if owners is not None:
        return _held(config, data, owners)
    scheme, alpha = split_scheme(config.data.partition)
    held = "records" if data.persons is None else "persons"
    return partition(labels, config.federation.agents, scheme, alpha=alpha, seed=config.run.seed, held=held)


def root_of(config: Config) -> bytes:
    """The key that a simulation's private randomness starts from. Without privacy there is nothing to hide: the seed
    decides which records are drawn, and a run can be repeated."""
    return root_key(config.privacy.noise if config.private else "seeded", config.run.seed)


def trained_on(config: Config, data: Dataset) -> Examples:
    """The training records, or the persons whose they are. What counts of a person is drawn from the run's private
    randomness: `data.persons` says why."""
    train = Examples(data.train_x, data.train_y)
    if data.persons is None:
        return train
    draws = Stream(derive_key(root_of(config), "records of persons"))
    return grouped(*train, data.persons, config.data.person_records, draws.uint64(len(data.persons)))


@lru_cache(maxsize=1)  # a sweep runs many configs on the same features, which take longer to make than some runs
def _mapped(
    name: str, folder: str, person: str | None, features: ImageFeatures, holdout: float, alone: bool, code: str | None
) -> Dataset:
    with torch_threads(1):
        return view(load(name, Path(folder), person, code=code), features, holdout, per_example=alone)


def _held(config: Config, data: Dataset, owners: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Records that came with their agents."""
    agents, own = config.federation.agents, int(owners.max()) + 1
    if agents != own:
        raise ConfigError(
            f"federation.agents is {agents}; the data comes with {own} agents of its own: set it to {own}"
        )
    holdings = [np.flatnonzero(owners == number) for number in range(agents)]
    for name, held in zip(names_of(config, data), holdings):
        if not len(held):
            raise DataError(
                f"{name} holds no training records; give it some, or hold out "
                f"fewer (data.holdout is {config.data.holdout:g})"
            )
    return holdings


def _labels(y: Tree) -> NDArray[np.int64]:
    """Return the classes by which records can be assigned unevenly; without classes, all are alike."""
    if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
        return np.asarray(y.numpy(), dtype=np.int64)
    return np.zeros(count(y), dtype=np.int64)


CLASS_TASKS = (Binary, Classification, MultiLabel)  # whose outputs are scores of classes, of any size


@dataclass(frozen=True)
class Training:
    """What agents train, decided before any value of a record is read: a module, or its head behind a frozen body.

    `request` asks for an engine for that, with the agents' examples, which may be persons; `choice` is the answer.
    `record` is the layout of one record, or of its features. `scored` is the split in eval mode, if there is one too.
    """

    request: EngineRequest
    choice: Choice
    record: Examples
    split: Split | None
    scored: Split | None

    @classmethod
    def prepare(cls, whole: EngineRequest, person_records: int | None, records: int | None = None) -> Self:
        """Split off the frozen body, check gradients and choose the engine.

        `whole` asks for the whole module on single records. Where persons are protected, an example has up to
        `person_records` of them. A simulation says how many `records` it would keep features of; at a site, whether
        there is a split may not depend on that.
        """
        module, record, task = whole.module, whole.like, whole.task or Classification(None)

        def examples_of(record: Examples) -> tuple[Examples, Task]:
            return (record, task) if person_records is None else (blank_person(record, person_records), PerPerson(task))

        frozen = any(not parameter.requires_grad for parameter in module.parameters())
        found = split(module, record, task) if frozen and whole.name != "reference" else ""
        if isinstance(found, Split) and records is not None:
            found = space_lacking(found, records) or found
        trained, scored, about = module, None, ""
        if isinstance(found, Split):
            trained, record, about = found.head, Examples(found.example_spec, record.y), f"; {found.description}"
            scored = _split_for_scores(found, module, whole.like, task)
            for each in tried(*examples_of(whole.like)):  # an engine tries what it trains, which is the head
                try_gradients(module, *each)
        elif found:
            about = f"; the frozen part is computed in every step: {found}"
        if next(module.parameters()).device.type != whole.device_type:  # a copy: a head may share layers with the body
            trained = copied(trained).to(whole.device)
        like, learned = examples_of(record)
        request = replace(whole, module=trained, like=like, task=learned)
        choice = decide(request)
        choice = replace(choice, why=choice.why + about)
        return cls(request, choice, record, found if isinstance(found, Split) else None, scored)

    @property
    def model(self) -> FlatModel:
        """Return what is learned of the agents' examples: of features, where a frozen body was split off."""
        return FlatModel(self.request.module, self.request.task)

    @property
    def engine_scores(self) -> bool:
        """Return whether an engine that trains may be given what is scored."""
        if self.split is None:
            return True
        return self.scored is not None and layout(self.scored.example_spec) == layout(self.split.example_spec)


def _split_for_scores(trained: Split, module: nn.Module, record: Examples, task: Task) -> Split | None:
    """Return the split of the module in eval mode."""
    if not any(layer.training for layer in module.modules()):
        return trained
    with evaluating(module):
        found = split(module, record, task)
    return found if isinstance(found, Split) else None


@dataclass(frozen=True)
class Given:
    """What the caller gave in Python, in place of what the config names."""

    module: nn.Module | None = None
    task: Loss | None = None
    metrics: Mapping[str, Metric] | None = None


NOTHING = Given()


@dataclass(frozen=True)
class Job:
    """A run whose server could start now. Its agents take part `cap` times at most, and hold records of their own.
    `schema` is that of a table, where the records are one; `agents` are their names; `given` came from Python."""

    config: Config
    server: ServerJob
    cap: int
    data_name: str
    training: Training
    schema: Schema | None
    agents: Sequence[str]
    given: Given

    @property
    def plan(self) -> Plan | None:
        return self.server.plan

    @property
    def task(self) -> TaskSection:
        """Return the section [task] with what follows from the server's held-out records: a score that is not the
        task's usual one, and balanced weights."""
        section, task = self.config.task, self.server.model.task
        options = dict(section.options)
        if isinstance(task, Totals):  # which agents need no schema to follow
            options = {"layout": task.layout.text()}
        if options.get("weights") == BALANCED:
            assert isinstance(task, Classification | MultiLabel)
            options["weights"] = list(task.weights or ())
        metric = section.metric or (task.headline if task.headline_note else None)
        return section.model_copy(update={"metric": metric, "options": options})

    def cohorts(self) -> Iterator[list[int]]:
        """Yield the agents that take part, round by round."""
        federation = self.config.federation
        return schedule(
            federation.participation,
            federation.agents,
            federation.per_round,
            federation.rounds,
            self.cap,
            seed=self.config.run.seed,
        )

    @property
    def trained_by(self) -> dict[str, Any]:
        """Return the summary's words on what the agents train with."""
        reason = "a deployed agent takes the fastest that it has"
        return {
            "engine": "each agent's own",
            "engine_reason": reason,
            "engine_hints": [],
            "tf32": False,
            "workers": None,
        }


@dataclass(frozen=True)
class Simulated(Job):
    """A job with its agents: `train` is what they hold, records or persons, `holdings[i]` are those of agent i.
    `features` are what the module's frozen body makes of it, where it has one that is computed once. Workers make
    their own engine by `make_engine`."""

    data: Dataset
    train: Examples
    holdings: list[NDArray[np.int64]]
    engine: Engine
    features: Features | None
    make_engine: Callable[[], Engine]

    def examples(self, held: NDArray[np.int64]) -> Examples:
        """Return what the engine trains on. Of all that there are, these may be read."""
        if self.features is None:
            return self.train
        return Examples(self.features.of(torch.from_numpy(held)), self.train.y)

    @property
    def trained_by(self) -> dict[str, Any]:
        return {
            "engine": self.engine.name,
            "engine_reason": self.training.choice.why,
            "engine_hints": list(self.training.choice.hints),
            "tf32": getattr(self.engine, "tf32", False),
            "workers": self.config.run.workers,
        }


def prepare(config: Config, data: Dataset | None = None, given: Given = NOTHING) -> Simulated:
    """Load, partition, build and calibrate. `data` and what is `given` stand in for what the config names."""
    data = data if data is not None else records_of(config)
    if data.persons is not None and config.data.person is None:  # every file of the run is to say who is protected
        config = config.model_copy(update={"data": config.data.model_copy(update={"person": f"{GIVEN}persons"})})
    config = with_own_agents(config, data)
    holdings = holdings_of(config, data)
    sizes = {len(held) for held in holdings}
    if config.task.name == Totals.name:
        sizes = {_bound(config, data, max(sizes))}
    job = prepare_server(config, data, sizes, given)
    config = job.config
    data = with_targets(data, job.server.model.task)
    require_known(job.server.model, data.train_x, data.train_y, f"data {data.name!r}: train")
    server = job.server
    train = trained_on(config, data)
    features, body = None, job.training.split
    if body is not None:
        features = Features(
            body,
            train.x,
            strict=not config.private,
            persons=unit_of(config, data) == "person",
            per_example=config.privacy.noise == "exact",
            threads=config.run.threads,
        )
    return Simulated(
        **{part.name: getattr(job, part.name) for part in fields(Job)},
        data=data,
        train=train,
        holdings=holdings,
        engine=server.engine,
        features=features,
        make_engine=partial(choose, replace(job.training.request)),  # without what the first choice found out
    )


def prepare_server(config: Config, data: Dataset, sizes: set[int], given: Given = NOTHING) -> Job:
    """The server's part, for agents that hold so many records, or persons, each. Of `data` it gets the held-out
    records, which stay records even if persons are protected."""
    learned, module = task_of(config, data, given.task), given.module
    if isinstance(learned, Totals):  # of all records, at rate 1
        batch = {"batch": min(sizes)}
        config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update=batch)})
    prepared = with_targets(data, learned)
    learned, judges = judged_by(config.task.metric, learned, prepared.test_y, given.metrics or {}, config.run.code)
    like, test = prepared.example_spec, Examples(prepared.test_x, prepared.test_y)
    what = "the module" if module is not None else f"model.name = {config.model.name!r}"
    if module is None:
        module = models.build(config.model.name, data.input_shape, learned.width, config.run.seed, config.run.code)
    require_module(module)
    if any(values.is_meta for values in (*module.parameters(), *module.buffers())):
        raise ConfigError("the module is on torch's device 'meta' and has no values; build it on another, as on 'cpu'")
    module = module.to(device_named(config.run.device, "run.device"))
    model = FlatModel(module, learned)
    require_fit(model, like, what)
    require_known(model, *test, f"data {data.name!r}: test")
    algorithm = algorithm_of(config)
    share, layers, active = config.algorithm.compression, None, model.dimension
    if isinstance(share, list):
        layers = _layers(share, model.sizes)
        active = sum(k for _, k in layers)
    elif algorithm.sparse:
        active = _active(share, model.dimension)
    config = with_steps(config, min(sizes))
    unit = unit_of(config, data)
    _check_sizes(config, sizes, unit)
    # The fewest records an agent has: its sampling rate is the largest, so noise that serves it serves all.
    plan = calibrated_plan(config, model.dimension, active, min(sizes), unit) if algorithm.private else None
    if plan is not None:
        config = with_rates(config, plan, classes=isinstance(learned, CLASS_TASKS))
        plan = plan.with_clip_value(config.privacy.clip_value)
        if config.privacy.noise != "seeded":
            check_finite(plan)
    run, settings = config.run, config.algorithm
    mask: MaskMode = algorithm.mask or settings.mask
    public_key = derive_key(root_key("seeded", run.seed), "public")
    slots = count(data.train_y) * (1 if unit == "record" else config.data.person_records)
    request = EngineRequest(
        name=run.engine,
        module=module,
        like=like,
        device=run.device,
        threads=run.threads,
        exact=config.privacy.noise == "exact",
        tf32=run.tf32,
        task=learned,
        optimizer=settings.local_optimizer,
    )
    person_records = None if unit == "record" else config.data.person_records
    training = Training.prepare(request, person_records, max(slots, count(data.test_y)))
    server = ServerJob(
        model=model,
        algorithm=algorithm,
        optimizer=ServerOptimizer(
            step=settings.server or algorithm.server,
            server_lr=settings.server_lr,
            ema=settings.ema,
            schedule=Schedule(settings.schedule, settings.warmup, config.federation.rounds),
            **dict(settings.server_options),
        ),
        terms=Terms(
            round=0,
            mask=mask,
            mask_seed=None if mask == "per-agent" else mask_seed(public_key, 0, -1),
            local_lr=settings.local_lr,
            steps=plan
            or NoPlan(model.dimension, active, config.privacy.sampling, settings.batch, settings.local_steps),
            layers=layers,
            options={key: value for key, value in settings.options.items() if not hasattr(plan, key)},
            optimizer=LocalOptimizer(settings.local_optimizer, **dict(settings.local_options)),
        ),
        # `int` where there is noise to hide the rounding in.
        coding=settings.coding or ("int" if plan is not None else "f32"),
        public_key=public_key,
        test=test,
        engine=training.choice.make(),
        threads=run.threads,
        metrics=judges,
        scored=training.scored,
        engine_scores=training.engine_scores,
    )
    return Job(config, server, cap_of(config), data.name, training, data.schema, names_of(config, data), given)


def task_of(config: Config, data: Dataset, task: Loss | None = None) -> Task:
    """Return what is learned of the data: what the config names, or the function that is given."""
    asked = task if task is not None else config.task.name
    scales = {*(data.target_scale or ())}  # how much of the targets' own unit 1 is
    options, scale = dict(config.task.options), scales.pop() if len(scales) == 1 else 1.0
    balanced = options.get("weights") == BALANCED and options.pop("weights")
    y, known = joined([data.train_y, data.test_y]), (data.classes, data.key)
    found = resolve(asked, y, *known, options, config.run.code, data.schema, scale)
    if balanced and isinstance(found, Classification | MultiLabel):  # the only ones with the option
        public = found.targets(data.test_y, f"data {data.name!r}: test")
        options["weights"] = found.balanced_weights(public)
        found = resolve(asked, y, *known, options, config.run.code)
    return found


def with_targets(data: Dataset, learned: Task) -> Dataset:
    """Return the data with targets as the task takes them."""
    train_y, test_y = (
        learned.targets(learned.labels(x, y), f"data {data.name!r}: {split}")
        for split, x, y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y))
    )
    classes = data.classes if isinstance(learned, Classification) else None
    return replace(data, train_y=train_y, test_y=test_y, classes=classes)


def _bound(config: Config, data: Dataset, records: int) -> int:
    """Return the number by which sums of statistics are divided: a public bound on an agent's records. Under secure
    aggregation a coordinate of an agent's sum has to stay within `DiscreteGaussianPlan.reach`."""
    task = task_of(config, data)
    assert isinstance(task, Totals)
    if config.privacy.adversary == "local":
        return records
    largest = max(block.weight for block in task.layout.blocks)
    return math.ceil(records * max(1.0, largest / reach_share(task.layout.width)))


def _active(compression: float, dimension: int) -> int:
    if compression * dimension < 1:
        raise ConfigError(
            f"algorithm.compression is {compression}; with d = {dimension} parameters it leaves no active coordinate: "
            f"it must be at least {1 / dimension:.3g}"
        )
    return round(compression * dimension)


def _layers(shares: list[float], sizes: list[int]) -> tuple[tuple[int, int], ...]:
    """Return (d_j, k_j) of each parameter tensor."""
    if len(shares) != len(sizes):
        raise ConfigError(
            f"algorithm.compression has {len(shares)} shares; the model has {len(sizes)} parameter tensors, of "
            f"{', '.join(map(str, sizes))} coordinates: one share for each"
        )
    layers = tuple((size, round(share * size)) for share, size in zip(shares, sizes))
    if not any(active for _, active in layers):
        raise ConfigError("algorithm.compression leaves no active coordinate: at least one share must be larger")
    return layers


def _check_sizes(config: Config, sizes: set[int], unit: Unit) -> None:
    agents = config.federation.agents
    if config.algorithm.batch > min(sizes):
        raise ConfigError(
            f"algorithm.batch is {config.algorithm.batch}; the smallest of the {agents} agents holds "
            f"{min(sizes)} {unit}s: at most that"
        )
    # With δ a person may be exposed whole, so it must be small against all of them: an agent may be one person's phone.
    among, held = (max(sizes), "agents hold") if unit == "record" else (agents * max(sizes), f"{agents} agents hold")
    if config.private and config.privacy.delta >= 1 / among:
        raise ConfigError(
            f"privacy.delta is {config.privacy.delta}; {held} up to {max(sizes)} {unit}s"
            f"{' each' * (unit == 'person')}: it must be below 1/{among} = {1 / among:.3g}"
        )
