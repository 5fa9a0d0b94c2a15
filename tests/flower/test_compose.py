"""deploy/: image, services and units are as they should be, and the services' commands make a federation."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import configparser
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify

from .test_deployment import until

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
    if unit.name.startswith("fedspa-site@"):  # `fedspa server run` checks by itself
        assert "check" in service["ExecStartPre"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_commands_of_the_compose_file_make_a_federation(tmp_path, hospital):
    """The services as processes: what a container would mount at a path is at another one here."""
    loopback, _ = hospital
    ports = [loopback.free_port() for _ in range(4)]
    folders = tmp_path / "folders"
    with loopback.Deployment(tmp_path) as deployment:

        def words(name: str, given: list[str]) -> list[str]:
            mounts = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES[name]["volumes"]}
            return [str(tmp_path / mounts[word]) if word in mounts else word for word in given]

        def start(name: str) -> None:
            entry = [BIN / part for part in json.loads(instructions("ENTRYPOINT")[-1])]
            own = dict(pair.split("=") for pair in instructions("ENV")[-1].split())
            deployment.start(name, *entry, *words(name, SERVICES[name]["command"]), env=deployment._env | own)

        def is_healthy(name: str) -> bool:
            test = words(name, SERVICES[name]["healthcheck"]["test"][2:])
            return subprocess.run([BIN / "fedspa", *test], capture_output=True, timeout=60).returncode == 0

        prepare = {"HOST": "127.0.0.1", "LISTEN": "127.0.0.1", "PORT": str(ports[0])}
        prepare["PORTS"] = " ".join(map(str, ports[1:]))
        subprocess.run([DEPLOY / "prepare", folders], env=deployment._env | prepare, check=True, capture_output=True)
        for site in SITES:  # a mount within a mount
            (folders / site / "records").rmdir()
            (folders / site / "records").symlink_to(folders / "records" / site)
        start("server")
        until(lambda: is_healthy("server"), 60)
        deployment.fedspa(*words("register", SERVICES["register"]["command"]))
        for site in SITES:
            start(site)
        for site in SITES:
            until(lambda site=site: is_healthy(site), 60)
        assert "completed" in deployment.fedspa(*words("train", SERVICES["train"]["command"]))
        for site in SITES:  # as a container is stopped, SIGTERM and time to end; north as at a terminal, by Ctrl-C
            process = deployment._processes[site]
            os.kill(process.pid, signal.SIGINT if site == "north" else signal.SIGTERM)
            assert process.wait(30) == 0
    assert deployment.processes() == []

    (run,) = (folders / "server/runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["rounds"], summary["dropped"]) == (3, {})
    for site in SITES:
        ledger = folders / site / "ledger/ledger.sqlite"
        assert verify(ledger) == []
        with Ledger.open(ledger, create=False) as opened:
            assert sum(opened.spent(site).values()) == 3
        lines = [json.loads(line) for line in deployment.log(site).read_text().splitlines()]
        assert [line["event"] for line in lines].count("answered") == 3
        assert {line["logger"] for line in lines} == {"flwr", "fedspa.agent"}
