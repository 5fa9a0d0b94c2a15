"""The page on tasks: its code runs, and its table has every task."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from fedspa.learning.options import OPTIONS
from fedspa.learning.tasks.named import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text("utf-8")


def test_every_task_and_option_is_there() -> None:
    named = re.findall(r"^\| `([\w-]+)` \|", PAGE, flags=re.M)
    assert named == list(NAMES)
    for option in {option for options in OPTIONS.values() for option in options.model_fields}:
        assert f"`{option}`" in PAGE or f'"{option}"' in PAGE, option


def test_its_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
    assert len(blocks) == 3
    result = subprocess.run([sys.executable, "-c", "".join(blocks)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    first, second, third = result.stdout.splitlines()
    score, without = (float(number) for number in re.findall(r"\d+\.\d+", first))
    assert first.startswith("rmse ")
    assert score < without
    assert "perplexity" in second
    assert "top_3" in third
