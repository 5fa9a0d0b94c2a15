"""Ctrl-C in a long run: once asks it to stop after the round, twice ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODE = 130  # as a shell reports a process that Ctrl-C ended; fedspa/__main__.py has it too, before any import


@contextmanager
def watched(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Within it, the yielded function tells whether Ctrl-C was pressed. The second press does not return.

    Python's own handlers wait until the main thread is back from native code, which can take a whole round. The kernel
    writes to the wakeup pipe at once, and a thread reads it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    asked = threading.Event()

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] != signal.SIGINT:
                continue
            if asked.is_set():
                os._exit(EXIT_CODE)
            asked.set()
            on_first()

    thread = threading.Thread(target=watch, daemon=True)
    handler = signal.signal(signal.SIGINT, lambda number, frame: None)
    pipe_before = signal.set_wakeup_fd(writer)
    thread.start()
    try:
        yield asked.is_set
    finally:
        signal.set_wakeup_fd(pipe_before)
        signal.signal(signal.SIGINT, handler)
        os.close(writer)
        thread.join()
        os.close(reader)
