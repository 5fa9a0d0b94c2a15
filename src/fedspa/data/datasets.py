"""Datasets by name: scikit-learn's digits, MNIST, Fashion-MNIST, CIFAR-10, a table, an ``.npz``, or the user's
``package.module:function``.

MNIST, Fashion-MNIST and CIFAR-10 are normalised by the constants that the field has used for years. They are public,
so using them spends no privacy budget; a mean computed from the agents' own records would.
"""

from __future__ import annotations

import functools
import gzip
import math
import pickle
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedspa.data import plugin
from fedspa.data.adapters import from_agents, from_arrays, from_table
from fedspa.data.columns import Schema
from fedspa.data.dataset import Dataset
from fedspa.data.plugin import TABLES, is_pattern
from fedspa.errors import DataError, did_you_mean, first_line

NAMES = ("digits", "mnist", "fashion-mnist", "cifar10")

# Name → mean and standard deviation of the pixels, the folder that torchvision keeps the files in, where to get them.
_MNIST = {
    "mnist": (
        ([0.1307], [0.3081]),
        "MNIST/raw",
        "https://ossci-datasets.s3.amazonaws.com/mnist/ (PyTorch's copy of yann.lecun.com/exdb/mnist)",
    ),
    "fashion-mnist": (
        ([0.2860], [0.3530]),
        "FashionMNIST/raw",
        "https://github.com/zalandoresearch/fashion-mnist ('Get the Data': four .gz files)",
    ),
}
_CIFAR10_MEAN, _CIFAR10_STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]

_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_CIFAR10_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR10_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html ('CIFAR-10 python version')"


def load(
    name: str,
    directory: Path | None,
    person: str | None = None,
    schema: Schema | None = None,
    code: str | None = None,
) -> Dataset:
    """Load the data called ``name``; the files of mnist, fashion-mnist, cifar10, an .npz or a table are looked for in
    ``directory`` (data.dir).

    ``schema`` describes a table; with ``*`` in its name there is one per agent, who has the name of its file.
    ``person`` names the array of an .npz with the person IDs (data.person). ``code`` is the folder of the user's own
    functions (run.code).
    """
    if schema is not None:
        if is_pattern(name):
            return from_agents({file: from_table(path, schema) for file, path in _sites(name, directory)}, name=name)
        return from_table(_placed(name, directory), schema, name=name)
    if name.endswith(".npz") and not name.startswith(plugin.GIVEN):
        return _npz(name, directory, person)
    if plugin.is_plugin(name):
        return _users(name, code)
    match name:
        case "digits":
            return _digits()
        case "mnist" | "fashion-mnist":
            return _mnist(name, directory)
        case "cifar10":
            return _cifar10(directory)
    raise DataError(
        f"data.name = {name!r} is unknown{did_you_mean(name, NAMES)}: choose {', '.join(NAMES)}, a path that ends in "
        ".npz, one that ends in .csv or .parquet with [data.table], or 'package.module:function'"
    )


def files(name: Literal["mnist", "fashion-mnist", "cifar10"], directory: Path | None) -> list[Path]:
    """Return the paths of the files of ``name`` in ``directory``; a DataError names those that are missing."""
    if name in _MNIST:
        _, below, source = _MNIST[name]
        folders = _folders(name, directory, ("", name, below))
        return _find(name, {file: (file, f"{file}.gz") for file in _MNIST_FILES}, folders, source)
    folders = _folders(name, directory, ("cifar-10-batches-py", ""))
    return _find(name, {file: (file,) for file in _CIFAR10_FILES}, folders, _CIFAR10_SOURCE)


