"""What was really trained, and by what: records, module, engine and versions, beside the config.

`facts` go into every checkpoint, where a resume is held against them. A name says little: data files change under
theirs, and what was given in Python has none that a config could use. The summary repeats what is nobody's secret: a
digest of records has no noise, so whoever knows all of them but one could try guesses at that one.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedspa import __version__
from fedspa.data.dataset import Dataset
from fedspa.data.plugin import GIVEN
from fedspa.engine.native import library
from fedspa.errors import ConfigError, printable
from fedspa.examples import Tree, count, layout, leaves
from fedspa.learning.tasks import Loss
from fedspa.runs import digest, editions
from fedspa.runs.checkpoint import Fact
from fedspa.runs.config import Config, load, with_task
from fedspa.runs.section import Section
from fedspa.runs.setup import Job, Simulated

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
        "digest of the task": digest.of_function(getattr(server.model.task, "function", server.model.task.name)),
        "number of outputs": server.model.task.width or 0,
        "number of test records": count(server.test.y),
        **(digests or _digests(test_records=server.test.x, test_labels=server.test.y)),
        **(_of_agents(job) if isinstance(job, Simulated) else {}),
        "class of the module": f"{kind.__module__}.{kind.__qualname__}",
        "number of parameters": server.model.dimension,
        "digest of the module": digest.of_module(module),
        **of_machine(job.config.run.device),
        COMMIT: _commit(),
    }


def of_machine(device: str) -> dict[str, Fact]:
    """What computes on it, down to what may change the last bit."""
    return {
        PACKAGE: __version__,
        "set of editions": editions.written(),
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
    return {f"digest of the {name.replace('_', ' ')}": digest.of_tensors(leaves(part)) for name, part in parts.items()}


def _of_agents(job: Simulated) -> dict[str, Fact]:
    sizes = torch.tensor([len(held) for held in job.holdings])
    return {
        "number of training records": count(job.data.train_y),
        "digest of the agents' holdings": digest.of_tensors([sizes, torch.from_numpy(np.concatenate(job.holdings))]),
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
