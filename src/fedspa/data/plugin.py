"""Names of the form ``package.module:function``, by which a user brings their own data or model.

The current directory is importable, last on the path: a file there can be named, and none there can shadow an installed
package. The code named is the user's own and runs with the user's rights; never take such a name from someone else.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable

from fedspa.errors import FedspaError

# Before a name in the files of a run whose records, persons or module were given in Python: it names nothing that can
# be loaded.
GIVEN = "given:"

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_plugin(name: str) -> bool:
    """Whether ``name`` points at a user's function rather than at something built in."""
    return ":" in name


def one_line(error: BaseException) -> str:
    """A foreign exception in one line: its kind and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0].strip()}" if said else type(error).__name__


def resolve(name: str, *, key: str, error: type[FedspaError]) -> Callable[..., object]:
    """The callable that ``name`` points at; whatever goes wrong is an ``error`` that quotes ``key`` and ``name``."""
    if name.startswith(GIVEN):
        argument = "data" if key == "data.name" else "module"
        raise error(
            f"{key} = {name!r} says that a run was given its {argument} in Python, which no config can name; go on "
            f"with that run by fedspa.run(resume=FOLDER, {argument}=…), or name what is to be used"
        )
    if not _NAME.fullmatch(name):
        raise error(f"{key} = {name!r} is not of the form 'package.module:function'")
    module_name, _, path = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as cause:  # the user's module may raise anything, and a script without a guard exits
        top = module_name.partition(".")[0]
        unknown = isinstance(cause, ModuleNotFoundError) and cause.name == top
        way_out = f"; start fedspa in the folder that holds {top}, or install it" if unknown else ""
        raise error(f"{key} = {name!r}: cannot import {module_name!r} ({one_line(cause)}){way_out}") from cause
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as cause:
            raise error(f"{key} = {name!r}: module {module_name!r} has no {path!r}") from cause
        except Exception as cause:  # a module's __getattr__ and a class's descriptors are the user's code too
            raise error(f"{key} = {name!r} failed in its own code ({one_line(cause)})") from cause
    if not callable(found):
        raise error(f"{key} = {name!r}: {path!r} is a {type(found).__name__}, not a function")
    return found