@functools.cache
def _digits_as_shipped() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read the images and labels, once: it takes as long as a round."""
    from sklearn.datasets import load_digits  # heavy, and wanted by this one name only

    bunch = load_digits()
    return bunch.images, bunch.target


def _digits() -> Dataset:
    images, labels = _digits_as_shipped()
    x = torch.from_numpy(images).to(torch.float32).div_(16).unsqueeze(1)
    y = torch.from_numpy(labels).to(torch.int64)
    # Every fifth record of each class is held out: stratified, and the same whatever the library's version.
    held_out = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        held_out[torch.nonzero(y == label).squeeze(1)[4::5]] = True
    return Dataset(x[~held_out], y[~held_out], x[held_out], y[held_out], classes=10, name="digits")


def _mnist(name: Literal["mnist", "fashion-mnist"], directory: Path | None) -> Dataset:
    scale, paths = _MNIST[name][0], files(name, directory)
    arrays = [read_idx(path, (28, 28) if "images" in path.name else ()) for path in paths]
    train_x, test_x = (_normalised(x[:, None], *scale) for x in (arrays[0], arrays[2]))
    train_y, test_y = (torch.from_numpy(y.astype(np.int64)) for y in (arrays[1], arrays[3]))
    return Dataset(train_x, train_y, test_x, test_y, classes=10, name=name)


def _cifar10(directory: Path | None) -> Dataset:
    batches = [read_cifar_batch(path) for path in files("cifar10", directory)]
    train_x, test_x = (
        _normalised(np.concatenate([x for x, _ in part]), _CIFAR10_MEAN, _CIFAR10_STD)
        for part in (batches[:-1], batches[-1:])
    )
    train_y, test_y = (torch.from_numpy(np.concatenate([y for _, y in part])) for part in (batches[:-1], batches[-1:]))
    return Dataset(train_x, train_y, test_x, test_y, classes=10, name="cifar10")


def _normalised(images: NDArray[np.uint8], mean: list[float], std: list[float]) -> torch.Tensor:
    x = torch.from_numpy(images).to(torch.float32).div_(255)
    return x.sub_(torch.tensor(mean).view(-1, 1, 1)).div_(torch.tensor(std).view(-1, 1, 1))


def _folders(name: str, directory: Path | None, below: Sequence[str]) -> list[Path]:
    if directory is None:
        raise DataError(f"data.name = {name!r} needs data.dir, the folder that holds its files")
    return [directory / folder for folder in below]


def _find(name: str, forms: Mapping[str, tuple[str, ...]], folders: list[Path], source: str) -> list[Path]:
    """Return a path per file, in the folder that has the most of them; the first of several forms is preferred."""
    found = [
        {file: path for file, some in forms.items() for form in some[::-1] if (path := folder / form).is_file()}
        for folder in folders
    ]
    best = max(found, key=len)
    missing = [" or ".join(some) for file, some in forms.items() if file not in best]
    if missing:
        where = f"'{folders[found.index(best)]}'" if best else " or ".join(f"'{folder}'" for folder in folders)
        lacking = f"data.name = {name!r}: missing {', '.join(missing)} in {where} (see data.dir)"
        raise DataError(f"{lacking}; get them from {source}")
    return [best[file] for file in forms]


def _placed(name: str, directory: Path | None) -> Path:
    """Return the path of a file: in the folder if it is there, else as it is."""
    path = Path(name).expanduser()
    try:
        return directory / path if directory is not None and (directory / path).is_file() else path
    except (OSError, ValueError):  # a name that no file can have
        return path


def _sites(name: str, directory: Path | None) -> list[tuple[str, Path]]:
    """Return name and path of each file of a list, or that matches a pattern, in the order of their names."""
    paths = [path for each in name.split(TABLES) for path in _matching(each, directory)]
    twice = [stem for stem, times in Counter(path.stem for path in paths).items() if times > 1]
    if twice:
        raise DataError(
            f"data.name = {name!r} matches two files named {twice[0]!r}: an agent has the name of its file, so "
            "each needs another one"
        )
    return [(path.stem, path) for path in paths]


def _matching(name: str, directory: Path | None) -> list[Path]:
    if not any(mark in name for mark in "*?"):
        return [_placed(name, directory)]
    folders = [Path() if Path(name).is_absolute() else folder for folder in (directory, Path()) if folder is not None]
    for folder in folders:
        if paths := sorted(map(Path, glob(str(folder / name)))):
            return paths
    where = " or ".join(f"'{folder}'" for folder in folders)
    raise DataError(f"data.name = {name!r}: no file in {where} matches it (see data.dir)")


def _npz(name: str, directory: Path | None, person: str | None) -> Dataset:
    arrays = read_npz(_placed(name, directory), (*NPZ_ARRAYS, *(() if person is None else (person,))))
    persons = None if person is None else arrays[person]
    return from_arrays(*(arrays[member] for member in NPZ_ARRAYS), name=name, persons=persons)


def _users(name: str, code: str | None) -> Dataset:
    function = plugin.resolve(name, key="data.name", error=DataError, code=code)
    made = plugin.call(function, what=f"data.name = {name!r}", error=DataError)
    if isinstance(made, Dataset):
        return made
    if isinstance(made, tuple) and len(made) == 4:
        return from_arrays(*made, name=name)
    raise DataError(
        f"data.name = {name!r} returned a {type(made).__name__}: a Dataset or the tuple "
        "(train_x, train_y, test_x, test_y) is needed"
    )


# Readers of MNIST's idx files, CIFAR-10's python batches and a user's .npz.
#
# Nothing in a file is executed: a pickle may name numpy's arrays and nothing else, and an .npz holds no pickle.

NPZ_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_UNSIGNED_BYTE = 0x08
_PIXELS = 3 * 32 * 32
_PICKLED_ARRAYS = {
    *(("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")),
    *(("numpy", "ndarray"), ("numpy", "dtype")),
}


def read_idx(path: Path, record: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an idx file of bytes, gzipped or not, as an array of shape (records, *record).

    Format (LeCun, Cortes and Burges): two zero bytes, a type code, the number of dimensions, each dimension as a
    big-endian 32-bit count, then the values in C order.
    """
    dimensions = 1 + len(record)
    start = 4 + 4 * dimensions
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except Exception as cause:  # gzip and zlib raise several kinds
        raise DataError(f"{path} cannot be read ({first_line(cause)}): fetch it again") from cause
    if content[:4] != bytes([0, 0, _UNSIGNED_BYTE, dimensions]) or len(content) < start:
        raise DataError(f"{path} is not an idx file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if shape[1:] != record:
        raise DataError(f"{path} holds records of shape {shape[1:]}, where {record} is expected")
    if math.prod(shape) != len(content) - start:
        raise DataError(f"{path} says {math.prod(shape)} values and has {len(content) - start}: fetch it again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLED_ARRAYS:
            raise DataError(f"it asks for {f'{module}.{name}'[:80]!r}, and only numpy arrays are allowed")
        return super().find_class(module, name)


def read_cifar_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read images (records, 3, 32, 32) and labels of one batch file."""
    try:
        with path.open("rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()
        images, labels = (batch[key] if key in batch else batch[key.encode()] for key in ("data", "labels"))
        data, numbers = np.asarray(images), np.asarray(labels)
    except Exception as cause:  # a damaged pickle raises anything
        raise DataError(f"{path} is not a CIFAR-10 batch: {first_line(cause)}") from cause
    if data.dtype != np.uint8 or data.shape[1:] != (_PIXELS,) or numbers.dtype.kind != "i":
        raise DataError(f"{path} is not a CIFAR-10 batch: 'data' must be bytes in {_PIXELS} columns, 'labels' integers")
    if numbers.shape != data.shape[:1]:
        raise DataError(f"{path} is not a CIFAR-10 batch: {len(data)} images and labels of shape {numbers.shape}")
    return data.reshape(-1, 3, 32, 32), numbers.astype(np.int64)


def read_npz(path: Path, wanted: tuple[str, ...] = NPZ_ARRAYS) -> dict[str, NDArray[Any]]:
    """Read the arrays of an .npz by name."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in wanted if name not in archive.files]
            if missing:
                raise DataError(f"{path} lacks {', '.join(missing)}: an .npz needs the arrays {', '.join(wanted)}")
            return {name: archive[name] for name in wanted}
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"data = '{path}': there is no such file") from None
    except Exception as cause:  # zipfile and numpy raise a dozen kinds
        raise DataError(f"{path} is damaged, or not an .npz of plain arrays ({first_line(cause)})") from cause
