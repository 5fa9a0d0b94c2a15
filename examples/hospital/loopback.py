"""A federation with TLS and authenticated nodes on this machine: its folders, its processes, and their end.

Every process is started in a group of its own and ended by its number; `Deployment.close` ends whatever is left.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
NAME = "fedspa"  # of the SuperLink, in the Flower config that `fedspa server` writes


class Deployment:
    """One server and any number of sites under `folder`, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._offsets: dict[str, int] = {}  # where in its log the latest process of a name begins
        self._mark = f"HOSPITAL_EXAMPLE={folder}"
        key, _, value = self._mark.partition("=")
        self._env = os.environ | {key: value, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
        self._flower = self._env | {  # for Flower's own commands; fedspa's set it themselves
            "FLWR_HOME": str(folder / "server/flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
        }
        folder.mkdir(parents=True, exist_ok=True)

    def start_superlink(self) -> None:
        """The server, whose folder is made once. Its database keeps the nodes' keys and ids over a restart."""
        home = self.folder / "server"
        if not home.exists():
            where = ("--name", "127.0.0.1", "--host", "127.0.0.1", "--port", str(self.port))
            self.fedspa("server", "new", home, *where)
        self.start("superlink", BIN / "fedspa", "server", "run", home)
        wait_for_port(self.port)

    def start_simulator(self) -> None:
        """A SuperLink that plays all nodes itself, in Flower's simulation engine."""
        home = self.folder / "server/flwr"
        home.mkdir(parents=True)
        text = f'[superlink.{NAME}]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (home / "config.toml").write_text(text)
        where = ("--host", "127.0.0.1", "--port", str(self.port), "--database", str(self.folder / "superlink.db"))
        self.start("superlink", BIN / "flower-superlink", "--insecure", "--simulation", *where, env=self._flower)
        wait_for_port(self.port)

    def new_site(self, site: str, superlink: str | None = None) -> Path:
        """A site's folder, with its node's key and its ledger."""
        home = self.folder / site
        where = ("--superlink", superlink or f"127.0.0.1:{self.port}", "--port", str(free_port()))
        self.fedspa("site", "new", home, "--certificate", self.folder / "server/ca.crt", *where)
        return home

    def register(self, site: str) -> None:
        """Tell the SuperLink the public half of the site's key."""
        public = self.folder / f"{site}.pub"
        public.write_bytes((self.folder / site / "node.key.pub").read_bytes())
        self.fedspa("server", "register", self.folder / "server", public)

    def start_node(self, site: str) -> None:
        """It runs the apps that the site pinned, and no other."""
        self.start(site, BIN / "fedspa", "site", "run", self.folder / site)

    def start_node_when_allowed(self, site: str, patience: float = 180.0) -> None:
        """Restart a site that was killed: the SuperLink takes its key again when it has missed some heartbeats."""
        end = time.monotonic() + patience
        while True:
            self.start_node(site)
            if self.accepted(site):
                return
            self.kill(site)
            if time.monotonic() > end:
                raise TimeoutError(f"{site} was not taken back: see {self.log(site)}")
            time.sleep(2.0)

    def fedspa(self, *arguments: str | Path) -> str:
        """A `fedspa` command's output; what it prints on failure is in the exception."""
        return _output(self._env, self.folder, BIN / "fedspa", *arguments)

    def accepted(self, site: str, timeout: float = 60.0) -> bool:
        """Whether the SuperLink took the node that was started last: True or False as soon as that is known."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            said = self.log(site).read_bytes()[self._offsets[site] :]
            if b"SuperNode ID:" in said:
                return True
            if b"Exit Code:" in said or self._processes[site].poll() is not None:
                return False
            time.sleep(0.2)
        return False

    def kill(self, name: str) -> None:
        """As a power cut would: SIGKILL to the process and all that it started."""
        started = descendants(self._processes[name].pid)  # Flower's apps lead groups of their own
        self._end(name, signal.SIGKILL)
        for process in started:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def flwr(self, *arguments: str) -> str:
        return _output(self._flower, self.folder, BIN / "flwr", *arguments)

    def submit(self, app: Path, config: Mapping[str, Any], *options: str) -> str:
        """Start a run; its id."""
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        answer = json.loads(self.flwr("run", str(app), NAME, "-c", text, "--format", "json", *options))
        if not answer.get("success"):
            raise RuntimeError(f"the run was not taken: {answer}")
        return str(answer["run-id"])

    def run(self, run_id: str) -> dict[str, Any]:
        """What `flwr list` says of a run. (`flwr run` itself exits with 0 for runs that fail.)"""
        listed = json.loads(self.flwr("list", NAME, "--run-id", run_id, "--format", "json"))
        found: dict[str, Any] = listed["runs"][0]
        return found

    def wait(self, run_id: str, timeout: float) -> dict[str, Any]:
        """The run when it is over, whatever came of it."""
        end = time.monotonic() + timeout
        while not (run := self.run(run_id))["status"].startswith("finished"):
            if time.monotonic() > end:
                raise TimeoutError(f"run {run_id} is {run['status']} after {timeout:g} s: see {self.log('superlink')}")
            time.sleep(1.0)
        return run

    def output(self, run_id: str) -> str:
        """What the ServerApp of a run has printed."""
        return self.flwr("log", run_id, NAME, "--show")

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def processes(self) -> list[int]:
        """Everything alive that was started from here, by a mark in its environment (Linux)."""
        mark = f"{self._mark}\0".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes() and "Z (zombie)" not in (entry / "status").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        """End everything: politely, then for sure."""
        try:
            for name in reversed(list(self._processes)):
                self._end(name, signal.SIGTERM)
        finally:  # also what a signal to this process, or an impatient test, kept from its end
            for process in self.processes():
                with suppress(ProcessLookupError):  # it ended by itself
                    os.kill(process, signal.SIGKILL)
        end = time.monotonic() + 10
        while self.processes() and time.monotonic() < end:
            time.sleep(0.1)

    def __enter__(self) -> Deployment:
        """Within it SIGTERM ends this process by way of `close`, as Ctrl-C does: others would stay behind."""
        self._before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            signal.signal(signal.SIGTERM, self._before)

    def start(self, name: str, *command: str | Path, env: Mapping[str, str] | None = None) -> None:
        """Any program, as a process of this deployment."""
        with self.log(name).open("ab") as log:
            self._offsets[name] = log.tell()
            self._processes[name] = subprocess.Popen(
                command,
                env=env or self._env,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _end(self, name: str, how: signal.Signals) -> None:
        process = self._processes.pop(name)
        for number in (how, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                return
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue


def _output(env: Mapping[str, str], folder: Path, *command: str | Path) -> str:
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done.stdout


def descendants(ancestor: int) -> list[int]:
    """All that a process started, and what that started (Linux)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # "pid (name) state ppid …", where the name may hold anything
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [ancestor]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(port: int, timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"nothing listens on port {port} after {timeout:g} s")
