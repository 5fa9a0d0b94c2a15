"""The session of a round under secure aggregation: what its members and its server must have been told alike.

The digest in it covers everything that makes an update what it is: the algorithm, the terms with the whole plan, the
coding, the noise, and θ to the bit. docs/secagg.md writes it out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedspa.algorithms.algorithm import Algorithm
from fedspa.algorithms.base import Terms
from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import STEPS
from fedspa.randomness.streams import NoiseMode
from fedspa.secagg.session import Session
from fedspa.wire.payload import Coding


def session_of(
    run: str,
    attempt: int,
    members: Mapping[str, bytes],
    algorithm: Algorithm,
    terms: Terms,
    theta: Tensor,
    coding: Coding,
    noise: NoiseMode | None,
) -> Session:
    """Where these members, by name and public key, add up; a PrivacyError where they are fewer than the plan's ε needs,
    or where the plan wants no sum."""
    aggregation = None if terms.plan is None else terms.plan.aggregation
    if aggregation is None:
        raise PrivacyError("the terms hold no plan of a sum: its updates are noisy enough by themselves")
    if len(members) < aggregation.members:
        raise PrivacyError(f"a cohort of {len(members)} members; the plan's ε holds from {aggregation.members} on")
    digest = hashlib.sha256(_told(algorithm, terms, theta, coding, noise)).digest()
    return Session(run, terms.round, attempt, members, digest, aggregation.low, aggregation.high, aggregation.count)


def _told(algorithm: Algorithm, terms: Terms, theta: Tensor, coding: Coding, noise: NoiseMode | None) -> bytes:
    """JSON with its keys in order and no blanks. Numbers that are not whole are written as hexadecimal floats."""
    assert algorithm.mechanism is not None
    values = np.ascontiguousarray(theta.detach().cpu().numpy(), dtype="<f4")
    told = {
        "adversary": algorithm.adversary,
        "algorithm": algorithm.name,
        "coding": coding,
        "layers": None if terms.layers is None else [list(layer) for layer in terms.layers],
        "local_lr": terms.local_lr,
        "mask": terms.mask,
        "mask_seed": None if terms.mask_seed is None else terms.mask_seed.hex(),
        "noise": noise,
        **({"options": dict(terms.options)} if terms.options else {}),
        "plan": {key: getattr(terms.steps, key) for key in (*STEPS, *algorithm.mechanism.record)},
        "round": terms.round,
        "theta": hashlib.sha256(values.tobytes()).hexdigest(),
    }
    return json.dumps(_written(told), sort_keys=True, separators=(",", ":")).encode("ascii")


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _written(part) for key, part in value.items()}
    return value.hex() if isinstance(value, float) else value
