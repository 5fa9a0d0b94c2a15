"""The configuration of a run: TOML in, checked values out, every error one line that names its key.

`Config()` is not runnable by itself only in that a private algorithm needs exactly one of `privacy.epsilon` and
`privacy.noise_multiplier`; everything else has a default.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedspa.errors import ConfigError
from fedspa.privacy.plan import LARGEST_CLIP, SMALLEST_CLIP

AlgorithmName = Literal["fedspa", "fedavg", "dp-fed", "cpsgd"]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Strict: unknown keys, NaN, ∞ and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class Federation(Section):
    """Who takes part. `cap` is the most rounds an agent may take part in; the noise is calibrated to it."""

    agents: Count = 10
    rounds: Count = 30
    per_round: Count = 5
    participation: Literal["balanced", "uniform"] = "balanced"
    cap: Count | None = None


class Data(Section):
    """Which records, as which features, and how they are dealt out to agents.

    `holdout` is the share of the training records that no agent gets and accuracy is measured on, in place of the test
    records: for choosing settings.
    """

    name: str = "digits"
    dir: str = "data"
    features: Literal["aligned", "orientations", "aligned-orientations"] | None = None
    holdout: Share = 0.0
    partition: Literal["iid", "dirichlet", "shards"] = "iid"
    alpha: Positive = 0.5


class Model(Section):
    """`init`: the first values are PyTorch's own (`default`) or public filters (`oriented`, federation/initial.py)."""

    name: str = "logistic"
    init: Literal["default", "oriented"] = "default"


class Algorithm(Section):
    """`server` defaults to the algorithm's own step, `coding` to `int` where there is noise and `f32` where not.

    cpsgd alone has `bits` (b: gradients on 2^b levels) and `rotation` (by random signs and Hadamard's matrix). Its
    `compression` below 1 fixes the trials of its noise by p = log2(m + 2^b)/32.

    `layer_shares` draws a `fixed` mask layer by layer, in place of `compression`: the share of the coordinates of each
    parameter tensor, in the model's order, that is ever trained; p is what they add up to.
    """

    name: AlgorithmName = "fedspa"
    compression: Annotated[float, Field(gt=0, le=1)] = 1.0
    mask: Literal["per-agent", "shared", "fixed"] = "per-agent"
    layer_shares: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    local_steps: Count = 20
    batch: Count = 10
    local_lr: Positive = 0.1
    server: Literal["adam", "average", "momentum"] | None = None
    server_lr: Positive = 1.0
    beta1: Share = 0.9
    beta2: Share = 0.99
    kappa: Positive = 1e-3
    ema: Share = 0.0
    lr_decay: Literal["none", "sqrt"] = "none"
    coding: Literal["f32", "f16", "int"] | None = None
    bits: Annotated[int, Field(ge=1, le=16)] = 4
    rotation: bool = False


class Privacy(Section):
    """`neighbours` defaults to `add-remove` for Poisson sampling and `replace-one` for fixed-size sampling.

    `noise_multiplier` is σ in units of √p·G/B (coordinate) or C/B (l2). `clip_rule`: `given` clips at `clip_value`;
    `quantile` starts there and follows a private quantile; `median` reads it off the data and is not private.
    cpsgd alone has `trials` (m: each value carries Binomial(m, 1/2) noise) and `adversary`: what is promised holds
    against the server (`local`), or only against one that sees nothing but the sum over all agents.
    """

    epsilon: Positive | None = None
    noise_multiplier: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    neighbours: Literal["add-remove", "replace-one"] | None = None
    sampling: Literal["poisson", "fixed"] = "poisson"
    accountant: Literal["pld", "rdp", "theorem-1"] = "pld"
    clip: Literal["coordinate", "l2"] = "l2"
    clip_value: Annotated[float, Field(ge=SMALLEST_CLIP, le=LARGEST_CLIP)] = 1.0
    clip_rule: Literal["given", "quantile", "median"] = "given"
    noise: Literal["secure", "exact", "seeded"] = "secure"
    trials: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    adversary: Literal["local", "secure-aggregation"] = "local"


class Run(Section):
    """`out` defaults to a new folder under runs/, `ledger` to a new one in that folder. `policy` limits every agent.

    A checkpoint is saved every `checkpoint_every` rounds and the last `keep` stay: two, so that one may be damaged.
    """

    seed: Annotated[int, Field(ge=0)] = 0
    device: str = "cpu"
    engine: Literal["auto", "native", "stacked", "generic", "reference"] = "auto"
    tf32: bool = False
    threads: Count = 2
    out: str | None = None
    ledger: str | None = None
    policy: str | None = None
    checkpoint_every: Count = 1
    keep: Count = 2
    track: Literal["tensorboard", "mlflow"] | None = None

    @field_validator("ledger", "policy")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        """In the run's own files too: resumed from another folder, the same words would name another ledger."""
        return None if path is None else str(Path(path).absolute())


