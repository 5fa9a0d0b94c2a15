"""Count the modules of fedspa whose functions a plain `fedspa.run` calls; module bodies do not count.

    python benchmarks/modules_called.py [--list]

A reader who follows a run opens at most these files. Threads count; processes of their own would not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from types import FrameType

import fedspa

PACKAGE = Path(fedspa.__file__).parent
NO_FUNCTIONS = ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


def called_modules() -> dict[str, set[str]]:
    """Return the functions that a run calls, by module."""
    found: dict[str, set[str]] = {}
    in_class_body = set[str]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        own = code.co_filename.startswith(str(PACKAGE)) and code.co_filename.endswith(".py")  # no page templates
        if event != "call" or not own or code.co_name in NO_FUNCTIONS:
            return
        if "__qualname__" in frame.f_locals or code.co_qualname in in_class_body:  # the body of a class
            in_class_body.add(code.co_qualname)
            return
        found.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), set()).add(code.co_qualname)

    import fedspa.running  # what importing calls is not what running calls

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            fedspa.run({"privacy": {"epsilon": 2.0}, "run": {"out": f"{folder}/run"}}, progress=False)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the modules and how many of their functions ran")
    arguments = parser.parse_args()
    found = called_modules()
    if arguments.list:
        for name in sorted(found):
            print(f"{len(found[name]):4} {name}")
    print(f"{len(found)} modules, {sum(map(len, found.values()))} functions")


if __name__ == "__main__":
    main()
