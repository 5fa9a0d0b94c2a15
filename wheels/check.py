"""Is a wheel what is meant to be published: compiled, for any Python, and without libraries that a machine may lack?

    python wheels/check.py dist/*.whl

Exit code 0 and one line for each wheel; 1 and what is wrong.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

LIBRARY = "fedspa/engine/native/_native.so"
# Names that a shared object has in it only if it asks for them. OpenMP would come with a library of its own, and two of
# them in one process (torch has another) do not get on.
FOREIGN = (b"libpython", b"PyObject_", b"libgomp", b"libomp", b"libstdc++")


def faults(path: Path) -> list[str]:
    """What is wrong with a wheel; nothing if it may be published."""
    match = re.fullmatch(r"fedspa-[^-]+-([^-]+)-([^-]+)-([^-]+)\.whl", path.name)
    if match is None:
        return ["its name is none of a wheel of fedspa"]
    found = []
    if match.groups()[:2] != ("py3", "none") or match[3] == "any":
        found.append(f"its tag is {'-'.join(match.groups())}, and must be py3-none-PLATFORM")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        if LIBRARY not in names:
            return [*found, "the compiled part is not in it: was there a compiler?"]
        library = wheel.read(LIBRARY)
    others = [name for name in names if re.search(r"\.(so|dylib)\b", name) and name != LIBRARY]
    found += [f"a second library is in it: {name}" for name in others]
    return found + [f"the compiled part asks for {name.decode()}" for name in FOREIGN if name in library]


def glibc(path: Path) -> str:
    """The newest symbol version that the compiled part asks for; empty where it is not of Linux."""
    with zipfile.ZipFile(path) as wheel:
        versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", wheel.read(LIBRARY))
    return "GLIBC_{}.{}".format(*max((int(major), int(minor)) for major, minor in versions)) if versions else ""


def main(arguments: list[str]) -> int:
    wrong = False
    for path in map(Path, arguments):
        found = faults(path)
        wrong |= bool(found)
        print(f"{path.name}: {'; '.join(found) or 'sound ' + glibc(path)}")
    return int(wrong or not arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
