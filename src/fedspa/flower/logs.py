"""Logs as JSON lines, for machines that collect them: what happened, and nothing that tells of records.

An agent's own log says in words what was wrong, and such words may name records: how many there are, which are bad,
what a cell holds. They are for the site's people. So a JSON line of an agent is an event with a code, which the server
sees, too; the words go to a file that only the site's user can read. The same holds for whatever else a node's
processes print that is no line of Flower's own log, such as a traceback or what a data function logs.

One process per node turns lines into JSON: Flower starts others, which all write where the node writes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import traceback
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

_FORMAT, _PRIVATE = "FEDSPA_LOG_FORMAT", "FEDSPA_LOG_PRIVATE"  # for child processes
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# "INFO :      SuperNode ID: 7" of Flower, "INFO:     Started server process [1]" of its HTTP server. Both pad the level
# to a width, which other formats do not: a data function that logs is not taken for them. The HTTP server's CRITICAL
# has no padding to be known by.
_PREFIXES = {
    **{f"{level} :{' ' * (10 - len(level))}": level for level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")},
    **{f"{level}:{' ' * (9 - len(level))}": level for level in ("DEBUG", "INFO", "WARNING", "ERROR")},
}


class JsonFormatter(logging.Formatter):
    """The event of a record and its code. Its message is for the private file."""

    def format(self, record: logging.LogRecord) -> str:
        return _line(record.levelname, record.name, getattr(record, "event", ""), code=getattr(record, "code", None))


def event(name: str, code: str | None = None) -> dict[str, str | None]:
    """Return the `extra` of a call to an agent's logger: its JSON line says this. A call without it gives no line."""
    return {"event": name, "code": code}


def set_up() -> None:
    """Set up fedspa's loggers in an agent's process, by the format that its node was started with: text with the time,
    or JSON lines beside a private file. Elsewhere, as in a simulation, loggers stay as they are."""
    form, private, logger = os.environ.get(_FORMAT), os.environ.get(_PRIVATE), logging.getLogger("fedspa")
    if form is None or logger.handlers or (form == "json" and private is None):
        return
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logger.handlers = [lines]
    if form == "json":
        lines.addFilter(lambda record: hasattr(record, "event"))
        whole = logging.StreamHandler(os.fdopen(_private(Path(str(private))), "a", encoding="utf-8"))
        whole.setFormatter(logging.Formatter(_TEXT))
        logger.handlers.append(whole)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def as_json(private: Path | None) -> None:
    """Turn all that this process and its children print from now on into JSON lines on standard output. What is no
    line of a log is written to `private`; without such a file, it is an event of its own."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:  # it ends when the last of them has closed its end
        os.close(writing)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        code = 0
        try:
            with (
                os.fdopen(reading, "rb") as lines,
                nullcontext() if private is None else os.fdopen(_private(private), "ab") as rest,
            ):
                convert(lines, sys.stdout.buffer, rest)
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    if private is not None:
        os.environ |= {_FORMAT: "json", _PRIVATE: str(private)}


def convert(lines: BinaryIO, out: BinaryIO, private: BinaryIO | None) -> None:
    """Convert lines until they end."""
    for line in lines:
        text = _COLOUR.sub("", line.decode("utf-8", "replace")).rstrip("\r\n")
        if _is_json(text):
            entry = text
        elif prefix := next(filter(text.startswith, _PREFIXES), None):
            entry = _line(_PREFIXES[prefix], "flwr", text.removeprefix(prefix))
        elif private is not None:
            private.write(line)
            private.flush()
            continue
        else:
            entry = _line("INFO", "output", text)
        if text.strip():
            out.write(entry.encode() + b"\n")
            out.flush()


def _private(path: Path) -> int:
    """Open a file to append to, which only its owner can read."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _line(level: str, logger: str, event: str, code: str | None = None) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    entry = {"time": now, "level": level, "logger": logger, "event": event.strip()}
    return json.dumps(entry if code is None else {**entry, "code": code})


def _is_json(text: str) -> bool:
    """Return whether it is a line that this module wrote. Other code may log as JSON, too."""
    if not text.startswith('{"time": '):
        return False
    try:
        found = json.loads(text)
    except ValueError:
        return False
    ours = isinstance(found, dict) and found.keys() - {"code"} == {"time", "level", "logger", "event"}
    return ours and str(found["logger"]).partition(".")[0] == "fedspa"
