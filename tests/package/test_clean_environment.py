"""The wheel in an environment of its own, in an empty folder, without a compiler and without the checkout.

What is done there stands in `wheels/tryout.py`, step by step; a new step belongs there.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
from building import ROOT, Built


def environment(home: Path) -> tuple[Path, Path]:
    """A new environment: its Python, and where its packages go."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    return python, Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())


@pytest.mark.long
def test_a_newcomer_gets_through_every_step(built: Built, tmp_path: Path) -> None:
    """Dependencies are lent by this environment, by path; fedspa itself can only come from the wheel."""
    python, site = environment(tmp_path / "venv")
    # A folder that a .pth names is searched, but its own .pth files (an editable fedspa) are not read.
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(built.wheel)], check=True, capture_output=True)
    done = subprocess.run([str(python), str(ROOT / "wheels" / "tryout.py")], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    steps = [line.split()[0] for line in done.stdout.splitlines()]
    assert steps[:6] == ["installed", "version", "doctor", "quickstart", "own_table", "report"]
    assert {"site_check", "guarded_opacus"} <= set(steps)
    for line in done.stdout.splitlines():  # what is here may not be passed over there
        if "skipped" in line:
            assert find_spec(line.split()[2]) is None, line


@pytest.mark.long
def test_the_same_with_all_that_it_needs_from_the_registry(tmp_path: Path) -> None:
    """As a forge builds it: sdist, wheel, auditwheel, and a whole `pip install`."""
    done = subprocess.run([str(ROOT / "wheels" / "make"), "--install", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*.whl"))) == len(list(tmp_path.glob("*.tar.gz"))) == 1
