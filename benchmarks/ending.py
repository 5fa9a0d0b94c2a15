"""A benchmark that is told to end takes along what it started, as Ctrl-C in a terminal does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn


def ends_with_children() -> None:
    """From here on SIGTERM ends this process with its own ones, in place of leaving them behind."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    for child in multiprocessing.active_children():
        child.terminate()
    raise SystemExit(128 + number)


def ran(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with all output caught; whatever ends the wait ends all that the command started, too."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
