"""The program `fedspa`, and `python -m fedspa`."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run a command. Ctrl-C ends the process at once, without a traceback, until a command has its own use for it.

    This comes before any other import: torch alone takes seconds, and a KeyboardInterrupt within would surface as
    whatever the importing code makes of it. Nothing needs a cleaner end, since a run may be killed at any instant.
    """
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    _open_streams()
    from fedspa.cli import main as command

    command()


def _open_streams() -> None:
    """Where a shell closed a standard stream (`>&-`), give it back as one that leads nowhere. Python has None in its
    place, and the next file that is opened would get its number, and whatever a library prints there."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            taken = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
            setattr(sys, name, open(taken, mode, encoding="utf-8"))  # noqa: SIM115


if __name__ == "__main__":
    main()
