"""The table of DEPENDENCIES.md: every pinned package with its licence, as its own metadata states it.

    python tests/licences.py > DEPENDENCIES.md

Run it after a change of constraints.txt, in an environment that has everything installed.
"""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HEAD = """\
# Dependencies and their licences

What `constraints.txt` pins, what for, and under which licence, in the words of each package's own metadata (on Linux).
`use` is what `pip install fedspa` brings; the others are extras. No licence among them is of the GPL's family; MPL-2.0
asks for changes to its own files only. `tests/test_packaging.py` keeps the list in step.

| package | version | licence | for |
|---|---|---|---|
"""


def pins() -> dict[str, str]:
    """Canonical name → version, from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def direct() -> dict[str, list[Requirement]]:
    """What pyproject.toml asks for: `use` (the package itself) and each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = {"use": project["dependencies"], **project["optional-dependencies"]}
    return {group: [Requirement(text) for text in texts] for group, texts in groups.items()}


def closure(requirements: list[Requirement]) -> dict[str, list[Requirement]]:
    """Canonical name → who asks for it with what, over all that is installed; markers of this machine."""
    found: dict[str, list[Requirement]] = {}
    visited: set[tuple[str, str]] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        found.setdefault(name, []).append(requirement)
        for extra in {"", *requirement.extras}:
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            try:
                texts = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            needed = (Requirement(text) for text in texts)
            waiting += [r for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})]
    return found


def licence(name: str) -> str:
    about = metadata.metadata(name)
    stated = about.get("License-Expression") or about.get("License") or ""
    if stated and "\n" not in stated and stated != "UNKNOWN":
        return stated
    classified = [line.split(" :: ")[-1] for line in about.get_all("Classifier", []) if line.startswith("License ::")]
    return " or ".join(classified) or "not stated"


def purposes() -> dict[str, str]:
    """Canonical name → the first group that needs it."""
    found: dict[str, str] = {}
    for group, requirements in direct().items():
        for name in closure(requirements):
            found.setdefault(name, group)
    return found


def table() -> str:
    groups = purposes()
    rows = (f"| {name} | {version} | {licence(name)} | {groups.get(name, '')} |" for name, version in pins().items())
    return HEAD + "\n".join(sorted(rows)) + "\n"


def listed() -> dict[str, tuple[str, str, str]]:
    """Canonical name → (version, licence, purpose) as DEPENDENCIES.md has it."""
    text = (ROOT / "DEPENDENCIES.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", text, flags=re.M)
    return {name: (version, words, purpose) for name, version, words, purpose in rows if name != "package"}


if __name__ == "__main__":
    print(table(), end="")
