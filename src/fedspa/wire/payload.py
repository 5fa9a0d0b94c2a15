"""Payload v1: one update on the wire. docs/wire.md gives the format to the bit.

    offset  bytes  field
         0      4  magic "FSPA"
         4      1  version, 1
         5      1  coding: 0 f32, 1 f16, 2 int, 3 whole (an algorithm's own codec)
         6      1  scale of the table (int, whole), else 0
         7      1  flags, 0
         8      4  round
        12      4  d
        16      4  k
        20     16  mask seed
        36      4  clip value, float32; 0 where the agent has none of its own
        40      4  float32: step (int) or divisor (f16), else 0
        44      4  CRC-32 of everything else: against accidents, not against malice
        48      …  body

Numbers are little-endian. No agent, no count and nothing un-noised travels: the body is a function of the noisy values
and of public numbers, so it costs no privacy (post-processing).
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import PayloadError
from fedspa.randomness.mask import DIMENSION_LIMIT
from fedspa.randomness.philox import SEED_BYTES
from fedspa.wire import coding as codings

Coding = Literal["f32", "f16", "int"]
CODINGS: tuple[Coding, ...] = get_args(Coding)
# As the header numbers them. The last is no choice of a config: an algorithm whose
# answers are whole numbers has a codec of its own.
HeaderCoding = Literal["f32", "f16", "int", "whole"]
HEADER_CODINGS: tuple[HeaderCoding, ...] = get_args(HeaderCoding)

MAGIC = b"FSPA"
VERSION = 1
# Everything before the checksum; the checksum; then the body.
FIELDS = struct.Struct("<4s4B3I16s2f")
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = FIELDS.size + CHECKSUM.size
ROUND_LIMIT = 2**31
FLOAT32_MAX = codings.FLOAT32_MAX
# In units of the noise of a value. docs/wire.md has the table that chose it.
DEFAULT_STEP = 0.75
LARGEST_STEP = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What an agent releases in a round: k noisy values, in ascending order of the coordinates its seed picks."""

    round: int
    dimension: int
    mask_seed: bytes
    values: NDArray[np.float32]
    clip_value: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.round < ROUND_LIMIT:
            raise PayloadError("round", f"round is {self.round}; it must lie between 0 and 2^31 − 1")
        if not 1 <= self.dimension < DIMENSION_LIMIT:
            raise PayloadError("dimension", f"d is {self.dimension}; it must lie between 1 and 2^31 − 1")
        if self.values.ndim != 1 or self.values.dtype != np.float32:
            raise PayloadError(
                "active", f"values are {self.values.dtype} in {self.values.ndim} axes; float32 in 1 needed"
            )
        if not 1 <= len(self.values) <= self.dimension:
            raise PayloadError("active", f"k is {len(self.values)}; it must lie between 1 and d = {self.dimension}")
        if len(self.mask_seed) != SEED_BYTES:
            raise PayloadError("seed", f"mask seed has {len(self.mask_seed)} bytes; it must have {SEED_BYTES}")
        if not 0 <= self.clip_value <= FLOAT32_MAX:
            raise PayloadError("clip", f"clip value is {self.clip_value}; it must be a float32 and not negative")

    @property
    def active(self) -> int:
        """k."""
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the server knows of an update before it comes, from the plan and the round's terms.

    `bound` is the largest plausible |value|. `noise_std` is the noise of one value; where it is not 0, a step above it
    is refused. `seed` is the mask seed the server set (masks `shared` and `fixed`, or one dealt to each agent); `seen`
    holds the seeds already accepted, for agents that draw their own: the caller adds to it.
    """

    round: int
    dimension: int
    active: int
    bound: float
    noise_std: float = 0.0
    codings: frozenset[HeaderCoding] = frozenset(CODINGS)
    seed: bytes | None = None
    seen: Container[bytes] = field(default=frozenset())


def encode(update: Update, coding: Coding, noise_std: float = 0.0, step: float = DEFAULT_STEP) -> bytes:
    """An update as bytes. `noise_std` is the noise of one value and `step` a fraction of it; only `int` uses them.

    No value is refused: an agent that fell silent over one would tell of it. One that is too large becomes the largest
    that its coding has, and NaN becomes 0.
    """
    scale, parameter = 0, 0.0
    if coding == "f32":
        body = codings.encode_f32(update.values)
    elif coding == "f16":
        parameter, body = codings.encode_f16(update.values)
    elif coding == "int":
        parameter = step_size(noise_std, step)
        scale, body = codings.encode_int(update.values, parameter, update.mask_seed, update.round)
    else:
        raise PayloadError("coding", f"coding is {coding!r}; allowed: {', '.join(CODINGS)}")
    header = Header(
        coding, scale, update.round, update.dimension, update.active, update.mask_seed, update.clip_value, parameter
    )
    return sealed(header, body)


def decode(data: bytes, expect: Expected) -> Update:
    """The update in `data`, or a PayloadError that names what is wrong. Any bytes may be handed in.

    Sizes are compared with the expected k before anything is allocated or summed.
    """
    header, body = opened(data, expect, codings.body_limits)
    coding, parameter = header.coding, header.parameter
    _check_parameter(coding, header.scale, parameter, expect.noise_std)
    if coding == "f32":
        values = codings.decode_f32(body)
    elif coding == "f16":
        values = codings.decode_f16(body, parameter)
    else:
        values = codings.decode_int(body, parameter, header.scale, header.seed, header.round, header.active)
    largest = float(np.max(np.abs(values)))
    if not math.isfinite(largest):
        raise PayloadError("not-finite", "a value is NaN or infinite")
    if largest > expect.bound:
        raise PayloadError("bound", f"a value is {largest:.3g} from 0; the plausible bound is {expect.bound:.3g}")
    return Update(header.round, header.dimension, header.seed, values, header.clip_value)


class Header(NamedTuple):
    """What a payload says before its body."""

    coding: HeaderCoding
    scale: int
    round: int
    dimension: int
    active: int
    seed: bytes
    clip_value: float
    parameter: float


def sealed(header: Header, body: bytes) -> bytes:
    """Header, checksum and body as bytes."""
    fields = FIELDS.pack(MAGIC, VERSION, HEADER_CODINGS.index(header.coding), header.scale, 0, *header[2:])
    return b"".join((fields, CHECKSUM.pack(zlib.crc32(body, zlib.crc32(fields))), body))


def opened(data: bytes, expect: Expected, limits: Callable[[str, int], tuple[int, int]]) -> tuple[Header, bytes]:
    """Header and body of `data`, after a check against `expected` and of the body's length by `limits(coding, k)`."""
    if len(data) < HEADER_BYTES:
        raise PayloadError("length", f"{len(data)} bytes; a payload has at least {HEADER_BYTES}")
    magic, version, kind, scale, flags, *rest = FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise PayloadError("magic", "these bytes do not begin like a payload")
    if version != VERSION:
        raise PayloadError("version", f"payload version is {version}; this server reads {VERSION}")
    coding = HEADER_CODINGS[kind] if kind < len(HEADER_CODINGS) else None
    if coding is None or coding not in expect.codings:
        raise PayloadError("coding", f"coding is {coding or kind}; allowed here: {', '.join(sorted(expect.codings))}")
    header = Header(coding, scale, *rest)
    if flags != 0:
        raise PayloadError("flags", f"flags are {flags}; version {VERSION} has none")
    for code, got, wanted in (
        ("round", header.round, expect.round),
        ("dimension", header.dimension, expect.dimension),
        ("active", header.active, expect.active),
    ):
        if got != wanted:
            raise PayloadError(code, f"{code} is {got}; {wanted} was expected")
    fewest, most = limits(coding, header.active)
    if not fewest <= len(data) - HEADER_BYTES <= most:
        raise PayloadError(
            "length", f"the body has {len(data) - HEADER_BYTES} bytes; {coding} needs between {fewest} and {most}"
        )
    _check_seed(header.seed, expect)
    body = data[HEADER_BYTES:]
    if CHECKSUM.unpack_from(data, FIELDS.size)[0] != zlib.crc32(body, zlib.crc32(data[: FIELDS.size])):
        raise PayloadError("checksum", "the checksum does not fit; the bytes were damaged on the way")
    if not 0 <= header.clip_value < math.inf:
        raise PayloadError("clip", f"clip value is {header.clip_value}; it must be finite and not negative")
    return header, body


