"""From a config to everything a run needs, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedspa.algorithms import Terms
from fedspa.data.columns import Schema
from fedspa.data.dataset import Dataset
from fedspa.data.participation import schedule
from fedspa.data.persons import blank_person
from fedspa.data.plugin import GIVEN
from fedspa.engine.choose import Choice, choose, decide, device_named
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.examples import Examples, Tree, count, joined, layout
from fedspa.learning import forward, models
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features, room_lacking
from fedspa.learning.fit import require_fit, require_known
from fedspa.learning.flat import FlatModel
from fedspa.learning.layers import require_module
from fedspa.learning.options import Options
from fedspa.learning.tasks import Classification, Loss, PerPerson, Task
from fedspa.learning.tasks.named import resolve
from fedspa.learning.tasks.wrappers import tried
from fedspa.learning.validate import try_gradients
from fedspa.mechanisms import Plan
from fedspa.mechanisms.base import NoPlan
from fedspa.privacy.event import Unit
from fedspa.randomness.sparsify import MaskMode
from fedspa.randomness.streams import derive_key, mask_seed, root_key
from fedspa.runs.config import Config
from fedspa.runs.guarantee import check_finite
from fedspa.runs.plans import algorithm_of, calibrated_plan, cap_of
from fedspa.runs.records import dealt, records_of, trained_on, unit_of
from fedspa.server.job import Metric, ServerJob
from fedspa.server.optimizers import ServerOptimizer


@dataclass(frozen=True)
class Job:
    """A run whose server could start now. Its agents take part `cap` times at most, and hold records of their own.
    `schema` is that of a table, where the records are one."""

    config: Config
    server: ServerJob
    cap: int
    data_name: str
    choice: Choice
    frozen: Frozen
    schema: Schema | None

    @property
    def plan(self) -> Plan | None:
        return self.server.plan

    def cohorts(self) -> Iterator[list[int]]:
        """Who takes part, round by round."""
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
        """The summary's words on what the agents train with."""
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
    """With the agents: `train` is what they hold, records or persons, `holdings[i]` are those of agent i. `features`
    are what the module's frozen body makes of it, where it has one that is computed once. Workers make their own engine
    by `make_engine`."""

    data: Dataset
    train: Examples
    holdings: list[NDArray[np.int64]]
    engine: Engine
    features: Features | None
    make_engine: Callable[[], Engine]

    def examples(self, held: NDArray[np.int64]) -> Examples:
        """What the engine trains on. Of all that there are, these may be read."""
        if self.features is None:
            return self.train
        return Examples(self.features.of(torch.from_numpy(held)), self.train.y)

    @property
    def held_model(self) -> FlatModel:
        """What is learned of the agents' examples, which may be persons, and of features where there are some."""
        task = self.server.model.task
        return FlatModel(self.frozen.trained, task if unit_of(self.config, self.data) == "record" else PerPerson(task))

    @property
    def trained_by(self) -> dict[str, Any]:
        return {
            "engine": self.engine.name,
            "engine_reason": self.choice.why,
            "engine_hints": list(self.choice.hints),
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
    holdings = dealt(config, data)
    job = prepare_server(config, data, {len(held) for held in holdings}, module, task, metrics)
    data = with_targets(data, job.server.model.task)
    require_known(job.server.model, data.train_x, data.train_y, f"data {data.name!r}: train")
    server = job.server
    train = trained_on(config, data)
    like, trained = _trained(config, unit_of(config, data), job.frozen.like, server.model.task)
    return Simulated(
        config=config,
        server=server,
        cap=job.cap,
        data_name=job.data_name,
        choice=job.choice,
        schema=job.schema,
        data=data,
        train=train,
        holdings=holdings,
        engine=server.engine,
        frozen=job.frozen,
        features=job.frozen.features(train.x, unit_of(config, data), config),
        make_engine=partial(choose, *_asked(config, job.frozen.trained, like, trained)),
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
    records, which stay records whoever they belong to."""
    learned = task_of(config, data, task)
    prepared = with_targets(data, learned)
    like, test = prepared.like, Examples(prepared.test_x, prepared.test_y)
    what = "the module" if module is not None else f"model.name = {config.model.name!r}"
    if module is None:
        module = models.build(config.model.name, data.input_shape, learned.width, config.run.seed, config.run.code)
    require_module(module)
    if any(values.is_meta for values in (*module.parameters(), *module.buffers())):
        raise ConfigError(
            "the module lies on torch's device 'meta' and has no values; build it on another, as on 'cpu'"
        )
    run, settings = config.run, config.algorithm
    module = module.to(device_named(run.device, "run.device"))
    model = FlatModel(module, learned)
    require_fit(model, like, what)
    require_known(model, *test, f"data {data.name!r}: test")
    algorithm = algorithm_of(config)
    share, layers, active = settings.compression, None, model.dimension
    if isinstance(share, list):
        layers = _layers(share, model.sizes)
        active = sum(k for _, k in layers)
    elif algorithm.sparse:
        active = _active(share, model.dimension)
    unit = unit_of(config, data)
    _refuse_sizes(config, sizes, unit)
    # The fewest records an agent has: its sampling rate is the largest, so noise that serves it serves all.
    plan = calibrated_plan(config, model.dimension, active, min(sizes), unit) if algorithm.private else None
    if plan is not None and config.privacy.noise != "seeded":
        check_finite(plan)
    mask: MaskMode = algorithm.mask or settings.mask
    public_key = derive_key(root_key("seeded", run.seed), "public")
    places = count(data.train_y) * (1 if unit == "record" else config.data.person_records)
    frozen = frozen_body(config, module, like, learned, max(places, count(data.test_y)))
    if frozen.split is not None:  # an engine tries what it trains, which is the head
        for each in tried(*_trained(config, unit, like, learned)):
            try_gradients(module, *each)
    like, trained = _trained(config, unit, frozen.like, learned)
    choice = decide(*_asked(config, frozen.trained, like, trained))
    choice = replace(choice, why=frozen.describe(choice.why))
    server = ServerJob(
        model=model,
        algorithm=algorithm,
        optimizer=ServerOptimizer(
            step=settings.server or algorithm.server,
            server_lr=settings.server_lr,
            ema=settings.ema,
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
        ),
        # `int` where there is noise to hide the rounding in.
        coding=settings.coding or ("int" if plan is not None else "f32"),
        clip_value=None if plan is None else plan.clip_value,
        public_key=public_key,
        test=test,
        engine=choice.make(),
        threads=run.threads,
        metrics=metrics or {},
        scored=frozen.scored,
        engine_scores=frozen.engine_scores,
    )
    return Job(config, server, cap_of(config), data.name, choice, frozen, data.schema)


def _asked(config: Config, module: nn.Module, like: Examples, task: Task) -> tuple[Any, ...]:
    """Of `decide`."""
    run, exact = config.run, config.privacy.noise == "exact"
    return run.engine, module, like, run.device, run.threads, exact, run.tf32, task


def task_of(config: Config, data: Dataset, task: Loss | None = None) -> Task:
    """What is learned of the data: what the config names, or the function that is given."""
    asked = task if task is not None else config.task.name
    options = Options.of(config.task.options, _one_scale(data))
    return resolve(asked, joined([data.train_y, data.test_y]), data.classes, data.key, options, config.run.code)


def with_targets(data: Dataset, learned: Task) -> Dataset:
    """The data with targets as the task takes them."""
    train_y, test_y = (
        learned.targets(learned.labels(x, y), f"data {data.name!r}: {split}")
        for split, x, y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y))
    )
    classes = data.classes if isinstance(learned, Classification) else None
    return replace(data, train_y=train_y, test_y=test_y, classes=classes)


def _trained(config: Config, unit: Unit, like: Examples, task: Task) -> tuple[Examples, Task]:
    """An example as agents train on it, and their task, from those of records."""
    return (like, task) if unit == "record" else (blank_person(like, config.data.person_records), PerPerson(task))


def _one_scale(data: Dataset) -> float:
    """How much of the targets' own unit 1 is: 1 where no table says so, or where its targets have several units."""
    scales = {*(data.target_scale or ())}
    return scales.pop() if len(scales) == 1 else 1.0


def _active(compression: float, dimension: int) -> int:
    if compression * dimension < 1:
        raise ConfigError(
            f"algorithm.compression is {compression}; with d = {dimension} parameters it leaves no active coordinate: "
            f"it must be at least {1 / dimension:.3g}"
        )
    return round(compression * dimension)


def _layers(shares: list[float], sizes: list[int]) -> tuple[tuple[int, int], ...]:
    """(d_j, k_j) of each parameter tensor."""
    if len(shares) != len(sizes):
        raise ConfigError(
            f"algorithm.compression has {len(shares)} shares; the model has {len(sizes)} parameter tensors, of "
            f"{', '.join(map(str, sizes))} coordinates: one share for each"
        )
    layers = tuple((size, round(share * size)) for share, size in zip(shares, sizes))
    if not any(active for _, active in layers):
        raise ConfigError("algorithm.compression leaves no active coordinate: at least one share must be larger")
    return layers


def _refuse_sizes(config: Config, sizes: set[int], unit: Unit) -> None:
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


@dataclass(frozen=True)
class Frozen:
    """`trained` is what an engine trains, the module or its head, on examples made as `like`. Without a `split`, `why`
    says why there is none; "" where nothing is frozen. `scored` is the split in eval mode, if that can be cut too."""

    trained: nn.Module
    like: Examples
    split: Split | None
    scored: Split | None
    why: str

    @property
    def engine_scores(self) -> bool:
        """Whether an engine that trains may be given what is scored."""
        if self.split is None:
            return True
        return self.scored is not None and layout(self.scored.like) == layout(self.split.like)

    def describe(self, reason: str) -> str:
        """Why the engine was chosen, and what was taken out before."""
        if self.split is not None:
            return f"{reason}; {self.split.description}"
        return f"{reason}; the frozen part is computed in every step: {self.why}" if self.why else reason

    def features(self, x: Tree, unit: Unit, config: Config) -> Features | None:
        """Of what agents train on."""
        if self.split is None:
            return None
        return Features(
            self.split,
            x,
            strict=not config.private,
            persons=unit == "person",
            alone=config.privacy.noise == "exact",
            threads=config.run.threads,
        )


def frozen_body(config: Config, module: nn.Module, like: Examples, task: Task, records: int) -> Frozen:
    """Of a module on records made as those `like` which one is given, for so many of them."""
    if config.run.engine == "reference":
        return Frozen(module, like, None, None, "")
    trained = split(module, like, task)
    if isinstance(trained, str):
        return Frozen(module, like, None, None, trained)
    if (lacking := room_lacking(trained, records)) is not None:
        return Frozen(module, like, None, None, lacking)
    scored: Split | str = trained
    if any(layer.training for layer in module.modules()):
        with forward.evaluating(module):
            scored = split(module, like, task)
    return Frozen(
        trained.head, Examples(trained.like, like.y), trained, scored if isinstance(scored, Split) else None, ""
    )
