"""Payload v1: one update on the wire. docs/wire.md gives the format to the bit.

    offset  bytes  field
         0      4  magic "FSPA"
         4      1  version, 1
         5      1  coding: 0 f32, 2 int, 3 whole (an algorithm's own codec)
         6      1  scale of the table (int, whole), else 0
         7      1  flags, 0
         8      4  round
        12      4  d
        16      4  k
        20     16  mask seed
        36      4  more flags, 0
        40      4  float32: step (int), else 0
        44      4  CRC-32 of everything else: against accidents, not against malice
        48      …  body

Numbers are little-endian. No agent, no count and nothing un-noised travels: the body is a function of the noisy values
and of public numbers, so it costs no privacy (post-processing).
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import PayloadError
from fedspa.randomness.mask import DIMENSION_LIMIT, SEED_BYTES
from fedspa.wire import coding as codings

# The frame of every message: a header of fixed fields, a CRC-32 and a body; and words of b bits in a body. The checksum
# covers header and body. It is against accidents, not against malice.
CHECKSUM = struct.Struct("<I")
Words = NDArray[np.unsignedinteger]


def frame(header: bytes, body: bytes) -> bytes:
    """Return header, checksum and body."""
    return b"".join((header, CHECKSUM.pack(zlib.crc32(body, zlib.crc32(header))), body))


def read_header(data: bytes, fields: struct.Struct, magic: bytes, version: int, name: str) -> tuple[Any, ...]:
    """Return the fields after magic and version, or raise a PayloadError where these bytes do not begin with them."""
    least = fields.size + CHECKSUM.size
    if len(data) < least:
        raise PayloadError("length", f"{len(data)} bytes; a {name} has at least {least}")
    found, number, *rest = fields.unpack_from(data)
    if found != magic:
        raise PayloadError("magic", f"these bytes do not begin like a {name}")
    if number != version:
        raise PayloadError("version", f"the version of this {name} is {number}; this server reads {version}")
    return tuple(rest)


def check_flags(flags: int, version: int) -> None:
    if flags != 0:
        raise PayloadError("flags", f"flags are {flags}; version {version} has none")


def check_equal(code: str, found: object, expected: object) -> None:
    if found != expected:
        raise PayloadError(code, f"{code} is {found}; {expected} was expected")


def read_body(data: bytes, fields: struct.Struct) -> bytes:
    """Return what follows the checksum, or raise a PayloadError where the bytes were damaged."""
    body = data[fields.size + CHECKSUM.size :]
    if CHECKSUM.unpack_from(data, fields.size)[0] != zlib.crc32(body, zlib.crc32(data[: fields.size])):
        raise PayloadError("checksum", "the checksum does not fit; the bytes were damaged on the way")
    return body


def word_type(bits: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest unsigned integer that holds a word, little-endian."""
    return np.dtype(f"<u{next(width for width in (1, 2, 4, 8) if bits <= 8 * width)}")


def reduced(words: Words, bits: int) -> Words:
    """Return `words` modulo 2^bits."""
    return words & words.dtype.type(2**bits - 1)


