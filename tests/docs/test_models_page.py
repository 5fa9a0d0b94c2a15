"""The page on models: its code runs, and its table is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")


def test_its_code_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    check, after = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    names: dict[str, Any] = {}
    with caplog.at_level("INFO", "fedspa"):
        exec(check, names)
    (found,), (changed,) = capsys.readouterr().out.splitlines(), caplog.messages
    assert found.startswith("the module's layer '1' (BatchNorm2d) mixes the examples of a batch")
    assert changed.startswith("1: BatchNorm2d(16) became GroupNorm(4, 16)")
    exec(after, names)
    assert torch.equal(names["module"][1].weight, names["result"].module[1].weight)
    assert names["again"].summary == names["result"].summary