class Config(Section):
    """A whole run."""

    federation: Federation = Federation()
    data: Data = Data()
    model: Model = Model()
    algorithm: Algorithm = Algorithm()
    privacy: Privacy = Privacy()
    run: Run = Run()

    @property
    def private(self) -> bool:
        """Whether the algorithm has an ε at all."""
        return self.algorithm.name != "fedavg"

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        federation, algorithm, privacy = self.federation, self.algorithm, self.privacy
        if federation.per_round > federation.agents:
            raise ValueError(
                f"federation.per_round is {federation.per_round}; it must not exceed federation.agents = "
                f"{federation.agents}"
            )
        if algorithm.name == "cpsgd":
            _check_cpsgd(self)
            return self
        if privacy.trials is not None or privacy.adversary != "local":
            raise ValueError(f"privacy.trials and privacy.adversary belong to cpsgd; {algorithm.name} takes neither")
        if algorithm.name != "fedspa" and algorithm.compression != 1:
            raise ValueError(
                f"algorithm.compression is {algorithm.compression}; {algorithm.name} uploads every coordinate: only 1.0"
            )
        if algorithm.layer_shares is not None and (
            algorithm.name != "fedspa" or algorithm.mask != "fixed" or algorithm.compression != 1
        ):
            raise ValueError(
                "algorithm.layer_shares is for fedspa with algorithm.mask 'fixed', and sets the compression itself: "
                "leave algorithm.compression out"
            )
        if not self.private:
            if algorithm.coding == "int":
                raise ValueError(
                    "algorithm.coding is 'int', whose step is a share of the noise; fedavg has none: f32, f16"
                )
            for key, path in (("ledger", self.run.ledger), ("policy", self.run.policy)):
                if path is not None:
                    raise ValueError(
                        f"run.{key} is {path!r}; fedavg releases what no ledger can count and no policy allows: leave "
                        f"it out (--set run.{key}=none)"
                    )
            return self
        if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
            both = "neither" if privacy.epsilon is None else "both"
            raise ValueError(f"privacy.epsilon and privacy.noise_multiplier: {both} given; exactly one must be")
        if privacy.sampling == "fixed" and privacy.neighbours == "add-remove":
            raise ValueError(
                "privacy.neighbours is 'add-remove'; privacy.sampling 'fixed' has a sound accountant under "
                "'replace-one' only"
            )
        if privacy.sampling == "poisson" and privacy.neighbours == "replace-one" and privacy.accountant == "rdp":
            raise ValueError(
                "privacy.accountant is 'rdp'; Poisson sampling under 'replace-one' has a sound accountant in 'pld' only"
            )
        if privacy.accountant == "theorem-1" and privacy.sampling != "fixed":
            raise ValueError("privacy.accountant is 'theorem-1', which assumes privacy.sampling 'fixed'")
        return self


def _check_cpsgd(config: Config) -> None:
    """cpSGD is one step a round, of every agent, on batches of a fixed size."""
    federation, algorithm, privacy = config.federation, config.algorithm, config.privacy
    only: tuple[tuple[str, object, object, str], ...] = (
        ("federation.per_round", federation.per_round, federation.agents, "all agents take part in every round"),
        ("algorithm.local_steps", algorithm.local_steps, 1, "one step a round"),
        ("algorithm.coding", algorithm.coding or "int", "int", "whole numbers travel"),
        ("privacy.sampling", privacy.sampling, "fixed", "batches of exactly B records"),
        ("privacy.neighbours", privacy.neighbours or "replace-one", "replace-one", "batches are of a fixed size"),
        ("privacy.clip_rule", privacy.clip_rule, "given", "the levels lie within the clip value"),
        ("privacy.noise_multiplier", privacy.noise_multiplier, None, "its noise is Binomial: give privacy.trials"),
        ("privacy.accountant", privacy.accountant, "pld", "it has an accounting of its own"),
    )
    for key, value, allowed, why in only:
        if value != allowed:
            shown = "unset" if allowed is None else repr(allowed)
            raise ValueError(f"{key} is {value!r}; for cpsgd it must be {shown}: {why}")
    if privacy.clip == "l2" and not algorithm.rotation:
        raise ValueError(
            "privacy.clip is 'l2'; cpsgd without algorithm.rotation needs 'coordinate': its levels span one coordinate"
        )
    given = [
        key
        for key, there in (
            ("privacy.epsilon", privacy.epsilon is not None),
            ("privacy.trials", privacy.trials is not None),
            ("algorithm.compression (below 1)", algorithm.compression < 1),
        )
        if there
    ]
    if len(given) != 1:
        raise ValueError(
            f"cpsgd takes exactly one of privacy.epsilon, privacy.trials and algorithm.compression (below 1); given: "
            f"{', '.join(given) or 'none'}"
        )


def load(source: Path | str | Mapping[str, Any] | None = None, overrides: Iterable[str] = ()) -> Config:
    """A checked config from a TOML file, a nested mapping, or None (the packaged quickstart); then `--set` overrides.

    An override reads `section.key=value`, with the value in TOML's notation or a bare word; `none` unsets a key.
    """
    if source is None:
        values = tomllib.loads(resources.files("fedspa.runs").joinpath("quickstart.toml").read_text("utf-8"))
    elif isinstance(source, Mapping):
        values = {key: dict(value) if isinstance(value, Mapping) else value for key, value in source.items()}
    else:
        values = _read(Path(source))
    for override in overrides:
        _apply(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None


def to_toml(config: Config) -> str:
    """The config with every default written out; keys that are unset are left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
        if not values:
            raise ConfigError(f"{path} is empty; a config needs at least a [privacy] section with an epsilon")
        return values
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give the path of a TOML config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f"--set {override}: it must read section.key=value, as in algorithm.compression=0.05")
    if not isinstance(values.setdefault(section, {}), dict):
        raise ConfigError(f"{section} must be a table of keys, not a single value")
    if text.strip() == "none":
        values[section].pop(name, None)
        return
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    values[section][name] = value


def _one_line(error: ValidationError) -> str:
    return "; ".join(_describe(item["type"], item["loc"], item["msg"], item.get("input")) for item in error.errors())


def _describe(kind: str, location: tuple[int | str, ...], message: str, given: Any) -> str:
    key = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        owner: Any = Config
        for part in location[:-1]:
            owner = owner.model_fields[part].annotation
        return f"unknown key {key}; allowed: {', '.join(sorted(owner.model_fields))}"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{key} is {given!r}; {message.replace('Input should be', 'it must be', 1)}"
