"""The sdist, and a wheel from it, by setuptools itself, as pip does it: nothing is fetched for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALL = ("src/", "pyproject.toml", "setup.py", "README.md", "LICENSE")


@dataclass(frozen=True)
class Built:
    sdist: Path
    unpacked: Path  # the sdist's content, from which wheels are built
    wheel: Path


def build(kind: str, source: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`kind` is sdist or wheel."""
    out.mkdir(exist_ok=True)
    call = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", call], cwd=source, env=env, capture_output=True, text=True)


def build_both(folder: Path, tracked: Iterable[str]) -> None:
    """From the files that git knows, in a folder of their own: no leftovers of earlier builds get in."""
    for name in tracked:
        if name.startswith(INSTALL) and (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    _checked(build("sdist", folder / "source", folder / "sdist"))
    with tarfile.open(next((folder / "sdist").iterdir())) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    _checked(build("wheel", unpacked, folder / "wheel"))


def found_in(folder: Path) -> Built:
    (sdist,), (unpacked,), (wheel,) = ((folder / name).iterdir() for name in ("sdist", "unpacked", "wheel"))
    return Built(sdist, unpacked, wheel)


def _checked(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
