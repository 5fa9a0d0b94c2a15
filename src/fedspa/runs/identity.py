"""The identity of a run: digests of its records and module, the versions that compute it, and protocol versions.

`facts` go into every checkpoint, where a resume is compared with them: a name says little, since data files change
under theirs, and what was given in Python has none that a config could use. They find what was changed by accident or
in good faith; `resume.refuse_other_scores` finds the rest, by what the model scores. The summary repeats what may be
published: a digest of records has no noise, so that anyone who knows all records but one could test guesses at it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import numbers
import os
import platform
import shlex
import subprocess
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from fedspa import __version__
from fedspa.data.dataset import Dataset
from fedspa.data.plugin import GIVEN
from fedspa.engine.native import library
from fedspa.errors import ConfigError, printable
from fedspa.examples import Tree, count, layout, leaves
from fedspa.learning.tasks import Loss
from fedspa.runs.checkpoint import Fact
from fedspa.runs.config import Config, load, with_task
from fedspa.runs.section import Section
from fedspa.runs.setup import Job, Simulated
from fedspa.secagg import message
from fedspa.wire import payload

# Protocol versions. Each is one more with every change after which two ends would misunderstand each other: a server
# that adds up other coordinates than an agent sent, or states an ε that the agent's ledger does not have. Terms carry
# them, so that an agent refuses before it pays, and checkpoints, so that a run resumes only with what it began with.
# The version of the package is none of them.
# Which coordinates a seed means: the test vectors of docs/wire.md.
MASK: Final = 1
# What an event costs. The server states ε, and each agent's ledger counts it: both by the same prices.
PRICING: Final = 2

EDITIONS: Final[Mapping[str, int]] = {
    "mask": MASK,
    "payload": payload.VERSION,
    "pricing": PRICING,
    "sum": message.VERSION,
}

COMMIT = "commit of the working folder"
# Told, and free to differ: the digests decide.
TOLD = frozenset({"class of the module", COMMIT})
# These change the last bits of a sum, and no promise but that of the same bits.
ROUNDING = frozenset({"Python version", "torch version", "numpy version", "instruction set", "device"})
# Another one may round otherwise, too. What it must have in common with the one that began is the set of editions.
PACKAGE = "fedspa version"

# Functions of the records without any noise: they stay beside the records.
_RECORDS = ("training records", "training labels", "test records", "test labels", "persons", "agents' holdings")
ALL_RECORDS = "digest of the training records"  # a run that has every agent's has it
UNPUBLISHED = frozenset({"number of training records", *(f"digest of the {name}" for name in _RECORDS)})


def digests_of(data: Dataset) -> dict[str, Fact]:
    """Of every record and label. It takes a quarter of a second for MNIST, and can be made beside other work."""
    persons = {} if data.persons is None else {"persons": torch.from_numpy(data.persons)}
    return _digests(
        training_records=data.train_x,
        training_labels=data.train_y,
        test_records=data.test_x,
        test_labels=data.test_y,
        **persons,
    )


def facts(job: Job, digests: Mapping[str, Fact] | None = None) -> dict[str, Fact]:
    """What decides a run beside its config. `digests` are those of its records, where they were made before."""
    server, module = job.server, job.server.model.module
    kind = type(module)
    return {
        "shape of a record": layout(server.test.x),
        "task": server.model.task.name,
        "digest of the task": digest_code(getattr(server.model.task, "function", server.model.task.name)),
        "number of outputs": server.model.task.width or 0,
        "number of test records": count(server.test.y),
        **(digests or _digests(test_records=server.test.x, test_labels=server.test.y)),
        **(_of_agents(job) if isinstance(job, Simulated) else {}),
        "class of the module": f"{kind.__module__}.{kind.__qualname__}",
        "number of parameters": server.model.dimension,
        "digest of the module": digest_code(module),
        **of_machine(job.config.run.device),
        COMMIT: _commit(),
    }


def of_machine(device: str) -> dict[str, Fact]:
    """What computes on it, down to what may change the last bit."""
    return {
        PACKAGE: __version__,
        "set of editions": written_editions(),
        "Python version": ".".join(platform.python_version_tuple()[:2]),
        "torch version": str(torch.__version__),
        "numpy version": np.__version__,
        "instruction set": f"{library.best_level()}, in torch {torch.backends.cpu.get_cpu_capability()}",
        "device": _device(device),
    }


def under_true_names(config: Config, data: Dataset | None, module: nn.Module | None, task: Loss | None) -> Config:
    """The config of a run that was given its records or its module in Python: no file may say that it trained what the
    config would have named, and no command may take it for that."""
    sections: dict[str, Section] = {}
    if isinstance(data, Dataset):
        if config.data.columns is not None:
            raise ConfigError(
                f"data.columns describes the table {config.data.name!r}; the data that was given stands in for it: "
                "leave them out"
            )
        sections["data"] = config.data.model_copy(update={"name": _given_name(data.name)})
    if isinstance(module, nn.Module):
        sections["model"] = config.model.model_copy(update={"name": _given_name(type(module).__qualname__)})
    if task is not None:
        name = getattr(task, "__name__", type(task).__name__)
        sections["task"] = with_task(config, _given_name(name)).task
    return config.model_copy(update=sections)


def to_go_on(config: Config, folder: Path) -> str:
    """What resumes the run in `folder`: the command line, or Python where something was given there."""
    command = "run" if config.tuning.candidates is None else "tune"  # which also scores it on the test records
    if not (given := _given(config)):
        return f"fedspa {command} --resume {shlex.quote(str(folder))}{_elsewhere(config, folder)}"
    return f"fedspa.{command}(resume={str(folder)!r}, {', '.join(f'{argument}=…' for argument in given)})"


def _elsewhere(config: Config, folder: Path) -> str:
    """Where the data's files lie now, if that is not where the run began with them."""
    try:
        began = load(folder / "config.toml").data.dir
    except ConfigError:  # it begins now
        return ""
    place = config.data.dir
    return "" if place == began else f" --set {shlex.quote(f'data.dir={json.dumps(place)}')}"


