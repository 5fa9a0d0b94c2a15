"""`fedspa new`: a small project with data, model and config of one's own, which runs at once."""

from __future__ import annotations

from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedspa.errors import ConfigError

FILES = ("config.toml", "my_data.py", "my_model.py", "README.md")


def new(folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet, or is empty.")]) -> None:
    """Make a project: your own data function, model function and config, ready to run.

    Example: fedspa new my-study
    """
    template = resources.files("fedspa.cli").joinpath("template")
    made: list[Path] = []
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder")
        made += (one for one in (folder, *folder.parents) if not one.exists())
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).write_bytes(template.joinpath(name).read_bytes())
    except OSError as error:
        for one in made:  # parents of what could not be made; with something in it, a folder stays
            with suppress(OSError):
                one.rmdir()
        raise ConfigError(f"{folder}: {error.strerror or error}; name a folder that can be written") from None
    print(f"Made {', '.join(FILES)} in {folder}. Now:\n\n    cd {folder}\n    fedspa run config.toml\n")
