"""From a config to everything a run needs, checked before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedspa.algorithms import Terms
from fedspa.data.columns import Schema
from fedspa.data.dataset import Dataset, blank_person
from fedspa.data.partition import schedule
from fedspa.data.plugin import GIVEN
from fedspa.engine.choose import Choice, EngineRequest, choose, decide, device_named
from fedspa.engine.local import Engine
from fedspa.engine.optimizer import LocalOptimizer
from fedspa.errors import ConfigError
from fedspa.examples import Examples, count, joined, layout
from fedspa.learning import models
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features, space_lacking
from fedspa.learning.fit import require_fit, require_known
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.forward import evaluating
from fedspa.learning.layers import require_module
from fedspa.learning.options import BALANCED, Options
from fedspa.learning.tasks import Binary, Classification, Loss, Metric, MultiLabel, PerPerson, Task
from fedspa.learning.tasks.named import judged_by, resolve, with_balanced_weights
from fedspa.learning.tasks.totals import Totals
from fedspa.learning.tasks.wrappers import tried
from fedspa.learning.validate import try_gradients
from fedspa.mechanisms import Plan
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.discrete_gaussian.plan import reach_share
from fedspa.privacy.event import Unit
from fedspa.randomness.mask import MaskMode
from fedspa.randomness.streams import derive_key, mask_seed, root_key
from fedspa.runs.config import Config, algorithm_of, calibrated_plan, cap_of
from fedspa.runs.defaults import with_rates, with_steps
from fedspa.runs.guarantee import check_finite
from fedspa.runs.records import holdings_of, names_of, records_of, trained_on, unit_of, with_own_agents
from fedspa.runs.sections import Task as TaskSection
from fedspa.server.coordinator import ServerJob
from fedspa.server.optimizers import Schedule, ServerOptimizer

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

        found = split(module, record, task) if whole.name != "reference" else ""
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
class Job:
    """A run whose server could start now. Its agents take part `cap` times at most, and hold records of their own.
    `schema` is that of a table, where the records are one; `agents` are their names."""

    config: Config
    server: ServerJob
    cap: int
    data_name: str
    training: Training
    schema: Schema | None
    agents: Sequence[str]

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


def prepare(
    config: Config,
    data: Dataset | None = None,
    module: nn.Module | None = None,
    task: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Simulated:
    """Load, partition, build and calibrate. `data`, `module` and `task` stand in for what the config names."""
    data = data if data is not None else records_of(config)
    if data.persons is not None and config.data.person is None:  # every file of the run is to say who is protected
        config = config.model_copy(update={"data": config.data.model_copy(update={"person": f"{GIVEN}persons"})})
    config = with_own_agents(config, data)
    holdings = holdings_of(config, data)
    sizes = {len(held) for held in holdings}
    if config.task.name == Totals.name:
        sizes = {_bound(config, data, max(sizes))}
    job = prepare_server(config, data, sizes, module, task, metrics)
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


def prepare_server(
    config: Config,
    data: Dataset,
    sizes: set[int],
    module: nn.Module | None = None,
    task: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Job:
    """The server's part, for agents that hold so many records, or persons, each. Of `data` it gets the held-out
    records, which stay records even if persons are protected."""
    learned = task_of(config, data, task)
    if isinstance(learned, Totals):  # of all records, at rate 1
        batch = {"batch": min(sizes)}
        config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update=batch)})
    prepared = with_targets(data, learned)
    learned, judges = judged_by(config.task.metric, learned, prepared.test_y, metrics or {}, config.run.code)
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
        clip_value=None if plan is None else plan.clip_value,
        public_key=public_key,
        test=test,
        engine=training.choice.make(),
        threads=run.threads,
        metrics=judges,
        scored=training.scored,
        engine_scores=training.engine_scores,
    )
    return Job(config, server, cap_of(config), data.name, training, data.schema, names_of(config, data))


def task_of(config: Config, data: Dataset, task: Loss | None = None) -> Task:
    """Return what is learned of the data: what the config names, or the function that is given."""
    asked = task if task is not None else config.task.name
    scales = {*(data.target_scale or ())}  # how much of the targets' own unit 1 is
    options = Options.of(config.task.options, scales.pop() if len(scales) == 1 else 1.0)
    y, known = joined([data.train_y, data.test_y]), (data.classes, data.key)
    found = resolve(asked, y, *known, options, config.run.code, data.schema)
    if not options.balanced:
        return found
    public = found.targets(data.test_y, f"data {data.name!r}: test")
    return resolve(asked, y, *known, with_balanced_weights(found, options, public), config.run.code)


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
