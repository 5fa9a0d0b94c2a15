"""The page on adapters: its code runs, and trains a head behind a frozen body, or the factors B and the head alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedspa.learning.flat import FlatModel

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text("utf-8")

CODE = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)


def test_a_frozen_body_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(CODE[0], names)
    assert "native because the fastest that can run this model here; the frozen body" in capsys.readouterr().out
    assert names["result"].module is names["module"]


def test_its_code_freezes_one_factor() -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install fedspa[dev]")
    names: dict[str, Any] = {}
    exec(CODE[1], names)
    trained = [name for name, parameter in names["module"].named_parameters() if parameter.requires_grad]
    assert sum("lora_B" in name for name in trained) == 2
    assert not any("lora_A" in name for name in trained)
    assert FlatModel(names["module"]).dimension == 2 * 4 * 32 + 32 * 3 + 3
