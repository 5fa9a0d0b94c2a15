"""The identity of a run: digests of its records and module, the versions that compute it, and protocol versions.

`facts` go into every checkpoint, where a resume is compared with them: a name says little, since data files change
under theirs, and what was given in Python has none that a config could use. They find what was changed by accident or
in good faith; `loop.check_scores` finds the rest, by what the model scores. The summary repeats what may be
published: a digest of records has no noise, so that anyone who knows all records but one could test guesses at it.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import subprocess
import sys
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
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
from fedspa.runs.config import Config, with_task
from fedspa.runs.sections import Section
from fedspa.runs.setup import Job, Simulated
from fedspa.secagg import masking
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
    "sum": masking.VERSION,
}

COMMIT = "commit of the working folder"
# Reported, and free to differ: the digests decide.
REPORTED = frozenset({"class of the module", COMMIT})
# These change the last bits of a sum, and no promise but that of the same bits.
ROUNDING = frozenset({"Python version", "torch version", "numpy version", "instruction set", "device"})
# Another one may round otherwise, too. What it must have in common with the one that began is the set of editions.
PACKAGE = "fedspa version"

# Functions of the records without any noise: they stay beside the records.
_RECORDS = ("training records", "training labels", "test records", "test labels", "persons", "agents' holdings")
ALL_RECORDS = "digest of the training records"  # a run that has every agent's has it
UNPUBLISHED = frozenset({"number of training records", *(f"digest of the {name}" for name in _RECORDS)})


def digests_of(data: Dataset) -> dict[str, Fact]:
    """Digest every record and label. It takes a quarter of a second for MNIST, and can be made beside other work."""
    persons = {} if data.persons is None else {"persons": torch.from_numpy(data.persons)}
    return _digests(
        training_records=data.train_x,
        training_labels=data.train_y,
        test_records=data.test_x,
        test_labels=data.test_y,
        **persons,
    )


def facts(job: Job, digests: Mapping[str, Fact] | None = None) -> dict[str, Fact]:
    """Return what decides a run beside its config. `digests` are those of its records, where they were made before."""
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
    """Return what computes on it, down to what may change the last bit."""
    return {
        PACKAGE: __version__,
        "set of editions": written_editions(),
        "Python version": ".".join(platform.python_version_tuple()[:2]),
        "torch version": str(torch.__version__),
        "numpy version": np.__version__,
        "instruction set": f"{library.best_level()}, in torch {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device,
    }


def record_inputs(config: Config, data: Dataset | None, module: nn.Module | None, task: Loss | None) -> Config:
    """Return the config with the names of the data, the module and the task that were given in Python: no file may say
    that the run trained what the config would have named, and no command may take it for that."""
    sections: dict[str, Section] = {}
    if isinstance(data, Dataset):
        if config.data.table is not None:
            raise ConfigError(
                f"data.table describes the table {config.data.name!r}; the data that was given stands in for it: "
                "leave them out"
            )
        sections["data"] = config.data.model_copy(update={"name": _given_name(data.name)})
    if isinstance(module, nn.Module):
        sections["model"] = config.model.model_copy(update={"name": _given_name(type(module).__qualname__)})
    if task is not None:
        name = getattr(task, "__name__", type(task).__name__)
        sections["task"] = with_task(config, _given_name(name)).task
    return config.model_copy(update=sections)


def _given_name(name: str) -> str:
    """One that the run's own config.toml can be read with, whatever somebody chose."""
    return GIVEN + printable(name)[:60]


def with_commits(then: Mapping[str, Fact], now: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return the facts of a resumed run: its code may have moved on beside what was trained."""
    commits = dict.fromkeys((*str(then[COMMIT]).split(", "), str(now[COMMIT])))
    return {**now, COMMIT: ", ".join(commits)}


def provenance(config: Config, known: Mapping[str, Fact], engine: str) -> dict[str, Fact]:
    """Return the facts for a summary, whose `engine` counts: a deployment's server has one that trains nobody."""
    published = {key: value for key, value in known.items() if key not in UNPUBLISHED}
    return {"data": config.data.name, "model": config.model.name, **published, "engine": engine}


def _digests(**parts: Tree) -> dict[str, Fact]:
    return {f"digest of the {name.replace('_', ' ')}": digest_tensors(leaves(part)) for name, part in parts.items()}


def _of_agents(job: Simulated) -> dict[str, Fact]:
    sizes = torch.tensor([len(held) for held in job.holdings])
    return {
        "number of training records": count(job.data.train_y),
        "digest of the agents' holdings": digest_tensors([sizes, torch.from_numpy(np.concatenate(job.holdings))]),
        "engine": job.engine.name,
        "frozen body": "" if job.training.split is None else job.training.split.description,
    }


def _commit() -> str:
    """Return the commit of the folder that the run is started in, most often that of the user's own code."""
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
    """Return the editions as terms and checkpoints carry them."""
    return ", ".join(f"{name} {number}" for name, number in sorted(EDITIONS.items()))


def edition_differences(theirs: str) -> list[str]:
    """Return what another end has in another edition, in words; empty where the two understand each other."""
    given = dict(part.strip().rpartition(" ")[::2] for part in theirs.split(","))
    ours = {name: str(number) for name, number in EDITIONS.items()}
    return [
        f"{name} {given.get(name, 'none')[:20]} there and {ours.get(name, 'none')} here"
        for name in sorted(given.keys() | ours.keys())
        if given.get(name) != ours.get(name)
    ]


_PART = 4 * 2**20  # bytes
# Code that a version identifies, so that its name is enough.
_VERSIONED = frozenset({"torch", "numpy", "fedspa", "builtins", *sys.stdlib_module_names} - {"__main__"})


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """Digest kinds, shapes and every byte."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode())
        content = memoryview(_bytes(tensor))
        for start in range(0, len(content), _PART):
            total.update(hashlib.blake2b(content[start : start + _PART], digest_size=16).digest())
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
    """Digest a module, a task or a function: its layers and their settings, the sources of its classes and functions,
    its frozen values, and the kinds and shapes of what is trained. What this does not see (a constant that a function
    reads, the functions that a module holds) shows in the scores, which `loop.check_scores` compares."""
    if isinstance(value, nn.Module):
        found = [repr(value), str([layer.training for layer in value.modules()])]
        found += [_source(kind) for kind in dict.fromkeys(map(type, value.modules()))]
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            lazy = nn.parameter.is_lazy(tensor)
            found.append(f"{name} {tensor.dtype} {'' if lazy else tuple(tensor.shape)}")
            found += [] if trained or lazy else [digest_tensors([tensor])]
    elif isinstance(value, str):
        found = [value]
    else:
        found = [_source(value if isinstance(value, type | types.FunctionType) else type(value))]
    return hashlib.blake2b("\n".join(found).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _source(kind: Any) -> str:
    """Return the source of a function or of a class with its bases; of code that a version identifies, the name."""
    found = f"{kind.__module__}.{kind.__qualname__}"
    for part in kind.__mro__ if isinstance(kind, type) else (inspect.unwrap(kind),):
        if (part.__module__ or "").partition(".")[0] not in _VERSIONED:
            with suppress(OSError, TypeError):  # it was made at run time
                found += inspect.getsource(part)
    return found
