"""The policy: an agent's own limits, in a TOML file that belongs to the agent.

A server proposes a plan; the agent takes part only if every term is at least as strict as its policy, and refuses
otherwise before it uses any record. What the server learns of a refusal is one fixed code. The text stays with the
agent: it holds what the agent has spent, and that is nobody else's business.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from fedspa import toml
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import BudgetError, ConfigError, FedspaError, quoted
from fedspa.mechanisms.base import Clipping, ClipRule, Plan
from fedspa.privacy.cap import Cap
from fedspa.privacy.event import Neighbours, Unit

Code = Literal[
    "not-private",
    "unit",
    "relation",
    "delta",
    "noise-too-small",
    "too-many-steps",
    "too-many-rounds",
    "compression-too-large",
    "clipping-not-allowed",
    "clip-rule-not-allowed",
    "aggregation",
    "budget",
]

_LARGEST = 1e15  # beyond any limit that means something, and still exact as a float
_TEXTS: Final = ("Neighbours", "Unit")


class PolicyRefusal(FedspaError):
    """A plan is laxer than the agent's policy. Only `code` may travel to the server; the text is for the agent."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(code, text)
        self.code: Final = code

    def __str__(self) -> str:
        return f"refused ({self.code}): {self.args[1]}"


@dataclass(frozen=True, slots=True)
class Policy:
    """An agent's limits. `epsilon` at `delta` under `neighbours` caps all runs together; the rest bounds each plan.

    `min_noise_multiplier` is in the units of `Plan`, `max_rounds` counts the agent's participations in one
    run, `max_compression` is the largest p = k/d. Every mechanism's plan states them. `unit` is what a plan must
    protect; None allows each.

    Without `min_honest` and `max_floor` the agent relies on nobody's noise but its own: plans for secure aggregation
    are refused, and entries of such are priced as if everyone else had colluded. With them, the noise of `min_honest`
    members must count, the agent's own among it, a plan must reckon with `min_colluders` others who are with the
    server, and `max_floor` caps what all runs together cost where all others are. `min_noise_multiplier` then is of the
    noise that counts: the floor bounds the agent's own share.
    """

    epsilon: float
    delta: float
    neighbours: Neighbours
    min_noise_multiplier: float
    max_local_steps: int
    max_rounds: int
    max_compression: float
    clippings: tuple[Clipping, ...]
    clip_rules: tuple[ClipRule, ...] = get_args(ClipRule)
    unit: Unit | None = None
    min_honest: int | None = None
    min_colluders: int = 0
    max_floor: float | None = None

    def __post_init__(self) -> None:
        _number("epsilon", self.epsilon, "above 0", self.epsilon > 0)
        _number("delta", self.delta, "above 0 and below 1", 0 < self.delta < 1)
        _number("min_noise_multiplier", self.min_noise_multiplier, "above 0", self.min_noise_multiplier > 0)
        _number("max_compression", self.max_compression, "above 0 and at most 1", 0 < self.max_compression <= 1)
        _number("max_local_steps", self.max_local_steps, "at least 1", self.max_local_steps >= 1)
        _number("max_rounds", self.max_rounds, "at least 1", self.max_rounds >= 1)
        _names("neighbours", (self.neighbours,), get_args(Neighbours))
        _names("clippings", self.clippings, get_args(Clipping))
        if self.unit is not None:
            _names("unit", (self.unit,), get_args(Unit))
        _names("clip_rules", self.clip_rules, get_args(ClipRule))
        _number("min_colluders", self.min_colluders, "at least 0", self.min_colluders >= 0)
        if (self.min_honest is None) != (self.max_floor is None) or (self.min_colluders and self.min_honest is None):
            raise ConfigError(
                "min_honest and max_floor: a policy states both, and may then state min_colluders, or it states none "
                "of them and refuses secure aggregation"
            )
        if self.min_honest is not None and self.max_floor is not None:
            _number("min_honest", self.min_honest, "at least 1", self.min_honest >= 1)
            allowed = f"at least epsilon = {self.epsilon:g}, as whoever colludes with all others sees no less"
            _number("max_floor", self.max_floor, allowed, self.max_floor >= self.epsilon)

    @staticmethod
    def load(path: str | Path) -> Policy:
        """Read the policy file at `path`; anything that is not exactly a policy is a ConfigError."""
        text = toml.text(Path(path), "a policy, in TOML")
        try:
            return Policy.parse(text)
        except ConfigError as error:
            raise ConfigError(f"policy {path}: {error}") from error

    @staticmethod
    def parse(text: str) -> Policy:
        """The policy that a TOML text spells out."""
        try:
            table = toml.parse(text)
        except ConfigError as error:
            raise ConfigError(f"not TOML: {error}") from error
        known = {field.name: field for field in fields(Policy)}
        for key in table:
            if key not in known:
                raise ConfigError(f"unknown key {key!r}; allowed: {', '.join(known)}")
        for key, field in known.items():
            if key not in table and field.default is MISSING:
                raise ConfigError(
                    f"{key} is missing; a policy states every limit (only clip_rules, unit and those of secure "
                    "aggregation may be left out)"
                )
        return Policy(**{key: _typed(key, value, str(known[key].type)) for key, value in table.items()})

    @property
    def cap(self) -> Cap:
        """What the ledger holds the agent to, over all runs."""
        trust = self.max_floor, self.min_honest or 1, self.min_colluders
        return Cap(self.epsilon, self.delta, self.neighbours, *trust)

    def check(self, plan: Plan) -> None:
        """Raise a PolicyRefusal where `plan` is laxer than this policy, its budget aside. Looks at no data and no
        ledger: see `admit`."""
        if self.unit is not None and plan.unit != self.unit:
            raise PolicyRefusal("unit", f"the plan protects each {plan.unit}, this policy asks for each {self.unit}")
        if self.neighbours == "replace-one" and plan.neighbours != "replace-one":
            raise PolicyRefusal("relation", f"the plan protects {plan.neighbours}, this policy asks for replace-one")
        if self.neighbours == "add-remove" and plan.sampling == "fixed":
            raise PolicyRefusal("relation", "fixed-size sampling has no sound guarantee under this policy's add-remove")
        if plan.delta > self.delta:
            raise PolicyRefusal("delta", f"the plan's δ = {plan.delta:g} is above this policy's {self.delta:g}")
        if self.delta * plan.records >= 1:
            raise PolicyRefusal(
                "delta",
                f"this policy's δ = {self.delta:g} promises nothing to {plan.records} {plan.unit}s; set it below 1/m",
            )
        self._check_cohort(plan)
        counted = 1 if plan.aggregation is None else plan.aggregation.honest
        noise = plan.noise_multiplier * math.sqrt(counted)
        if noise < self.min_noise_multiplier:
            whose = f", of {counted} members together" * (counted > 1)
            raise PolicyRefusal(
                "noise-too-small", f"noise multiplier {noise:g}{whose}, at least {self.min_noise_multiplier:g}"
            )
        if plan.local_steps > self.max_local_steps:
            raise PolicyRefusal("too-many-steps", f"{plan.local_steps} local steps, at most {self.max_local_steps}")
        if plan.participations > self.max_rounds:
            raise PolicyRefusal("too-many-rounds", f"{plan.participations} participations, at most {self.max_rounds}")
        if plan.compression > self.max_compression:
            raise PolicyRefusal(
                "compression-too-large", f"compression {plan.compression:g}, at most {self.max_compression:g}"
            )
        if plan.clip not in self.clippings:
            raise PolicyRefusal("clipping-not-allowed", f"clipping {plan.clip!r}, allowed: {', '.join(self.clippings)}")
        if plan.clip_rule not in self.clip_rules:
            raise PolicyRefusal(
                "clip-rule-not-allowed", f"clip rule {plan.clip_rule!r}, allowed: {', '.join(self.clip_rules)}"
            )

    def _check_cohort(self, plan: Plan) -> None:
        found = plan.aggregation
        if found is None:
            return
        if self.min_honest is None:
            raise PolicyRefusal(
                "aggregation",
                "the plan counts the noise of others, and this policy relies on nobody's: to allow it, set min_honest "
                "and max_floor",
            )
        if found.honest < self.min_honest:
            raise PolicyRefusal(
                "aggregation",
                f"the noise of {found.honest} members counts ({found.members} less {found.colluders} colluding), at "
                f"least {self.min_honest}",
            )
        if found.colluders < self.min_colluders:
            raise PolicyRefusal(
                "aggregation", f"the plan reckons with {found.colluders} colluding, at least {self.min_colluders}"
            )

    def admit(self, plan: Plan, ledger: Ledger, agent: str, run: str, message: str) -> None:
        """`check`, and that all of the plan's participations still to come in `run` fit under the cap.

        Call it before each participation: at the first it refuses a run that would end over budget, later it stops a
        server that asks for more than its plan said, and a `message` that was reserved before a crash passes. Then
        `Ledger.reserve(cap=policy.cap)` decides for good.
        """
        self.check(plan)
        if ledger.find(agent, run, message) is not None:
            return
        done = ledger.participations(agent, run)
        if done >= plan.participations:
            raise PolicyRefusal("too-many-rounds", f"{done} participations in run {run!r}: its plan has no more")
        try:
            ledger.require(agent, plan.event, self.cap, participations=plan.participations - done)
        except BudgetError as error:
            raise PolicyRefusal("budget", str(error)) from error


def _typed(key: str, value: Any, kind: str) -> Any:
    """`value` as the field's type, from what TOML can say: whole numbers serve as numbers, booleans do not."""
    kind = kind.removesuffix(" | None")
    if kind == "float" and type(value) in (int, float) and abs(value) < _LARGEST:
        return float(value)
    if kind == "int" and type(value) is int and abs(value) < _LARGEST:
        return value
    if kind in _TEXTS and isinstance(value, str):
        return value
    if kind.startswith("tuple") and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    expected = {"float": "a number", "int": "a whole number", **dict.fromkeys(_TEXTS, "a text")}
    raise ConfigError(f"{key} is {quoted(value)}; it must be {expected.get(kind, 'a list of texts')}")


def _number(key: str, value: float, allowed: str, holds: bool) -> None:
    if not (holds and math.isfinite(value)):
        raise ConfigError(f"{key} is {value}; it must be finite and {allowed}")


def _names(key: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for value in values or ("nothing",):
        if value not in allowed:
            raise ConfigError(f"{key} holds {value!r}; allowed: {', '.join(allowed)}")
