"""Many runs, one folder each: those that ended are kept, those that were cut off go on, the rest begin.

Killed at any instant, a sweep that is called again repeats no run that had ended, and no round that had been saved
(runs/loop.py). Several processes can share the work; they end with the one that started them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

import provenance
from fedspa import durable
from fedspa.errors import ConfigError, FedspaError, PrivacyError, RunWarning, SeededNoiseWarning
from fedspa.running import run as simulate
from fedspa.runs.config import Config, load
from fedspa.runs.rundir import Stopped
from fedspa.runs.setup import Job
from fedspa.server.coordinator import Diverged
from reproduction.published import published_epsilon

_WITH_ACCURACY = ("classification", "binary")  # tasks that are judged by it


@dataclass(frozen=True)
class Planned:
    """A run that a sweep wants: its name there, and a config whose `run.out` is its folder."""

    name: str
    config: Config

    @property
    def folder(self) -> Path:
        assert self.config.run.out is not None
        return Path(self.config.run.out)


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `done`: with a summary; `diverged`; `refused`: no sound guarantee exists for its settings."""

    status: Literal["done", "diverged", "refused"]
    reason: str = ""
    summary: dict[str, Any] | None = None
    commits: tuple[str | None, ...] = ()
    hardware: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """What ended a run in a worker, in words: not every error survives the way between processes."""

    sentence: str | None  # None: it was asked to stop


class Interrupted(FedspaError):
    """The sweep was asked to stop; what ended is kept and what ran can go on."""


def sweep(planned: Sequence[Planned], jobs: int, stop: Callable[[], bool]) -> Iterator[tuple[Planned, Outcome]]:
    """Each run with its outcome, first those that ended earlier. `jobs` processes at once; one means this one."""
    left = []
    for run in planned:
        if run.config.task.name not in _WITH_ACCURACY:
            raise ConfigError(
                f"task.name is {run.config.task.name!r}; a sweep compares accuracies: {', '.join(_WITH_ACCURACY)}"
            )
        if _begun(run):
            _same_settings(run)  # for all of them before any trains: nobody waits hours to be told
    for run in planned:
        if (found := ended(run.folder)) is not None:
            yield run, found
        else:
            left.append(run)
    yield from _here(left, stop) if jobs == 1 else _processes(left, jobs, stop)


def settle(run: Planned, stop: Callable[[], bool]) -> Outcome:
    """Bring one run to its end, from wherever it is."""
    folder, begun = run.folder, _begun(run)
    try:
        for told in (SeededNoiseWarning, RunWarning):  # by the table, the curves and each run's own report
            warnings.simplefilter("ignore", told)
        given = _moved(run) if begun else run.config
        simulate(given, resume=folder if begun else None, progress=False, on_start=_sign, stop=stop)
    except Diverged as error:
        durable.replace_text(folder / "diverged.json", json.dumps({"reason": f"{error.sign}, round {error.round + 1}"}))
    except PrivacyError as error:
        return Outcome("refused", str(error))
    found = ended(folder)
    assert found is not None
    return found


def ended(folder: Path) -> Outcome | None:
    """The outcome that a folder holds; None while its run is not over."""
    attempts = _attempts(folder / "attempts.jsonl")
    commits = tuple(dict.fromkeys(attempt.commit for attempt in attempts))
    hardware = tuple(dict.fromkeys(attempt.hardware for attempt in attempts))
    if (folder / "summary.json").is_file():
        summary = _read(folder / "summary.json", _Summary).model_dump()
        if summary.get("delta") is not None:
            terms = summary["participations_max"], summary["delta"]
            summary["epsilon_published"] = published_epsilon(folder / "ledger.sqlite", *terms)
        return Outcome("done", "", summary, commits, hardware)
    if (folder / "diverged.json").is_file():
        return Outcome("diverged", _read(folder / "diverged.json", _Diverged).reason, None, commits, hardware)
    return None


