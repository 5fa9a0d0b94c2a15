"""The run's folder: config.toml, metrics.jsonl (a line a round), checkpoint/, summary.json,
model.safetensors, ledger, report.html.

A folder is one run's and is locked while that runs. The lock is the kernel's and ends with the process, however that
ends, so nothing stale is left to clear away. No clock is in metrics.jsonl, so that two runs can be compared bit for
bit.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import TypeAdapter, ValidationError

from fedspa import durable
from fedspa.agent.ledger.ledger import has_entries
from fedspa.data.plugin import GIVEN, TABLES
from fedspa.errors import ConfigError, FedspaError, one_line, os_errors_as, quoted
from fedspa.runs.config import Config, load, to_toml

if TYPE_CHECKING:
    from fedspa.learning.flat import FlatModel
    from fedspa.runs.checkpoint import Checkpoint

# What agents say of trials: the share of their records whose class was found; of other tasks, the mean of e^(−loss).
AGENTS_SCORE = "agents' score"
# Scores of which less is better, scores that are shares of a whole, and what people call them.
LOWER = frozenset({"loss", "rmse", "mae", "perplexity", "log_loss"})
SHARES = frozenset({"accuracy", "balanced_accuracy", "token_accuracy", "exact_match", AGENTS_SCORE})
_CALLED = {"rmse": "RMSE", "mae": "MAE", "r2": "R²", "f1": "F1", "auc": "AUC"}
_WORDS = SHARES | {"log_loss", "average_precision"}


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """What is known after a round. `epsilon` is the largest over agents so far, verified; None without privacy.
    `epsilon_worst_case` is the same against one who colludes with all others, where agents' uploads are aggregated;
    None where they are not, or where it is infinite.

    `scores` are the task's and the user's own, by name; `accuracy` is a classifier's among them, else None. `trials` is
    what agents said of the settings that were tried, from 0 to 1 by the candidate's number, in a round in which they
    scored and did not train; None in all others.
    `private` is False where there is no ε, and where it does not count: a clip value read off the data, seeded noise.
    """

    round: int
    accuracy: float | None
    loss: float
    agents: int
    uplink_bytes: int
    epsilon: float | None
    private: bool
    clip_value: float | None
    scores: dict[str, float | None] = field(default_factory=dict)
    epsilon_worst_case: float | None = None
    trials: dict[int, float | None] | None = None

    @property
    def headline(self) -> str:
        """Return the name of the score that the run is judged by."""
        return next(iter(self.scores), "loss" if self.accuracy is None else "accuracy")

    @property
    def score(self) -> float:
        """Its value; NaN where the examples do not say."""
        found = self.scores.get(self.headline, self.accuracy)
        return self.loss if self.headline == "loss" else math.nan if found is None else found


def better(name: str) -> Callable[[Iterable[float]], float]:
    """`max` or `min`: which of several values of that score is the best."""
    return min if name in LOWER else max


def label(name: str) -> str:
    """A score's name for people, within a sentence; a metric of the user's own has the name that it was given, or its
    function's."""
    return _CALLED.get(name, name.replace("_", " ") if name in _WORDS else name.rpartition(":")[2])


def heading(name: str) -> str:
    """Return the label for the beginning of a line."""
    return label(name)[:1].upper() + label(name)[1:]


def shown_score(name: str, value: float | None) -> str:
    """Format a score: shares as percentages."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.2%}" if name in SHARES else f"{value:.4g}"


log = logging.getLogger(__name__)


def ledger_of(folder: Path, config: Config) -> Path:
    """Return the ledger of the run in `folder`: its own, or `run.ledger`, beside the folder if both were moved."""
    if config.run.ledger is None:
        return folder / "ledger.sqlite"
    path = Path(config.run.ledger)
    beside = folder.parent / path.name
    return beside if not path.exists() and beside.exists() else path


def runs_folder(config: Config) -> Path:
    """Return the folder that the run's folder lies in."""
    return Path("runs") if config.run.out is None else Path(config.run.out).parent


