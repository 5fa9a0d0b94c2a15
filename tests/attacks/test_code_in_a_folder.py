"""A run's folder may be somebody else's: commands that only read it must not import the code that its config names. And
a plug-in that redefines a built-in kind of event, by mistake or not, would reprice the entries that ledgers hold."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedspa import mechanisms, registry
from fedspa.cli import app
from fedspa.errors import PrivacyError
from fedspa.mechanisms import event_of
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.runs.config import load
from fedspa.runs.rundir import resume_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder whose config names an algorithm in a module beside it, which leaves a file when it is imported."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/of_somebody.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nALG = None\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(
        f'[algorithm]\nname = "of_somebody:ALG"\n[privacy]\nepsilon = 1.0\n[run]\ncode = "{tmp_path / "code"}"\n'
    )
    (run / "metrics.jsonl").touch()
    return run


@pytest.mark.parametrize(
    "words",
    ["report {}", "export {} card.md", "ledger show {}", "ledger verify {}", "data check {} --schema {}"],
)
def test_no_command_that_reads_a_folder_imports_its_code(
    folder: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    CliRunner().invoke(app, words.format(folder, folder / "config.toml").split())
    assert not (folder.parent / "imported").exists()
    assert "of_somebody" not in sys.modules


def test_nor_does_the_command_that_resumes_it(folder: Path) -> None:
    resume_command(load(None), folder)
    assert not (folder.parent / "imported").exists()


def test_a_plug_in_cannot_reprice_a_built_in_event(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cheap(GaussianEvent):
        pass

    fedspa = registry.known("fedspa")
    monkeypatch.setattr(registry, "ALGORITHMS", dict(registry.ALGORITHMS))
    plan = type("CheapPlan", (fedspa.mechanism.plan,), {"event_type": Cheap})
    registry.add("mine:ALG", replace(fedspa, mechanism=replace(fedspa.mechanism, plan=plan)))
    mechanisms.base._event_of.cache_clear()
    with pytest.raises(PrivacyError, match="redefines the event kind 'gaussian'"):
        event_of(GaussianEvent("poisson", 10, 143, 2, 2.0).to_json())
