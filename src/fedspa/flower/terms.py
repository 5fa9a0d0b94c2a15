"""What the server announces to one agent for one round, as one flat Flower record, and its strict reading.

The agent does not trust the server. Every key must be there, no other may be, every value has exactly its type, and the
plan is derived again from what was read: a number that decides privacy is stated once, so it cannot contradict itself.
Every number has bounds, and terms under which no update could be written are refused here, before anything is paid for
them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, cast, get_args

from flwr.app import ConfigRecord
from pydantic import BeforeValidator, Field, ValidationError, create_model

from fedspa import registry
from fedspa.algorithms import Algorithm, Terms, chosen
from fedspa.algorithms.base import MOST_MODELS, check_sendable, score_terms
from fedspa.data.features import Features
from fedspa.engine.optimizer import LocalOptimizer, OptimizerName
from fedspa.errors import ConfigError, FedspaError, PayloadError, PrivacyError, describe_detail
from fedspa.learning.flat import NUMBERS
from fedspa.learning.options import BALANCED
from fedspa.mechanisms.base import (
    LARGEST_CLIP,
    SMALLEST_CLIP,
    STEPS,
    Adversary,
    Mechanism,
    NoPlan,
    Plan,
)
from fedspa.privacy.event import Sampling
from fedspa.randomness.mask import SEED_BYTES, MaskMode
from fedspa.randomness.streams import NoiseMode
from fedspa.runs import checkpoint
from fedspa.runs.config import check_options, check_task_options
from fedspa.runs.sections import Section, Task
from fedspa.secagg.masking import SEALED_BYTES
from fedspa.secagg.recovery import TAG_BYTES, Step
from fedspa.secagg.session import DIGEST_BYTES, MOST_MEMBERS
from fedspa.wire.payload import Coding

VERSION: Final = 1  # one more with every change of the keys below, or of what one means
MOST_CLASSES: Final = 10**6
MOST_LAYERS: Final = 10_000  # parameter tensors of a model whose mask is drawn layer by layer
_MANY: Final = 2**31 - 1
_MODEL_SEED_BYTES: Final = 8


def _a_float(value: object) -> object:
    if type(value) is not float:  # pydantic's strict mode takes whole numbers, too
        raise ValueError("it must be a float")
    return value


Float = Annotated[float, BeforeValidator(_a_float)]
Count = Annotated[int, Field(ge=1, le=_MANY)]
Index = Annotated[int, Field(ge=0, le=_MANY)]


class Record(Section):
    """The keys of every record. A private algorithm's has its plan's too (`record_model`).

    Bounds of numbers are far beyond any use, and well within what float64, float32 and 32-bit integers can carry: a
    number past them is a mistake, or asks for an overflow. What one number demands of another (k ≤ d, B ≤ m, δ < 1/m)
    is for the plan to say.
    """

    version: int
    editions: Annotated[str, Field(max_length=200)]
    run: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    number: Index
    round: Index
    algorithm: str
    model: Annotated[str, Field(max_length=200)]
    model_seed: Annotated[bytes, Field(min_length=_MODEL_SEED_BYTES, max_length=_MODEL_SEED_BYTES)]
    constants: Annotated[list[Float], Field(max_length=NUMBERS)]
    task: Annotated[str, Field(max_length=300_000)]  # its weights are as many as there are classes
    classes: Annotated[int, Field(ge=0, le=MOST_CLASSES)]
    features: Features | Literal[""]
    dimension: Count
    active: Count
    mask: MaskMode
    mask_seed: Annotated[bytes, Field(min_length=SEED_BYTES, max_length=SEED_BYTES)]
    layer_sizes: Annotated[list[Index], Field(max_length=MOST_LAYERS)]
    layer_active: Annotated[list[Index], Field(max_length=MOST_LAYERS)]
    coding: Coding
    sampling: Sampling
    batch: Count
    local_steps: Annotated[int, Field(ge=1, le=10**6)]
    local_lr: Annotated[Float, Field(ge=1e-12, le=1e6)]
    local_optimizer: OptimizerName
    local_beta1: Annotated[Float, Field(ge=1e-9, le=0.999999)]
    local_beta2: Annotated[Float, Field(ge=0.5, le=0.999999)]
    local_kappa: Annotated[Float, Field(ge=1e-10, le=1e10)]
    options: Annotated[str, Field(max_length=10_000)]
    private: bool
    adversary: Adversary
    attempt: Count
    scored: Annotated[int, Field(ge=0, le=MOST_MODELS)]
    cohort: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=MOST_MEMBERS)]
    binding: Annotated[bytes, Field(max_length=DIGEST_BYTES)]
    recovery: bool


# Of the plans of all mechanisms; a mechanism's own numbers have bounds in its module.
PLAN_LIMITS: Final[dict[str, tuple[float, float]]] = {
    "agents": (1, _MANY),
    "participations": (1, 10**6),
    "records": (1, _MANY),
    "clip_value": (SMALLEST_CLIP, LARGEST_CLIP),
    "noise_multiplier": (1e-6, 1e6),
    "delta": (1e-30, 1.0),
    "members": (0, MOST_MEMBERS),
    "colluders": (0, MOST_MEMBERS),
}
_CONSTANTS: Final = ("beta1", "beta2", "kappa")  # of an agent's optimiser
# What an announcement says as it is.
_OWN: Final = ("run", "number", "algorithm", "model", "model_seed", "classes", "features", "coding", "mask_seed")


def record_model(mechanism: Mechanism | None) -> type[Record]:
    """Return the strict model of a record, with the keys of the mechanism's plan where there is one."""
    if mechanism is None:
        return Record
    return _with_plan(mechanism)


