"""A user's ``.npz`` with x_train, y_train, x_test and y_test, read without trust.

Never a pickle, and each member's size, as its header claims it, must be the size that the archive records and that its
compressed bytes can hold, before anything of that size is allocated.
"""

import math
import zipfile
from pathlib import Path
from typing import Any

from numpy.lib import format as npy
from numpy.typing import NDArray

from fedspa.errors import DataError

MEMBERS = ("x_train", "y_train", "x_test", "y_test")
_MAX_BYTES = 1 << 32
# Deflate cannot shrink by more than this factor.
_MAX_DEFLATE_RATIO = 1032


def read(path: Path, more: tuple[str, ...] = ()) -> dict[str, NDArray[Any]]:
    """The four arrays and those of `more`, by name; anything else is a DataError."""
    members = (*MEMBERS, *more)
    try:
        there = path.is_file()
    except OSError:  # a name that no file can have
        there = False
    if not there:
        raise DataError(f"data.name = '{path}': there is no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            present = set(archive.namelist())
            missing = [name for name in members if f"{name}.npy" not in present]
            if missing:
                raise DataError(f"{path} lacks {', '.join(missing)}: an .npz needs the arrays {', '.join(members)}")
            infos = {name: archive.getinfo(f"{name}.npy") for name in members}
            total = sum(info.file_size for info in infos.values())
            if total > _MAX_BYTES:
                raise DataError(
                    f"{path} unpacks to {total} bytes, more than the {_MAX_BYTES} read from an .npz: "
                    "give larger data by 'package.module:function'"
                )
            return {name: _member(archive, info, path) for name, info in infos.items()}
    except DataError:
        raise
    except Exception as cause:  # zipfile and numpy raise a dozen kinds on foreign bytes, and none of them is our bug
        raise DataError(f"{path} is damaged, or not an .npz of plain arrays ({str(cause)[:100]!r})") from cause


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> NDArray[Any]:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{path}: {info.filename} is compressed in a way that numpy never uses")
    with archive.open(info) as file:
        header = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = header(file)
        claimed = file.tell() + math.prod(shape) * dtype.itemsize
    if claimed != info.file_size or claimed > info.compress_size * _MAX_DEFLATE_RATIO:
        raise DataError(f"{path}: {info.filename} claims shape {shape}, which is not what it holds")
    with archive.open(info) as file:
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    return array
