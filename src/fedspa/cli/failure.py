"""The one place that turns whatever ends a command into a line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback

import click

from fedspa.cli.interrupt import EXIT_CODE as INTERRUPTED
from fedspa.errors import FedspaError, place_of, printable

IN_FULL = "FEDSPA_TRACEBACK"  # set, a traceback stands before the line
BAD_INPUT, BUG = 2, 70  # 70 is sysexits' EX_SOFTWARE: no script may take a bug for "the answer is no"


def handled(error: BaseException) -> int:
    """Say on standard error, in one line, what ended the command; the exit code."""
    if os.environ.get(IN_FULL):
        traceback.print_exception(error)
    line, code = _told(error)
    if line is not None:
        say(line)
    return code


def say(line: str) -> None:
    """One line on standard error, or nothing where that cannot be written either: the exit code still tells."""
    try:
        print(f"fedspa: {printable(line)}", file=sys.stderr, flush=True)
    except OSError:
        silence()


def silence() -> None:
    """Point the standard streams at nothing, so that the interpreter's own last flush does not fail once more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _told(error: BaseException) -> tuple[str | None, int]:
    match error:
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return None, BAD_INPUT
        case click.ClickException():
            context = getattr(error, "ctx", None)
            hint = "" if context is None else f" (see {context.command_path} --help)"
            return f"{error.format_message().rstrip('.')}{hint}", BAD_INPUT
        case FedspaError():
            own = error.__cause__ is not None and place_of(error.__cause__) is not None
            return f"{error}{f'; {IN_FULL}=1 shows the way there' * own}", BAD_INPUT
        case click.Abort() | KeyboardInterrupt():
            return None, INTERRUPTED
        case BrokenPipeError():
            return None, 1  # whoever read the output has had enough
        case OSError(errno=errno.ENOSPC):
            return f"no room to write {error.filename or 'the output'}; free disk space", BAD_INPUT
        case OSError():
            where = "" if error.filename is None else f"{error.filename}: "
            return f"{where}{error.strerror or error}; give a path that can be used", BAD_INPUT
        case _ if _out_of_memory(error):
            return (
                "there is not enough memory; take a smaller model, a smaller algorithm.batch, fewer run.threads or "
                "--jobs, or a larger machine",
                BAD_INPUT,
            )
    return f"this is a bug in fedspa ({type(error).__name__}); {_kept(error)}, please report it", BUG


def _out_of_memory(error: BaseException) -> bool:
    """Python's own error, or torch's: of a GPU it has a type, of the CPU only its words tell."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _kept(error: BaseException) -> str:
    """Where the traceback went: a file that only this user can read."""
    trace = "".join(traceback.format_exception(error))
    try:
        number, path = tempfile.mkstemp(prefix="fedspa-bug-", suffix=".txt")
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
    except OSError:
        return f"{trace}, which could not be kept in a file"
    return f"its traceback is in {path}"