@lru_cache(maxsize=16)
def _with_plan(mechanism: Mechanism) -> type[Record]:
    fields: dict[str, Any] = {"noise": (NoiseMode, ...)}
    for key, (kind, limits) in mechanism.announced.items():
        if key in Record.model_fields:
            continue
        if kind in (int, float):  # a number without limits of its own: the plan checks it
            least, most = PLAN_LIMITS.get(key, (-_MANY, _MANY)) if limits is None else (limits.least, limits.most)
            fields[key] = (Annotated[Float if kind is float else int, Field(ge=kind(least), le=kind(most))], ...)
        else:
            fields[key] = (kind, ...)
    return create_model("PlanRecord", __base__=Record, **fields)


class TermsError(FedspaError):
    """A record that claims to be a round's terms is not one."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """`terms` for all, and what is this agent's alone: its mask seed, and its number in the federation.

    `run` is drawn by the server at random once per run. `number` is only used in simulations, where it says which agent
    is simulated; a deployed agent has a name of its own. `task` is the run's section [task], in the record as JSON;
    `classes` is how many outputs it wants of an example, 0 where that is the model's affair. `features` is the run's
    data.features, "" for none. `noise` is None where nothing is private. `model_seed` is what the server drew the
    model's first values with, and `constants` sketches those that never change (`flat.sketch`).

    Under secure aggregation, `cohort` names everybody in the sum of this `attempt` at the round, the agent itself
    among them, and `binding` is that of the session in which the server adds up; empty where no update is asked for.
    `recovery` says whether the sum can be recovered when members fall silent.

    Where `scored` is not 0, nobody trains: so many models are to be scored.
    """

    run: str
    number: int
    algorithm: str
    model: str
    task: Task
    classes: int
    features: str
    coding: Coding
    mask_seed: bytes
    noise: NoiseMode | None
    terms: Terms
    attempt: int = 1
    scored: int = 0
    cohort: tuple[str, ...] = ()
    binding: bytes = b""
    recovery: bool = False
    model_seed: bytes = bytes(8)
    constants: tuple[float, ...] = ()

    @property
    def adversary(self) -> Adversary:
        plan = self.terms.plan
        return "local" if plan is None or plan.aggregation is None else "secure-aggregation"


def to_record(announcement: Announcement) -> ConfigRecord:
    terms, plan = announcement.terms, announcement.terms.plan
    values: dict[str, Any] = {
        "version": VERSION,
        "editions": checkpoint.written_editions(),
        **{key: getattr(announcement, key) for key in _OWN},
        "task": announcement.task.model_dump_json(exclude={"metric"}),  # how the server judges is its own matter
        "options": json.dumps(dict(terms.options), sort_keys=True),
        "private": plan is not None,
        "adversary": announcement.adversary,
        "attempt": announcement.attempt,
        "scored": announcement.scored,
        "cohort": list(announcement.cohort),
        "binding": announcement.binding,
        "recovery": announcement.recovery,
        "constants": list(announcement.constants),
        "layer_sizes": [size for size, _ in terms.layers or ()],
        "layer_active": [active for _, active in terms.layers or ()],
        **{key: getattr(terms, key) for key in ("round", "mask", "local_lr")},
        "local_optimizer": terms.optimizer.name,
        **{f"local_{key}": getattr(terms.optimizer, key) for key in _CONSTANTS},
        **{key: getattr(terms.steps, key) for key in STEPS},
    }
    mechanism = chosen(announcement.algorithm, announcement.adversary).mechanism
    if plan is not None and mechanism is not None:
        values |= {key: getattr(plan, key) for key in mechanism.announced}
        values["noise"] = announcement.noise
    return ConfigRecord(values)


def from_record(record: ConfigRecord) -> Announcement:
    """Return the announcement in `record`, or a TermsError. Any record may be handed in."""
    values: dict[str, Any] = dict(record)
    if values.get("version") != VERSION:
        raise TermsError(
            f"terms of version {values.get('version')!r}; this agent reads {VERSION}: upgrade one end until "
            "`fedspa site check` and `fedspa server run` print the same"
        )
    algorithm = _algorithm(values.get("algorithm"), values.get("adversary"))
    private, mechanism = values.get("private"), algorithm.mechanism
    model = record_model(mechanism)
    try:
        model.model_validate(values)
    except ValidationError as error:
        raise TermsError(describe_detail(error.errors(include_url=False)[0], model)[:500]) from None
    if other := checkpoint.edition_differences(values["editions"]):
        raise TermsError(
            f"incompatible protocol versions: {', '.join(other)}; upgrade one end until `fedspa site check` and "
            "`fedspa server run` print the same editions (versions of the package may differ)"
        )
    if len(values["constants"]) not in (0, NUMBERS):
        raise TermsError(f"a sketch of constants is {NUMBERS} numbers, or none")
    if values["active"] > values["dimension"]:
        raise TermsError(f"active is {values['active']}; it must not exceed dimension = {values['dimension']}")
    if private is not algorithm.private:
        raise TermsError(f"algorithm {algorithm.name!r} with private = {private}")
    if algorithm.mask is not None and values["mask"] != algorithm.mask:
        raise TermsError(f"mask is {values['mask']!r}; for {algorithm.name} it must be {algorithm.mask!r}")
    terms = Terms(
        round=values["round"],
        mask=cast(MaskMode, values["mask"]),
        mask_seed=None if values["mask"] == "per-agent" else values["mask_seed"],
        local_lr=values["local_lr"],
        steps=NoPlan(**{key: values[key] for key in STEPS}) if mechanism is None else _plan(mechanism, values),
        layers=_layers(values),
        optimizer=LocalOptimizer(values["local_optimizer"], *(values[f"local_{key}"] for key in _CONSTANTS)),
    )
    if terms.optimizer.name != "sgd" and not algorithm.local_steps:
        raise TermsError(f"local_optimizer is {terms.optimizer.name!r}, and {algorithm.name} takes one plain step")
    terms = replace(terms, options=_options(values["options"], algorithm, terms.plan))
    try:
        answered = score_terms(terms, values["scored"]) if values["scored"] else terms
        check_sendable(answered, values["coding"], exact=values.get("noise") == "exact")
    except (PayloadError, PrivacyError) as error:
        raise TermsError(f"terms under which no update can be written: {error}") from error
    own = {key: values[key] for key in (*_OWN, "attempt", "scored", "binding", "recovery")}
    found = Announcement(
        **own,
        constants=tuple(values["constants"]),
        cohort=tuple(values["cohort"]),
        task=_task(values["task"]),
        noise=values.get("noise"),
        terms=terms,
    )
    _check_cohort(found, values["adversary"])
    return found


def _algorithm(name: object, adversary: object) -> Algorithm:
    """Return the algorithm that was announced: the server's word imports nothing but what is installed here."""
    if adversary not in get_args(Adversary):
        raise TermsError(f"adversary is {str(adversary)[:50]!r}; allowed: {', '.join(get_args(Adversary))}")
    try:
        if not isinstance(name, str) or registry.known(name) is None:
            names = ", ".join(registry.offered())
            raise TermsError(f"algorithm is {str(name)[:200]!r}, which is not installed here; available: {names}")
        return chosen(name, str(adversary))
    except ConfigError as error:
        raise TermsError(str(error)) from error