def _check_seed(seed: bytes, expect: Expected) -> None:
    if expect.seed is not None and seed != expect.seed:
        raise PayloadError("seed", "the mask seed is not the one this round was given")
    if seed in expect.seen:
        raise PayloadError("replay", "an update with this mask seed was accepted before")


def _check_parameter(coding: HeaderCoding, scale: int, parameter: float, noise_std: float) -> None:
    if coding != "int" and scale != 0:
        raise PayloadError("scale", f"table scale is {scale}; coding {coding} has none and writes 0")
    if coding == "f32":
        if parameter != 0:
            raise PayloadError("step", "coding f32 has no parameter and writes 0")
    elif not 0 < parameter < math.inf:
        raise PayloadError("step", f"step is {parameter}; it must be positive and finite")
    # The step travels as float32: half a unit in its last place is allowed for.
    if coding == "int" and 0 < noise_std * LARGEST_STEP * (1 + 2**-23) < parameter:
        raise PayloadError(
            "step", f"step is {parameter:.3g}; at most the noise of a value, {noise_std:.3g}, is allowed"
        )


def step_size(noise_std: float, step: float = DEFAULT_STEP) -> float:
    """The step of coding `int` as it will be read, rounded to float32; a PayloadError where there is none."""
    if not 0 < step <= LARGEST_STEP:
        raise PayloadError("step", f"step is {step} of the noise; it must lie above 0 and not above {LARGEST_STEP}")
    if not 0 < noise_std < math.inf:
        raise PayloadError(
            "coding", f"noise of a value is {noise_std}; coding int needs it positive and finite; use f32"
        )
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(noise_std * step))
    if not np.finfo(np.float32).tiny <= rounded < math.inf:
        raise PayloadError("step", f"step {noise_std * step} does not fit float32; use f32")
    return rounded
