"""deploy/: image, services and units are as they should be, and the services' commands make a federation."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify
from fedspa.errors import LedgerError
from fedspa.mechanisms.gaussian.plan import GaussianEvent

from .test_deployment import until

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SITES = ("north", "south", "west")
CONTAINERFILE = (DEPLOY / "Containerfile").read_text("utf-8").replace("\\\n", " ")
BIN = Path(sys.executable).parent
MANIFESTS = [
    each
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text("utf-8"))
]
UNITS = sorted((DEPLOY / "systemd").iterdir())


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)$", CONTAINERFILE, flags=re.M)


def test_the_image_runs_as_nobody_and_holds_no_secret():
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", instructions("USER")[-1])
    copied = " ".join(instructions("COPY") + instructions("ADD"))
    assert not re.search(r"key|pem|crt|ledger|record|\.npz| \. ", copied), copied
    assert not re.search(r"(?i)password|secret|token", CONTAINERFILE.split("FROM", 1)[1])
    assert all("--no-cache-dir" in part for run in instructions("RUN") for part in run.split("&&") if " pip " in part)
    assert "apt-get" not in CONTAINERFILE


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


def test_the_proxies_let_sites_through_and_nothing_else():
    paths = re.findall(r"location (\S+) {(.*?)}", (DEPLOY / "nginx.conf").read_text("utf-8"), flags=re.S)
    assert [path for path, body in paths if "proxy_pass" in body] == ["/v1/fleet/"]
    assert "return 404" in dict(paths)["/"]
    [ingress] = [each for each in MANIFESTS if each["kind"] == "Ingress"]
    [rule] = ingress["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1/fleet/"]


def test_pods_can_do_no_more_than_they_must():
    sets = {each["metadata"]["name"]: each["spec"] for each in MANIFESTS if each["kind"] == "StatefulSet"}
    assert sets.keys() == {"site", "server"}
    for name, spec in sets.items():
        assert spec["replicas"] == 1  # two nodes of a site would answer as one agent
        pod = spec["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        [container] = pod["containers"]
        assert container["args"][:2] == [name, "run"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    [records] = [mount for mount in container_of(sets["site"])["volumeMounts"] if mount["name"] == "records"]
    assert records["readOnly"]


def container_of(spec):
    return spec["template"]["spec"]["containers"][0]


def test_the_manifests_are_valid():
    validator = pytest.importorskip("kubernetes_validate")
    for each in MANIFESTS:
        validator.validate(each, "1.31", strict=True)


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
def test_the_commands_of_the_compose_file_make_a_federation(disk, hospital):
    """The services as processes: what a container would mount at a path is at another one here."""
    loopback, _ = hospital
    ports = [loopback.free_port() for _ in range(4)]
    folders = disk / "folders"
    with loopback.Deployment(disk) as deployment:

        def words(name: str, given: list[str]) -> list[str]:
            mounts = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES[name]["volumes"]}
            return [str(disk / mounts[word]) if word in mounts else word for word in given]

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


# The drills of deploy/drills: what they copy can be used, and a ledger that went back in time is noticed.

DRILLS = Path(__file__).parents[2] / "deploy/drills"


EVENT = GaussianEvent(sampling="poisson", batch=20, records=100, steps=4, noise_multiplier=2.0)


def drill(name: str, *arguments: object, first: Path = BIN) -> tuple[int, str]:
    """Run a drill; its programs are looked for in the folder `first`, then beside this Python."""
    env = os.environ | {"PATH": f"{first}:{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        [DRILLS / name, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def spend(site: Path, rounds: range) -> None:
    with Ledger.open(site / "ledger/ledger.sqlite", create=False) as ledger:
        for t in rounds:
            ledger.reserve("north", EVENT, "run", f"round-{t}")


def put_back(ledger: Path, site: Path) -> None:
    """The site's whole folder of the ledger becomes an old one again, anchor and all."""
    shutil.rmtree(site / "ledger")
    shutil.copytree(ledger, site / "ledger")


def heads_of(home: Path) -> list[str]:
    return (home / "backups/HEADS").read_text().splitlines()


def accept_loss(site: Path, entries: int) -> None:
    accept = ["ledger", "accept-loss", site / "ledger/ledger.sqlite", "--entries", str(entries)]
    subprocess.run([BIN / "fedspa", *accept], check=True, capture_output=True)