class ExchangeRecord(Section):
    """The keys of a question about a sum that is recovered (agent/participate.py). `session` is empty but in
    simulations, whose agents keep nothing."""

    run: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    number: Index
    binding: Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    step: Step
    body: Annotated[bytes, Field(max_length=MOST_MEMBERS * (1 + TAG_BYTES + SEALED_BYTES))]
    session: Annotated[str, Field(max_length=200 * MOST_MEMBERS)]


def exchange_of(record: ConfigRecord) -> ExchangeRecord:
    """Return the question in `record`, or a TermsError. Any record may be handed in."""
    try:
        return ExchangeRecord.model_validate(dict(record))
    except ValidationError as error:
        raise TermsError(describe_detail(error.errors(include_url=False)[0], ExchangeRecord)[:500]) from None


def _check_cohort(found: Announcement, adversary: str) -> None:
    """Raise where a cohort stands beside a plan that wants none, or what is said of one is no cohort."""
    if found.adversary != adversary:
        raise TermsError(f"adversary is {adversary!r}; the plan of the same terms is for {found.adversary!r}")
    if adversary == "local" and (found.cohort or found.binding or found.recovery or found.attempt != 1):
        raise TermsError("a cohort, a binding, recovery or another attempt than the first, where nothing is added up")
    if len(found.binding) not in (0, DIGEST_BYTES):
        raise TermsError(f"a session's binding has {DIGEST_BYTES} bytes; this has {len(found.binding)}")


