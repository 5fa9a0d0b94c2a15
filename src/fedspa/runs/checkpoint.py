"""A run's state on disk: enough to resume after a kill as if nothing had happened.

One safetensors file a checkpoint (`round-000012.safetensors`: twelve rounds are done) with the server's tensors and
everything else as JSON in the header; nothing is ever unpickled. Files are written whole or not at all. A digest finds
damage, and a damaged newest file falls back to the one before it. Its size does not grow with the rounds: their metrics
are in metrics.jsonl, of which a checkpoint of t rounds counts the first t lines.

No private key is in it: a stored key would let anyone who reads the disk subtract the noise. Seeded noise follows from
the config; for `secure` and `exact` a resumed run draws a new key and its ledger counts the interrupted round twice.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import platform
import re
import subprocess
import sys
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from fedspa import __version__, durable
from fedspa.data.dataset import Dataset
from fedspa.data.plugin import GIVEN
from fedspa.engine.native import library
from fedspa.errors import ConfigError, FedspaError, first_line, os_errors_as, printable
from fedspa.examples import Tree, count, layout, leaves
from fedspa.learning.layers import plain_values
from fedspa.learning.tasks import Loss
from fedspa.runs.config import Config, with_task
from fedspa.runs.sections import Section
from fedspa.runs.setup import Job, Simulated
from fedspa.secagg import masking
from fedspa.server.optimizers import ServerState
from fedspa.wire import payload

Fact = str | int
_NAME = re.compile(r"round-(\d{6,9})\.safetensors")
_KEPT_FILES = 2  # so that one may be damaged
_FORMAT = 1
# What the file's header holds of a checkpoint as it is.
_KEPT = ("run", "config", "seconds", "facts", "extra")


class CheckpointError(FedspaError):
    """No checkpoint can be read, or none that belongs to this run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The server's state after `state.round` rounds.

    `run` is the run's name in ledgers, `seconds` the time spent so far. `facts` are what was trained, beside the config
    (runs/checkpoint.py); `extra` is the caller's own. `damaged` names newer files that could not be read.
    """

    state: ServerState
    run: str
    config: Config
    seconds: float = 0.0
    facts: Mapping[str, Fact] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()


class _Header(Section):
    """The JSON part."""

    format: Literal[1]
    round: Annotated[int, Field(ge=0)]
    run: Annotated[str, Field(min_length=1, max_length=200)]
    config: Config
    seconds: Annotated[float, Field(ge=0)]
    facts: dict[str, Fact]
    extra: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into `folder` (made if need be), durably; then remove all but the last two.

    OSError where the disk does not take it, CheckpointError where the state is not finite: what was there before is
    still there.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.state.tensors.items()}
    if (fault := _fault(tensors)) is not None:
        raise CheckpointError(f"nothing was saved after round {checkpoint.state.round}: {fault}")
    folder.mkdir(exist_ok=True)
    header = json.dumps(
        {
            "format": _FORMAT,
            "round": checkpoint.state.round,
            **{key: getattr(checkpoint, key) for key in _KEPT},
            "config": checkpoint.config.model_dump(exclude_none=True),
        },
        allow_nan=False,
    )
    path = folder / f"round-{checkpoint.state.round:06d}.safetensors"
    metadata = {"fedspa": header, "digest": _digest(header, tensors)}
    durable.replace_tensors(path, lambda draft: save_file(tensors, draft, metadata))
    _prune(folder, checkpoint.state.round)
    return path


def load(path: Path) -> Checkpoint:
    """Return the checkpoint in one file, or a CheckpointError that says what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
            if "theta" not in names:
                raise CheckpointError(f"{path} is damaged: its tensors are {', '.join(sorted(names))[:80] or 'none'}")
            # Copies: a tensor that stays mapped would change under the run if the file did.
            tensors = {name: file.get_tensor(name).clone() for name in names}
        header, digest = metadata["fedspa"], metadata["digest"]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)[:200]}") from None
    if (fault := _fault(tensors)) is not None:
        raise CheckpointError(f"{path} is damaged: {fault}")
    if _digest(header, tensors) != digest:
        raise CheckpointError(f"{path} is damaged: its digest does not fit its content")
    try:
        known = _Header.model_validate_json(header)
    except (ValidationError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint of this fedspa: {first_line(error)[:200]}") from None
    kept: dict[str, Any] = {key: getattr(known, key) for key in _KEPT}
    return Checkpoint(state=ServerState.of_tensors(tensors, known.round), **kept)


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint in `folder`; None where there never was one, a CheckpointError where all are damaged
    or of another format."""
    damaged: list[str] = []
    for path in _files(folder):
        try:
            return replace(load(path), damaged=tuple(damaged))
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"no whole checkpoint in {folder} ({'; '.join(damaged)}); restore one from a backup")
    return None


def _fault(tensors: Mapping[str, Tensor]) -> str | None:
    """Return why these are not the tensors of a server that can continue."""
    shape = tensors["theta"].shape
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.ndim != 1 or tensor.shape != shape or not len(tensor):
            return f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}"
        # Carries NaN and ∞ through, without a second tensor of this size.
        if not all(math.isfinite(bound) for bound in torch.aminmax(tensor)):
            return f"{name} holds NaN or ∞"
    return None


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"\0{name}\0{tensors[name].numel()}\0".encode())
        digest.update(tensors[name].numpy().data)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Newest first, by their number of rounds: a clock that jumped would mislead."""
    if not folder.is_dir():
        return []
    with os_errors_as(CheckpointError, f"{folder} cannot be read"):
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_rounds, reverse=True)


def _rounds(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _prune(folder: Path, newest: int) -> None:
    """Files beyond `newest` go too: a run that fell back behind them will write them anew."""
    files = _files(folder)
    kept = [path for path in files if _rounds(path) <= newest][:_KEPT_FILES]
    for path in (*(path for path in files if path not in kept), *folder.glob(f"*{durable.DRAFT}")):
        path.unlink(missing_ok=True)


# The identity of a run: digests of its records and module, the versions that compute it, and protocol versions.
#
# `facts` go into every checkpoint, where a resume is compared with them: a name says little, since data files change
# under theirs, and what was given in Python has none that a config could use. They find what was changed by accident or
# in good faith; `loop.check_scores` finds the rest, by what the model scores. The summary repeats what may be
# published: a digest of records has no noise, so that anyone who knows all records but one could test guesses at it.

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
    tensor = plain_values(tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach())
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
