"""Workers as actors of Ray: on this machine alone, in a Ray that comes and goes with the run, or on a cluster."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedspa.errors import ConfigError, first_line
from fedspa.runs.workers import reaper

# Ray's own words are in its logs: what a user must know of it, the crew says in a line.
_QUIET = {"log_to_driver": False, "logging_level": logging.CRITICAL}


class RayHand:
    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def start(self, made: Any) -> Future[bytes]:
        return self._actor.start.remote(made).future()  # type: ignore[no-any-return]

    def work(self, announced: Any | None, share: bytes, records: bytes) -> Future[bytes]:
        return self._actor.work.remote(announced, share, records).future()  # type: ignore[no-any-return]

    def end(self) -> None:
        with suppress(Exception):  # its cluster may be gone, too
            self._ray.kill(self._actor)


class RayPool:
    """`cores` and `gpus` are what each of the workers takes."""

    def __init__(self, cluster: str | None, workers: int, cores: int, gpus: int) -> None:
        self._ray = ray = _imported(workers, alone=cluster is None)
        self._reaper: subprocess.Popen[str] | None = None
        self._ours = not ray.is_initialized()  # else somebody's own Ray in this process, which stays as it is
        if self._ours and cluster is None:
            self._reaper = self._start(workers * cores, None if gpus else 0)
        elif self._ours:
            _connect(ray, cluster)
        self.lost: tuple[type[Exception], ...] = (ray.exceptions.RayError,)
        self._options = {"num_cpus": cores, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        there = ray.cluster_resources()
        if there.get("CPU", 0) < workers * cores or there.get("GPU", 0) < workers * gpus:
            room = self.room
            self.close()
            each = f"{cores} cores (run.threads)" + " and a GPU" * bool(gpus)
            raise ConfigError(f"run.workers is {workers}, each with {each}; {room}: lower one of them")

    @property
    def room(self) -> str:
        there = self._ray.cluster_resources()
        return f"Ray has {there.get('CPU', 0):g} cores and {there.get('GPU', 0):g} GPUs in all"

    def hire(self) -> RayHand:
        from fedspa.runs.workers.worker import Worker

        return RayHand(self._ray, self._ray.remote(Worker).options(**self._options).remote())

    def publish(self, content: bytes) -> Any:
        return self._ray.put(content)

    def packed(self, value: object) -> bytes:
        """Code that no worker could import, as that of a notebook, included."""
        try:
            content: bytes = self._ray.cloudpickle.dumps(value)
        except Exception as error:  # whatever somebody's own object says to it
            raise ConfigError(
                f"the model or its task cannot travel to a worker: {first_line(error)}; leave out what cannot be "
                "pickled, or train in this process: run.workers = 1"
            ) from error
        return content

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()
        if self._reaper is not None:
            self._reaper.communicate()

    def _start(self, cores: int, gpus: int | None) -> subprocess.Popen[str]:
        """A Ray of this run's own. It dies with this process, however that dies."""
        folder = Path(tempfile.mkdtemp(prefix="fedspa-", dir="/tmp"))  # sockets want a short path
        others = _children()
        try:
            self._ray.init(
                address="local", num_cpus=cores, num_gpus=gpus, include_dashboard=False, _temp_dir=str(folder), **_QUIET
            )
            return _reaper(folder, _children() - others)
        except BaseException as error:
            self._ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, Exception):
                raise ConfigError(
                    f"Ray does not start here: {first_line(error)}; run.workers = 1 needs none"
                ) from error
            raise


def _children() -> set[int]:
    import psutil  # Ray brings its own

    return {child.pid for child in psutil.Process().children(recursive=True)}


def _reaper(folder: Path, of_ray: set[int]) -> subprocess.Popen[str]:
    """Out of reach of a Ctrl-C, and watching before anything else happens."""
    import psutil

    found = subprocess.Popen(
        [sys.executable, reaper.__file__, str(Path(psutil.__file__).parents[1]), str(folder), *map(str, of_ray)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert found.stdout is not None
    found.stdout.readline()
    return found


def _imported(workers: int, *, alone: bool) -> Any:
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


def _connect(ray: Any, cluster: str | None) -> None:
    try:
        if cluster is not None and cluster != "auto":  # Ray itself would try for minutes
            host, _, port = cluster.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=cluster, **_QUIET)
    except Exception as error:  # by what was wrong, Ray raises one of many
        raise ConfigError(
            f"run.cluster is {cluster!r}, and no cluster took this process in: {first_line(error).rstrip('.')}; start "
            "Ray on this machine by `ray start --head`, or `ray start --address=…` to join one"
        ) from error
