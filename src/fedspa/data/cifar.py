"""CIFAR-10's python batches, read without running what they say.

The batches are pickles, and a pickle is a program that may call any importable function. Here Python's own unpickler
carries it out with most of its instructions taken away and nothing to import: the names by which numpy describes an
array stand for two classes of this file, which keep what they are told, and every other name is refused. Work and
memory are bounded by the file: the number of instructions is limited, a string cannot claim more than is there, a call
takes at most three arguments, and only strings are keys.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import DataError

# A real batch has 31 MB and, with its file names, some 50,000 instructions.
_MAX_BYTES = 1 << 26
_MAX_INSTRUCTIONS = 500_000
_PIXELS = 3 * 32 * 32


class _Refused(Exception):
    """What a pickle asked for is not among the things a CIFAR batch needs."""


class _Dtype:
    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment, which single bytes do not have."""


class _Array:
    values: NDArray[np.uint8] | None = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple() as shape, _Dtype(code="u1" | b"u1"), fortran, bytes() as raw):
                if len(shape) > 4 or not all(type(side) is int and 0 <= side < 1 << 31 for side in shape):
                    raise _Refused("an array has an impossible shape")
                if np.prod(shape, dtype=object) != len(raw):
                    raise _Refused(f"an array of shape {shape} has {len(raw)} bytes")
                self.values = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
            case _:
                raise _Refused("it sets the state of what is not an array of bytes")


_NAMES = {
    "numpy.core.multiarray _reconstruct": _Array,
    "numpy._core.multiarray _reconstruct": _Array,
    "numpy ndarray": _Array,
    "numpy dtype": _Dtype,
}
_INSTRUCTIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINSTRING", "SHORT_BINSTRING"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
)
_CODES = {op.name: ord(op.code) for op in pickletools.opcodes}


class _Steps(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> None:
        name = next((name for name, known in _CODES.items() if known == code), hex(code))
        raise _Refused(f"the pickle instruction {name} is not allowed")


class _Unpickler(pickle._Unpickler):  # the one in Python: the one in C has no table of instructions
    left = _MAX_INSTRUCTIONS

    def find_class(self, module: str, name: str) -> type:
        if (found := _NAMES.get(f"{module} {name}")) is None:
            raise _Refused(f"it asks for {f'{module} {name}'[:80]!r}, and only numpy arrays of bytes are allowed")
        return found


def _checked(name: str) -> Callable[[Any], None]:
    """An instruction of Python's unpickler, after a look at what it is about to do."""
    carry_out: Callable[[Any], None] = pickle._Unpickler.dispatch[_CODES[name]]

    def step(machine: Any) -> None:
        machine.left -= 1
        if machine.left < 0:
            raise _Refused(f"more than {_MAX_INSTRUCTIONS} instructions")
        stack = machine.stack
        if name == "REDUCE" and not (isinstance(stack[-1], tuple) and len(stack[-1]) <= 3):
            raise _Refused("it calls something")
        # Hashing a nest of shared tuples could take forever.
        keys = stack[-2:-1] if name == "SETITEM" else stack[::2] if name == "SETITEMS" else ()
        if not all(isinstance(key, str | bytes) for key in keys):
            raise _Refused("a dict is filled with what is not keys and values")
        carry_out(machine)

    return step


_Unpickler.dispatch = _Steps({_CODES[name]: _checked(name) for name in _INSTRUCTIONS})


def read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (records, 3, 32, 32) and labels of one batch file; anything else is a DataError."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise DataError(f"{path} has {size} bytes, more than the {_MAX_BYTES} that a CIFAR-10 batch can have")
        with path.open("rb") as file:
            raw = file.read(size)
    except OSError as cause:
        raise DataError(f"{path} cannot be read ({cause})") from cause
    try:
        batch = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except _Refused as cause:
        raise DataError(f"{path} is not a CIFAR-10 batch: {cause}") from cause
    except Exception as cause:  # whatever an instruction says of what it finds
        raise DataError(f"{path} is not a CIFAR-10 batch: damaged pickle ({str(cause)[:80]!r})") from cause
    if not isinstance(batch, dict):
        raise DataError(f"{path} is not a CIFAR-10 batch: it holds a {type(batch).__name__}, not a dict")
    named = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    return _images(named, path), _labels(named, path)


def _images(batch: dict[str, Any], path: Path) -> NDArray[np.uint8]:
    data = batch.get("data")
    values = data.values if isinstance(data, _Array) else None
    if values is None or values.ndim != 2 or values.shape[1] != _PIXELS:
        raise DataError(f"{path} has no array 'data' of bytes with {_PIXELS} columns")
    return values.reshape(-1, 3, 32, 32)


def _labels(batch: dict[str, Any], path: Path) -> NDArray[np.int64]:
    labels = batch.get("labels")
    # bool is an int to Python; a label is not a truth value.
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 1 << 31 for label in labels):
        raise DataError(f"{path} has no list 'labels' of integers")
    return np.array(labels, dtype=np.int64)
