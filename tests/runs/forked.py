"""`python WORDS` in a folder, as a fork of the tests' process: torch and all else that it imports is there already."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from small_runs import ended, start


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def python(folder: Path, words: list[str]) -> Done:
    """`words` are a script of the folder or -c and a program, and then its arguments."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = ended(start(lambda: _run(folder, words, out.fileno(), err.fileno())))
        told = [(stream.seek(0), stream.read())[1] for stream in (out, err)]
    return Done(code, *told)


def _run(folder: Path, words: list[str], out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    for path in folder.iterdir():  # a module of the same name that a test imported is another
        sys.modules.pop(path.stem, None)
    sys.path.insert(0, str(folder))
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            program = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(program))
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        raise SystemExit(stop.code or 0) from None
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
