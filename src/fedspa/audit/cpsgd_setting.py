"""What the audit of cpSGD attacks, and how hard: plans, the noise mode, an engine, and how many draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from fedspa.algorithms import ALGORITHMS
from fedspa.algorithms.base import Respond
from fedspa.audit.result import Check, Unit
from fedspa.engine.choose import EngineName, choose
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.mechanism.quantize import Integers, release
from fedspa.mechanism.streams import NoiseMode, Stream, derive_key, root_key
from fedspa.privacy.binomial import Sensitivity, sensitivity
from fedspa.privacy.binomial_plan import BinomialPlan

Release = Callable[[list[Tensor], BinomialPlan, bytes, Stream, Stream], Integers]
Claim = Callable[[BinomialPlan, float], Sensitivity]
SEED = bytes(range(16))
FALSE_ALARM = 1e-4


@dataclass(frozen=True, slots=True)
class CpsgdTarget:
    """What is attacked: one release, a whole answer, and the sensitivity that is claimed for a release."""

    release: Release = release
    respond: Respond = ALGORITHMS["cpsgd"].respond
    claim: Claim = lambda plan, delta: sensitivity(plan.event, delta)


@dataclass(frozen=True)
class CpsgdSetting:
    """`variants` are plans that differ in clipping and rotation; the first one's sampling is audited too."""

    variants: tuple[BinomialPlan, ...]
    noise_mode: NoiseMode = "secure"
    draws: int = 5000
    seed: int = 0
    false_alarm: float = FALSE_ALARM
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        if self.draws < 100:
            raise ConfigError(f"--draws is {self.draws}; below 100 no attack can say anything")
        for plan in self.variants:
            if plan.flaw is not None:
                raise ConfigError(f"there is no claim to audit: {plan.flaw}")
        object.__setattr__(self, "_root", root_key(self.noise_mode, self.seed))

    @property
    def exact(self) -> bool:
        return self.noise_mode == "exact"

    def make_engine(self, module: nn.Module, input_shape: tuple[int, ...]) -> Engine:
        """What a run with this noise mode would take for such a model."""
        return choose(self.engine, module, input_shape, "cpu", 1, self.exact)

    def stream(self, *labels: str | int) -> Stream:
        return Stream(self.key(*labels))

    def key(self, *labels: str | int) -> bytes:
        root: bytes = self._root  # type: ignore[attr-defined]
        return derive_key(root, "audit", *labels)


def synthetic(*, noise_mode: NoiseMode = "secure", draws: int = 5000, seed: int = 0) -> CpsgdSetting:
    """A small mechanism that the attacks see well: 16 coordinates, 2 of 8 records, little noise. Not the least that has
    an ε (17 and 31 trials): a claim so weak, of ε = 17 and 57, is beyond what thousands of draws could refute."""
    plan = BinomialPlan(16, "coordinate", 0.1, 2, 100, False, "local", 8, 2, 8, 1, 1e-3)
    rotated = replace(plan, rotation=True, trials=2000)
    return CpsgdSetting((plan, rotated, replace(rotated, clip="l2")), noise_mode, draws, seed)


def from_config(path: Path, *, overrides: Sequence[str] = (), draws: int = 5000, seed: int = 0) -> CpsgdSetting | None:
    """The mechanism of a run's config, calibrated as the run would; None where the config is not of cpSGD."""
    from fedspa.runs.config import load
    from fedspa.runs.setup import prepare

    config = load(path, overrides)
    if config.algorithm.name != "cpsgd":
        return None
    plan = prepare(config).plan
    assert isinstance(plan, BinomialPlan)
    return CpsgdSetting((plan,), config.privacy.noise, draws, seed, engine=config.run.engine)


def bounded(name: str, unit: Unit, claimed: float, seen: float, confidence: float, detail: str) -> Check:
    """Holds where what was seen is no more than what is claimed."""
    return Check(name, unit, claimed, seen, confidence, seen <= claimed, detail)
