"""The README's Python runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_its_python_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    result = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    accuracy, epsilon, folder = result.stdout.split()
    assert float(accuracy) > 0.7
    assert float(epsilon) <= 4
    assert (tmp_path / folder / "summary.json").exists()
