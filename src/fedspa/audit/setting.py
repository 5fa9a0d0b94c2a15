"""How an audit attacks, whatever the mechanism: with which randomness and engine, and with how many draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import nn

from fedspa.engine import EngineName
from fedspa.engine.choose import choose
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.examples import blank
from fedspa.randomness.streams import NoiseMode, Stream, derive_key, root_key

FALSE_ALARM = 1e-4
DRAWS = 5000


@dataclass(frozen=True, slots=True)
class Setting:
    """`seed` decides the audit's data. `root` is where the mechanism's randomness comes from: the operating system,
    unless the noise mode is `seeded`."""

    noise_mode: NoiseMode = "secure"
    engine: EngineName = "auto"
    draws: int = DRAWS
    seed: int = 0
    false_alarm: float = FALSE_ALARM
    root: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.draws < 100:
            raise ConfigError(f"--draws is {self.draws}; below 100 no attack can say anything")
        if not 0 < self.false_alarm < 0.5:
            raise ConfigError(f"the false-alarm rate is {self.false_alarm}; it must lie above 0 and below 0.5")
        refuse_unless("noise_mode", self.noise_mode, get_args(NoiseMode))
        refuse_unless("engine", self.engine, get_args(EngineName))
        object.__setattr__(self, "root", root_key(self.noise_mode, self.seed))

    @property
    def exact(self) -> bool:
        return self.noise_mode == "exact"

    def key(self, *labels: str | int) -> bytes:
        return derive_key(self.root, "audit", *labels)

    def stream(self, *labels: str | int) -> Stream:
        return Stream(self.key(*labels))

    def generator(self) -> torch.Generator:
        """For the audit's data, afresh each time."""
        return torch.Generator().manual_seed(self.seed)

    def make_engine(self, module: nn.Module, input_shape: tuple[int, ...]) -> Engine:
        """What a run with this noise mode would take for such a model."""
        return choose(self.engine, module, blank(input_shape), "cpu", 1, self.exact)


def refuse_unless(option: str, value: object, allowed: tuple[str, ...]) -> None:
    """An error in the words of the command line."""
    if value not in allowed:
        raise ConfigError(f"--{option.replace('_', '-')} is {value!r}; allowed: {', '.join(allowed)}")
