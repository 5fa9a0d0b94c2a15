"""Names of the form ``package.module:function``, by which a user supplies data, a model, a task or an algorithm.

The module may lie beside the config (``code``, the config's ``run.code``) or in the current folder. Both are last on
the path, in this order, so that neither can shadow an installed package. The code runs with the user's rights; never
take such a name from someone else.
"""

import importlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from fedspa.errors import FedspaError
from fedspa.errors import one_line as one_line

# Prefix of names in the files of a run whose records, persons or module were passed in Python: such a name cannot be
# loaded.
GIVEN = "given:"
TABLES = "|"  # between the names of several tables, in the one text that `data.name` is

T = TypeVar("T")

_appended: list[str] = []  # to sys.path, the newest first
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_plugin(name: str) -> bool:
    """Return whether ``name`` points at a user's function rather than at something built in."""
    return ":" in name


def is_table(name: str) -> bool:
    """Return whether ``name`` is the path of a table."""
    return name.lower().endswith((".csv", ".parquet", ".pq")) and not name.startswith(GIVEN)


def is_pattern(name: str) -> bool:
    """Return whether ``name`` is a pattern or a list of tables, one per agent."""
    return is_table(name) and any(mark in name for mark in ("*", "?", TABLES))


def resolve(name: str, *, key: str, error: type[FedspaError], code: str | None = None) -> Callable[..., object]:
    """Return the callable that ``name`` points at; every failure is an ``error`` that quotes ``key`` and ``name``."""
    found = imported(name, key=key, error=error, code=code)
    if not callable(found):
        path = name.partition(":")[2]
        raise error(f"{key} = {name!r}: {path!r} is a {type(found).__name__}, not a function")
    return found


def imported(name: str, *, key: str, error: type[FedspaError], code: str | None = None) -> object:
    """Return the object that ``name`` points at; every failure is an ``error`` that quotes ``key`` and ``name``."""
    if name.startswith(GIVEN):
        argument = "data" if key == "data.name" else "module"
        raise error(
            f"{key} = {name!r} says that a run got its {argument} in Python, which no config can name; resume that "
            f"run by fedspa.run(resume=FOLDER, {argument}=…), or name what is to be used"
        )
    if not _NAME.fullmatch(name):
        raise error(f"{key} = {name!r} is not of the form 'package.module:function'")
    module_name, _, path = name.partition(":")
    top = module_name.partition(".")[0]
    try:
        found: object = _imported(module_name, [os.getcwd()] if code is None else [code, os.getcwd()])
    except (Exception, SystemExit) as cause:  # the user's module may raise anything, and a script without a guard exits
        unknown = isinstance(cause, ModuleNotFoundError) and cause.name == top
        hint = f"; put {top} beside the config, start fedspa in the folder that holds it, or install it" * unknown
        raise error(f"{key} = {name!r}: cannot import {module_name!r} ({one_line(cause)}){hint}") from cause
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as cause:
            raise error(f"{key} = {name!r}: module {module_name!r} has no {path!r}") from cause
        except Exception as cause:  # a module's __getattr__ and a class's descriptors are the user's code too
            raise error(f"{key} = {name!r} failed in its own code ({one_line(cause)})") from cause
    return found


def call(function: Callable[..., T], *arguments: object, what: str, error: type[FedspaError]) -> T:
    """Call a user's function. Any exception of its own becomes an ``error`` that begins with ``what``."""
    try:
        return function(*arguments)
    except (FedspaError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as cause:  # the user's code may raise anything, and a script exits
        raise error(f"{what} failed in its own code ({one_line(cause)})") from cause


def _imported(name: str, folders: list[str]) -> ModuleType:
    """Import a module, looking in `folders` after everything that is installed. A module of the same name from another
    folder is replaced: two projects of `fedspa new` in one session use the same module names."""
    top = name.partition(".")[0]
    before = [entry for entry in sys.path if entry not in _appended]
    sys.path[:] = [entry for entry in before if os.path.abspath(entry) not in folders] + folders
    importlib.invalidate_caches()
    try:
        there = importlib.machinery.PathFinder.find_spec(top)
        if there is not None and there.origin is not None and _folder(there.origin) in folders:
            loaded = getattr(sys.modules.get(top), "__file__", None)
            if loaded is not None and os.path.realpath(loaded) != os.path.realpath(there.origin):
                for module in [module for module in sys.modules if module.partition(".")[0] == top]:
                    del sys.modules[module]
        return importlib.import_module(name)
    finally:  # imports at call time, and those of workers, look there too
        own = [folder for folder in folders if folder not in before]
        _appended[:] = dict.fromkeys([*own, *_appended])
        sys.path[:] = before + _appended


def _folder(origin: str) -> str:
    """Return the folder that contains a module or package."""
    folder = os.path.dirname(os.path.abspath(origin))
    return os.path.dirname(folder) if os.path.basename(origin) == "__init__.py" else folder
