"""The compiled library's engine: its types, its functions, and why it is missing where it is."""

from __future__ import annotations

import ctypes
import platform
import shutil
import sysconfig
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from typing import Literal, get_args

from fedspa import compiled
from fedspa.engine import Unsupported

Level = Literal["plain", "avx2", "avx512", "neon"]  # as fedspa_native.h numbers them
_NUMBERED: tuple[Level, ...] = get_args(Level)
# Those that a CPU of this kind may have, the best last.
LEVELS: tuple[Level, ...] = (
    ("plain", "neon") if platform.machine() in ("aarch64", "arm64") else ("plain", "avx2", "avx512")
)

# The enumerations of fedspa_native.h.
CONV, LINEAR, MAXPOOL, RELU, TANH, FLATTEN = range(6)
OK, STOPPED, MEMORY, LABEL, MASK, ORDER, RECORD, COUNT = range(8)
SAMPLINGS = {"poisson": 0, "fixed": 1}
CLIPPINGS = {None: 0, "coordinate": 1, "l2": 2}


class Layer(Structure):
    """`struct fedspa_layer`."""

    _fields_ = [
        (name, c_int64)
        for name in (
            *("kind", "outputs", "kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w"),
            *("weight_offset", "bias_offset"),
        )
    ]


class Task(Structure):
    """`struct fedspa_task`."""

    _fields_ = [
        ("x", c_void_p),
        ("y", c_void_p),
        ("numbers", c_void_p),
        ("records", c_int64),
        ("held", c_int64),
        ("counts", c_void_p),
        ("slots", c_int64),
        ("coordinates", c_void_p),
        ("active", c_int64),
        ("steps", c_int64),
        ("batch", c_int64),
        ("sampling", c_int64),
        ("clip", c_int64),
        ("rate", c_double),
        ("step_size", c_double),
        ("clip_value", c_double),
        ("noise_per_clip", c_double),
        ("clip_margin", c_double),
        ("sampling_key", c_uint8 * 32),
        ("noise_key", c_uint8 * 32),
    ]


class Agent(Structure):
    """`struct fedspa_agent`."""

    _fields_ = [
        ("net", c_void_p),
        ("task", Task),
        ("delta", c_void_p),
        ("zeroed", c_int64),
        ("code", c_int64),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """Return the library with the engine's functions declared, or None where there is none."""
    loaded = compiled.library()
    return None if loaded is None else declare(loaded)


def compiler() -> tuple[str, str | None]:
    """The C compiler that an install here would ask for, and where it is, if it is."""
    name = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return name, shutil.which(name)


def missing() -> Unsupported | None:
    """None where there is a library, else why there is none."""
    if library() is not None:
        return None
    built = compiled.FILE.exists()
    why = "its compiled part was built for another version or machine" if built else "its compiled part was not built"
    name, found = compiler()
    # pip keeps what it built: without the last option it would take the same files again.
    again = "install fedspa again from where it came, with pip's --force-reinstall --no-deps --no-cache-dir"
    return Unsupported(why, again if found else f"install a C compiler ({name}), then {again}")


def best_level() -> Level:
    """The best instruction set that this CPU and the library share."""
    loaded = library()
    return "plain" if loaded is None else _NUMBERED[loaded.fedspa_best_level()]


def number(level: Level) -> int:
    """As the library's functions take it; one above what the CPU has counts as its best."""
    return _NUMBERED.index(level)


def declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.fedspa_best_level.restype = c_int64
    loaded.fedspa_net_new.restype = c_void_p
    loaded.fedspa_net_new.argtypes = [POINTER(Layer), c_int64, POINTER(c_int64), c_int64]
    loaded.fedspa_net_free.restype = None
    loaded.fedspa_net_free.argtypes = [c_void_p]
    loaded.fedspa_classes.restype = c_int64
    loaded.fedspa_classes.argtypes = [c_void_p]
    loaded.fedspa_train.restype = None
    loaded.fedspa_train.argtypes = [POINTER(Agent), c_int64, c_int64, c_void_p, c_int64, POINTER(c_int32)]
    loaded.fedspa_sum.restype = c_int64
    loaded.fedspa_sum.argtypes = [c_void_p, c_int64, c_void_p, POINTER(Task), c_void_p, POINTER(c_int64)]
    loaded.fedspa_logits.restype = c_int64
    loaded.fedspa_logits.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p]
    return loaded