def packed(words: Words, bits: int) -> bytes:
    """Pack words of `bits` bits one after the other, the lowest bit first. Eight of them fill `bits` bytes."""
    eights = np.zeros((-(-len(words) // 8), 8), words.dtype)
    eights.reshape(-1)[: len(words)] = words
    out = np.zeros((len(eights), bits), np.uint8)
    for column, byte, shift in _overlaps(bits):
        part = eights[:, column] >> shift if shift >= 0 else eights[:, column] << -shift
        out[:, byte] |= part.astype(np.uint8)
    return out.tobytes()[: -(-len(words) * bits // 8)]


def unpacked(body: bytes, count: int, bits: int) -> Words:
    """Return the `count` words that `packed` made `body` of."""
    padded = np.zeros((-(-count // 8), bits), np.uint8)
    padded.reshape(-1)[: len(body)] = np.frombuffer(body, np.uint8)
    eights = np.zeros((len(padded), 8), word_type(bits))
    for column, byte, shift in _overlaps(bits):
        part = padded[:, byte].astype(eights.dtype)
        eights[:, column] |= part << shift if shift >= 0 else part >> -shift
    return reduced(eights.reshape(-1)[:count], bits)


def _overlaps(bits: int) -> list[tuple[int, int, int]]:
    """Return which of eight words has bits in which of `bits` bytes, and by how many bits the byte begins after the
    word."""
    return [
        (word, byte, 8 * byte - word * bits)
        for word in range(8)
        for byte in range(word * bits // 8, ((word + 1) * bits - 1) // 8 + 1)
    ]


Coding = Literal["f32", "int"]
CODINGS: tuple[Coding, ...] = get_args(Coding)
# As the header numbers them. A config cannot choose the last: it is for algorithms whose answers are integers.
HeaderCoding = Literal["f32", "int", "whole"]
HEADER_CODINGS: Mapping[int, HeaderCoding] = {0: "f32", 2: "int", 3: "whole"}
CODING_NUMBERS = {name: number for number, name in HEADER_CODINGS.items()}

MAGIC = b"FSPA"
VERSION = 1
FIELDS = struct.Struct("<4s4B3I16sIf")
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

    @property
    def active(self) -> int:
        """k."""
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the server knows of an update before it comes, from the plan and the round's terms.

    `bound` is the largest plausible |value|. `noise_std` is the noise of one value; where it is not 0, a step above it
    is refused. `seed` is the mask seed the server set (masks `shared` and `fixed`, or one assigned to each agent);
    `seen` holds the seeds already accepted, for agents that draw their own: the caller adds to it.
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
    """Return an update as bytes. `noise_std` is the noise of one value and `step` a fraction of it; only `int` uses
    them.

    No value is refused: an agent that did not answer would reveal it. One that is too large becomes the largest
    that its coding has, and NaN becomes 0.
    """
    scale, parameter = 0, 0.0
    if coding == "f32":
        body = codings.encode_f32(update.values)
    elif coding == "int":
        parameter = step_size(noise_std, step)
        scale, body = codings.encode_int(update.values, parameter, update.mask_seed, update.round)
    else:
        raise PayloadError("coding", f"coding is {coding!r}; allowed: {', '.join(CODINGS)}")
    header = Header(coding, scale, update.round, update.dimension, update.active, update.mask_seed, parameter)
    return sealed(header, body)


def decode(data: bytes, expect: Expected) -> Update:
    """Return the update in `data`, or a PayloadError that names what is wrong. Any bytes may be handed in.

    Sizes are compared with the expected k before anything is allocated or summed.
    """
    header, body = opened(data, expect, codings.body_limits)
    coding, parameter = header.coding, header.parameter
    _check_parameter(coding, header.scale, parameter, expect.noise_std)
    if coding == "f32":
        values = codings.decode_f32(body)
    else:
        values = codings.decode_int(body, parameter, header.scale, header.seed, header.round, header.active)
    largest = float(np.max(np.abs(values)))
    if not math.isfinite(largest):
        raise PayloadError("not-finite", "a value is NaN or infinite")
    if largest > expect.bound:
        raise PayloadError("bound", f"a value is {largest:.3g} from 0; the plausible bound is {expect.bound:.3g}")
    return Update(header.round, header.dimension, header.seed, values)


class Header(NamedTuple):
    """What a payload says before its body."""

    coding: HeaderCoding
    scale: int
    round: int
    dimension: int
    active: int
    seed: bytes
    parameter: float


def sealed(header: Header, body: bytes) -> bytes:
    """Return header, checksum and body as bytes."""
    coding, scale, *public, parameter = header
    fields = FIELDS.pack(MAGIC, VERSION, CODING_NUMBERS[coding], scale, 0, *public, 0, parameter)
    return frame(fields, body)


def opened(data: bytes, expect: Expected, limits: Callable[[str, int], tuple[int, int]]) -> tuple[Header, bytes]:
    """Return header and body of `data`, after a check against `expected` and of the body's length by `limits(coding,
    k)`."""
    found = read_header(data, FIELDS, MAGIC, VERSION, "payload")
    kind, scale, flags, number, dimension, active, seed, more, parameter = found
    coding = HEADER_CODINGS.get(kind)
    if coding is None or coding not in expect.codings:
        raise PayloadError("coding", f"coding is {coding or kind}; allowed here: {', '.join(sorted(expect.codings))}")
    header = Header(coding, scale, number, dimension, active, seed, parameter)
    check_flags(flags, VERSION)
    check_flags(more, VERSION)
    check_equal("round", header.round, expect.round)
    check_equal("dimension", header.dimension, expect.dimension)
    check_equal("active", header.active, expect.active)
    fewest, most = limits(coding, header.active)
    if not fewest <= len(data) - HEADER_BYTES <= most:
        raise PayloadError(
            "length", f"the body has {len(data) - HEADER_BYTES} bytes; {coding} needs between {fewest} and {most}"
        )
    if expect.seed is not None and header.seed != expect.seed:
        raise PayloadError("seed", "the mask seed is not the one this round was given")
    if header.seed in expect.seen:
        raise PayloadError("replay", "an update with this mask seed was accepted before")
    return header, read_body(data, FIELDS)


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
    """Return the step of coding `int` as it will be read, rounded to float32; a PayloadError where there is none."""
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
