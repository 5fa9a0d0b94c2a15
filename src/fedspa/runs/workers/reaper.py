"""Ends the processes of a run's own Ray once the run's process is gone, however it went: run as a script beside it.

    python reaper.py FOLDER-OF-PSUTIL RAY'S-FOLDER PID…

Some of Ray's processes outlive one that is killed. Standard input is a pipe that nobody writes to, and that ends with
whoever holds its other end.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress


def main(psutil_at: str, folder: str, *pids: str) -> None:
    sys.path.append(psutil_at)
    import psutil

    watched = []  # by process and not by number, which may be another's by then
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            watched.append(psutil.Process(int(pid)))
    print("ready", flush=True)
    sys.stdin.read()
    for process in watched:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(watched, timeout=10)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
