"""The configs that come with the package, by name."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from fedspa.errors import ConfigError

_HERE = Path(str(resources.files(__name__)))


def names() -> list[str]:
    return sorted(path.stem for path in _HERE.glob("*.toml"))


def find(name: str) -> Path:
    """Return the file of a config: the path of a TOML file, or the name of a shipped one (`mnist-best`)."""
    if name in (known := names()):
        return _HERE / f"{name}.toml"
    if not re.fullmatch(r"[\w-]+", name) or Path(name).exists():
        return Path(name)
    raise ConfigError(f"there is no config {name!r}; shipped: {', '.join(known)}; or give the path of a TOML file")
