"""The page of the API: every public name is on it, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedspa

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")


def test_every_public_name_is_on_it() -> None:
    assert sorted(re.findall(r"^::: fedspa\.(\w+)$", PAGE, flags=re.M)) == sorted(fedspa.__all__)


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    exec(code, {})
    first, guarantee, card = capsys.readouterr().out.splitlines()
    assert first.startswith("<RunResult: accuracy ")
    assert guarantee.startswith(" guarantee: (ε = 1.999, δ = 0.001) for each record of each agent, against the server")
    assert card == "# Model card: "
