"""What the server announces to one agent for one round, as one flat Flower record, and its strict reading.

The agent does not trust the server. Every key must be there, no other may be, every value has exactly its type, and the
plan is derived again from what was read: a number that decides privacy is stated once, so it cannot contradict itself.
Every number lies within `LIMITS`, and terms under which no update could be written are refused here, before anything is
paid for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast, get_args

from flwr.app import ConfigRecord
from pydantic import ValidationError

from fedspa import registry
from fedspa.algorithms import Algorithm, Terms, chosen
from fedspa.algorithms.base import require_sendable
from fedspa.algorithms.scores import MOST_MODELS, score_terms
from fedspa.data.features import NAMES
from fedspa.errors import ConfigError, FedspaError, PayloadError, PrivacyError
from fedspa.flower.node_config import MOST_CLASSES
from fedspa.learning.flat import NUMBERS
from fedspa.mechanisms.base import (
    LARGEST_CLIP,
    SMALLEST_CLIP,
    STEPS,
    Adversary,
    Clipping,
    ClipRule,
    Mechanism,
    NoPlan,
    Plan,
)
from fedspa.privacy.event import Neighbours, Sampling, Unit
from fedspa.randomness.philox import SEED_BYTES
from fedspa.randomness.sparsify import MaskMode
from fedspa.randomness.streams import NoiseMode
from fedspa.runs import identity
from fedspa.runs.combinations import check_options
from fedspa.runs.sections import Task
from fedspa.secagg.session import DIGEST_BYTES, MOST_MEMBERS
from fedspa.wire.payload import Coding

VERSION: Final = 1  # one more with every change of the keys below, or of what one means
_LONGEST_EDITIONS = 200
_LONGEST_OPTIONS = 10_000
_LONGEST_TASK = 300_000  # its weights are as many as there are classes
_MODEL_SEED_BYTES = 8
_RUN = re.compile(r"[0-9a-f]{32}")
# Key → type. A private algorithm's record has its mechanism's `record` too, and the noise mode.
_KEYS: Final[dict[str, type]] = {
    "version": int,
    "editions": str,
    "run": str,
    "number": int,
    "round": int,
    "algorithm": str,
    "model": str,
    "model_seed": bytes,
    "constants": list,
    "task": str,
    "classes": int,
    "features": str,
    "dimension": int,
    "active": int,
    "mask": str,
    "mask_seed": bytes,
    "layer_sizes": list,
    "layer_active": list,
    "coding": str,
    "sampling": str,
    "batch": int,
    "local_steps": int,
    "local_lr": float,
    "options": str,
    "private": bool,
    "adversary": str,
    "attempt": int,
    "scored": int,
    "cohort": list,
    "binding": bytes,
}
# What an announcement says as it is.
_OWN: Final = ("run", "number", "algorithm", "model", "model_seed", "classes", "features", "coding", "mask_seed")
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "mask": get_args(MaskMode),
    "coding": get_args(Coding),
    "features": ("", *NAMES),
    "sampling": get_args(Sampling),
    "clip": get_args(Clipping),
    "clip_rule": get_args(ClipRule),
    "neighbours": get_args(Neighbours),
    "noise": get_args(NoiseMode),
    "unit": get_args(Unit),
    "adversary": get_args(Adversary),
}

_MANY: Final = 2**31 - 1

# How far the numbers may go: far beyond any use, and well within what float64, float32 and 32-bit integers can carry. A
# number past them is a slip, or asks for an overflow. Least and most, both allowed; a mechanism's own numbers have
# theirs in its room. What one number demands of another (k ≤ d, B ≤ m, δ < 1/m) is for the plan to say.
LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "number": (0, _MANY),
    "agents": (1, _MANY),
    "round": (0, _MANY),
    "participations": (1, 10**6),
    "classes": (0, MOST_CLASSES),
    "dimension": (1, _MANY),
    "active": (1, _MANY),
    "records": (1, _MANY),
    "batch": (1, _MANY),
    "local_steps": (1, 10**6),
    "local_lr": (1e-12, 1e6),
    "clip_value": (SMALLEST_CLIP, LARGEST_CLIP),
    "noise_multiplier": (1e-6, 1e6),
    "delta": (1e-30, 1.0),
    "attempt": (1, _MANY),
    "scored": (0, MOST_MODELS),
    "members": (0, MOST_MEMBERS),
    "colluders": (0, MOST_MEMBERS),
}
# As many parameter tensors as a model may have where a mask is drawn layer by layer.
MOST_LAYERS: Final = 10_000


class TermsError(FedspaError):
    """A record that claims to be a round's terms is not one."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """`terms` for all, and what is this agent's alone: its mask seed, and its number in the federation.

    `run` is drawn by the server at random once per run. `number` is only used in simulations, where it says which agent
    is played; a deployed agent has a name of its own. `task` is the run's section [task], in the record as JSON;
    `classes` is how many outputs it wants of an example, 0 where that is the model's affair. `features` is the run's
    data.features, "" for none. `noise` is None where nothing is private. `model_seed` is what the server drew the
    model's first values with, and `constants` sketches those that never change (learning/constants.py).

    Under secure aggregation, `cohort` names everybody in the sum of this `attempt` at the round, the agent itself
    among them, and `binding` is that of the session in which the server adds up; empty where no update is asked for.

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
        "editions": identity.written_editions(),
        **{key: getattr(announcement, key) for key in _OWN},
        "task": announcement.task.model_dump_json(),
        "options": json.dumps(dict(terms.options), sort_keys=True),
        "private": plan is not None,
        "adversary": announcement.adversary,
        "attempt": announcement.attempt,
        "scored": announcement.scored,
        "cohort": list(announcement.cohort),
        "binding": announcement.binding,
        "constants": list(announcement.constants),
        "layer_sizes": [size for size, _ in terms.layers or ()],
        "layer_active": [active for _, active in terms.layers or ()],
        **{key: getattr(terms, key) for key in ("round", "mask", "local_lr")},
        **{key: getattr(terms.steps, key) for key in STEPS},
    }
    mechanism = chosen(announcement.algorithm, announcement.adversary).mechanism
    if plan is not None and mechanism is not None:
        values |= {key: getattr(plan, key) for key in mechanism.record}
        values["noise"] = announcement.noise
    return ConfigRecord(values)


