"""A result names its commit and machine, and says so where it cannot."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fedspa.paper import provenance


def git(where: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", str(where), *who, *words], check=True, capture_output=True, text=True).stdout


def test_the_commit_is_read_and_edits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSPA_COMMIT", raising=False)
    source = tmp_path / "src" / "fedspa"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    monkeypatch.setattr("fedspa.__file__", str(source / "__init__.py"))
    assert provenance.commit() is None  # no repository
    git(tmp_path, "init", "-q")
    assert provenance.commit() is None  # not in it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    found = provenance.commit()
    assert found is not None
    assert head.startswith(found)
    assert len(found) >= 12
    (tmp_path / "notes.txt").write_text("beside the source")
    assert provenance.commit() == found
    (source / "__init__.py").write_text("edited = True\n")
    assert provenance.commit() == f"{found}-dirty"
    monkeypatch.setenv("FEDSPA_COMMIT", "abc1234")
    assert provenance.commit() == "abc1234"


def test_the_machine_is_named() -> None:
    words = provenance.hardware("cpu")
    assert int(words.split(" cores of ")[0]) >= 1
    assert words.split(" cores of ")[1]
