"""MNIST's idx files, gzipped or not, read without trust.

Format (LeCun, Cortes and Burges): two zero bytes, a type code, the number of dimensions, each dimension as a big-endian
32-bit count, then the values in C order. A file may be damaged or hostile, so the size that the header claims is
compared with what the file can hold before anything of that size is allocated, and no more than that is unpacked.
"""

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import DataError

_UNSIGNED_BYTE = 0x08
# Five times the largest of MNIST's files.
_MAX_BYTES = 1 << 28
# Deflate cannot shrink by more than this factor: a pair of bits stands for at most 258 bytes.
_MAX_DEFLATE_RATIO = 1032


def read(path: Path, record: tuple[int, ...]) -> NDArray[np.uint8]:
    """The values of an idx file of bytes, shape (records, *record); anything else is a DataError."""
    try:
        size = path.stat().st_size
        if path.suffix == ".gz":
            with gzip.open(path) as unpacked:
                return _values(unpacked, path, record, size * _MAX_DEFLATE_RATIO)
        with path.open("rb") as plain:
            return _values(plain, path, record, size)
    except (OSError, EOFError, zlib.error) as cause:  # gzip.BadGzipFile is an OSError
        raise DataError(f"{path} is damaged or unreadable ({cause}): fetch it again") from cause


def _values(file: io.BufferedIOBase, path: Path, record: tuple[int, ...], can_hold: int) -> NDArray[np.uint8]:
    dimensions = 1 + len(record)
    header = file.read(4 + 4 * dimensions)
    if header[:4] != bytes([0, 0, _UNSIGNED_BYTE, dimensions]) or len(header) != 4 + 4 * dimensions:
        raise DataError(f"{path} is not an idx file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", header[4:])
    if shape[1:] != record:
        raise DataError(f"{path} holds records of shape {shape[1:]}, where {record} is expected")
    size = math.prod(shape)
    if size > min(can_hold, _MAX_BYTES):
        raise DataError(f"{path} claims {size} values, more than it can hold (at most {min(can_hold, _MAX_BYTES)})")
    values = np.empty(size, dtype=np.uint8)
    filled = 0
    while filled < size:
        got = file.readinto(values[filled:].data)
        if not got:
            raise DataError(f"{path} ends after {filled} of {size} values: fetch it again")
        filled += got
    if file.read(1):  # also makes gzip compare its checksum
        raise DataError(f"{path} goes on after its {size} values: fetch it again")
    return values.reshape(shape)