def _task(text: str) -> Task:
    try:
        task = Task.model_validate_json(text)
        check_task_options(task)
        if task.options.get("weights") == BALANCED:  # the server's labels say what that is, so it sends numbers
            raise ValueError
        return task
    except ValueError:
        raise TermsError("the task is none that this fedspa knows") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _options(text: str, algorithm: Algorithm, plan: Plan | None) -> dict[str, Any]:
    """Return the algorithm's options, as its own model checks them. What the plan states is stated once."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise TermsError("the options must be a JSON object")
    if twice := [key for key in found if hasattr(plan, key)]:
        raise TermsError(f"the plan states {', '.join(twice)}; the options must not")
    try:
        check_options(found, algorithm)  # which fills in defaults
    except ValueError as error:
        raise TermsError(str(error)[:500]) from None
    return {key: value for key, value in found.items() if not hasattr(plan, key)}


def _layers(values: dict[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """Return the layers of a mask that is drawn layer by layer; two empty lists where it is not."""
    sizes, active = values["layer_sizes"], values["layer_active"]
    if not sizes and not active:
        return None
    if len(sizes) != len(active) or any(k > d for d, k in zip(sizes, active)):
        raise TermsError("layer sizes and active coordinates must be as many, and no layer may have more of the latter")
    if sum(sizes) != values["dimension"] or sum(active) != values["active"] or values["mask"] != "fixed":
        raise TermsError("the layers do not add up to d and k, or the mask is not 'fixed'")
    return tuple(zip(sizes, active))


def _plan(mechanism: Mechanism, values: dict[str, Any]) -> Plan:
    try:
        return mechanism.of_terms(values)
    except PrivacyError as error:
        raise TermsError(f"terms that make no plan: {error}") from error
