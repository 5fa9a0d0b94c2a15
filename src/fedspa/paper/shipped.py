"""The configs and tables that come with the package, by their names; nothing else knows where they lie."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from fedspa.errors import ConfigError

_HERE = Path(str(resources.files(__name__.rpartition(".")[0])))


def names(kind: str) -> list[str]:
    """What there is of a kind, `configs` or `tables`."""
    return sorted(path.stem for path in (_HERE / kind).glob("*.toml"))


def table(name: str) -> Path:
    """The file of a table: the path of a TOML file, or one of ours (`mnist`)."""
    return _find("tables", "table", name)


def config(name: str) -> Path:
    """The file of a config: the path of a TOML file, or one of ours (`mnist-best`)."""
    return _find("configs", "config", name)


def _find(kind: str, what: str, name: str) -> Path:
    if name in (known := names(kind)):
        return _HERE / kind / f"{name}.toml"
    if not re.fullmatch(r"[\w-]+", name) or Path(name).exists():
        return Path(name)
    raise ConfigError(f"there is no {what} {name!r}; there are {', '.join(known)}, or give the path of a TOML file")
