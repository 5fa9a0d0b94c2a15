"""Worker processes that train a simulation's agents, as actors of Ray on this machine or on a cluster.

The driver pays, draws keys and aggregates, as without workers. A round's agents are cut into batches; a worker that is
free trains the next one, and returns its payloads. An agent's update depends on its own task only, so it has the same
bits wherever it is made. A batch whose worker died is trained again by another, and a new worker takes its place.

θ and records go through Ray's object store, which may spill to a disk. Keys do not: a batch with the keys of its agents
is an argument below 100 KiB, which Ray sends within the call.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedspa.agent.participate import Invitation
from fedspa.algorithms import Agent
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError, FedspaError, first_line
from fedspa.examples import Examples
from fedspa.runs.checkpoint import Fact
from fedspa.runs.identity import ROUNDING, of_machine
from fedspa.runs.setup import Simulated
from fedspa.runs.simulate import simulate_uploads

log = logging.getLogger(__name__)

MOST_LOSSES = 3  # of one batch, or of workers in a row that end as they start
MOST_AGENTS = 256  # in a batch
LARGEST_BATCH = 90_000  # bytes; from 100 KiB on Ray puts an argument into its object store
START_SECONDS = 120.0
_BATCHES = 4  # per worker and round, so that a slow one holds up nobody for long
# Ray's own messages are in its logs: what a user must know of it, a line of ours says.
_QUIET = {"log_to_driver": False, "logging_level": logging.CRITICAL}


class WorkersLost(FedspaError):
    """Workers end as often as they are started, or none can be started."""


class Turn(NamedTuple):
    """An agent in one round."""

    name: str
    number: int
    mask_seed: bytes
    key: bytes
    exact: bool


class Worker:
    """The actor: an engine of its own. Every answer is (True, value) or (False, error)."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._device = "cpu"

    def start(self, engine: bytes, device: str, path: tuple[str, ...]) -> tuple[bool, Any]:
        """Build the engine by its pickled constructor; return the facts of this machine that may change a bit."""

        def build() -> dict[str, Fact]:
            torch.set_num_threads(1)
            sys.path += [folder for folder in path if folder not in sys.path]
            try:
                make: Callable[[], Engine] = pickle.loads(engine)
            except (ImportError, AttributeError) as error:
                raise ConfigError(
                    f"a worker cannot load the model or its task: {first_line(error)}; install the code on every "
                    "machine of the cluster"
                ) from error
            self._device, self._engine = device, make()
            return {"engine": self._engine.name, **of_machine(device)}

        return _answer(build)

    def train(self, invitation: Invitation, batch: bytes, *records: Examples) -> tuple[bool, Any]:
        """Return the payloads of a batch of agents by name, and what was logged meanwhile."""

        def run() -> tuple[dict[str, bytes], list[tuple[str, int, str]]]:
            assert self._engine is not None
            turns: list[Turn] = pickle.loads(batch)
            here = replace(invitation, theta=invitation.theta.to(self._device))
            agents = {
                turn.name: Agent(turn.number, *held, turn.mask_seed, turn.key, turn.exact)
                for turn, held in zip(turns, records, strict=True)
            }
            with _collect_warnings() as logged:
                return simulate_uploads(here, agents, self._engine), logged

        return _answer(run)


