"""TOML that may hold anything: whatever is wrong with a file or a text of it is a ConfigError of one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fedspa.errors import ConfigError

# A thousand times the largest config there is, and little enough for /dev/zero to be refused at once.
_LARGEST = 1 << 20


class NotToml(ConfigError):
    """A text cannot be read as TOML."""


def read(path: Path, what: str) -> dict[str, Any]:
    """Return the table in the file at `path`; `what` says in an error which file to give: 'a TOML config'."""
    try:
        return parse(text(path, what))
    except NotToml as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def text(path: Path, what: str) -> str:
    """Return what stands in the file at `path`."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give the path of {what}") from None
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{str(path)!r} is no file's name ({error}); give the path of {what}") from None
    if len(content) > _LARGEST:
        raise ConfigError(f"{path} is larger than {_LARGEST} bytes; give the path of {what}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def parse(text: str) -> dict[str, Any]:
    """Return the table that `text` spells out."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotToml(str(error)) from None
    except ValueError:  # Python's own
        raise NotToml("a number in it has too many digits") from None
    except RecursionError:
        raise NotToml("it is nested too deeply to be read") from None
