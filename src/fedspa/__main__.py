"""The program `fedspa`, and `python -m fedspa`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run a command. Ctrl-C ends the process at once, without a traceback, until a command has its own use for it.

    This comes before any other import: torch alone takes seconds, and a KeyboardInterrupt within would surface as
    whatever the importing code makes of it. Nothing needs a cleaner end, since a run may be killed at any instant.
    """
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from fedspa.cli import main as command

    command()


if __name__ == "__main__":
    main()
