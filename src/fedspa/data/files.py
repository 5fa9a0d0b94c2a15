"""Readers of MNIST's idx files, CIFAR-10's python batches and a user's .npz.

Nothing in a file is executed: a pickle may name numpy's arrays and nothing else, and an .npz holds no pickle.
"""

from __future__ import annotations

import gzip
import math
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import DataError, first_line

NPZ_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_UNSIGNED_BYTE = 0x08
_PIXELS = 3 * 32 * 32
_PICKLED_ARRAYS = {
    *(("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")),
    *(("numpy", "ndarray"), ("numpy", "dtype")),
}


def read_idx(path: Path, record: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an idx file of bytes, gzipped or not, as an array of shape (records, *record).

    Format (LeCun, Cortes and Burges): two zero bytes, a type code, the number of dimensions, each dimension as a
    big-endian 32-bit count, then the values in C order.
    """
    dimensions = 1 + len(record)
    start = 4 + 4 * dimensions
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except Exception as cause:  # gzip and zlib raise several kinds
        raise DataError(f"{path} cannot be read ({first_line(cause)}): fetch it again") from cause
    if content[:4] != bytes([0, 0, _UNSIGNED_BYTE, dimensions]) or len(content) < start:
        raise DataError(f"{path} is not an idx file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if shape[1:] != record:
        raise DataError(f"{path} holds records of shape {shape[1:]}, where {record} is expected")
    if math.prod(shape) != len(content) - start:
        raise DataError(f"{path} says {math.prod(shape)} values and has {len(content) - start}: fetch it again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLED_ARRAYS:
            raise DataError(f"it asks for {f'{module}.{name}'[:80]!r}, and only numpy arrays are allowed")
        return super().find_class(module, name)


def read_cifar_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read images (records, 3, 32, 32) and labels of one batch file."""
    try:
        with path.open("rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()
        images, labels = (batch[key] if key in batch else batch[key.encode()] for key in ("data", "labels"))
        data, numbers = np.asarray(images), np.asarray(labels)
    except Exception as cause:  # a damaged pickle raises anything
        raise DataError(f"{path} is not a CIFAR-10 batch: {first_line(cause)}") from cause
    if data.dtype != np.uint8 or data.shape[1:] != (_PIXELS,) or numbers.dtype.kind != "i":
        raise DataError(f"{path} is not a CIFAR-10 batch: 'data' must be bytes in {_PIXELS} columns, 'labels' integers")
    if numbers.shape != data.shape[:1]:
        raise DataError(f"{path} is not a CIFAR-10 batch: {len(data)} images and labels of shape {numbers.shape}")
    return data.reshape(-1, 3, 32, 32), numbers.astype(np.int64)


def read_npz(path: Path, wanted: tuple[str, ...] = NPZ_ARRAYS) -> dict[str, NDArray[Any]]:
    """Read the arrays of an .npz by name."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in wanted if name not in archive.files]
            if missing:
                raise DataError(f"{path} lacks {', '.join(missing)}: an .npz needs the arrays {', '.join(wanted)}")
            return {name: archive[name] for name in wanted}
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"data = '{path}': there is no such file") from None
    except Exception as cause:  # zipfile and numpy raise a dozen kinds
        raise DataError(f"{path} is damaged, or not an .npz of plain arrays ({first_line(cause)})") from cause
