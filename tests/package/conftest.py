"""The sdist and the wheel that is built from it, once for all tests and all their processes."""

from __future__ import annotations

import os
import subprocess

import pytest
from building import ROOT, Built, build_both, found_in
from filelock import FileLock


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with FileLock(shared / "package.lock"):
        if not (shared / "package").exists():
            build_both(shared / "package", tracked.stdout.decode().split("\0"))
    return found_in(shared / "package")
