"""The drills of deploy/drills: what they copy can be used, and a ledger that went back in time is noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.verify import verify
from fedspa.errors import LedgerError
from fedspa.mechanisms.gaussian.event import GaussianEvent

DRILLS = Path(__file__).parents[2] / "deploy/drills"
BIN = Path(sys.executable).parent
EVENT = GaussianEvent(sampling="poisson", batch=20, records=100, steps=4, noise_multiplier=2.0)


def drill(name: str, *arguments: object) -> tuple[int, str]:
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        [DRILLS / name, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def spend(site: Path, rounds: range) -> None:
    with Ledger.open(site / "ledger/ledger.sqlite", create=False) as ledger:
        for t in rounds:
            ledger.reserve("north", EVENT, "run", f"round-{t}")


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
    heads = (home / "backups/HEADS").read_text().splitlines()
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


def test_an_old_backup_is_noticed_by_the_witness_and_the_drill_says_what_to_do(home):
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


def test_without_a_witness_a_restored_ledger_waits_for_its_owners_word(home):
    ledger = home / "north/ledger/ledger.sqlite"
    shutil.rmtree(ledger.parent)
    code, said = drill("restore", home / "backups", home / "north")
    assert code == 1
    assert "or nobody can\ntell" in said
    with pytest.raises(LedgerError, match="witness"):
        Ledger.open(ledger, create=False)
    accept = ["ledger", "accept-loss", ledger, "--entries", "3"]
    subprocess.run([BIN / "fedspa", *accept], check=True, capture_output=True)
    assert spent(home / "north") == 3


def test_the_newest_backup_restores_what_it_holds(home):
    assert drill("backup", home / "north", home / "backups")[0] == 0
    ledger = home / "north/ledger/ledger.sqlite"
    ledger.unlink()
    code, said = drill("restore", home / "backups", home / "north")
    assert code == 0, said
    assert "lacks nothing" in said
    assert spent(home / "north") == 5


def test_a_backup_notices_a_disk_that_was_put_back_whole(home, made):
    """Ledger and witness both are old copies: nothing in the files tells, and the list of backups does."""
    assert drill("backup", home / "north", home / "backups")[0] == 0
    copy = home / "backups" / (home / "backups/HEADS").read_text().split()[0]
    shutil.rmtree(home / "north/ledger")
    shutil.copytree(copy / "ledger", home / "north/ledger")
    assert verify(home / "north/ledger/ledger.sqlite") == []
    code, said = drill("backup", home / "north", home / "backups")
    assert code == 1
    assert "THE LEDGER WENT BACK IN TIME: it holds 3 entries" in said
    assert len((home / "backups/HEADS").read_text().splitlines()) == 2


def test_an_upgrade_that_does_not_do_leaves_the_ledger_alone(home):
    code, said = drill("upgrade", home / "north", home / "backups", "echo", "installing")
    assert code == 1  # the site has no records yet
    assert "installing" in said
    assert "Do not restore the ledger for it" in said
    code, said = drill("upgrade", home / "north", home / "backups", "false")
    assert code == 1
    assert "Nothing at the site was changed" in said
    assert spent(home / "north") == 5


@pytest.mark.parametrize("name", ["backup", "restore", "upgrade"])
def test_usage(name):
    code, said = drill(name)
    assert code == 2
    assert said.startswith("usage: ")
