"""CIFAR-10's python batches, read without running what they say.

The batches are pickles, and a pickle is a program that may call any importable function. Here nothing is ever imported
or called: ``pickletools`` lists the instructions, and a small stack machine carries out those that make bytes, strings,
integers, lists, tuples and dicts. Of the globals it knows the three by which numpy describes an array, and reads that
description itself. All else is refused. Work and memory are bounded by the file: a string cannot claim more than is
there, the number of instructions is limited, and none makes more objects than instructions went before it.
"""

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import DataError

# A real batch has 31 MB and, with its file names, some 50,000 instructions.
_MAX_BYTES = 1 << 26
_MAX_INSTRUCTIONS = 500_000
_PIXELS = 3 * 32 * 32

_ARRAY_GLOBALS = {
    "numpy.core.multiarray _reconstruct": "reconstruct",
    "numpy._core.multiarray _reconstruct": "reconstruct",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
}


class _Refused(Exception):
    """What a pickle asked for is not among the things a CIFAR batch needs."""


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass
class _Dtype:
    code: str


@dataclass
class _Array:
    values: NDArray[np.uint8] | None = None


@dataclass
class _Machine:
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise _Refused("an instruction finds nothing to work on")
        return self.stack.pop()

    def top(self) -> Any:
        self.stack.append(self.pop())
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            raise _Refused("an instruction finds no mark")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


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
        batch = _load(raw)
    except _Refused as cause:
        raise DataError(f"{path} is not a CIFAR-10 batch: {cause}") from cause
    return _images(batch, path), _labels(batch, path)


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


def _load(raw: bytes) -> dict[str, Any]:
    machine = _Machine()
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(io.BytesIO(raw))):
            if count >= _MAX_INSTRUCTIONS:
                raise _Refused(f"more than {_MAX_INSTRUCTIONS} instructions")
            carry_out = _INSTRUCTIONS.get(instruction.name)
            if carry_out is None:
                raise _Refused(f"the pickle instruction {instruction.name} is not allowed")
            carry_out(machine, argument)
    except ValueError as cause:  # what pickletools says of bytes that are no pickle
        raise _Refused(f"damaged pickle ({str(cause)[:80]!r})") from cause
    batch = machine.pop()
    if not isinstance(batch, dict):
        raise _Refused(f"it holds a {type(batch).__name__}, not a dict")
    return {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in batch.items()}


def _push(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _push_python2_string(machine: _Machine, argument: str) -> None:
    machine.stack.append(argument.encode("latin-1"))


def _mark(machine: _Machine, _: Any) -> None:
    machine.marks.append(len(machine.stack))


def _append(machine: _Machine, items: list[Any]) -> None:
    target = machine.top()
    if not isinstance(target, list):
        raise _Refused("an item is appended to what is not a list")
    target.extend(items)


def _set_items(machine: _Machine, flat: list[Any]) -> None:
    target = machine.top()
    # Only strings as keys: hashing a nest of shared tuples could take forever.
    if not isinstance(target, dict) or len(flat) % 2 or not all(isinstance(key, str | bytes) for key in flat[::2]):
        raise _Refused("a dict is filled with what is not keys and values")
    target.update(zip(flat[::2], flat[1::2]))


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.pop(), machine.pop()
    _set_items(machine, [key, value])


def _tuple(size: int) -> Callable[[_Machine, Any], None]:
    def make(machine: _Machine, _: Any) -> None:
        machine.stack.append(tuple([machine.pop() for _ in range(size)][::-1]))

    return make


def _put(machine: _Machine, index: int) -> None:
    machine.memo[index] = machine.top()


def _get(machine: _Machine, index: int) -> None:
    if index not in machine.memo:
        raise _Refused("it recalls what it never remembered")
    machine.stack.append(machine.memo[index])


def _global(machine: _Machine, name: str) -> None:
    if name not in _ARRAY_GLOBALS:
        raise _Refused(f"it asks for {name[:80]!r}, and only numpy arrays of bytes are allowed")
    machine.stack.append(_Global(_ARRAY_GLOBALS[name]))


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.pop(), machine.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise _Refused("a global's name is not a string")
    _global(machine, f"{module} {name}")


def _reduce(machine: _Machine, _: Any) -> None:
    arguments, function = machine.pop(), machine.pop()
    match function, arguments:
        case _Global("reconstruct"), (_Global("ndarray"), tuple(), _):
            machine.stack.append(_Array())
        case _Global("dtype"), (str() | bytes() as code, *_):
            machine.stack.append(_Dtype(code if isinstance(code, str) else code.decode("latin-1")))
        case _:
            raise _Refused("it calls something")


def _build(machine: _Machine, _: Any) -> None:
    state, target = machine.pop(), machine.top()
    match target, state:
        case _Dtype(), tuple():  # byte order and alignment, which single bytes do not have
            pass
        case _Array(), (int(), tuple() as shape, _Dtype("u1"), fortran, bytes() as raw):
            if not all(type(side) is int and 0 <= side < 1 << 31 for side in shape) or len(shape) > 4:
                raise _Refused("an array has an impossible shape")
            values = np.frombuffer(raw, dtype=np.uint8)
            try:
                target.values = values.reshape(shape, order="F" if fortran else "C")
            except ValueError:
                raise _Refused(f"an array of shape {shape} has {len(raw)} bytes") from None
        case _:
            raise _Refused("it sets the state of what is not an array of bytes")


_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _push),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), _push_python2_string),
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "MARK": _mark,
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "APPEND": lambda machine, _: _append(machine, [machine.pop()]),
    "APPENDS": lambda machine, _: _append(machine, machine.pop_mark()),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "SETITEM": _set_item,
    "SETITEMS": lambda machine, _: _set_items(machine, machine.pop_mark()),
    "EMPTY_TUPLE": _tuple(0),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_mark())),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _put),
    "MEMOIZE": lambda machine, _: _put(machine, len(machine.memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _get),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
}
