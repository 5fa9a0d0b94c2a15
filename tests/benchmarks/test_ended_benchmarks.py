"""Scripts that start processes, told to end: nothing that they started stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each says the numbers of what it started, and then waits.
SCRIPTS = {
    "a command and what it started": """
from ending import ends_with_children, ran
ends_with_children()
ran(["sh", "-c", f"sleep 60 & echo $! $$ > {HERE}/started; wait"])
""",
    "a pool": """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from ending import ends_with_children
if __name__ == "__main__":
    ends_with_children()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        waiting = pool.submit(time.sleep, 60)
        numbers = [str(child.pid) for child in multiprocessing.active_children()]
        open(f"{HERE}/started", "w").write(" ".join(numbers) + "\\n")
        waiting.result()
""",
    "a deployment": """
import time
from pathlib import Path
from loopback import Deployment
with Deployment(Path(HERE) / "deployment") as deployment:
    deployment.start("site", "sh", "-c", f"sleep 60 & echo $! $$ > {HERE}/started; wait")
    time.sleep(60)
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_sigterm_ends_what_it_started(name: str, tmp_path: Path) -> None:
    script, started = tmp_path / "script.py", tmp_path / "started"
    script.write_text(f"HERE = {str(tmp_path)!r}\n{SCRIPTS[name]}")
    folders = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "hospital")]
    process = subprocess.Popen([sys.executable, script], env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)})
    try:
        wait_for(lambda: started.exists() and started.read_text().endswith("\n"))
        numbers = [int(number) for number in started.read_text().split()]
        assert all(map(alive, numbers))
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
        wait_for(lambda: not any(map(alive, numbers)))
    finally:
        process.kill()
        process.wait()


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(number: int) -> bool:
    """A zombie is none: whoever takes in the orphans of a container may be slow."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