class WorkerPool:
    """`workers` actors of `ray`, each made by the arguments of `Worker.start`. An engine trains `at_once` agents
    together, or, with None, all of a batch. `check` raises where the facts of a worker's machine do not fit the run."""

    def __init__(
        self,
        ray: Any,
        workers: int,
        made: tuple[bytes, str, tuple[str, ...]],
        options: Mapping[str, Any],
        at_once: int | None,
        check: Callable[[Mapping[str, Fact]], None],
    ) -> None:
        self._ray, self._workers, self._at_once, self._check = ray, workers, at_once, check
        self._actor, self._made = ray.remote(Worker).options(**options), tuple(map(ray.put, made))
        self._records: dict[str, Any] = {}
        self._alive: list[Any] = []
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}  # the answer to come → the actor that gives it
        self._training: dict[Any, tuple[Any, list[str]]] = {}
        self.lost = 0
        self._failed_starts = 0
        try:
            for _ in range(workers):
                self._start()
            self._await_all()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for actor in self._alive:
            with suppress(Exception):  # its cluster may be gone, too
                self._ray.kill(actor)
        self._alive = []

    def train(self, invitation: Invitation, agents: Mapping[str, Agent]) -> dict[str, bytes]:
        """Return every agent's payload, in their order."""
        try:
            return self._train(invitation, agents)
        except BaseException:  # a pool that did not end a round begins no other
            self.close()
            raise

    def _train(self, invitation: Invitation, agents: Mapping[str, Agent]) -> dict[str, bytes]:
        theta = invitation.theta.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        announced = self._ray.put(replace(invitation, theta=theta))
        waiting = deque(self._batches(agents))
        losses: Counter[str] = Counter()
        payloads: dict[str, bytes] = {}
        while len(payloads) < len(agents):
            while waiting and self._idle:
                self._submit(self._idle.pop(), waiting.popleft(), agents, announced)
            actor, names, answer = self._next()
            if answer is None:
                self.lost += 1
                losses.update(names)
                if max(losses[name] for name in names) >= MOST_LOSSES:
                    raise WorkersLost(
                        f"{MOST_LOSSES} workers were lost while they trained {', '.join(names[:3])}"
                        f"{' and others' * (len(names) > 3)}; look for memory that ran out (fewer run.workers or "
                        "run.threads, a smaller algorithm.batch), then --resume"
                    )
                log.warning("a worker was lost with %d agents: they are trained again", len(names))
                waiting.append(names)
                self._start()
            elif names:
                made, logged = answer
                payloads |= made
                self._idle.append(actor)
                for name, level, text in logged:
                    logging.getLogger(name).log(level, "%s", text)
        return {name: payloads[name] for name in agents}

    def _batches(self, agents: Mapping[str, Agent]) -> list[list[str]]:
        """Cut a round into batches, those with most records first."""
        names = sorted(agents, key=lambda name: -agents[name].records)
        each = -(-len(names) // self._workers)
        if self._at_once is not None:  # whole rows of what an engine trains together
            each = -(-len(names) // (self._workers * _BATCHES * self._at_once)) * self._at_once
        each = min(each, MOST_AGENTS)
        return [names[first : first + each] for first in range(0, len(names), each)]

    def _submit(self, actor: Any, names: list[str], agents: Mapping[str, Agent], announced: Any) -> None:
        for name in names:
            if name not in self._records:
                self._records[name] = self._ray.put(agents[name].take(torch.arange(agents[name].records)))
        turns = [Turn(name, (a := agents[name]).number, a.mask_seed, a.key, a.exact) for name in names]
        answer = actor.train.remote(announced, pickle.dumps(turns), *(self._records[name] for name in names))
        self._training[answer] = actor, names

    def _next(self) -> tuple[Any, list[str], Any]:
        """Wait for a worker, which trained the agents named, or none where it is new; without an answer it is lost."""
        waited = [*self._starting, *self._training]
        done, _ = self._ray.wait(waited, num_returns=1, timeout=None if self._training else START_SECONDS)
        if not done:
            raise WorkersLost(
                f"no worker came up within {START_SECONDS:.0f} s: {describe_resources(self._ray)}; lower run.workers "
                "or run.threads, or wait until others are done, then --resume"
            )
        if done[0] in self._starting:
            self._join(done[0])
            return None, [], ()
        actor, names = self._training.pop(done[0])
        return actor, names, self._result(done[0])

    def _start(self) -> None:
        if self._failed_starts < MOST_LOSSES:
            actor = self._actor.remote()
            self._alive.append(actor)
            self._starting[actor.start.remote(*self._made)] = actor
        elif not self._starting and not self._training and not self._idle:
            raise WorkersLost("every worker ended as it was started; look for memory that ran out, then --resume")

    def _join(self, ready: Any) -> None:
        actor, facts = self._starting.pop(ready), self._result(ready)
        if facts is None:
            self.lost += 1
            self._failed_starts += 1
            log.warning("a worker was lost as it started")
            self._start()
            return
        self._failed_starts = 0
        self._idle.append(actor)
        self._check(facts)

    def _await_all(self) -> None:
        """A run begins with the workers it asked for."""
        end = time.monotonic() + START_SECONDS
        while self._starting:
            left = max(0.0, end - time.monotonic())
            done, _ = self._ray.wait(list(self._starting), num_returns=1, timeout=left)
            if not done:
                raise WorkersLost(
                    f"{len(self._idle)} of {self._workers} workers came up within {START_SECONDS:.0f} s: "
                    f"{describe_resources(self._ray)}; lower run.workers or run.threads, or wait until others are done"
                )
            self._join(done[0])

    def _result(self, answer: Any) -> Any:
        """Return the answer; None where the worker that was to give it is lost."""
        try:
            good, value = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            log.debug("a worker was lost: %s", first_line(error))
            return None
        if not good:
            raise value
        return value


@contextmanager
def start_workers(job: Simulated) -> Iterator[WorkerPool]:
    """Within it, as many workers are there as `run.workers` says."""
    run = job.config.run
    gpus = int(torch.device(run.device).type == "cuda")
    with connected(run.workers, run.threads, gpus) as ray:
        try:  # with code that no worker could import, as that of a notebook
            engine = ray.cloudpickle.dumps(job.make_engine)
        except Exception as error:  # a user's own object may raise anything
            raise ConfigError(
                f"the model or its task cannot travel to a worker: {first_line(error)}; leave out what cannot be "
                "pickled, or train in this process: run.workers = 1"
            ) from error
        options = {"num_cpus": run.threads, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        made = (engine, run.device, tuple(map(str, sys.path)))
        # A GPU trains all agents that it is given as one stack; a CPU one per thread.
        at_once = None if gpus else run.threads
        with closing(WorkerPool(ray, run.workers, made, options, at_once, _check_alike(job))) as pool:
            yield pool


def _check_alike(job: Simulated) -> Callable[[Mapping[str, Fact]], None]:
    """Return a check that a worker computes what this process would. Where noise is drawn anew nobody expects the same
    bits, so that a difference in rounding is a warning."""
    here = {"engine": job.engine.name, **of_machine(job.config.run.device)}
    repeated, warned = job.config.privacy.noise == "seeded", set[str]()

    def check(about: Mapping[str, Fact]) -> None:
        for key, value in about.items():
            if value == here[key]:
                continue
            line = f"the {key} of a worker is {value!r}, and here it is {here[key]!r}"
            if key not in ROUNDING or repeated:
                raise ConfigError(f"{line}; make the machines of the Ray cluster alike in this, or leave that one out")
            if key not in warned:
                log.warning("%s; its agents' updates may round otherwise", line)
                warned.add(key)

    return check


def describe_resources(ray: Any) -> str:
    there = ray.cluster_resources()
    return f"Ray has {there.get('CPU', 0):g} cores and {there.get('GPU', 0):g} GPUs in all"


@contextmanager
def connected(workers: int, cores: int, gpus: int) -> Iterator[Any]:
    """Ray with room for workers of so many cores and GPUs each: the cluster that RAY_ADDRESS names, or a Ray of the
    run's own that ends with it."""
    cluster = os.environ.get("RAY_ADDRESS")
    ray = _import_ray(workers, alone=cluster is None)
    ours = not ray.is_initialized()  # else somebody's own Ray in this process, which stays as it is
    reaper = None
    if ours and cluster is None:
        reaper = _start_local(ray, workers * cores, None if gpus else 0)
    elif ours:
        _connect(ray, str(cluster))
    try:
        there = ray.cluster_resources()
        if there.get("CPU", 0) < workers * cores or there.get("GPU", 0) < workers * gpus:
            each = f"{cores} cores (run.threads)" + " and a GPU" * bool(gpus)
            room = describe_resources(ray)
            raise ConfigError(f"run.workers is {workers}, each with {each}; {room}: lower one of them")
        yield ray
    finally:
        if ours:
            ray.shutdown()
        if reaper is not None:
            reaper.communicate()


def _import_ray(workers: int, *, alone: bool) -> Any:
    fresh = "ray" not in sys.modules
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a worker without a GPU is no cause to warn
    if alone and fresh and "RAY_AUTH_MODE" not in os.environ:
        # Ray listens on every address of the machine, and runs what it is sent: only for who knows this.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"run.workers is {workers}, and workers are Ray's: pip install 'fedspa[ray]', or leave it at 1"
        ) from error
    return ray


def _connect(ray: Any, cluster: str) -> None:
    try:
        if cluster != "auto":  # Ray itself would try for minutes
            host, _, port = cluster.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=cluster, **_QUIET)
    except Exception as error:  # by what was wrong, Ray raises one of many
        raise ConfigError(
            f"RAY_ADDRESS is {cluster!r}, and no cluster took this process in: {first_line(error).rstrip('.')}; it "
            "must be 'auto' or host:port; start Ray on this machine by `ray start --head`, or unset it"
        ) from error


def _start_local(ray: Any, cores: int, gpus: int | None) -> subprocess.Popen[str]:
    """Start a Ray of this run's own, and the process that ends it when this one ends, however that ends."""
    folder = Path(tempfile.mkdtemp(prefix="fedspa-", dir="/tmp"))  # sockets want a short path
    others = _children()
    try:
        ray.init(
            address="local", num_cpus=cores, num_gpus=gpus, include_dashboard=False, _temp_dir=str(folder), **_QUIET
        )
        return _start_reaper(folder, _children() - others)
    except BaseException as error:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, Exception):
            raise ConfigError(f"Ray does not start here: {first_line(error)}; run.workers = 1 needs none") from error
        raise


