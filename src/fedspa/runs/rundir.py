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
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from pydantic import TypeAdapter, ValidationError

from fedspa import durable
from fedspa.agent.ledger.ledger import has_entries
from fedspa.data.plugin import GIVEN
from fedspa.errors import ConfigError, FedspaError, one_line, place_of, printable, worded
from fedspa.runs.config import Config, load, to_toml
from fedspa.runs.metrics import RoundMetrics

if TYPE_CHECKING:
    from fedspa.learning.flat import FlatModel
    from fedspa.runs.checkpoint import Checkpoint

log = logging.getLogger(__name__)
_GAINS = "expected_gains.json"  # of the candidates of `fedspa tune`, by its proxy runs


class Follower(Protocol):
    """Who is told of a run as it is written: each round, its end, and that the folder is let go."""

    def add_round(self, metrics: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


Follow = Callable[[Config, Path], Follower]  # made before anything is written: it may refuse the config


class RunFolder:
    """A fresh folder: `run.out`, or a dated one under runs/. `reopen` is for a run that was interrupted."""

    def __init__(
        self, config: Config, data_name: str, follow: Follow, expected_gains: Sequence[Sequence[float]] | None = None
    ) -> None:
        self._name(Path(config.run.out) if config.run.out is not None else _dated(config, data_name), config, follow)
        with _starting(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            try:
                _check_empty(self.path)
            except ConfigError:
                self.close()
                raise
            if expected_gains is not None:  # before the config: a folder with one can be resumed
                durable.replace_text(self.path / _GAINS, json.dumps(expected_gains) + "\n")
            durable.replace_text(self.path / "config.toml", to_toml(config))

    @classmethod
    def reopen(cls, path: Path, config: Config, follow: Follow) -> Self:
        """The folder of an interrupted run, locked."""
        self = cls.__new__(cls)
        self._name(path, config, follow)
        if not (path / "config.toml").is_file():
            raise ConfigError(f"{path} holds no run (there is no config.toml in it); give the folder of one")
        check_is_run(path)
        with _starting(path):
            self._take_lock()
        return self

    def _name(self, path: Path, config: Config, follow: Follow) -> None:
        self.path, self._lock, self._begun = path, -1, False
        self._follower = follow(config, path)
        self._journal = Journal(path)
        self._resume_command = resume_command(config, path)

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
            (self.path / ENDED).unlink(missing_ok=True)
            self._begun = True

    def add_round(self, metrics: Mapping[str, Any]) -> None:
        self.begin()
        with self._writing():
            self._journal.add(metrics)
        self._follower.add_round(metrics)

    def save(self, state: Checkpoint) -> None:
        """Save a checkpoint, after the metrics of its rounds."""
        from fedspa.runs.checkpoint import save

        with self._writing():
            self._journal.settle()
            save(self.checkpoints, state)

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
            _write_ending(self.path, error)
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
        kept = f"nothing is lost up to the last checkpoint: fix that, then `{self._resume_command}`"
        return worded(FedspaError, lambda why: f"{self.path} cannot be written: {why}; {kept}")


def read_expected_gains(folder: Path) -> list[list[float]] | None:
    """Return what a run of `fedspa tune` was started with; None for another run."""
    path = folder / _GAINS
    try:
        return [[float(gain) for gain in gains] for gains in json.loads(path.read_bytes())] if path.exists() else None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}; restore it from a backup") from None


def resume_command(config: Config, folder: Path) -> str:
    """Return what resumes the run in `folder`: the command line, or Python where something was given there."""
    command = "run" if config.tuning.candidates is None else "tune"  # which also scores it on the test records
    if not (given := _given(config)):
        return f"fedspa {command} --resume {shlex.quote(str(folder))}{_elsewhere(config, folder)}"
    return f"fedspa.{command}(resume={str(folder)!r}, {', '.join(f'{argument}=…' for argument in given)})"


def _elsewhere(config: Config, folder: Path) -> str:
    """Where the data's files lie now, if that is not where the run began with them."""
    try:
        began = load(folder / "config.toml", own_code=False).data.dir
    except ConfigError:  # it begins now
        return ""
    place = config.data.dir
    return "" if place == began else f" --set {shlex.quote(f'data.dir={json.dumps(place)}')}"


def check_given(config: Config, folder: Path, **now: object) -> None:
    """Raise where the run in `folder` was given in Python what is missing now."""
    given = _given(config)
    if any(now[argument] is None for argument in given):
        raise ConfigError(
            f"the run in {folder} was given its {' and '.join(given)} in Python, which no file can name; go on there: "
            f"{resume_command(config, folder)}"
        )


def _given(config: Config) -> list[str]:
    names = {"data": config.data.name, "module": config.model.name, "task": config.task.name}
    return [argument for argument, name in names.items() if name.startswith(GIVEN)]


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


class Journal:
    """The file of one run. It is empty for a new run; a run that resumes calls `rewind`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "metrics.jsonl"

    def add(self, metrics: Mapping[str, Any]) -> None:
        with self._file.open("ab") as file:
            file.write((json.dumps(metrics, allow_nan=False) + "\n").encode())

    def settle(self) -> None:
        """Force the lines to the disk, before a checkpoint counts on them."""
        if self._file.exists():
            durable.force(self._file)
            durable.force_folder(self._file.parent)

    def rewind(self, rounds: int) -> list[RoundMetrics]:
        """Return the lines of the first `rounds` rounds, and remove what follows them."""
        content = self._file.read_bytes() if self._file.exists() else b""
        lines, check = content.split(b"\n")[:-1][:rounds], TypeAdapter(RoundMetrics)
        try:
            found = [check.validate_json(line) for line in lines]
        except ValidationError:
            found = []
        if [line.round for line in found] != list(range(rounds)):
            raise FedspaError(
                f"{self._file} is damaged: it does not hold the {rounds} rounds that the checkpoint counts; restore it "
                "from a backup"
            )
        whole = b"".join(line + b"\n" for line in lines)
        if content != whole:
            durable.replace_bytes(self._file, whole)
        return found


Ending = Literal["stopped", "failed"]
ENDED = "ended.json"


class Stopping(FedspaError):
    """What a run raises that was asked to stop and did: its end, and no failure."""


def _write_ending(folder: Path, error: BaseException) -> None:
    """Beside the run, whatever becomes of the exception. A disk that takes no more is no reason to hide the error."""
    how: Ending = "failed" if isinstance(error, Exception) and not isinstance(error, Stopping) else "stopped"
    with suppress(OSError):
        durable.replace_text(folder / ENDED, json.dumps({"ended": how, "why": _why(error)}) + "\n")


def _why(error: BaseException) -> str:
    """What fedspa says itself. Of foreign code the kind and the place: its words may quote a record, and the folder is
    one that is shown around."""
    root = error.__cause__ or error
    if isinstance(error, FedspaError) and isinstance(root, FedspaError):
        return str(error)
    place = place_of(root)
    return type(root).__name__ + ("" if place is None else f" at {place}")


def read_ending(folder: Path) -> tuple[Ending, str] | None:
    """How the run in `folder` ended, and why; None where it left no word."""
    try:
        found = json.loads((folder / ENDED).read_bytes())
        how, why = found["ended"], str(found["why"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (how, printable(why)) if how in ("stopped", "failed") else None


_OF_A_RUN = ("checkpoint", "ledger.sqlite", "metrics.jsonl", "summary.json")


def check_is_run(folder: Path) -> None:
    """Raise where `folder` holds a project, which would else be taken for a run that was killed before its first round,
    and be trained in. A run writes no code, at whatever instant it is killed. Nor does it make pipes, sockets or
    devices, and to open a pipe would wait for ever."""
    for path in (*folder.iterdir(), *folder.glob("checkpoint/*")):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path} is not a plain file; put the run's own file back from a backup")
    if any(folder.glob("*.py")) and not any((folder / name).exists() for name in _OF_A_RUN):
        start = folder / "config.toml"
        raise ConfigError(f"{folder} holds a config and no run yet; `fedspa run {start}` starts one, under runs/")
