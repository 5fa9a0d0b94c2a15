"""The policy: an agent's own limits, in a TOML file that belongs to the agent.

A server proposes a plan; the agent takes part only if every term is at least as strict as its policy, and refuses
otherwise before it uses any record. What the server learns of a refusal is one fixed code. The text stays with the
agent: it holds what the agent has spent, and that is nobody else's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from fedspa import toml
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import BudgetError, ConfigError, FedspaError, quoted
from fedspa.mechanisms.base import Clipping, Plan
from fedspa.privacy.budget import PrivacyBudget
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
    "aggregation",
    "budget",
]

# 1e15 is beyond any limit that means something, and still exact as a float.
_Positive = Annotated[float, Field(gt=0, lt=1e15)]
_Count = Annotated[int, Field(ge=1, lt=10**15)]


class PolicyRefusal(FedspaError):
    """A plan is laxer than the agent's policy. Only `code` may travel to the server; the text is for the agent."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(code, text)
        self.code: Final = code

    def __str__(self) -> str:
        return f"refused ({self.code}): {self.args[1]}"


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class Policy:
    """An agent's limits. `epsilon` at `delta` under `neighbours` caps all runs together; the rest bounds each plan.

    `min_noise_multiplier` is in the units of `Plan`, `max_rounds` counts the agent's participations in one
    run, `max_compression` is the largest p = k/d. Every mechanism's plan states them. `unit` is what a plan must
    protect; None allows each.

    Without `min_honest` and `max_worst_case` the agent relies on nobody's noise but its own: plans for secure
    aggregation are refused, and entries of such count as if everyone else had colluded. With them, the noise of
    `min_honest` members must count, the agent's own among it, a plan must assume `min_colluders` others who collude
    with the server, and `max_worst_case` caps what all runs together cost if all others collude.
    `recovery` says whether a sum may be recovered from the silence of others (secagg/recovery.py).
    `min_noise_multiplier` then is of the noise that counts: `max_worst_case` bounds the agent's own share.
    """

    epsilon: _Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    neighbours: Neighbours
    min_noise_multiplier: _Positive
    max_local_steps: _Count
    max_rounds: _Count
    max_compression: Annotated[float, Field(gt=0, le=1)]
    clippings: Annotated[tuple[Clipping, ...], Field(min_length=1, strict=False)]  # TOML has lists
    unit: Unit | None = None
    min_honest: _Count | None = None
    min_colluders: Annotated[int, Field(ge=0, lt=10**15)] = 0
    max_worst_case: _Positive | None = None
    recovery: bool = False

    def __post_init__(self) -> None:
        if (self.min_honest is None) != (self.max_worst_case is None) or (
            self.min_colluders and self.min_honest is None
        ):
            raise ConfigError(
                "min_honest and max_worst_case: a policy states both, and may then state min_colluders, or it states "
                "none of them and refuses secure aggregation"
            )
        if self.max_worst_case is not None and self.max_worst_case < self.epsilon:
            raise ConfigError(
                f"max_worst_case is {self.max_worst_case:g}; it must be at least epsilon = {self.epsilon:g}, since an "
                "adversary who colludes with all others sees no less"
            )

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
        """Read the policy that a TOML text states."""
        try:
            return Policy(**toml.parse(text))
        except toml.NotToml as error:
            raise ConfigError(f"not TOML: {error}") from error
        except ValidationError as error:
            raise ConfigError(_describe(error)) from None

    @property
    def cap(self) -> PrivacyBudget:
        """The budget over all runs, which the ledger enforces."""
        trust = self.max_worst_case, self.min_honest or 1, self.min_colluders
        return PrivacyBudget(self.epsilon, self.delta, self.neighbours, *trust)

    def check(self, plan: Plan) -> None:
        """Raise a PolicyRefusal if `plan` is laxer than this policy, its budget aside. Looks at no data and no ledger:
        see `admit`."""
        for code, text in self._violation(plan):
            raise PolicyRefusal(code, text)

    def _violation(self, plan: Plan) -> Iterator[tuple[Code, str]]:
        cohort, honest = plan.aggregation, 1
        if self.neighbours == "replace-one" and plan.neighbours != "replace-one":
            yield "relation", f"the plan protects {plan.neighbours}, this policy asks for replace-one"
        if self.neighbours == "add-remove" and plan.sampling == "fixed":
            yield "relation", "fixed-size sampling has no accountant under this policy's add-remove"
        if plan.delta > self.delta:
            yield "delta", f"the plan's δ = {plan.delta:g} is above this policy's {self.delta:g}"
        if self.delta * plan.records >= 1:
            promised = f"is too large for {plan.records} {plan.unit}s; set it below 1/{plan.records}"
            yield "delta", f"this policy's δ = {self.delta:g} {promised}"
        if cohort is not None:
            honest, counted = cohort.honest, f"{cohort.members} less {cohort.colluders} colluding"
            if self.min_honest is None:
                allow = "to allow it, set min_honest and max_worst_case"
                yield (
                    "aggregation",
                    f"the plan relies on the noise of other members, which this policy does not allow: {allow}",
                )
            elif honest < self.min_honest:
                yield "aggregation", f"the noise of {honest} members counts ({counted}), at least {self.min_honest}"
            if cohort.colluders < self.min_colluders:
                yield "aggregation", f"the plan assumes {cohort.colluders} colluding, at least {self.min_colluders}"
        noise = plan.noise_multiplier * math.sqrt(honest)
        shape = plan.local_steps, plan.participations, plan.compression, plan.clip
        yield from self.limit_violations(
            plan.unit, noise, *shape, whose=f", of {honest} members together" * (honest > 1)
        )

    def limit_violations(
        self,
        unit: Unit,
        noise: float,
        steps: int,
        rounds: int,
        compression: float = 1.0,
        clip: Clipping = "l2",
        whose: str = "",
    ) -> Iterator[tuple[Code, str]]:
        """Yield the code and the text of each limit that is laxer than this policy."""
        if self.unit not in (None, unit):
            yield "unit", f"each {unit} is protected, this policy asks for each {self.unit}"
        if not noise >= self.min_noise_multiplier:
            yield "noise-too-small", f"noise multiplier {noise:g}{whose}, at least {self.min_noise_multiplier:g}"
        if steps > self.max_local_steps:
            yield "too-many-steps", f"{steps} local steps, at most {self.max_local_steps}"
        if rounds > self.max_rounds:
            yield "too-many-rounds", f"{rounds} participations, at most {self.max_rounds}"
        if compression > self.max_compression:
            yield "compression-too-large", f"compression {compression:g}, at most {self.max_compression:g}"
        if clip not in self.clippings:
            yield "clipping-not-allowed", f"clipping {clip!r}, allowed: {', '.join(self.clippings)}"

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


def _describe(error: ValidationError) -> str:
    """Describe in one line the first thing that is wrong with a policy's keys."""
    first = error.errors(include_url=False)[0]
    key, kind = str(first["loc"][0]), first["type"]
    if kind == "unexpected_keyword_argument":
        return f"unknown key {key!r}; allowed: {', '.join(Policy.__dataclass_fields__)}"
    if kind == "missing":
        return (
            f"{key} is missing; a policy states every limit (only unit and those of secure aggregation may be left out)"
        )
    rule = first["msg"].replace("Input should", "it must").replace("a valid integer", "a whole number")
    return f"{key} is {quoted(first['input'])}; {rule}"
