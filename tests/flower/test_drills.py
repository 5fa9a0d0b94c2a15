"""The drills of deploy/drills: what they copy can be used, and a ledger that went back in time is noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify
from fedspa.errors import LedgerError
from fedspa.mechanisms.gaussian.event import GaussianEvent

DRILLS = Path(__file__).parents[2] / "deploy/drills"
BIN = Path(sys.executable).parent
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


def test_without_an_anchor_a_restored_ledger_waits_for_its_owners_word(home):
    ledger = home / "north/ledger/ledger.sqlite"
    shutil.rmtree(ledger.parent)
    code, said = drill("restore", home / "backups", home / "north")
    assert code == 1
    assert "or nobody can\ntell" in said
    with pytest.raises(LedgerError, match="anchor"):
        Ledger.open(ledger, create=False)
    accept_loss(home / "north", 3)
    assert spent(home / "north") == 3


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


@pytest.mark.parametrize("spoil", [lambda line: line[:-8], lambda line: "damaged\n" + line], ids=["cut", "damaged"])
def test_a_list_of_backups_that_cannot_be_read_lets_nothing_pass(home, spoil):
    heads = home / "backups/HEADS"
    heads.write_text(spoil(heads.read_text()))
    before = heads.read_text()
    code, said = drill("backup", home / "north", home / "backups")
    assert code == 1
    assert "whether the ledger went back in time cannot be told" in said
    assert heads.read_text() == before


def test_backups_go_on_after_a_loss_that_was_accepted_and_excuse_no_other(home):
    site, old = home / "north", home / "old"
    shutil.copytree(site / "ledger", old)
    assert drill("backup", site, home / "backups")[0] == 0
    (first, second) = heads_of(home)
    (site / "ledger/ledger.sqlite").unlink()  # and of the second backup nothing is left: the first is put back
    shutil.copy(home / "backups" / first.split()[0] / "ledger/ledger.sqlite", site / "ledger/ledger.sqlite")
    accept_loss(site, 3)
    spend(site, range(5, 9))
    code, said = drill("backup", site, home / "backups")
    assert code == 0, said
    assert "Entries behind entry 3 were lost" in said
    assert "Backed up 7 entries" in said
    assert heads_of(home)[:2] == [first, second]
    shutil.rmtree(old)
    shutil.copytree(site / "ledger", old)
    spend(site, range(9, 11))
    code, said = drill("backup", site, home / "backups")
    assert code == 0, said
    assert "lost" not in said
    put_back(old, site)  # the loss is in this copy, too, and was known to the last backup
    spend(site, range(11, 14))
    code, said = drill("backup", site, home / "backups")
    assert code == 1
    assert "THE LEDGER WENT BACK IN TIME: its entry 9 is another" in said
    assert len(heads_of(home)) == 4


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
