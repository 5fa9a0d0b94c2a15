"""The run's folder: config.toml, metrics.jsonl (a line a round), checkpoint/, summary.json,
model.safetensors, ledger, report.html; ended.json where it ended before its last round.

A folder is one run's and is locked while that runs. The lock is the kernel's and ends with the process, however that
ends, so nothing stale is left to clear away.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

from fedspa import durable
from fedspa.agent.ledger.ledger import has_entries
from fedspa.errors import ConfigError, FedspaError, one_line, worded
from fedspa.learning.flat import FlatModel
from fedspa.runs import checkpoint, ending, project
from fedspa.runs.checkpoint import Checkpoint
from fedspa.runs.config import Config, to_toml
from fedspa.runs.identity import to_go_on
from fedspa.runs.journal import Journal
from fedspa.runs.metrics import RoundMetrics

log = logging.getLogger(__name__)


class Follower(Protocol):
    """Who is told of a run as it is written: each round, its end, and that the folder is let go."""

    def add_round(self, metrics: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


Follow = Callable[[Config, Path], Follower]  # made before anything is written: it may refuse the config


class RunFolder:
    """A fresh folder: `run.out`, or a dated one under runs/. `reopen` is for a run that was interrupted."""

    def __init__(self, config: Config, data_name: str, follow: Follow) -> None:
        self._name(Path(config.run.out) if config.run.out is not None else _dated(config, data_name), config, follow)
        with _starting(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            try:
                _check_empty(self.path)
            except ConfigError:
                self.close()
                raise
            durable.replace_text(self.path / "config.toml", to_toml(config))

    @classmethod
    def reopen(cls, path: Path, config: Config, follow: Follow) -> Self:
        """The folder of an interrupted run, locked."""
        self = cls.__new__(cls)
        self._name(path, config, follow)
        if not (path / "config.toml").is_file():
            raise ConfigError(f"{path} holds no run (there is no config.toml in it); give the folder of one")
        project.refuse(path)
        with _starting(path):
            self._take_lock()
        return self

    def _name(self, path: Path, config: Config, follow: Follow) -> None:
        self.path, self._lock, self._begun = path, -1, False
        self._follower = follow(config, path)
        self._journal = Journal(path)
        self._to_go_on = to_go_on(config, path)

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    def started(self) -> bool:
        """Whether anything can have been spent: the first checkpoint is saved before the first entry."""
        return (self.path / "metrics.jsonl").exists() or has_entries(self.ledger)

    def rewind(self, state: Checkpoint) -> list[RoundMetrics]:
        """Bring metrics.jsonl to the rounds of this checkpoint, which are returned."""
        with self._writing():
            return self._journal.rewind(state.state.round)

    def begin(self) -> None:
        """Nothing refuses the run any more: from here on the folder says how it ends. One that is refused leaves what
        is there as it was."""
        if not self._begun:
            ending.clear(self.path)
            self._begun = True

    def add_round(self, metrics: Mapping[str, Any]) -> None:
        self.begin()
        with self._writing():
            self._journal.add(metrics)
        self._follower.add_round(metrics)

    def save(self, state: Checkpoint, keep: int) -> None:
        """Save a checkpoint, after the metrics of its rounds."""
        with self._writing():
            self._journal.settle()
            checkpoint.save(self.checkpoints, state, keep)

    def summary(self) -> dict[str, Any] | None:
        """Of a run that is done; None where there is none, or none that can be read."""
        try:
            found = json.loads((self.path / "summary.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def save_model(self, model: FlatModel) -> None:
        """The trained module as it is now. What its state_dict cannot say is left out: its parameters are not."""
        from safetensors.torch import save_file, save_model

        file, module = self.path / "model.safetensors", model.module
        with self._writing():
            try:
                durable.replace_tensors(file, lambda draft: save_model(module, str(draft)))
            except OSError:
                raise
            except Exception as error:  # a module may have a state_dict of its own
                log.warning("model.safetensors has the trained parameters only: %s", one_line(error))
                values = {name: values.detach().contiguous() for name, values in zip(model.names, model.parameters())}
                durable.replace_tensors(file, lambda draft: save_file(values, str(draft)))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The summary, after the model: where there is one, the run is done."""
        with self._writing():
            durable.replace_text(
                self.path / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            )
        self._follower.finish(summary)
        self.close()

    def close(self) -> None:
        """Let the folder go."""
        self._follower.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._begun:
            ending.note(self.path, error)
        self.close()

    def _take_lock(self) -> None:
        if os.name != "posix":
            return
        import fcntl

        self._lock = os.open(self.path, os.O_RDONLY)  # the folder itself: a lock file would outlive its process
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(
                    f"{self.path} is in use by another run; wait for its end or name another folder"
                ) from None
            raise

    def _writing(self) -> AbstractContextManager[None]:
        kept = f"nothing is lost up to the last checkpoint: mend that, then `{self._to_go_on}`"
        return worded(FedspaError, lambda why: f"{self.path} cannot be written: {why}; {kept}")


def check_out(config: Config) -> None:
    """Raise where no run can begin in `run.out`, before hours of work for one. Nothing is made."""
    path = Path("runs" if config.run.out is None else config.run.out)
    with _starting(path):
        durable.check_folder(path)
        if config.run.out is not None and path.exists():
            _check_empty(path)


def _check_empty(path: Path) -> None:
    # A start that was killed may have left a draft; nothing is in it that anyone needs.
    if any(not file.name.endswith(durable.DRAFT) for file in path.iterdir()):
        raise ConfigError(
            f"run.out is {path}, which is not empty; name a new folder, or resume the run in it by "
            f"`fedspa run --resume {path}`"
        )


def _starting(path: Path) -> AbstractContextManager[None]:
    return worded(ConfigError, lambda why: f"run.out is {path}: {why}; name a folder to write to")


def _dated(config: Config, data_name: str) -> Path:
    """runs/<algorithm>-<data>-<UTC time>, with a number behind it where two start within one second."""
    data = re.sub(r"[^\w.-]", "_", Path(data_name.replace(":", ".")).stem)[:40]  # whatever a caller named it
    stem = f"{config.algorithm.name}-{data}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    path, number = Path("runs", stem), 1
    while path.exists():
        number += 1
        path = Path("runs", f"{stem}-{number}")
    return path