def refuse_ungiven(config: Config, folder: Path, **now: object) -> None:
    """Raise where the run in `folder` was given in Python what is missing now."""
    given = _given(config)
    if any(now[argument] is None for argument in given):
        raise ConfigError(
            f"the run in {folder} was given its {' and '.join(given)} in Python, which no file can name; go on there: "
            f"{to_go_on(config, folder)}"
        )


def _given_name(name: str) -> str:
    """One that the run's own config.toml can be read with, whatever somebody chose."""
    return GIVEN + printable(name)[:60]


def _given(config: Config) -> list[str]:
    names = {"data": config.data.name, "module": config.model.name, "task": config.task.name}
    return [argument for argument, name in names.items() if name.startswith(GIVEN)]


def with_commits(then: Mapping[str, Fact], now: Mapping[str, Fact]) -> dict[str, Fact]:
    """The facts of a run that goes on: its code may have moved on beside what was trained."""
    commits = dict.fromkeys((*str(then[COMMIT]).split(", "), str(now[COMMIT])))
    return {**now, COMMIT: ", ".join(commits)}


def provenance(config: Config, known: Mapping[str, Fact], engine: str) -> dict[str, Fact]:
    """For the reader of a summary, whose `engine` counts: a deployment's server has one that trains nobody."""
    told = {key: value for key, value in known.items() if key not in UNPUBLISHED}
    return {"data": config.data.name, "model": config.model.name, **told, "engine": engine}


def _digests(**parts: Tree) -> dict[str, Fact]:
    return {f"digest of the {name.replace('_', ' ')}": digest_tensors(leaves(part)) for name, part in parts.items()}


def _of_agents(job: Simulated) -> dict[str, Fact]:
    sizes = torch.tensor([len(held) for held in job.holdings])
    return {
        "number of training records": count(job.data.train_y),
        "digest of the agents' holdings": digest_tensors([sizes, torch.from_numpy(np.concatenate(job.holdings))]),
        "engine": job.engine.name,
        "frozen body": "" if job.frozen.split is None else job.frozen.split.description,
    }


def _device(name: str) -> str:
    return torch.cuda.get_device_name(name) if torch.device(name).type == "cuda" else name


