"""The configs that come with the package, by name."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from fedspa.errors import ConfigError, did_you_mean

_HERE = Path(str(resources.files(__name__)))


def names() -> list[str]:
    return sorted(path.stem for path in _HERE.glob("*.toml"))


def find(name: str) -> Path:
    """Return the file of a config: the path of a TOML file, or the name of a shipped one (`mnist-best`)."""
    if name in (known := names()):
        return _HERE / f"{name}.toml"
    path = Path(name)
    beside = [str(other) for other in path.parent.glob("*.toml")]
    meant = did_you_mean(name, [*known, *beside])
    if path.exists() or not (meant or re.fullmatch(r"[\w-]+", name)):
        return path
    raise ConfigError(
        f"there is no config {name!r}; shipped: {', '.join(known)}; or give the path of a TOML file{meant}"
    )


def complete(start: str) -> list[str]:
    """Return the shipped configs, and the TOML files of the folder, that begin so: for a shell's completion."""
    here = Path(start).parent if start else Path()
    return [name for name in [*names(), *sorted(map(str, here.glob("*.toml")))] if name.startswith(start)]
