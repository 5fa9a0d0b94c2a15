"""The native engine's streams, compiled by themselves for one instruction set level."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from fedspa.engine.native import library

CSRC = Path(library.__file__).with_name("csrc")
COMPILER = shutil.which("cc")
_CPU = Path("/proc/cpuinfo")
_TARGETS = {"avx2": ("avx2", "fma"), "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma")}


@cache
def probe(level: library.Level) -> ctypes.CDLL:
    """Return the functions of streams_probe.c; skip the test where they cannot be compiled or run."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    target = _TARGETS.get(level, ())
    if platform.machine() == "x86_64" and not set(target) <= set(_CPU.read_text("ascii").split()):
        pytest.skip("this CPU has no such level")
    with tempfile.TemporaryDirectory() as folder:
        made, source = Path(folder) / "probe.so", Path(__file__).with_name("streams_probe.c")
        options = [
            "-std=gnu11",
            "-O2",
            "-Wno-psabi",
            "-fPIC",
            "-shared",
            f"-I{CSRC}",
            f"-DLEVEL={library.number(level)}",
        ]
        flags = [f"-DLEVEL={library.number(level)}", *(f"-m{each}" for each in target)]
        subprocess.run([COMPILER, *options, *flags, source, CSRC / "stream.c", "-lm", "-o", made], check=True)
        loaded = ctypes.CDLL(str(made))
    loaded.probe_words.argtypes = [ctypes.c_char_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    loaded.probe_gaussian.argtypes = [ctypes.c_char_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    loaded.probe_draw.argtypes = [ctypes.c_char_p, *[ctypes.c_int64] * 5, *[ctypes.c_void_p] * 3]
    loaded.probe_draw.restype = ctypes.c_int64
    loaded.probe_pairs.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    loaded.probe_pairs.restype = ctypes.c_int64
    return loaded
