"""Digests of what decides a run and has no name: records, and the code behind a module's forward pass.

They find what was changed by accident or in good faith between a start and a resume. Records count by every byte. A
module counts by its layers, their settings, constants and code, and not by the values that are trained.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PART = 4 * 2**20  # bytes
# Code that a version tells apart, so that its name is enough.
_VERSIONED = frozenset({"torch", "numpy", "fedspa", "builtins", *sys.stdlib_module_names} - {"__main__"})
# What a class carries beside the code that its author wrote, or for a reader only.
_UNTOLD = frozenset(
    ("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__", "__static_attributes__")
) | {"__slotnames__"}  # comes with a first copy
# Of torch's own bookkeeping in every module, what decides a forward pass. Another torch may keep more.
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_DEEPEST = 100


def of_tensors(tensors: Iterable[Tensor]) -> str:
    """Kinds, shapes and every byte, in parts that are hashed beside each other."""
    total = _new()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode())
        content = memoryview(_bytes(tensor))
        parts = [content[start : start + _PART] for start in range(0, len(content), _PART)]
        if len(parts) > 1:
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing lets go of the interpreter's lock
                digests = list(pool.map(_digest, parts))
        else:
            digests = [_digest(part) for part in parts]
        total.update(b"".join(digests))
    return str(total.hexdigest())


def of_module(module: nn.Module) -> str:
    """What its forward pass is made of."""
    return of_function(module)


def of_function(value: object) -> str:
    """What a function, or an object with functions, is made of."""
    walk = _Walk()
    walk.see(value)
    return str(walk.total.hexdigest())


def _new() -> Any:
    return hashlib.blake2b(digest_size=16)


def _digest(part: memoryview) -> bytes:
    return hashlib.blake2b(part, digest_size=16).digest()


def _bytes(tensor: Tensor) -> Any:
    """Of one row where all are the same memory: a server has stand-ins for records that it does not hold."""
    tensor = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    tensor = tensor.cpu().contiguous()
    # One element is contiguous by any stride, and only by its own can its bytes be seen.
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).numpy()


class _Walk:
    """Goes through an object by what it is made of; the same in another process, so no address is ever looked at."""

    def __init__(self) -> None:
        self.total = _new()
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # an id is one object's only while that lives
        self._depth = 0

    def see(self, value: object) -> None:
        self._depth += 1
        if self._depth < _DEEPEST:  # beyond, only that there is more
            self._look(value)
        self._depth -= 1

    def _look(self, value: object) -> None:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            self._say(f"{type(value).__name__} {value!r}")
            return
        match value:  # containers first: which of two equal constants are one object is Python's own affair
            case Mapping():
                self._say(f"mapping {len(value)}")
                self._each(part for item in value.items() for part in item)
                return
            case list() | tuple() | deque():
                self._say(f"sequence {len(value)}")
                self._each(value)
                return
            case set() | frozenset():
                self._say(f"set {sorted(map(self._apart, value))}")
                return
            case range() | slice() | bytearray() | Fraction() | Decimal() | np.generic():
                self._say(f"{type(value).__name__} {value!r}")
                return
            case np.ndarray():
                self._say(f"array {value.dtype} {value.shape}")
                self.see(value.tolist() if value.dtype.hasobject else value.tobytes())
                return
        if id(value) in self._seen:
            self._say(f"again {self._seen[id(value)]}")
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        match value:
            case Tensor():
                # What has a history was made of parameters (torch.nn.utils.weight_norm), and is made anew each time.
                trained = (isinstance(value, nn.Parameter) and value.requires_grad) or not value.is_leaf
                content = f"{value.dtype} {tuple(value.shape)}" if trained else of_tensors([value])
                self._say(f"tensor {trained} {content}")
            case nn.Module():
                self._class(type(value))
                self.see({name: each for name, each in vars(value).items() if name not in _BOOKKEEPING})
                # Filed by a number that counts all hooks of the process.
                self._each(list(getattr(value, name, {}).values()) for name in _HOOKS)
            case functools._lru_cache_wrapper():
                self.see(value.__wrapped__)
            case functools.partial():
                self._each((value.func, value.args, value.keywords))
            case types.MethodType():
                self._each((value.__func__, value.__self__))
            case types.FunctionType():
                self._function(value)
            case type():
                self._class(value)
            case _:
                self._other(value)

    def _each(self, values: Iterable[object]) -> None:
        for value in values:
            self.see(value)

    def _say(self, text: str) -> None:
        self.total.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def _other(self, value: object) -> None:
        name = getattr(value, "__name__", None)
        self._say(f"object {name}" if isinstance(name, str) else "object")
        self._class(type(value))
        if not _versioned(type(value)):
            self.see(getattr(value, "__dict__", None))
            slots = [vars(base).get("__slots__", ()) for base in type(value).__mro__]
            names = [name for some in slots for name in ([some] if isinstance(some, str) else some)]
            self.see({name: getattr(value, name, None) for name in names})

    def _apart(self, value: object) -> str:
        """What a set holds has no order, and its names may be addresses: each by a digest of its own."""
        walk = _Walk()
        walk._seen, walk._depth = dict(self._seen), self._depth
        walk.see(value)
        return str(walk.total.hexdigest())

    def _class(self, kind: type) -> None:
        self._say(f"class {kind.__qualname__}")
        for base in kind.__mro__:
            if _versioned(base) or id(base) in self._seen:
                continue
            self._seen[id(base)] = len(self._seen)
            self._kept.append(base)
            for name, value in sorted(vars(base).items()):
                if name in _UNTOLD:
                    continue
                self._say(name)
                if isinstance(value, staticmethod | classmethod):
                    self.see(value.__func__)
                elif isinstance(value, property):
                    self._each((value.fget, value.fset))
                elif isinstance(value, types.FunctionType | bool | int | float | str | tuple | list | type):
                    self.see(value)

    def _function(self, function: types.FunctionType) -> None:
        if _versioned(function):
            self._say(f"function {function.__module__} {function.__qualname__}")
            return
        self._code(function.__code__)
        self._each((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                self.see(cell.cell_contents)
            except ValueError:
                self._say("empty")
        self._named(function.__code__, function.__globals__)

    def _code(self, code: types.CodeType) -> None:
        self._say(f"code {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_flags}")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.see(constant)

    def _named(self, code: types.CodeType, names: Mapping[str, object]) -> None:
        """What a function reaches by name: helpers and constants of its file, and functions of files that it uses."""
        # Of the code's names only those: an attribute's name may be, by chance, that of something else in the file.
        read = (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        for name in dict.fromkeys(read):
            value = names.get(name)
            if isinstance(value, types.ModuleType):
                if not _rooted(value.__name__):
                    self._each(vars(value).get(each) for each in code.co_names if _plain(vars(value).get(each)))
            elif _plain(value):
                self.see(value)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._named(constant, names)


def _plain(value: object) -> bool:
    return isinstance(value, types.FunctionType | type | bool | int | float | str | Tensor)


def _versioned(kind: Any) -> bool:
    return _rooted(getattr(kind, "__module__", None) or "")


def _rooted(module: str) -> bool:
    return module.partition(".")[0] in _VERSIONED
