"""A Flower deployment with TLS and authenticated nodes on this machine: certificates, keys, processes, and their end.

Every process is started in a group of its own and ended by its number; `Deployment.close` ends whatever is left.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
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

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BIN = Path(sys.executable).parent
NAME = "loopback"


class Deployment:
    """One SuperLink and any number of SuperNodes under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._offsets: dict[str, int] = {}  # where in its log the latest process of a name begins
        self._env = os.environ | {
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        (folder / "flwr").mkdir(parents=True)
        make_certificates(folder)
        (folder / "flwr/config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n'
            f'[superlink.{NAME}]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{folder / "ca.crt"}"\n'
        )

    def start_superlink(self) -> None:
        """The server's side. Its database keeps the nodes' keys and ids over a restart."""
        tls = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
        self._start(
            "superlink",
            BIN / "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(self.port), "--enable-supernode-auth"),
            *("--database", str(self.folder / "superlink.db")),
            *(part for option, file in tls.items() for part in (f"--ssl-{option}", str(self.folder / file))),
        )
        wait_for_port(self.port)

    def start_simulator(self) -> None:
        """A SuperLink that plays all nodes itself, in Flower's simulation engine."""
        home = self.folder / "flwr/config.toml"
        home.write_text(f'[superlink.{NAME}]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n')
        where = ("--host", "127.0.0.1", "--port", str(self.port), "--database", str(self.folder / "superlink.db"))
        self._start("superlink", BIN / "flower-superlink", "--insecure", "--simulation", *where)
        wait_for_port(self.port)

    def register(self, site: str) -> None:
        """Make the site's key and tell the SuperLink its public half."""
        make_node_key(self.folder / site)
        self.flwr("supernode", "register", str(self.folder / site / "node.pub"), NAME)

    def build(self, app: Path) -> str:
        """The digest of the app as it will be shipped: what a site's people pin after they have read it."""
        self.flwr("build", "--app", str(app))
        (fab,) = self.folder.glob("*.fab")
        digest = hashlib.sha256(fab.read_bytes()).hexdigest()
        fab.unlink()
        return digest

    def start_node(
        self, site: str, config: Mapping[str, Any], *options: str, pin: str | None = None, secure: bool = True
    ) -> None:
        """A site's SuperNode. With `pin`, it runs the app of this digest and no other."""
        node_config = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        tls = ("--root-certificates", str(self.folder / "ca.crt")) if secure else ("--insecure",)
        key = ("--auth-supernode-private-key", str(self.folder / site / "node")) if secure else ()
        pinned = (sys.executable, "-m", "fedspa.flower.supernode", "--fab-sha256", pin)
        self._start(
            site,
            *(pinned if pin is not None else (BIN / "flower-supernode",)),
            *("--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port())),
            *("--node-config", node_config, *tls, *key, *options),
        )

    def start_node_when_allowed(self, site: str, config: Mapping[str, Any], pin: str, patience: float = 180.0) -> None:
        """Restart a site that was killed: the SuperLink takes its key again when it has missed some heartbeats."""
        end = time.monotonic() + patience
        while True:
            self.start_node(site, config, pin=pin)
            if self.accepted(site):
                return
            self.kill(site)
            if time.monotonic() > end:
                raise TimeoutError(f"{site} was not taken back: see {self.log(site)}")
            time.sleep(2.0)

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
        """A `flwr` command's output; what it prints on failure is in the exception."""
        done = subprocess.run(
            [BIN / "flwr", *arguments], env=self._env, cwd=self.folder, capture_output=True, text=True, timeout=120
        )
        if done.returncode != 0:
            raise RuntimeError(f"flwr {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

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
        """Everything alive that was started from here, by the FLWR_HOME in its environment (Linux)."""
        mark = f"FLWR_HOME={self.folder / 'flwr'}\0".encode()
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
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, name: str, *command: str | Path) -> None:
        with self.log(name).open("ab") as log:
            self._offsets[name] = log.tell()
            self._processes[name] = subprocess.Popen(
                command,
                env=self._env,
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


def make_certificates(folder: Path) -> None:
    """ca.crt, server.pem and server.key for 127.0.0.1. A real deployment's come from its own authority."""
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "example authority")])
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "superlink")])
    ca = (
        _certificate(ca_name, ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA384())
    )
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    server = (
        _certificate(server_name, ca_name, server_key)
        .add_extension(address, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(ca.public_bytes(pem))
    (folder / "server.pem").write_bytes(server.public_bytes(pem))
    _write_private(
        folder / "server.key",
        server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=30))
    )


def make_node_key(folder: Path) -> None:
    """node and node.pub, as `ssh-keygen -t ecdsa -b 384` makes them."""
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    openssh, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    _write_private(folder / "node", key.private_bytes(serialization.Encoding.PEM, openssh, plain))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "node.pub").write_bytes(public + b"\n")


def _write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
