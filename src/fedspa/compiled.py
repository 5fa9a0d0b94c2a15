"""The compiled library, where the install has or could build it: the native engine, masks, decoding, sums of updates.

Every caller has a way without it, which gives the same bits.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ABI = 15
# Under this name on every platform and for every Python (setup.py).
FILE = Path(__file__).parent / "engine" / "native" / "_native.so"


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None where it was not built (no compiler at install time) or is of another version."""
    try:
        loaded = ctypes.CDLL(str(FILE))  # calls release the interpreter's lock
    except OSError:
        return None
    loaded.fedspa_abi.restype = c_int64
    if loaded.fedspa_abi() != ABI:
        return None
    loaded.fedspa_words.restype = None
    loaded.fedspa_words.argtypes = [c_void_p, c_uint64, c_int64, c_void_p]
    loaded.fedspa_mask.restype = c_int64
    loaded.fedspa_mask.argtypes = [c_void_p, c_int64, c_int64, c_void_p]
    loaded.fedspa_add_units.restype = None
    loaded.fedspa_add_units.argtypes = [c_void_p, c_void_p, c_int64, c_double, c_void_p]
    loaded.fedspa_unpack.restype = c_int64
    loaded.fedspa_unpack.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]
    return loaded


def address(array: np.ndarray[Any, Any]) -> int:
    """Return where the library finds an array's values, which lie one after the other. The caller keeps the array."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of strides {array.strides} is not contiguous")
    return array.ctypes.data
