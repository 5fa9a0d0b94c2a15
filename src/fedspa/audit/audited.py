"""The audit: how it attacks, what a mechanism tells it, and the false-alarm rate shared out among its questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from fedspa.audit.statistics import Question, Report
from fedspa.data.plugin import GIVEN
from fedspa.engine import EngineName
from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.local import Engine
from fedspa.errors import ConfigError
from fedspa.examples import blank
from fedspa.privacy.event import Unit
from fedspa.randomness.streams import NoiseMode, Stream, derive_key, root_key

if TYPE_CHECKING:
    from fedspa.runs.config import Config

FALSE_ALARM = 1e-4
DRAWS = 5000
RECOVERY = (
    "privacy.recovery = true: the attacks are on sums over privacy.members agents, the fewest that recovery opens, and "
    "not on its exchanges; docs/secagg.md has their proof, tests/secagg/test_recovery.py a server that cheats in them"
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """`seed` decides the audit's data. `root` is where the mechanism's randomness comes from: the operating system,
    unless the noise mode is `seeded`. `notes` say what is not attacked."""

    noise_mode: NoiseMode = "secure"
    engine: EngineName = "auto"
    draws: int = DRAWS
    seed: int = 0
    false_alarm: float = FALSE_ALARM
    notes: tuple[str, ...] = ()
    root: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.draws < 100:
            raise ConfigError(f"--draws is {self.draws}; an attack needs at least 100")
        if not 0 < self.false_alarm < 0.5:
            raise ConfigError(f"the false-alarm rate is {self.false_alarm}; it must lie above 0 and below 0.5")
        object.__setattr__(self, "root", root_key(self.noise_mode, self.seed))

    @property
    def exact(self) -> bool:
        return self.noise_mode == "exact"

    def key(self, *labels: str | int) -> bytes:
        return derive_key(self.root, "audit", *labels)

    def stream(self, *labels: str | int) -> Stream:
        return Stream(self.key(*labels))

    def generator(self) -> torch.Generator:
        """Return a fresh generator for the audit's data."""
        return torch.Generator().manual_seed(self.seed)

    def make_engine(self, module: nn.Module, input_shape: tuple[int, ...]) -> Engine:
        """Return what a run with this noise mode would take for such a model."""
        return choose(EngineRequest(self.engine, module, blank(input_shape), "cpu", 1, self.exact))


@dataclass(frozen=True, slots=True)
class Audited(Generic[T]):
    """What a mechanism tells the audit. A target T is what is attacked: plans, and the functions that train by them.

    `of_plan` makes the target of a run's plan. Each of `faults` makes a target with one known mistake in it, which the
    audit must catch (`--self-test`).
    """

    name: str
    of_plan: Callable[[Any], T]
    questions: Callable[[Setting, T], Iterable[Question]]
    faults: Mapping[str, Callable[[T], T]] = field(default_factory=dict)

    def audit(self, setting: Setting, target: T) -> Report:
        """Attack the target. Holds on sound code except with chance `setting.false_alarm`, by the union bound."""
        seeded = (
            "seeded noise is a function of run.seed: an adversary who knows the seed can subtract it; not tested here"
        )
        notes = (*setting.notes, *([seeded] if setting.noise_mode == "seeded" else []))
        questions = list(self.questions(setting, target))
        whole = sum(question.share for question in questions) or 1.0
        checks = (question.answer(setting.false_alarm * question.share / whole) for question in questions)
        return Report(tuple(checks), setting.false_alarm, notes)

    def self_test(self, setting: Setting, target: T) -> dict[str, Report]:
        """Attack the target with each fault in it; none of the reports may hold."""
        if not self.faults:
            raise ConfigError(f"--self-test: the audit of {self.name} has no faults of its own; audit fedspa")
        return {name: self.audit(setting, fault(target)) for name, fault in self.faults.items()}


def of_config(path: Path | None, overrides: Sequence[str], draws: int, seed: int) -> tuple[Audited[Any], Any, Setting]:
    """Return the audit of a run's config (the quickstart's without a path), with its plan, calibrated as the run would,
    noise mode and engine."""
    from fedspa.runs.config import STATISTICS, algorithm_of, load

    config = load(path, overrides)
    plan, options = _prepared(config, None if path is None else path.parent)
    reference, name = algorithm_of(config).audit, config.algorithm.name
    if plan is None:
        raise ConfigError(f"algorithm.name is {name!r}, which promises no privacy; audit a config that has a plan")
    if reference is None:
        raise ConfigError(f"algorithm.name is {name!r}, which names no audit; its Algorithm must (`audit`)")
    audited = _referred(reference)
    target, notes = audited.of_plan(plan), (RECOVERY,) if config.privacy.recovery else ()
    setting = Setting(config.privacy.noise, config.run.engine, draws, seed, notes=notes)
    if config.model.name == STATISTICS["model.name"]:
        audited = replace(audited, questions=partial(_with_part, audited.questions, plan.unit, config, options))
    return audited, target, setting


def _prepared(config: Config, folder: Path | None) -> tuple[Any, Mapping[str, Any]]:
    """Return the plan and the task's options: of data that came from Python, as the run in `folder` left them."""
    from fedspa.agent.ledger.ledger import Ledger
    from fedspa.runs.checkpoint import load_latest
    from fedspa.runs.config import plan_of
    from fedspa.runs.rundir import ledger_of, read_summary
    from fedspa.runs.setup import prepare

    if not config.data.name.startswith(GIVEN):
        job = prepare(config)
        return job.plan, job.task.options
    summary = None if folder is None else read_summary(folder)
    begun = None if summary is None or folder is None else load_latest(folder / "checkpoint")
    if summary is None or begun is None or folder is None or not config.private:
        raise ConfigError(
            f"data.name is {config.data.name!r}, which came from Python and is not here: audit the config.toml of its "
            "finished private run"
        )
    with Ledger.read(ledger_of(folder, config)) as ledger:
        events = {event.with_noise(None) for event in ledger.events(begun.run)}
    if len(events) != 1:
        raise ConfigError(f"the ledger has no entries of one plan of the run in {folder}: put it back")
    dimension = int(summary["dimension"])
    return plan_of(config, events.pop(), dimension, round(summary["compression"] * dimension)), config.task.options


def _with_part(
    questions: Callable[[Setting, Any], Iterable[Question]],
    unit: Unit,
    config: Config,
    options: Mapping[str, Any],
    setting: Setting,
    target: Any,
) -> Iterator[Question]:
    """Ask what one record or person adds to a release first, then what is asked of every plan."""
    from fedspa.audit.probes import part_question
    from fedspa.learning.tasks.totals import Layout

    generator = torch.Generator().manual_seed(setting.seed)
    yield part_question(Layout.parse(options["layout"]), unit, config.data.person_records, generator)
    yield from questions(setting, target)


def _referred(reference: str) -> Audited[Any]:
    module, _, variable = reference.partition(":")
    found: Audited[Any] = getattr(import_module(module), variable)
    return found
