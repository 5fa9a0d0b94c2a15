"""Coverage-guided fuzzing of `decode` with atheris: python tests/wire/fuzz_payload.py -max_total_time=600

Half of the inputs are taken as they come; the other half get the fields that a hostile agent can always get right
(magic, version, round, d, k, checksum), so that the search spends its time on the codings. Anything but an update that
keeps its promises or a PayloadError ends the run with the input on disk.
"""

from __future__ import annotations

import struct
import sys
import tempfile
import warnings
import zlib
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fedspa.wire", "fedspa.mechanism"]):
    from fedspa.errors import PayloadError
    from fedspa.wire import coding as codings
    from fedspa.wire.payload import CODINGS, Coding, Expected, Update, decode, encode

import numpy as np

ROUND, D, K = 3, 320, 32
EXPECTED = Expected(round=ROUND, dimension=D, active=K, bound=1e6)
PREFIX = struct.pack("<4sB", b"FSPA", 1)
PLACE = struct.pack("<3I", ROUND, D, K)


def helped(data: bytes) -> bytes:
    """The input with every field right that can be had without luck: 5: coding, 6: scale, 20: seed, 36: clip, step."""
    fields = PREFIX + bytes([data[5] % len(CODINGS)]) + data[6:7] + b"\0" + PLACE + data[20:44]
    return fields + struct.pack("<I", zlib.crc32(fields + data[48:])) + data[48:]


def one_input(data: bytes) -> None:
    """Decode; what comes back must be what was asked for, and of coding `int` have one spelling."""
    if len(data) > 48 and data[4] % 2:
        data = helped(data)
    try:
        update = decode(data, EXPECTED)
    except PayloadError as error:
        if error.code not in PayloadError.CODES:
            raise RuntimeError(f"unlisted code {error.code}") from error
        return
    if update.values.shape != (K,) or not np.all(np.abs(update.values) <= EXPECTED.bound):
        raise RuntimeError(f"decoded to {update}")
    if CODINGS[data[5]] == "int" and codings._pack(codings._unpack(data[48:], data[6], K), data[6]) != data[48:]:
        raise RuntimeError("one body was read that the encoder would not write")


def write_corpus(folder: Path) -> None:
    """A few honest payloads of each coding to start from, marked odd at byte 4 by their version."""
    rng = np.random.default_rng(0)
    for number, coding in enumerate(CODINGS * 3):
        kind: Coding = coding
        values = (rng.standard_t(2, K) * 10.0 ** (number % 3)).astype(np.float32)
        (folder / str(number)).write_bytes(encode(Update(ROUND, D, rng.bytes(16), values), kind, 1.0))


if __name__ == "__main__":
    warnings.simplefilter("error")
    # libFuzzer leaves without a goodbye, so nothing can be tidied up after it; what it found serves the next run.
    corpus = Path(tempfile.gettempdir()) / "fedspa-fuzz-payload"
    corpus.mkdir(exist_ok=True)
    write_corpus(corpus)
    limits = ["-max_len=512", "-timeout=10", "-rss_limit_mb=1024"]
    atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], str(corpus)], one_input)
    atheris.Fuzz()
