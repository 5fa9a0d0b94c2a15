"""`fedspa --version`: one line that begins with the name and the version, as scripts expect it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
import torch

from fedspa.cli import main
from fedspa.engine.native import library

AT_THE_END = """
import atexit, sys
from fedspa.cli import main
sys.argv = ["fedspa", "--version"]
atexit.register(lambda: print("torch" in sys.modules))
main()
"""


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["fedspa", "--version"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    return capsys.readouterr().out


def test_it_names_fedspa_torch_and_the_instruction_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "missing", lambda: None)
    monkeypatch.setattr(library, "best_level", lambda: "neon")
    expected = f"fedspa {metadata.version('fedspa')} (torch {torch.__version__}, native neon)\n"
    assert told(monkeypatch, capsys) == expected


def test_it_does_not_wait_for_torch() -> None:
    """Importing it takes seconds, and its version is written down."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(")\nFalse\n")


def test_it_says_where_the_compiled_part_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    assert told(monkeypatch, capsys).endswith("native engine: none, see fedspa doctor)\n")