def _children() -> set[int]:
    import psutil  # Ray brings its own

    return {child.pid for child in psutil.Process().children(recursive=True)}


# Some of Ray's processes outlive one that is killed. Standard input is a pipe that nobody writes to, and that ends with
# whoever holds its other end. Processes are held by object and not by number, which may be another's by then.
_REAPER = """
import shutil, sys, time
place, folder, *pids = sys.argv[1:]
sys.path.append(place)
import psutil
watched = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
print("ready", flush=True)
sys.stdin.read()
def alive():
    return [each for each in watched if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
for each in alive():
    each.kill()
end = time.monotonic() + 10
while alive() and time.monotonic() < end:
    time.sleep(0.02)
shutil.rmtree(folder, ignore_errors=True)
"""


def _start_reaper(folder: Path, of_ray: set[int]) -> subprocess.Popen[str]:
    """Out of reach of a Ctrl-C, and watching before anything else happens."""
    import psutil

    place = str(Path(psutil.__file__).parents[1])
    found = subprocess.Popen(
        [sys.executable, "-c", _REAPER, place, str(folder), *map(str, of_ray)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert found.stdout is not None
    found.stdout.readline()
    return found


def _answer(function: Callable[[], object]) -> tuple[bool, Any]:
    """Return what `function` returns, or the error that it raises, which is the caller's to raise."""
    try:
        return True, function()
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # a user's own type, whose arguments do not make it again
            return False, RuntimeError(f"{type(error).__name__}: {error}")
        return False, error


@contextmanager
def _collect_warnings() -> Iterator[list[tuple[str, int, str]]]:
    """Collect what is logged meanwhile, for the driver to log."""
    logged: list[tuple[str, int, str]] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append((record.name, record.levelno, record.getMessage()))

    handler, logger = Collector(logging.WARNING), logging.getLogger("fedspa")
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)