def spent(site: Path) -> int:
    with Ledger.open(site / "ledger/ledger.sqlite", create=False) as ledger:
        return sum(ledger.spent("north").values())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site that spent three rounds, backed up, and two more."""
    home = tmp_path_factory.mktemp("drills")
    subprocess.run([BIN / "fedspa", "site", "new", home / "north"], check=True, capture_output=True)
    spend(home / "north", range(3))
    code, said = drill("backup", home / "north", home / "backups")
    assert code == 0, said
    assert "Backed up 3 entries" in said
    spend(home / "north", range(3, 5))
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "home")
    return tmp_path / "home"


def test_a_backup_is_whole_and_its_owners_alone(home):
    heads = heads_of(home)
    assert len(heads) == 1
    copy = home / "backups" / heads[0].split()[0]
    assert verify(copy / "ledger/ledger.sqlite") == []
    assert {path.name for path in copy.iterdir()} >= {"site.toml", "policy.toml", "node.key", "apps.sha256", "ledger"}
    assert copy.stat().st_mode & 0o077 == 0


def test_a_sound_ledger_is_never_rolled_back(home):
    code, said = drill("restore", home / "backups", home / "north")
    assert code == 1
    assert "There is nothing to restore" in said
    assert spent(home / "north") == 5


def test_an_old_backup_is_noticed_by_the_anchor_and_the_drill_says_what_to_do(home):
    ledger = home / "north/ledger/ledger.sqlite"
    ledger.write_bytes(b"damaged")
    code, said = drill("restore", home / "backups", home / "north")
    assert code == 1
    assert "SPENDS ARE MISSING" in said
    assert "Lower epsilon" in said
    assert f"fedspa ledger accept-loss {ledger} --entries 3" in said
    assert "asked.jsonl" in said
    with pytest.raises(LedgerError, match="2 "):
        Ledger.open(ledger, create=False)
    assert [path.read_bytes() for path in ledger.parent.glob("lost-*/ledger.sqlite")] == [b"damaged"]


def test_the_newest_backup_restores_what_it_holds(home):
    assert drill("backup", home / "north", home / "backups")[0] == 0
    ledger = home / "north/ledger/ledger.sqlite"
    ledger.unlink()
    code, said = drill("restore", home / "backups", home / "north")
    assert code == 0, said
    assert "lacks nothing" in said
    assert spent(home / "north") == 5


def test_a_backup_notices_an_old_disk_that_was_spent_from_again(home):
    """As many entries as before, or more, and other ones: those of the last backup are gone all the same."""
    site, old = home / "north", home / "old"
    shutil.copytree(site / "ledger", old)
    spend(site, range(5, 7))
    assert drill("backup", site, home / "backups")[0] == 0
    put_back(old, site)
    assert verify(site / "ledger/ledger.sqlite") == []  # nothing in the files tells, and the list of backups does
    assert "THE LEDGER WENT BACK IN TIME: it holds 5 entries" in drill("backup", site, home / "backups")[1]
    spend(site, range(7, 10))
    code, said = drill("backup", site, home / "backups")
    assert code == 1
    assert "THE LEDGER WENT BACK IN TIME: its entry 7 is another than in the backup of" in said
    assert len(heads_of(home)) == 2
    assert {path.name for path in (home / "backups").glob("2*")} == {line.split()[0] for line in heads_of(home)}
    # What it says to do leads on: the backup's entries are back, and that others may be missing is on record.
    (site / "ledger").rename(home / "forked")
    assert "SPENDS ARE MISSING" in drill("restore", home / "backups", site)[1]
    accept_loss(site, 7)
    spend(site, range(10, 11))
    code, said = drill("backup", site, home / "backups")
    assert code == 0, said
    assert "Backed up 8 entries" in said


def test_an_upgrade_that_does_not_do_leaves_the_ledger_alone(home):
    """With a `fedspa site check` that fails at once; what it checks is tested by itself."""
    stub = home / "bin/fedspa"
    stub.parent.mkdir()
    stub.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "site check" ] && {{ echo "terms 1: no records"; exit 1; }}\nexec {BIN}/fedspa "$@"\n'
    )
    stub.chmod(0o755)
    code, said = drill("upgrade", home / "north", home / "backups", "echo", "installing", first=stub.parent)
    assert code == 1
    assert "installing" in said
    assert "Do not restore the ledger for it" in said
    code, said = drill("upgrade", home / "north", home / "backups", "false", first=stub.parent)
    assert code == 1
    assert "Nothing at the site was changed" in said
    assert spent(home / "north") == 5