def _commit() -> str:
    """Of the folder that the run is started in, which is most often that of the user's own code."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            capture_output=True,
            text=True,
            timeout=2,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "none"


def written_editions() -> str:
    """As terms and checkpoints carry them."""
    return ", ".join(f"{name} {number}" for name, number in sorted(EDITIONS.items()))


def edition_differences(theirs: str) -> list[str]:
    """What another end has in another edition, in words; empty where the two understand each other."""
    told = dict(part.strip().rpartition(" ")[::2] for part in theirs.split(","))
    ours = {name: str(number) for name, number in EDITIONS.items()}
    return [
        f"{name} {told.get(name, 'none')[:20]} there and {ours.get(name, 'none')} here"
        for name in sorted(told.keys() | ours.keys())
        if told.get(name) != ours.get(name)
    ]


_PART = 4 * 2**20  # bytes
# Code that a version identifies, so that its name is enough.
_VERSIONED = frozenset({"torch", "numpy", "fedspa", "builtins", *sys.stdlib_module_names} - {"__main__"})
# Of what torch keeps in every module, what does not decide a forward pass.
_DECIDING = {"training", "_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks"}
_BOOKKEEPING = frozenset(vars(nn.Module())) - _DECIDING
_PLAIN = (numbers.Number, np.generic, str, bytes, range, slice, type(None), torch.dtype, torch.device)


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """Digest kinds, shapes and every byte, in parts that are hashed in parallel."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode())
        content = memoryview(_bytes(tensor))
        parts = [content[start : start + _PART] for start in range(0, len(content), _PART)]
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter's lock
            for digest in pool.map(lambda part: hashlib.blake2b(part, digest_size=16).digest(), parts):
                total.update(digest)
    return total.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """The bytes of one row where all are the same memory: a server has stand-ins for records that it does not hold."""
    tensor = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    tensor = tensor.cpu().contiguous()
    # One element is contiguous by any stride, and only by its own can its bytes be seen.
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).numpy()


def digest_code(value: object) -> str:
    """Digest a module, a task or a function: the source of its classes and functions, settings, frozen values, and the
    kinds and shapes of what is trained. No address counts, so that it is the same in another process."""
    return hashlib.blake2b(_described(value, set()).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _described(value: object, seen: set[int]) -> str:
    """`seen` are the objects that were described before, by id."""
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Tensor):
        trained = (isinstance(value, nn.Parameter) and value.requires_grad) or not value.is_leaf
        return f"{value.dtype} {tuple(value.shape)}" if trained else digest_tensors([value])
    if isinstance(value, np.ndarray):
        content = _described(value.tolist(), seen) if value.dtype.hasobject else value.tobytes().hex()
        return f"{value.dtype} {value.shape} {content}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!s}: {_described(part, seen)}' for key, part in value.items())}}}"
    if isinstance(value, list | tuple | deque):
        return f"[{', '.join(_described(part, seen) for part in value)}]"
    if isinstance(value, set | frozenset):
        return f"set {sorted(_described(part, {*seen}) for part in value)}"
    if isinstance(value, functools.partial):
        return f"partial {_described((value.func, value.args, value.keywords), seen)}"
    if isinstance(value, types.MethodType):
        return _source(value.__func__)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return _source(value)
    if isinstance(value, functools._lru_cache_wrapper):
        return _described(value.__wrapped__, seen)
    kind: Any = type(value)
    own = {} if _is_versioned(kind) else getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        own = {name: each for name, each in vars(value).items() if name not in _BOOKKEEPING}
        for name in ("_forward_pre_hooks", "_forward_hooks"):  # filed by a number that counts all hooks of the process
            own[name] = list(own.get(name, {}).values())
    if id(value) in seen:
        return "described before"
    seen.add(id(value))
    return f"{getattr(value, '__name__', '')} {_source(kind)} {_described(own, seen)}"


@functools.cache
def _source(kind: Any) -> str:
    """The source of a function or of a class with its bases; of code that a version identifies, the name."""
    found = f"{getattr(kind, '__qualname__', kind)}"
    for part in kind.__mro__ if isinstance(kind, type) else (inspect.unwrap(kind),):
        if not _is_versioned(part):
            try:
                found += inspect.getsource(part)
            except (OSError, TypeError):  # made at run time
                code = getattr(part, "__code__", None)
                found += "" if code is None else code.co_code.hex()
    return found


def _is_versioned(kind: Any) -> bool:
    return (getattr(kind, "__module__", None) or "").partition(".")[0] in _VERSIONED
