"""What a run would do with a model: whether it is sound, which engine trains it and why, and how fast."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedspa.cli.step_time import StepTime, step_time
from fedspa.cli.suggest import sides_of
from fedspa.data.dataset import Dataset
from fedspa.data.given import from_arrays
from fedspa.errors import ConfigError, MixingWarning, SeededNoiseWarning
from fedspa.examples import Examples, layout
from fedspa.learning import models
from fedspa.learning.fit import require_fit
from fedspa.learning.flat import FlatModel
from fedspa.learning.layers import Problem, Unsound, layer_problems
from fedspa.learning.tasks import Task
from fedspa.learning.validate import trial
from fedspa.runs.config import Config, load
from fedspa.runs.records import records_of
from fedspa.runs.setup import prepare, task_of, with_targets

_CLASSES = 10
_BATCHES = 4  # that an agent's made-up records fill


@dataclass(frozen=True)
class Finding:
    """`engine` and what follows are None or empty where the model is refused. `passed` has each faster engine and why
    it cannot."""

    model: str
    data: str
    examples: str
    trained: int
    frozen: int
    problems: list[Problem]
    device: str
    batch: int
    engine: str | None = None
    why: str | None = None
    passed: dict[str, str] | None = None
    hints: tuple[str, ...] = ()
    step: StepTime | None = None

    @property
    def sound(self) -> bool:
        return not any(problem.unsound for problem in self.problems)


def examine_model(source: str, overrides: list[str], shape: str | None, classes: int | None) -> Finding:
    """`source` is a config's file, or a model as `model.name` has them: the rest is then the quickstart's."""
    given = source.endswith(".toml")
    if shape is not None and given:
        raise ConfigError("--shape stands in for data, and a config names its own; leave one of them out")
    if shape is None and classes is not None:
        raise ConfigError(f"--classes is {classes} and there is no --shape: they are made up together")
    config = load(source if given else None, [*([] if given else [f"model.name={source}"]), *overrides])
    data = records_of(config) if shape is None else _made_up(config, sides_of(shape), classes or _CLASSES)
    task = task_of(config, data)
    like = with_targets(data, task).like
    own_shape = given or shape is not None or any(override.startswith("data.") for override in overrides)
    module = _built(config, data, task, like, own_shape)
    finding = Finding(
        model=config.model.name,
        data=data.name,
        examples=layout(like.x),
        trained=_numbers(module, trained=True),
        frozen=_numbers(module, trained=False),
        problems=list(layer_problems(module)) or trial(module, like, task).problems,
        device=config.run.device,
        batch=config.algorithm.batch,
    )
    return _tried(finding, config, data) if finding.sound else finding


def _built(config: Config, data: Dataset, task: Task, like: Examples, own_shape: bool) -> nn.Module:
    """The model, which can take such records; whose shape may be nobody's wish but the quickstart's."""
    name = config.model.name
    module: nn.Module | None = None
    try:
        module = models.build(name, data.input_shape, task.width, config.run.seed, config.run.code)
        if not any(layer_problems(module)):
            require_fit(FlatModel(module, task), like, f"model.name = {name!r}")
    except ConfigError as cause:
        asked = module is not None or name in models.NAMES
        if own_shape or not asked:
            raise
        raise ConfigError(f"{cause}; these are the quickstart's records: --shape 1,28,28 makes up others") from cause
    return module


def _numbers(module: nn.Module, *, trained: bool) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad is trained and not is_lazy(p))


def _tried(finding: Finding, config: Config, data: Dataset) -> Finding:
    """By the engine of a run, which tries more of a model than is known without it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MixingWarning)  # it is among the problems
            warnings.simplefilter("ignore", SeededNoiseWarning)
            job = prepare(config, data)
        step = step_time(job)
    except Unsound as refused:
        return replace(finding, problems=[*finding.problems, refused.problem])
    choice = job.choice
    return replace(
        finding,
        engine=choice.engine,
        why=choice.why,
        passed={name: obstacle.why for name, obstacle in choice.passed.items()},
        hints=choice.hints,
        step=step,
    )


def _made_up(config: Config, sides: tuple[int, ...], classes: int) -> Dataset:
    each = _BATCHES * config.algorithm.batch
    x = torch.rand(config.federation.agents * each, *sides, generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(x)) % classes
    return from_arrays(x, y, x[:classes], y[:classes], name="made up", classes=classes)