class RunFolder:
    """The folder of a run, locked: a fresh one (`run.out`, or dated, under runs/), or `resume` of one that was
    interrupted."""

    def __init__(self, config: Config, data_name: str, resume: Path | None = None) -> None:
        fresh = _dated(config, data_name) if config.run.out is None else Path(config.run.out)
        self.path, self._lock = resume or fresh, -1
        self._journal = Journal(self.path)
        self._resume_command = resume_command(config, self.path)
        if resume is not None:
            check_is_run(resume)
        with _starting(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if resume is not None:
                return
            try:
                _check_empty(self.path)
            except ConfigError:
                self.close()
                raise
            durable.replace_text(self.path / "config.toml", to_toml(config))

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    def started(self) -> bool:
        """Return whether anything can have been spent: the first checkpoint is saved before the first entry."""
        return (self.path / "metrics.jsonl").exists() or has_entries(self.ledger)

    def rewind(self, state: Checkpoint) -> list[RoundMetrics]:
        """Bring metrics.jsonl to the rounds of this checkpoint, which are returned."""
        with self._writing():
            return self._journal.rewind(state.state.round)

    def add_round(self, metrics: Mapping[str, Any]) -> None:
        with self._writing():
            self._journal.add(metrics)

    def save(self, state: Checkpoint) -> None:
        """Save a checkpoint, after the metrics of its rounds."""
        from fedspa.runs.checkpoint import save

        with self._writing():
            self._journal.settle()
            save(self.checkpoints, state)

    def save_model(self, model: FlatModel) -> None:
        """The trained module as it is now. What its state_dict cannot say is left out: its parameters are not. Where
        frozen weights are quantised, the file has the trained parameters only."""
        from safetensors.torch import save_file, save_model

        from fedspa.learning.layers import is_quantised

        file, module = self.path / "model.safetensors", model.module
        trained = {name: values.detach().contiguous() for name, values in zip(model.names, model.parameters())}
        with self._writing():
            if is_quantised(module):
                durable.replace_tensors(file, lambda draft: save_file(trained, str(draft)))
                return
            try:
                durable.replace_tensors(file, lambda draft: save_model(module, str(draft)))
            except OSError:
                raise
            except Exception as error:  # a module may have a state_dict of its own
                log.warning("model.safetensors has the trained parameters only: %s", one_line(error))
                durable.replace_tensors(file, lambda draft: save_file(trained, str(draft)))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The summary, after the model: where there is one, the run is done."""
        with self._writing():
            write_summary(self.path, summary)
        self.close()

    def close(self) -> None:
        """Let the folder go."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
        return os_errors_as(FedspaError, f"{self.path} cannot be written", kept)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    durable.replace_text(folder / "summary.json", text)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run; None if there is none. Raise if it is damaged."""
    path = folder / "summary.json"
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or "epsilon" not in found:
        raise ConfigError(f"{path} is damaged; restore it from a copy, or delete it and resume the run")
    return found


def read_identity(folder: Path) -> tuple[str | None, int | None]:
    """Return the run's name in ledgers and d, from its newest checkpoint that can be opened."""
    from safetensors import SafetensorError, safe_open

    for path in sorted((folder / "checkpoint").glob("round-*.safetensors"), reverse=True):
        try:
            with safe_open(path, framework="numpy") as file:
                header = json.loads(file.metadata()["fedspa"])
                return str(header["run"]), int(file.get_slice("theta").get_shape()[0])
        except (OSError, SafetensorError, IndexError, ValueError, TypeError, KeyError):
            continue
    return None, None


def read_metrics(path: Path) -> tuple[RoundMetrics, ...]:
    """Return the complete lines of a run's metrics, in order. A last line without its end is being written, or was when
    the run died."""
    return tuple(_parsed_metrics(path, path.read_bytes().rpartition(b"\n")[0])) if path.exists() else ()


def _parsed_metrics(path: Path, lines: bytes) -> Iterator[RoundMetrics]:
    check = TypeAdapter(RoundMetrics)
    try:
        yield from (check.validate_json(line) for line in lines.splitlines())
    except ValidationError:
        raise ConfigError(f"{path} is damaged; restore it from a copy") from None


ASKED = "asked.jsonl"  # of a deployment's server: which agents it asked in which attempt at a round


def read_asked(path: Path) -> Iterator[tuple[int, int, list[int]]]:
    """Yield round, attempt and agents of each request of a server. A last line without its end was never sent."""
    complete = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(complete, 1):
        try:
            entry = json.loads(line)
            numbers = [entry["round"], entry.get("attempt", 1), *entry["agents"]]
            if any(type(each) is not int or each < 0 for each in numbers):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FedspaError(
                f"{path}, line {number}: not a line that this server wrote; put the file back from a backup"
            ) from None
        yield numbers[0], numbers[1], numbers[2:]


def resume_command(config: Config, folder: Path) -> str:
    """Return what resumes the run in `folder`: the command line, or Python where something was given there."""
    command = "run" if config.tuning.candidates is None else "tune"  # which also scores it on the test records
    if not (given := _given(config)):
        return f"fedspa {command} --resume {shlex.quote(str(folder))}{_elsewhere(config, folder)}"
    return f"fedspa.{command}(resume={str(folder)!r}, {', '.join(f'{argument}=…' for argument in given)})"


def _elsewhere(config: Config, folder: Path) -> str:
    """Return where the data's files lie now, if that is not where the run began with them."""
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
            f"the run in {folder} was given its {' and '.join(given)} in Python, which no file can name; resume it "
            f"there: {resume_command(config, folder)}"
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
    return os_errors_as(ConfigError, f"run.out is {path}", "name a folder to write to")


def _dated(config: Config, data_name: str) -> Path:
    """runs/<algorithm>-<data>-<UTC time>, with a number behind it where two start within one second."""
    first = Path(data_name.partition(TABLES)[0].replace(":", "."))  # of several tables
    data = re.sub(r"[^\w.-]", "_", first.stem)[:40].strip("_") or first.parent.name or "data"  # whatever it is called
    stem = f"{config.algorithm.name}-{data}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    path, number = Path("runs", stem), 1
    while path.exists():
        number += 1
        path = Path("runs", f"{stem}-{number}")
    return path


class Journal:
    """The file metrics.jsonl of one run. It is empty for a new run; a run that resumes calls `rewind`."""

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
        whole = b"".join(line + b"\n" for line in content.split(b"\n")[:-1][:rounds])
        found = list(_parsed_metrics(self._file, whole))
        if [line.round for line in found] != list(range(rounds)):
            raise FedspaError(
                f"{self._file} is damaged: it does not hold the {rounds} rounds that the checkpoint counts; restore it "
                "from a backup"
            )
        if content != whole:
            durable.replace_bytes(self._file, whole)
        return found


class Stopping(FedspaError):
    """What a run raises that was asked to stop and did: its end, and no failure."""


class Stopped(Stopping):
    """A run that was asked to stop did, after a whole round, and can be resumed."""

    def __init__(self, folder: Path, done: int, config: Config) -> None:
        super().__init__(
            f"stopped after round {done} of {config.federation.rounds}; to resume: {resume_command(config, folder)}"
        )


_OF_A_RUN = ("checkpoint", "ledger.sqlite", "metrics.jsonl", "summary.json")


def check_is_run(folder: Path) -> None:
    """Raise where `folder` holds no run, or a project, which would else be taken for a run that was killed before its
    first round, and be trained in. A run writes no code, at whatever instant it is killed."""
    start = folder / "config.toml"
    try:
        there = start.is_file()
    except (OSError, ValueError):  # a name that no folder can have
        there = False
    if not there:
        raise ConfigError(f"{quoted(str(folder))} holds no run: there is no config.toml; give the folder of one")
    if any(folder.glob("*.py")) and not any((folder / name).exists() for name in _OF_A_RUN):
        raise ConfigError(f"{folder} holds a config and no run yet; `fedspa run {start}` starts one, under runs/")
