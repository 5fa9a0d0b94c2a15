"""What several commands print: tables on a narrow screen, checklists, options that they share; and how a command ends:
an error or Ctrl-C becomes a line on standard error and an exit code."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedspa.errors import Check, FedspaError, failures, place_of, printable

WIDTH = 80  # every table fits it

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def show_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    screen: Console | None = None,
    *,
    title: str | None = None,
    right: bool = False,
) -> None:
    """Print a table at 80 columns where the screen has fewer, and let the terminal fold its lines. Squeezed to the
    screen it would lose whole columns, and the last ones are ε and whether it holds. `right`: numbers, but for the
    first column."""
    screen = screen or Console()
    table = Table(title=title, box=None)
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if right and place else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    own = screen.width
    screen.width = max(own, WIDTH)
    try:
        screen.print(table, crop=False)
    finally:
        screen.width = own


def show_facts(facts: Iterable[tuple[str, str]], screen: Console | None = None) -> None:
    """Print a line for each fact behind its label; notes, which a reader must know, in red."""
    screen = screen or Console()
    for label, text in facts:
        named = Text(f"{label:<11} ", "red" if label == "Note" else "")
        screen.print(named.append(printable(text), ""), soft_wrap=True)


def print_json(value: object) -> None:
    print(json.dumps(value, allow_nan=False))


def show_checks(name: str, checks: Sequence[Check], as_json: bool) -> None:
    """Print a verdict and every check; exit with code 1 if a required check failed."""
    failed = failures(checks)
    if as_json:
        found = {"name": name, "ready": not failed, "checks": [asdict(check) for check in checks]}
        print_json(found)
    else:
        count = f"{len(failed)} check{'s' * (len(failed) != 1)} failed"
        print(printable(f"{name}: not ready: {count}" if failed else f"{name}: ready"))
        width = max(len(check.subject) for check in checks)
        for check in checks:
            mark = {True: "ok", False: "FAILED", None: "–"}[check.passed]
            print(f"{mark:<6} {check.subject:<{width}}  {printable(check.detail)}")
    if failed:
        raise typer.Exit(1)


def complete_key(start: str) -> list[str]:
    """Return the keys of a config that begin so, each with its =, for a shell's completion."""
    from fedspa.runs.config import flat, load

    return [f"{key}=" for key in flat(load()) if key.startswith(start)]


IN_FULL = "FEDSPA_TRACEBACK"  # set, a traceback stands before the line
INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended; fedspa/__main__.py has it too, before any import
BAD_INPUT, BUG = 2, 70  # 70 is sysexits' EX_SOFTWARE: no script may take a bug for "the answer is no"


def handled(error: BaseException) -> int:
    """Say on standard error, in one line, what ended the command; the exit code."""
    if os.environ.get(IN_FULL):
        traceback.print_exception(error)
    line, code = _describe(error)
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


def _describe(error: BaseException) -> tuple[str | None, int]:
    match error:
        case click.exceptions.NoArgsIsHelpError():
            error.show()
            return None, BAD_INPUT
        case click.MissingParameter(ctx=click.Context() as found):
            missing = [name for name in map(_missing, found.command.params) if name]
            return f"missing: {', '.join(missing)} (see {found.command_path} --help)", BAD_INPUT
        case click.ClickException():
            context = getattr(error, "ctx", None)
            hint = "" if context is None else f" (see {context.command_path} --help)"
            return f"{error.format_message().rstrip('.')}{hint}", BAD_INPUT
        case FedspaError():
            own = error.__cause__ is not None and place_of(error.__cause__) is not None
            return f"{error}{f'; {IN_FULL}=1 shows the traceback' * own}", BAD_INPUT
        case click.Abort() | KeyboardInterrupt():
            return None, INTERRUPTED
        case BrokenPipeError():
            return None, 1  # the reader of the output has closed it
        case OSError(errno=errno.ENOSPC):
            return f"no disk space left to write {error.filename or 'the output'}; free some", BAD_INPUT
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


def _missing(parameter: click.Parameter) -> str | None:
    """Return the name of a required option that the command line lacks. Click itself stops at the first."""
    given = any(word.partition("=")[0] in parameter.opts for word in sys.argv[1:])
    if not parameter.required or (isinstance(parameter, click.Option) and given):
        return None
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name


def _out_of_memory(error: BaseException) -> bool:
    """Python's own error, or torch's: of a GPU it has a type, of the CPU only its words tell."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _kept(error: BaseException) -> str:
    """Return where the traceback went: a file that only this user can read."""
    trace = "".join(traceback.format_exception(error))
    try:
        number, path = tempfile.mkstemp(prefix="fedspa-bug-", suffix=".txt")
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
    except OSError:
        return f"{trace}, which could not be kept in a file"
    return f"its traceback is in {path}"


@contextmanager
def interruptible(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
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
                os._exit(INTERRUPTED)
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