def from_record(record: ConfigRecord) -> Announcement:
    """The announcement in `record`, or a TermsError. Any record may be handed in."""
    values: dict[str, Any] = dict(record)
    if values.get("version") != VERSION:
        raise TermsError(
            f"terms of version {values.get('version')!r}; this agent reads {VERSION}: upgrade one end until "
            "`fedspa site check` and `fedspa server run` print the same"
        )
    algorithm = _algorithm(values.get("algorithm"), values.get("adversary"))
    private, mechanism = values.get("private"), algorithm.mechanism
    expected = {**_KEYS, **(mechanism.record if mechanism is not None else {}), "noise": str} if private else _KEYS
    if values.keys() != expected.keys():
        strange = sorted(map(str, values.keys() ^ expected.keys()))
        raise TermsError(f"terms with missing or unknown keys: {', '.join(strange)[:200]}")
    limits = LIMITS if mechanism is None else {**LIMITS, **mechanism.limits}
    for key, kind in expected.items():
        _check(key, values[key], kind, limits)
    if other := identity.edition_differences(values["editions"][:_LONGEST_EDITIONS]):
        raise TermsError(
            f"the server's fedspa would misunderstand this one: {', '.join(other)}; upgrade one end until `fedspa site "
            "check` and `fedspa server run` print the same editions (versions of the package may differ)"
        )
    if not _RUN.fullmatch(values["run"]) or len(values["mask_seed"]) != SEED_BYTES:
        raise TermsError("the run must be 32 hexadecimal digits, and the mask seed 16 bytes")
    if len(values["model_seed"]) != _MODEL_SEED_BYTES:
        raise TermsError(f"the model's seed must be {_MODEL_SEED_BYTES} bytes")
    if len(values["constants"]) not in (0, NUMBERS) or not all(type(each) is float for each in values["constants"]):
        raise TermsError(f"a sketch of constants is {NUMBERS} numbers, or none")
    if values["active"] > values["dimension"] or len(values["model"]) > 200:
        raise TermsError("k must not exceed d, and the model's name must be short")
    if len(values["task"]) > _LONGEST_TASK:
        raise TermsError(f"a task of {len(values['task'])} letters; at most {_LONGEST_TASK} are read")
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
    )
    terms = replace(terms, options=_options(values["options"], algorithm, terms.plan))
    try:
        answered = score_terms(terms, values["scored"]) if values["scored"] else terms
        require_sendable(answered, values["coding"], exact=values.get("noise") == "exact")
    except (PayloadError, PrivacyError) as error:
        raise TermsError(f"terms under which no update can be written: {error}") from error
    own = {key: values[key] for key in (*_OWN, "attempt", "scored", "binding")}
    found = Announcement(
        **own,
        constants=tuple(values["constants"]),
        cohort=tuple(values["cohort"]),
        task=_task(values["task"]),
        noise=values.get("noise"),
        terms=terms,
    )
    _refuse_odd_cohort(found, values["adversary"])
    return found


