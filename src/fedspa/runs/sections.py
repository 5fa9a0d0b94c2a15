"""The sections of a config: every key with its type, its bounds, its default and its meaning.

What a key means stands here, in its description, and nowhere else: the reference is made from these. Every key has a
default, but a private algorithm needs exactly one of `privacy.epsilon` and `privacy.noise_multiplier`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    field_validator,
    model_validator,
)

from fedspa.data import columns as tables
from fedspa.data.columns import Schema, TableSection
from fedspa.data.partition import Rule, split_scheme
from fedspa.data.plugin import TABLES
from fedspa.engine import EngineName
from fedspa.errors import ConfigError
from fedspa.mechanisms.base import LARGEST_CLIP, SMALLEST_CLIP, Adversary, Clipping
from fedspa.mechanisms.gaussian.plan import LEAST_NOISE, MOST_NOISE
from fedspa.privacy.event import Neighbours, NoiseMode, Sampling
from fedspa.randomness.mask import MaskMode
from fedspa.registry import BUILT_IN

_LONGEST_NAME = 255  # of a file, in bytes, on every usual file system


def _a_path(text: str) -> str:
    if "\0" in text or max(len(os.fsencode(part)) for part in text.split("/")) > _LONGEST_NAME:
        raise ValueError(f"it must have no NUL character in it and no name of more than {_LONGEST_NAME} bytes")
    return text


Many = Annotated[int, Field(ge=1, le=10**7)]  # agents, records
Times = Annotated[int, Field(ge=1, le=10**6)]  # rounds, steps
Bounded = Annotated[float, Field(ge=-1e12, le=1e12)]  # a score; what a key may be, its own section says
Setting = bool | Annotated[int, Field(ge=-(10**12), le=10**12)] | Bounded | str
Share = Annotated[float, Field(ge=0, lt=1)]
StepSize = Annotated[float, Field(ge=1e-10, le=1e10)]
Name = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_a_path)]  # of something that may be a file


class Section(BaseModel):
    """Strict: unknown keys, NaN, ∞ and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


MOST_THREADS = 1024
_MOST_TENSORS = 10_000


