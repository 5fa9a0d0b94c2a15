"""What runs in a fork of the tests' process stands on its own, as in a fresh interpreter."""

from __future__ import annotations

from pathlib import Path

import torch
from forked import python


def test_nothing_of_the_tests_is_there(tmp_path: Path) -> None:
    torch.rand(1)
    done = python(tmp_path, ["-c", "import torch\nprint(torch.rand(1).item())\nimport small_runs"])
    assert done.returncode == 1
    assert "No module named 'small_runs'" in done.stderr
    assert float(done.stdout) == torch.rand(1, generator=torch.Generator()).item()
