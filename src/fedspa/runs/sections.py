"""The sections of a config: every key with its type, its bounds, its default and its meaning.

What a key means stands here, in its description, and nowhere else: the reference is made from these. Every key has a
default, but a private algorithm needs exactly one of `privacy.epsilon` and `privacy.noise_multiplier`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from fedspa.data import columns as tables
from fedspa.data.columns import ColumnName, Columns, Schema, Word
from fedspa.data.participation import Rule
from fedspa.data.partition import ALPHA_RANGE, Scheme
from fedspa.engine import EngineName
from fedspa.learning.options import Error, Options
from fedspa.mechanisms.base import LARGEST_CLIP, SMALLEST_CLIP, Adversary, Clipping, ClipRule
from fedspa.mechanisms.gaussian.calibrate import LEAST_NOISE, MOST_NOISE
from fedspa.privacy.event import Neighbours, NoiseMode, Sampling
from fedspa.randomness.sparsify import MaskMode
from fedspa.registry import BUILT_IN
from fedspa.runs.section import Address, Many, Name, Section, Setting, Share, StepSize, Times

MOST_THREADS = 1024


class Federation(Section):
    """Who takes part, and how often."""

    agents: Many = Field(10, description="How many agents hold records (n).")
    rounds: Times = Field(30, description="How many rounds (T).")
    per_round: Many = Field(5, description="How many agents train in a round; at most `agents`.")
    participation: Rule = Field(
        "balanced",
        description="`balanced` deals agents out in shuffled turns, so that nobody takes part oftener than "
        "⌈rounds·per_round/agents⌉ times; `uniform` draws them afresh each round (the paper) and skips those at the "
        "cap.",
    )
    cap: Times | None = Field(
        None,
        description="The most rounds an agent may take part in; the noise is calibrated to it. Unset, it is what "
        "`participation` allows: ⌈rounds·per_round/agents⌉, or all rounds under `uniform`.",
    )


def _of_a_schema(key: str, default: Any = None) -> Any:
    """A key that means here what it means in a schema."""
    return Field(default, description=Schema.model_fields[key].description)


class Data(Section):
    """Which records, as which features, and how they are dealt out to agents."""

    name: Name = Field(
        "digits",
        description="`digits` (in scikit-learn), `mnist`, `cifar10`, a path to a table (`.csv`, `.parquet`) that "
        "`columns` describes, to an `.npz` with x_train, y_train, x_test and y_test, or `package.module:function`.",
    )
    dir: Name = Field("data", description="The folder of the files of `mnist`, `cifar10`, a table or an `.npz`.")
    columns: Columns | None = _of_a_schema("columns")
    agent: ColumnName | None = _of_a_schema("agent")
    split: ColumnName | None = _of_a_schema("split")
    test: Word = _of_a_schema("test", Schema.model_fields["test"].default)
    features: Literal["aligned", "orientations", "aligned-orientations", "patches"] | None = Field(
        None,
        description="Each image as features that no data was needed for: `aligned` (moved, sized and sheared to a "
        "standard by its own moments; one channel), `orientations` (histograms of gradient directions), or both, "
        "`aligned-orientations`, for handwriting; `patches` (which small patterns lie where) for colour photographs "
        "of 32 by 32.",
    )
    holdout: Share = Field(
        0.0,
        description="The share of the training records that no agent gets, and that accuracy is measured on in place "
        "of the test records: for choosing settings, or where a table marks none for testing.",
    )
    partition: Scheme = Field(
        "iid",
        description="How records are dealt out: `iid`, `dirichlet` (label skew, see `alpha`), `shards` (few labels per "
        "agent).",
    )
    person: Name | None = Field(
        None,
        description="What says whose a training record is: the column of a table, or the array of an `.npz`, one id "
        "per record. Each person is then protected, and not each record: gradient, clip, noise, sampling, m, δ and ε "
        "are per person. Data from Python brings its persons along.",
    )
    person_records: Annotated[int, Field(ge=1, le=100_000)] = Field(
        8,
        description="The most records of a person that count, a public number; which ones, is drawn at random. More "
        "make a person's gradient steadier and a step slower, at the same ε.",
    )
    alpha: Annotated[float, Field(ge=ALPHA_RANGE[0], le=ALPHA_RANGE[1])] = Field(
        0.5, description="Concentration of `dirichlet`: small is skewed, large is nearly iid."
    )

    @property
    def table(self) -> Schema | None:
        """What the columns of a table mean; None where the data is no table."""
        return (
            None if self.columns is None else tables.checked({key: getattr(self, key) for key in Schema.model_fields})
        )


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
    weights: Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(min_length=1, max_length=10_000)] | None = (
        Field(
            None,
            description="Public weights in the loss: of each class (`classification`), or of the ones of each label "
            "against its zeros (`binary`, `multi-label`), as in `[1.0, 9.0]`.",
        )
    )
    label_smoothing: Share = Field(0.0, description="For `classification`: this share of a label goes to all classes.")
    loss: Error = Field("mse", description="For `regression`: squared, absolute or Huber's error.")
    huber: StepSize = Field(1.0, description="For the loss `huber`: squared up to this error, and absolute beyond.")
    ignore_index: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(
        -100, description="For `next-token` and `token-classification`: the label of tokens that do not count."
    )

    @property
    def options(self) -> Options:
        return Options(
            None if self.weights is None else tuple(self.weights),
            self.label_smoothing,
            self.loss,
            self.huber,
            self.ignore_index,
        )


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
    compression: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="p = k/d, the share of coordinates that an agent trains and uploads in a round.",
    )
    mask: MaskMode = Field(
        "per-agent",
        description="Who shares a mask: nobody (`per-agent`, the paper), a round's agents (`shared`), or everyone for "
        "the whole run (`fixed`).",
    )
    layer_shares: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(max_length=10_000)] | None = Field(
        None,
        description="With mask `fixed` and in place of `compression`: the share of each parameter tensor, in the "
        "model's order, that is ever trained, as in `[0, 1, 0.1, 1]`. p is what they add up to.",
    )
    local_steps: Times = Field(20, description="τ, noisy gradient steps that an agent takes in a round.")
    batch: Many = Field(
        10, description="B, the expected batch of a step. The sampling rate is B over the fewest records of an agent."
    )
    local_lr: StepSize = Field(0.1, description="The step size of an agent.")
    server: Literal["adam", "average", "momentum"] | None = Field(
        None, description="How the server moves the model by the mean update; unset, the algorithm's own way."
    )
    server_lr: StepSize = Field(1.0, description="The step size of the server.")
    beta1: Share = Field(0.9, description="The server's first moment, for `adam` and `momentum`.")
    beta2: Share = Field(0.99, description="The server's second moment, for `adam`.")
    kappa: StepSize = Field(1e-3, description="Added to the root of the second moment, for `adam`.")
    ema: Share = Field(
        0.0,
        description="Weight of the past in an average of the models of all rounds; 0 is none. Evaluated and saved in "
        "place of the last model.",
    )
    lr_decay: Literal["none", "sqrt"] = Field(
        "none", description="`sqrt` divides the step sizes of agents and server by √round (the paper)."
    )
    coding: Literal["f32", "f16", "int"] | None = Field(
        None,
        description="Values on the wire: `f32`, `f16`, or `int`, whose step hides in the noise. Unset, `int` where "
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
        description="How a batch is drawn, afresh each step: each record by its own coin, or a fixed number.",
    )
    clip: Clipping = Field(
        "l2",
        description="`l2` scales an example's gradient to the norm `clip_value`; `coordinate` (the paper) cuts each "
        "coordinate to ± it.",
    )
    clip_value: Annotated[float, Field(ge=SMALLEST_CLIP, le=LARGEST_CLIP)] = Field(
        1.0, description="C for `l2`, c for `coordinate`; the start, under `quantile`."
    )
    clip_rule: ClipRule = Field(
        "given",
        description="`given`, or `quantile`, which follows a private quantile of the gradients' norms.",
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
        "then share the noise, and a floor is stated beside ε: what an agent's own share is worth.",
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


class Run(Section):
    """Where and how it runs."""

    seed: Annotated[int, Field(ge=0, lt=2**64)] = Field(
        0, description="Of everything that is drawn but secure noise and sampling."
    )
    device: Annotated[str, Field(min_length=1, max_length=100)] = Field(
        "cpu", description="torch's name of a device: `cpu`, `cuda`."
    )
    engine: EngineName = Field("auto", description="What runs the local steps; `auto` takes the fastest that can.")
    tf32: bool = Field(False, description="TF32 on GPUs, for the stacked and the traced engine.")
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] = Field(
        2,
        description="Threads of the native and the traced engine: one per agent. They change the time, and not one bit "
        "of the result.",
    )
    workers: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1,
        description="Processes that train a round's agents, each with `threads` cores and, on `cuda`, a GPU of its "
        "own; 1 is this process. They change the time, and not one bit of the result. More need the extra `ray`.",
    )
    cluster: Address | None = Field(
        None,
        description="The Ray cluster that `workers` run on: `auto`, the one that this machine belongs to, or its "
        "`host:port`. Unset, they run on this machine.",
    )
    out: Name | None = Field(None, description="The run's folder; a new one under runs/ if unset.")
    code: Name | None = Field(
        None,
        description="The folder in which `package.module:function` is looked for, before the current one; if unset, "
        "that of the config's file.",
    )
    ledger: Name | None = Field(
        None,
        description="A ledger to go on with, so that runs on the same records add up; a new one in the run's folder if "
        "unset.",
    )
    policy: Name | None = Field(None, description="A policy (TOML) that every agent enforces.")
    checkpoint_every: Times = Field(1, description="Rounds between two checkpoints.")
    keep: Times = Field(2, description="Checkpoints that are kept: two, so that one may be damaged.")
    track: Literal["tensorboard", "mlflow"] | None = Field(
        None,
        description="Also log every round for TensorBoard, or to MLflow (where MLFLOW_TRACKING_URI says, or into the "
        "run's folder); an extra of the same name.",
    )

    @field_validator("code", "ledger", "policy")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        """In the run's own files too: resumed from another folder, the same words would name another ledger."""
        return None if path is None else str(Path(path).absolute())
