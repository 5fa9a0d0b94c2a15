"""Attack: remove the ledger of an interrupted run, and resume.

While the newest checkpoint was that of round 0 (in the first round, or with `checkpoint_every` above 1) the resumed run
made a new ledger without a word: 60 released spends were gone, and it ended with exit code 0. With a relative
`run.ledger`, resuming from another folder did the same.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from interruptions import Crash, crash
from small_runs import small

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export
from fedspa.errors import FedspaError, LedgerError
from fedspa.running import run as simulate
from fedspa.runs.checkpoint import load_latest
from fedspa.runs.rundir import RunFolder, Stopped


def remove(ledger: Path, *ends: str) -> None:
    for end in ends:
        Path(f"{ledger}{end}").unlink(missing_ok=True)


ALL = ("", "-wal", "-shm", ".anchor")


@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("kept", [(), (".anchor",), ("",)], ids=["nothing", "anchor", "ledger"])
@pytest.mark.parametrize(("t", "every"), [(0, 1), (2, 1), (2, 100)])
def test_a_deleted_ledger_is_never_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: str, kept: tuple[str, ...], t: int, every: int
) -> None:
    config = small(tmp_path / "run", privacy={"noise": noise}, run={"checkpoint_every": every})
    folder = crash(config, t, monkeypatch)
    assert len(export(folder / "ledger.sqlite")["entries"]) == 3 * (t + 1)
    remove(folder / "ledger.sqlite", *(end for end in ALL if end not in kept))
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(LedgerError, match=r"is missing, and what was spent is written nowhere|its anchor .* missing"):
        simulate(resume=folder)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_another_ledger_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared.sqlite"
    folder = crash(small(tmp_path / "run", run={"ledger": str(shared)}), 0, monkeypatch)
    remove(shared, *ALL)
    Ledger.open(shared).close()
    with pytest.raises(LedgerError, match="another ledger than the one that this run began with"):
        simulate(resume=folder)


@pytest.mark.parametrize("shared", [False, True])
def test_a_finished_or_stopped_run_whose_ledger_is_gone(tmp_path: Path, shared: bool) -> None:
    named = {"ledger": str(tmp_path / "shared.sqlite")} if shared else {}
    ledger = tmp_path / "shared.sqlite" if shared else tmp_path / "run/ledger.sqlite"
    with pytest.raises(Stopped):
        simulate(small(tmp_path / "run", run=named), stop=lambda: True)
    hidden = tmp_path / "hidden"
    ledger.rename(hidden)
    with pytest.raises(FedspaError, match="is missing"):
        simulate(resume=tmp_path / "run")
    hidden.rename(ledger)
    simulate(resume=tmp_path / "run")
    remove(ledger, *ALL)
    with pytest.raises(FedspaError, match="is missing"):
        simulate(resume=tmp_path / "run")
    assert not ledger.exists()


def test_a_relative_path_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own files name the ledger and the policy in whole."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = crash(small(tmp_path / "run", run={"ledger": "books.sqlite"}), 0, monkeypatch)
    monkeypatch.chdir(tmp_path / "there")
    assert simulate(resume=folder).summary["rounds"] == 4
    assert list(Path().iterdir()) == []
    assert len(export(tmp_path / "here/books.sqlite")["entries"]) >= 12
    found = load_latest(folder / "checkpoint")
    assert found.config.run.ledger == str(tmp_path / "here/books.sqlite")
    assert json.dumps(found.config.run.ledger) in (folder / "config.toml").read_text("utf-8")
    with pytest.raises(FedspaError, match=r"run\.ledger was .*here/books\.sqlite' and is .*there/books\.sqlite'"):
        simulate(small(folder, run={"ledger": "books.sqlite"}), resume=folder)


def test_killed_between_ledger_and_first_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was spent: the run begins, in the ledger that is there."""

    def dying(self: RunFolder, *arguments: object) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", dying)
        with pytest.raises(Crash):
            simulate(small(tmp_path / "run"))
    assert (tmp_path / "run/ledger.sqlite").exists()
    assert not os.listdir(tmp_path / "run/checkpoint") if (tmp_path / "run/checkpoint").exists() else True
    simulate(resume=tmp_path / "run")
    assert len(export(tmp_path / "run/ledger.sqlite")["entries"]) == 12