def _a_partition(text: str) -> str:
    try:
        split_scheme(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text


class Federation(Section):
    """Who takes part, and how often."""

    agents: Many = Field(
        10, description="How many agents hold records (n). Unset, as many as the data comes with, if it does."
    )
    rounds: Times = Field(
        40, description="How many rounds (T). Unset, 40, or more where it takes more for each agent to take part in 5."
    )
    per_round: Many = Field(
        10, description="How many agents train in a round; at most `agents`. Unset, a tenth of them, at least 10."
    )
    participation: Rule = Field(
        "balanced",
        description="`balanced` selects agents in shuffled turns, so that no agent participates more than "
        "⌈rounds·per_round/agents⌉ times; `uniform` draws them afresh each round (the paper) and skips those at the "
        "cap.",
    )
    cap: Times | None = Field(
        None,
        description="The most rounds an agent may take part in; the noise is calibrated to it. Unset, it is what "
        "`participation` allows: ⌈rounds·per_round/agents⌉, or all rounds under `uniform`.",
    )

    @model_validator(mode="after")
    def _of_the_agents(self) -> Self:
        """Fill in what follows from the agents, and leave it out of the keys that somebody set."""
        if "per_round" not in self.model_fields_set:
            self.__dict__["per_round"] = usual_cohort(self.agents)
        if "rounds" not in self.model_fields_set:
            self.__dict__["rounds"] = usual_rounds(self.agents, self.per_round)
        return self


def usual_cohort(agents: int) -> int:
    """Return how many agents train in a round where nobody says it."""
    return min(agents, max(10, agents // 10))


def usual_rounds(agents: int, per_round: int) -> int:
    """Return the rounds where nobody says them: 40, or so many that each agent takes part in 5."""
    return max(40, -(-5 * agents // max(1, per_round)))


def _one_text(given: Any) -> Any:
    """Join a list of tables to the one text that `data.name` is."""
    return TABLES.join(given) if isinstance(given, list) and all(isinstance(n, str) for n in given) else given


def _paths(text: str) -> str:
    return TABLES.join(map(_a_path, text.split(TABLES)))


class Data(Section):
    """Which records, as which features, and how they are assigned to agents."""

    name: Annotated[
        str, Field(min_length=1, max_length=1_000_000), BeforeValidator(_one_text), AfterValidator(_paths)
    ] = Field(
        "digits",
        description="`digits` (in scikit-learn), `mnist`, `fashion-mnist`, `cifar10`, a path to a table (`.csv`, "
        "`.parquet`) that `table` describes, a pattern or a list of tables, one per agent (`sites/*.csv`), a path to "
        "an `.npz` with x_train, y_train, x_test and y_test, or `package.module:function`.",
    )
    dir: Name = Field(
        "data", description="The folder of the files of `mnist`, `fashion-mnist`, `cifar10`, a table or an `.npz`."
    )
    table: TableSection | None = Field(
        None, description="The schema of a table ([data](data.md)); only for a `name` that is a table."
    )
    features: Literal["aligned", "orientations", "aligned-orientations", "patches", "patches-128"] | None = Field(
        None,
        description="Each image as features that no data was needed for: `aligned` (moved, sized and sheared to a "
        "standard by its own moments; one channel), `orientations` (histograms of gradient directions), or both, "
        "`aligned-orientations`, for handwriting; `patches` (which of 64 small patterns lie where) for colour "
        "photographs of 32 by 32 and grey ones of 28 by 28, `patches-128` with 128 patterns.",
    )
    holdout: Share = Field(
        0.0,
        description="The share of the training records that no agent gets, and that accuracy is measured on in place "
        "of the test records: for choosing settings, or where a table marks none for testing.",
    )
    agent_holdout: Share = Field(
        0.0,
        description="The share of its records (or persons) that each agent keeps out of training, for `fedspa "
        "evaluate`; which ones follows from their content and `run.seed`.",
    )
    partition: Annotated[str, AfterValidator(_a_partition)] = Field(
        "iid",
        description="How records are assigned to agents: `iid`, `dirichlet` (label skew; `dirichlet:0.1` names its "
        "concentration, 0.5 by default: small is skewed, large is nearly iid), or `shards` (few labels per agent).",
    )
    person: Name | None = Field(
        None,
        description="Column of a table, or array of an `.npz`, with the person ID of each training record. Each person "
        "is then protected, and not each record: gradient, clip, noise, sampling, m, δ and ε are per person. Data from "
        "Python brings its persons along.",
    )
    person_records: Annotated[int, Field(ge=1, le=100_000)] = Field(
        8,
        description="The most records of a person that count, a public number; which ones, is drawn at random. More "
        "make a person's gradient steadier and a step slower, at the same ε.",
    )

    @property
    def schema_of_table(self) -> Schema | None:
        """Return the schema of the table and the column with the person ID; None where the data is no table."""
        return None if self.table is None else tables.checked({**dict(self.table), "person": self.person})


class Model(Section):
    """What is trained."""

    name: Name = Field(
        "logistic",
        description="`logistic`, `mlp`, `small-cnn`, `mnist-cnn`, `cifar10-cnn`, or `package.module:function`.",
    )


class Task(Section):
    """What is learned."""

    name: Name = Field(
        "classification",
        description="`classification`, `binary`, `multi-label`, `regression`, `next-token`, `token-classification`, "
        "`module` (the loss that the module itself returns), or `package.module:function`, a function loss(module, "
        "example).",
    )
    metric: Name | None = Field(
        None,
        description="The score that the run is judged by: in charts, the best round, the baseline, comparisons and "
        "trials ([names](models.md#the-score)), or `package.module:function`. Unset, the task's first score; with "
        "imbalanced classes not accuracy.",
    )
    options: dict[Annotated[str, Field(max_length=100)], Any] = Field(
        {}, description="Settings of the task's own, each with a default ([tasks](models.md#tasks))."
    )


class LocalOptions(Section):
    """The constants of an agent's optimiser."""

    beta1: Annotated[float, Field(ge=1e-9, le=0.999999)] = Field(
        0.9, description="Decay of the first moment, for `adam` and `momentum`."
    )
    beta2: Annotated[float, Field(ge=0.5, le=0.999999)] = Field(
        0.999, description="Decay of the second moment, for `adam`."
    )
    kappa: StepSize = Field(1e-8, description="Added to the root of the second moment, for `adam`.")


class ServerOptions(Section):
    """How the server's step depends on the rounds before it."""

    beta1: Share = Field(0.9, description="Decay of the first moment, for `adam` and `momentum`.")
    beta2: Share = Field(0.99, description="Decay of the second moment, for `adam`.")
    kappa: StepSize = Field(1e-3, description="Added to the root of the second moment, for `adam`.")


def _shares(value: Any) -> float | list[float]:
    """Check `algorithm.compression`: one number, or one for each parameter tensor."""
    if isinstance(value, list) and 0 < len(value) <= _MOST_TENSORS and all(map(_is_share, value)):
        return [float(share) for share in value]
    if _is_share(value) and value > 0:
        return float(value)
    raise ValueError(
        "it must be a number above 0 and at most 1, or a list of numbers from 0 to 1, one per parameter tensor"
    )


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


# The default of a key beside it is that of algorithms without Gaussian noise.
_CHOSEN = "Under Gaussian noise and unset ([defaults](tuning.md#defaults))"


class Algorithm(Section):
    """How agents train and how the server moves the model."""

    name: Name = Field(
        "fedspa",
        description=f"`fedspa`, its rivals ({', '.join(f'`{name}`' for name in BUILT_IN if name != 'fedspa')}), or "
        "`package.module:NAME`, an Algorithm of your own.",
    )
    options: dict[Annotated[str, Field(max_length=100)], Setting] = Field(
        {}, description="Settings of the algorithm's own; its page lists them. `fedspa` has none."
    )
    compression: Annotated[float | list[float], PlainValidator(_shares)] = Field(
        1.0,
        description="p = k/d, the share of coordinates that an agent trains and uploads in a round. With mask `fixed` "
        "also a list, as in `[0, 1, 0.1, 1]`: the share of each parameter tensor, in the model's order, that is ever "
        "trained; p is what they add up to.",
    )
    mask: MaskMode = Field(
        "per-agent",
        description="Who shares a mask: nobody (`per-agent`, the paper), a round's agents (`shared`), or everyone for "
        "the whole run (`fixed`).",
    )
    local_steps: Times = Field(
        20,
        description=f"τ, noisy gradient steps that an agent takes in a round. {_CHOSEN}, 5, or 1 under secure "
        "aggregation.",
    )
    batch: Many = Field(
        10,
        description="B, the expected batch of a step. The sampling rate is B over the fewest records of an agent. "
        f"{_CHOSEN}, all of them.",
    )
    local_lr: StepSize = Field(0.1, description=f"The step size of an agent. {_CHOSEN}, see `server_lr`.")
    local_optimizer: Literal["sgd", "momentum", "adam"] = Field(
        "sgd",
        description="The agent's optimiser, as in torch.optim: plain steps, momentum, or Adam, on noisy gradients. It "
        "costs no ε, and its state is fresh in each participation.",
    )
    local_options: LocalOptions = Field(LocalOptions(), description="Of the agent's optimiser.")
    schedule: Literal["constant", "sqrt", "linear", "cosine"] = Field(
        "constant",
        description="How the step sizes of agents and server fall over the rounds after `warmup`: not at all, by "
        "1/√round (the paper), or to 0 in a line or half a cosine.",
    )
    warmup: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0, description="Rounds in which the step sizes rise in a line."
    )
    server: Literal["adam", "average", "momentum"] | None = Field(
        None, description="How the server moves the model by the mean update; default: depends on the algorithm."
    )
    server_lr: StepSize = Field(
        1.0,
        description=f"The step size of the server. {_CHOSEN}, the model can move as far as its noise lets it, where "
        "`server` is unset or `average`; `server`, `ema`, `local_lr` and `privacy.clip_value` follow with it.",
    )
    server_options: ServerOptions = Field(ServerOptions(), description="Of the server's step.")
    ema: Share = Field(
        0.0,
        description="Weight of the past in an average of the models of all rounds; 0 is none. Evaluated and saved in "
        "place of the last model. Unset, see `server_lr`.",
    )
    coding: Literal["f32", "int"] | None = Field(
        None,
        description="Values on the wire: `f32`, or `int`, whose step hides in the noise. Unset, `int` where "
        "there is noise and `f32` where not.",
    )


class Privacy(Section):
    """What is promised to each record, or to each person (`data.person`), and the noise that keeps it."""

    epsilon: Annotated[float, Field(ge=1e-6, le=1e6)] | None = Field(
        None,
        description="ε for each record or person over the whole run; the noise follows. This or `noise_multiplier`.",
    )
    noise_multiplier: Annotated[float, Field(ge=LEAST_NOISE, le=MOST_NOISE)] | None = Field(
        None, description="σ in units of √p·G/B (`coordinate`) or C/B (`l2`); ε follows."
    )
    delta: Annotated[float, Field(ge=1e-30, lt=1)] = Field(
        1e-3,
        description="δ, below 1 over the records of an agent; where persons are protected, below 1 over all persons.",
    )
    neighbours: Neighbours | None = Field(
        None,
        description="Which data are neighbours: with a record or without it (`add-remove`, for `poisson`), or with "
        "another in its place (`replace-one`). Unset, what fits `sampling`.",
    )
    sampling: Sampling = Field(
        "poisson",
        description="How a batch is drawn in each step: each record independently, with probability `batch` over "
        "records (`poisson`), or `batch` records (`fixed`).",
    )
    clip: Clipping = Field(
        "l2",
        description="`l2` scales an example's gradient to the norm `clip_value`; `coordinate` (the paper) cuts each "
        "coordinate to ± it.",
    )
    clip_value: Annotated[float, Field(ge=SMALLEST_CLIP, le=LARGEST_CLIP)] = Field(
        1.0,
        description="C for `l2`, c for `coordinate`. Unset, see `algorithm.server_lr`.",
    )
    noise: NoiseMode = Field(
        "secure",
        description="`secure` (keyed by the operating system), `exact` (integers, with a proof), `seeded` (from "
        "run.seed: for simulations that are to be repeated to the bit; nothing that comes of it is private).",
    )
    adversary: Adversary = Field(
        "local",
        description="Against whom ε holds: everyone outside the agent (`local`), or a server that sees no more than "
        "sums over a round's agents, with up to `colluders` of them (`secure-aggregation`, which is run). The agents "
        "then share the noise, and a worst-case ε is stated beside ε: what an agent's own share is worth.",
    )
    colluders: Annotated[int, Field(ge=0, le=10**7)] = Field(
        0,
        description="For `secure-aggregation`: how many of a round's agents may be with the server. ε counts the noise "
        "of the others.",
    )
    members: Annotated[int, Field(ge=2, le=10**7)] | None = Field(
        None,
        description="For `secure-aggregation`: the fewest agents that are ever added up. ε counts the noise of so "
        "many, less `colluders`. Unset, `federation.per_round`.",
    )
    recovery: bool = Field(
        False,
        description="For `secure-aggregation`: whether a round goes on without agents that fall silent, down to "
        "`members` of them. More than half of `per_round` plus `colluders` must then be `members`.",
    )


class Run(Section):
    """Where and how it runs."""

    seed: Annotated[int, Field(ge=0, lt=2**64)] = Field(
        0, description="Seed of all randomness except secure noise and sampling."
    )
    device: Annotated[str, Field(min_length=1, max_length=100)] = Field(
        "cpu", description="torch's name of a device: `cpu`, `cuda`."
    )
    engine: EngineName = Field("auto", description="What runs the local steps; `auto` takes the fastest that can.")
    tf32: bool = Field(False, description="TF32 on GPUs, for the traced engine.")
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] = Field(
        2,
        description="Threads of the native and the traced engine: one per agent. They change the time, and not one bit "
        "of the result.",
    )
    workers: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1,
        description="Processes that train a round's agents, each with `threads` cores and, on `cuda`, a GPU of its "
        "own; 1 is this process. They change the time, and not one bit of the result. More need the extra "
        "`ray`, and run on this machine, or on the Ray cluster that the environment variable RAY_ADDRESS names.",
    )
    out: Name | None = Field(None, description="The run's folder; a new one under runs/ if unset.")
    code: Name | None = Field(
        None,
        description="The folder in which `package.module:function` is looked for, before the current one; if unset, "
        "that of the config's file.",
    )
    ledger: Name | None = Field(
        None,
        description="The ledger that the run shares with others, so that runs on the same records add up. Unset, the "
        "`ledger.sqlite` beside the run's folder, which all runs there share; seeded noise and public data (`digits`, "
        "`mnist`, `fashion-mnist`, `cifar10`) spend nobody's budget, and such a run has a ledger of its own, in its "
        "folder. A simulation on Flower shares one only where it is named.",
    )
    policy: Name | None = Field(None, description="A policy (TOML) that every agent enforces.")
    chosen: Annotated[list[Name], Field(max_length=100)] = Field(
        [], description="Keys that were left out and follow from public numbers; the run writes them."
    )
    checkpoint_every: Times = Field(1, description="Rounds between two checkpoints; the last two are kept.")

    @field_validator("code", "ledger", "policy")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        """Make paths absolute: resumed from another folder, a relative one would name another ledger."""
        return None if path is None else str(Path(path).absolute())


MOST_CANDIDATES = 64

ScoredBy = Literal["server", "agents"]


class Tuning(Section):
    """Trials within the run: its first rounds try settings, and the best continue. `fedspa tune` fills it in."""

    candidates: Annotated[list[dict[str, Setting]], Field(min_length=1, max_length=MOST_CANDIDATES)] | None = Field(
        None,
        description='Settings to try, as in `[{ "algorithm.server_lr" = 30.0 }, { "algorithm.server_lr" = 90.0 }]`: '
        "keys that leave the cost of a participation as it is. Unset, the run has no trials.",
    )
    rounds: Times | None = Field(
        None,
        description="The most of `federation.rounds` that are for trials; unset, the fewest that halving the "
        "candidates takes.",
    )
    scored_by: ScoredBy | None = Field(
        None,
        description="Who scores trials: the `server`, by `data.holdout`, or the `agents`, each by a noisy count over "
        "its own records, in rounds of their own that cost what a round of training does. Unset, the server where it "
        "holds records out.",
    )
    expected_gains: list[list[Bounded]] | None = Field(
        None,
        description="How much each candidate's score is expected to gain from each of its rounds to the end, so that a "
        "slow start does not count against it. `fedspa tune` fills it in from its proxy runs.",
    )
