"""Ctrl-C while a command is still importing: no traceback, exit code 130, nothing left behind.

Before, it ended in a traceback through whatever was being imported, for the first tenth of a second (signal -2 or
exit code 1). Python tells when each import is done, so that the instant is the same on a slow machine as on a fast one.
What comes before the first line of fedspa is the interpreter's own start.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("imported", ["click", "typer", "rich", "pydantic", "numpy", "torch._C", "torch"])
def test_ctrl_c_during_an_import_is_quiet(tmp_path: Path, imported: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "fedspa", "run", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if line.rpartition("|")[2].strip() == imported:
            process.send_signal(signal.SIGINT)
            break
    else:
        pytest.fail(f"{imported} was never imported")
    out, err = process.communicate(timeout=60)
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, out, said) == (130, "", [])
    assert list(tmp_path.iterdir()) == []