class _Summary(BaseModel):
    """What a cell computes with; all else in a summary is only passed on."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    accuracy_best: float
    accuracy_last: float
    private: bool | str
    epsilon: float | None
    epsilon_replace_one: float | None
    payload_bytes: float
    uplink_bytes: float
    seconds: float


class _Diverged(BaseModel):
    reason: str


class _Attempt(BaseModel):
    commit: str | None
    hardware: str


Content = TypeVar("Content", bound=BaseModel)


def _read(path: Path, content: type[Content]) -> Content:
    try:
        return content.model_validate_json(path.read_bytes())
    except OSError as error:
        raise FedspaError(f"{path} cannot be read: {error.strerror or error}; mend that and try again") from None
    except ValidationError as error:
        first = error.errors()[0]
        what = ".".join(map(str, first["loc"])) or "JSON"
        raise FedspaError(
            f"{path} is damaged ({what}: {first['msg']}); restore it, or delete the folder to run it again"
        ) from None


def _attempts(path: Path) -> list[_Attempt]:
    """A line each. One that was torn by a kill is left out; one that cannot be read is of an unknown source."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        if line.endswith(b"}"):
            try:
                found.append(_Attempt.model_validate_json(line))
            except ValidationError:
                found.append(_Attempt(commit=None, hardware="unknown"))
    return found


def _begun(run: Planned) -> bool:
    return (run.folder / "config.toml").is_file()


def _sign(job: Job, folder: Path) -> None:
    """Each attempt at a run leaves a line: who finds the result can tell which source and machine made it."""
    line = {"commit": provenance.commit(), "hardware": provenance.hardware(job.config.run.device)}
    with (folder / "attempts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _same_settings(run: Planned) -> None:
    """A folder from earlier counts only for the same settings; threads, device and the data's place may be others."""
    begun = load(run.folder / "config.toml")
    found, wanted = begun.model_dump(), run.config.model_dump()
    for config in (found, wanted):
        config["run"] = {"seed": config["run"]["seed"]}
        del config["data"]["dir"]
    differing = [
        f"{section}.{key}"
        for section in wanted
        for key in wanted[section]
        if found[section][key] != wanted[section][key] and f"{section}.{key}" not in begun.run.chosen
    ]
    if differing:
        raise ConfigError(
            f"{run.folder} holds a run with other settings ({', '.join(differing)}); name another --out, or delete it"
        )


def _moved(run: Planned) -> Config:
    """The config that a run began with; the files that it reads may have gone elsewhere since."""
    place = run.config.data.dir
    return load(run.folder / "config.toml", [] if place is None else [f"data.dir={json.dumps(str(place))}"])


def _here(planned: Sequence[Planned], stop: Callable[[], bool]) -> Iterator[tuple[Planned, Outcome]]:
    for run in planned:
        if stop():
            raise Interrupted("stopped")
        try:
            yield run, settle(run, stop)
        except Stopped:
            raise Interrupted("stopped") from None


def _processes(planned: Sequence[Planned], jobs: int, stop: Callable[[], bool]) -> Iterator[tuple[Planned, Outcome]]:
    context = multiprocessing.get_context("spawn")  # a forked torch may hang on its parent's threads
    asked = context.Event()
    with ProcessPoolExecutor(max(1, min(jobs, len(planned))), context, _begin, (asked, os.getpid())) as pool:
        with _signals_held():
            waiting: dict[Future[Outcome | Failure], Planned] = {pool.submit(_work, run): run for run in planned}
        try:
            while waiting:
                done, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                if stop():
                    raise Interrupted("stopped")
                for future in done:
                    run, result = waiting.pop(future), future.result()
                    if isinstance(result, Failure):
                        raise FedspaError(result.sentence) if result.sentence is not None else Interrupted("stopped")
                    yield run, result
        except BrokenProcessPool:
            if stop():
                raise Interrupted("stopped") from None
            raise FedspaError(
                "a process that trained was ended from outside (no memory left?); the same command goes on, with fewer "
                "--jobs if need be"
            ) from None
        finally:
            asked.set()
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Processes started within are born with Ctrl-C blocked, for one during their imports would end in a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_asked: Callable[[], bool] = lambda: False  # noqa: E731


def _begin(asked: Any, parent: int) -> None:
    """A worker leaves Ctrl-C to the process that started it, and ends with it, however that ends."""
    global _asked
    _asked = asked.is_set
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # at any instant: runs can be killed

    threading.Thread(target=watch, daemon=True).start()


def _work(run: Planned) -> Outcome | Failure:
    if _asked():
        return Failure(None)
    try:
        return settle(run, _asked)
    except Stopped:
        return Failure(None)
    except FedspaError as error:
        return Failure(str(error))