def _algorithm(name: object, adversary: object) -> Algorithm:
    """Return the algorithm that was announced: the server's word imports nothing but what is installed here."""
    if adversary not in get_args(Adversary):
        raise TermsError(f"adversary is {str(adversary)[:50]!r}; allowed: {', '.join(get_args(Adversary))}")
    try:
        if not isinstance(name, str) or registry.known(name) is None:
            names = ", ".join(registry.offered())
            raise TermsError(f"algorithm is {str(name)[:200]!r}, which nothing installed here offers; known: {names}")
        return chosen(name, str(adversary))
    except ConfigError as error:
        raise TermsError(str(error)) from error


def _refuse_odd_cohort(found: Announcement, adversary: str) -> None:
    """Raise where a cohort stands beside a plan that wants none, or what is said of one is no cohort."""
    if found.adversary != adversary:
        raise TermsError(f"adversary is {adversary!r}; the plan of the same terms is for {found.adversary!r}")
    if adversary == "local" and (found.cohort or found.binding or found.attempt != 1):
        raise TermsError("a cohort, a binding or another attempt than the first, where nothing is added up")
    if len(found.cohort) > MOST_MEMBERS or not all(type(name) is str and len(name) <= 64 for name in found.cohort):
        raise TermsError(f"a cohort is a list of at most {MOST_MEMBERS} names of at most 64 letters")
    if len(found.binding) not in (0, DIGEST_BYTES):
        raise TermsError(f"a session's binding has {DIGEST_BYTES} bytes; this has {len(found.binding)}")


def _task(text: str) -> Task:
    try:
        return Task.model_validate_json(text)
    except ValidationError:
        raise TermsError("the task is none that this fedspa knows") from None


def _options(text: str, algorithm: Algorithm, plan: Plan | None) -> dict[str, Any]:
    """Return the algorithm's options, as its own model checks them. What the plan states is stated once."""
    try:
        found = json.loads(text[:_LONGEST_OPTIONS])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise TermsError(f"the options must be a JSON object of at most {_LONGEST_OPTIONS} letters")
    if twice := [key for key in found if hasattr(plan, key)]:
        raise TermsError(f"the plan states {', '.join(twice)}; the options must not")
    try:
        check_options(dict(found), algorithm)
    except ValueError as error:
        raise TermsError(str(error)[:500]) from None
    return found


def _layers(values: dict[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """The layers of a mask that is drawn layer by layer; two empty lists where it is not."""
    sizes, active = values["layer_sizes"], values["layer_active"]
    if not sizes and not active:
        return None
    if not all(type(number) is int for number in (*sizes, *active)) or not len(sizes) == len(active) <= MOST_LAYERS:
        raise TermsError(
            f"layer sizes and active coordinates must be two lists of at most {MOST_LAYERS} whole numbers, equally long"
        )
    if not all(0 <= k <= d for d, k in zip(sizes, active)):
        raise TermsError("a layer has more active coordinates than coordinates, or fewer than none")
    if sum(sizes) != values["dimension"] or sum(active) != values["active"] or values["mask"] != "fixed":
        raise TermsError("the layers do not add up to d and k, or the mask is not 'fixed'")
    return tuple(zip(sizes, active))


def _check(key: str, value: Any, kind: type, limits: Mapping[str, tuple[float, float]]) -> None:
    if type(value) is not kind:
        raise TermsError(f"{key} is a {type(value).__name__}; it must be a {kind.__name__}")
    if kind in (int, float):
        least, most = (VERSION, VERSION) if key == "version" else limits[key]
        if not least <= cast(float, value) <= most:  # NaN is nowhere
            raise TermsError(f"{key} is {value}; it must lie between {least:g} and {most:g}")
    if isinstance(value, str) and key in _NAMES and value not in _NAMES[key]:
        raise TermsError(f"{key} is {value[:50]!r}; allowed: {', '.join(_NAMES[key])}")


def _plan(mechanism: Mechanism, values: dict[str, Any]) -> Plan:
    try:
        return mechanism.of_record(values)
    except PrivacyError as error:
        raise TermsError(f"terms that make no plan: {error}") from error
