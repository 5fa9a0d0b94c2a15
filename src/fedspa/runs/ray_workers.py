"""Worker processes that train a simulation's agents, as actors of Ray on this machine or on a cluster.

The driver pays, draws keys and aggregates, as without workers. A round's agents are cut into batches; a worker that is
free trains the next one, and returns its payloads. An agent's update depends on its own task only, so it has the same
bits wherever it is made. Where a worker died, Ray starts a new one and gives it the batch again.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedspa.agent.participate import Request
from fedspa.algorithms import Agent
from fedspa.engine.local import Engine
from fedspa.errors import ConfigError, FedspaError, first_line
from fedspa.examples import Examples
from fedspa.runs.checkpoint import ROUNDING, Fact, of_machine
from fedspa.runs.local import simulate_uploads
from fedspa.runs.setup import Simulated

log = logging.getLogger(__name__)

MOST_LOSSES = 3  # of one batch
MOST_STARTS = 16  # of one worker
MOST_AGENTS = 256  # in a batch
LARGEST_BATCH = 90_000  # bytes; from 100 KiB on Ray puts an argument into its object store
START_SECONDS = 120.0
_BATCHES = 4  # per worker and round, so that a slow one holds up nobody for long
# Ray's own messages are in its logs: what a user must know of it, a line of ours says.
_QUIET = {"log_to_driver": False, "logging_level": logging.CRITICAL}


class WorkerFailure(FedspaError):
    """Workers end as often as they are started, or none can be started."""


class Turn(NamedTuple):
    """An agent in one round."""

    name: str
    number: int
    mask_seed: bytes
    key: bytes
    exact: bool


class Worker:
    """The actor: an engine of its own, by its pickled constructor. Every answer is (True, value) or (False, error)."""

    def __init__(self, engine: bytes, device: str, path: tuple[str, ...]) -> None:
        def make() -> tuple[Engine, dict[str, Fact]]:
            torch.set_num_threads(1)
            sys.path += [folder for folder in path if folder not in sys.path]
            try:
                build: Callable[[], Engine] = pickle.loads(engine)
            except (ImportError, AttributeError) as error:
                raise ConfigError(
                    f"a worker cannot load the model or its task: {first_line(error)}; install the code on every "
                    "machine of the cluster"
                ) from error
            made = build()
            return made, {"engine": made.name, **of_machine(device)}

        self._device, self._made = device, _answer(make)

    def facts(self) -> tuple[bool, Any]:
        """Return the facts of this machine that may change a bit."""
        good, made = self._made
        return good, made[1] if good else made

    def train(self, request: Request, batch: bytes, *records: Examples) -> tuple[bool, Any]:
        """Return the payloads of a batch of agents by name, what was logged meanwhile, and the facts."""
        good, made = self._made
        if not good:
            return good, made

        def run() -> tuple[dict[str, bytes], list[tuple[str, int, str]], dict[str, Fact]]:
            (engine, facts), turns = made, pickle.loads(batch)
            here = replace(request, theta=request.theta.to(self._device))
            agents = {
                turn.name: Agent(turn.number, *held, turn.mask_seed, turn.key, turn.exact)
                for turn, held in zip(turns, records, strict=True)
            }
            with _collect_warnings() as logged:
                return simulate_uploads(here, agents, engine), logged, facts

        return _answer(run)


class WorkerPool:
    """`workers` actors of `ray`, each made by the arguments of `Worker`. Ray starts one anew that was lost, and repeats
    its batch. An engine trains `at_once` agents together, or, with None, all of a batch. `check` raises where the facts
    of a worker's machine do not fit the run."""

    def __init__(
        self,
        ray: Any,
        workers: int,
        made: tuple[bytes, str, tuple[str, ...]],
        options: Mapping[str, Any],
        at_once: int | None,
        check: Callable[[Mapping[str, Fact]], None],
    ) -> None:
        self._ray, self._at_once, self._check = ray, at_once, check
        kind = ray.remote(Worker).options(**options)
        self._made = [ray.put(each) for each in made]  # held: Ray makes an actor anew of what is still in its store
        self._actors = [kind.remote(*self._made) for _ in range(workers)]
        self._records: dict[str, Any] = {}
        try:
            self._await_all()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for actor in self._actors:
            with suppress(Exception):  # its cluster may be gone, too
                self._ray.kill(actor)
        self._actors = []

    def _await_all(self) -> None:
        """A run begins with the workers it asked for."""
        asked = [actor.facts.remote() for actor in self._actors]
        done, waiting = self._ray.wait(asked, num_returns=len(asked), timeout=START_SECONDS)
        if waiting:
            raise WorkerFailure(
                f"{len(done)} of {len(asked)} workers came up within {START_SECONDS:.0f} s: "
                f"{describe_resources(self._ray)}; lower run.workers or run.threads, or wait until others are done"
            )
        for answer in done:
            with self._losses("as they started"):
                self._check(_value(self._ray.get(answer)))

    def train(self, request: Request, agents: Mapping[str, Agent]) -> dict[str, bytes]:
        """Return every agent's payload, in their order."""
        theta = request.theta.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        announced = self._ray.put(replace(request, theta=theta))
        pool, payloads = self._ray.util.ActorPool(self._actors), dict[str, bytes]()

        def submit(actor: Any, names: list[str]) -> Any:
            turns = [Turn(name, (a := agents[name]).number, a.mask_seed, a.key, a.exact) for name in names]
            held = [self._held(name, agents[name]) for name in names]
            return actor.train.remote(announced, pickle.dumps(turns), *held)

        try:
            with self._losses("while they trained a batch of agents"):
                for answer in pool.map_unordered(submit, self._batches(agents)):
                    made, logged, facts = _value(answer)
                    self._check(facts)  # of a worker that was started anew, too
                    payloads |= made
                    for name, level, text in logged:
                        logging.getLogger(name).log(level, "%s", text)
        except BaseException:  # a pool that did not end a round begins no other
            self.close()
            raise
        return {name: payloads[name] for name in agents}

    def _held(self, name: str, agent: Agent) -> Any:
        """Return an agent's records, once through the store."""
        if name not in self._records:
            self._records[name] = self._ray.put(agent.take(torch.arange(agent.records)))
        return self._records[name]

    def _batches(self, agents: Mapping[str, Agent]) -> list[list[str]]:
        """Cut a round into batches, those with most records first."""
        names = sorted(agents, key=lambda name: -agents[name].records)
        each = -(-len(names) // len(self._actors))
        if self._at_once is not None:  # whole rows of what an engine trains together
            each = -(-len(names) // (len(self._actors) * _BATCHES * self._at_once)) * self._at_once
        each = min(each, MOST_AGENTS)
        return [names[first : first + each] for first in range(0, len(names), each)]

    @contextmanager
    def _losses(self, when: str) -> Iterator[None]:
        """Within it, what Ray raises where it gives up on a worker becomes an error for the user."""
        try:
            yield
        except self._ray.exceptions.RayError as error:
            raise WorkerFailure(
                f"workers failed repeatedly {when} ({first_line(error)}); look for memory that ran out (fewer "
                "run.workers or run.threads, a smaller algorithm.batch), then --resume"
            ) from error


def _value(answer: tuple[bool, Any]) -> Any:
    good, value = answer
    if not good:
        raise value
    return value


@contextmanager
def start_workers(job: Simulated) -> Iterator[WorkerPool]:
    """Start as many workers as `run.workers` says, and stop them at the end."""
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
        options = {"num_cpus": run.threads, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
        options |= {"max_restarts": MOST_STARTS - 1, "max_task_retries": MOST_LOSSES - 1}
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
    """Ray with resources for workers of so many cores and GPUs each: the cluster that RAY_ADDRESS names, or a Ray of
    the run's own that ends with it."""
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
            available = describe_resources(ray)
            raise ConfigError(f"run.workers is {workers}, each with {each}; {available}: lower one of them")
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


# Some of Ray's processes outlive one that is killed. Standard input is a pipe that nobody writes to, and that ends
# with the process at its other end. Processes are held by object and not by number, which may be another's by then.
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
