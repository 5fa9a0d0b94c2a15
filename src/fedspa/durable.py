"""Files that are there whole or not at all, whatever happens to the process, the disk or the power."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

# What a killed writer leaves behind; never read, and removed by the next write of the same name. Nobody's own file ends
# so: whatever does may be overwritten.
DRAFT = ".fedspa-draft"


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` make a draft beside `path`, force it to the disk, and give it the name in one step."""
    if path.exists() and not path.is_file():  # renaming would put a plain file in the place of a device
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    draft = path.with_name(path.name + DRAFT)
    try:
        write(draft)
        force(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    force_folder(path.parent)


def replace_tensors(path: Path, write: Callable[[Path], None]) -> None:
    """`replace` for a writer of safetensors, which hides the system's error in a sentence of its own."""
    try:
        replace(path, write)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def replace_bytes(path: Path, content: bytes) -> None:
    def write(draft: Path) -> None:
        draft.write_bytes(content)

    replace(path, write)


def replace_text(path: Path, text: str) -> None:
    replace_bytes(path, text.encode("utf-8"))


def check_folder(path: Path) -> None:
    """Raise an OSError where `path` is no folder that can be written to and cannot become one. Nothing is made."""
    there = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    if not there.is_dir():
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def force_folder(folder: Path) -> None:
    """Names live in the folder: a file's own fsync does not keep them."""
    if os.name == "posix":
        force(folder)


def force(path: Path) -> None:
    """Force what any process wrote there to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
