"""`fedspa new`: a small project with data, model and config of one's own, which runs at once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedspa.errors import ConfigError, real_path, worded

# What the files are called in the template, and in the project.
FILES = {name: name for name in ("config.toml", "my_data.py", "my_model.py", "README.md")}
FLOWER = {"flower.toml": "pyproject.toml", "my_data.py": "my_data.py", "my_model.py": "my_model.py"}
FLOWER |= {"flower.md": "README.md"}
NewFolder = Annotated[Path, typer.Argument(help="A folder that does not exist yet, or is empty.")]
_SIMULATE = "flwr run . --stream --federation-config 'num-supernodes=8 client-resources-num-cpus=1'"


def new(
    folder: NewFolder,
    flower: Annotated[
        bool, typer.Option("--flower", help="Make a Flower app, for sites apart from each other.")
    ] = False,
) -> None:
    """Make a project: your own data function, model function and config, ready to run.

    Example: fedspa new my-study
    """
    files = FLOWER if flower else FILES
    name = re.sub(r"[^a-z0-9]+", "-", real_path(folder).name.lower()).strip("-") or "federation"
    with worded(ConfigError, lambda why: f"{folder}: {why}; name a folder that can be written"), whole(folder):
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        fill(folder, files, {"name": name})
    command = _SIMULATE if flower else "fedspa run config.toml"
    print(f"Made {', '.join(files.values())} in {folder}. Now:\n\n    cd {folder}\n    {command}\n")


@contextmanager
def whole(folder: Path) -> Iterator[None]:
    """What is made within it is made whole. Where that fails, as on a full disk, a folder that was not there or empty
    is so again: a half of it would be in the way of the next try."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    empty = bool(made) or (folder.is_dir() and not any(folder.iterdir()))
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for one in folder.iterdir() if empty else ():
                shutil.rmtree(one) if one.is_dir() else one.unlink()
        for one in made:  # with something in it, a folder stays
            with suppress(OSError):
                one.rmdir()
        raise


def fill(folder: Path, files: Mapping[str, str], values: Mapping[str, str]) -> None:
    """Write files of the template, by the names that they get in `folder`, each {word} of `values` in its place."""
    template = resources.files("fedspa.cli").joinpath("template")
    for source, target in files.items():
        text = template.joinpath(source).read_text("utf-8")
        for word, value in values.items():
            text = text.replace(f"{{{word}}}", value)
        (folder / target).write_text(text, "utf-8")
