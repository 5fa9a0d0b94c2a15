"""Data by name: scikit-learn's digits, MNIST, CIFAR-10, a table, an ``.npz``, or the user's
``package.module:function``.

MNIST and CIFAR-10 are normalised by the constants that the field has used for years. They are public, so using them
spends no privacy budget; a mean computed from the agents' own records would.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedspa.data import files as readers
from fedspa.data import plugin
from fedspa.data.columns import Schema
from fedspa.data.dataset import Dataset
from fedspa.data.given import from_arrays, from_table
from fedspa.errors import DataError

NAMES = ("digits", "mnist", "cifar10")

_MNIST_MEAN, _MNIST_STD = [0.1307], [0.3081]
_CIFAR10_MEAN, _CIFAR10_STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]

_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MNIST_SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/ (PyTorch's copy of yann.lecun.com/exdb/mnist)"
_CIFAR10_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR10_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html ('CIFAR-10 python version')"


def load(
    name: str,
    directory: Path | None,
    person: str | None = None,
    schema: Schema | None = None,
    code: str | None = None,
) -> Dataset:
    """The data called ``name``; the files of mnist, cifar10, an .npz or a table are looked for in ``directory``
    (data.dir).

    ``schema`` is a table's. ``person`` names what says whose a training record is (data.person), where other data has
    it beside the records. ``code`` is the folder of the user's own functions (run.code).
    """
    if schema is not None:
        return from_table(_placed(name, directory), schema, name=name)
    if name.endswith(".npz") and not name.startswith(plugin.GIVEN):
        return _npz(name, directory, person)
    if plugin.is_plugin(name):
        return _users(name, code)
    match name:
        case "digits":
            return _digits()
        case "mnist":
            return _mnist(directory)
        case "cifar10":
            return _cifar10(directory)
    raise DataError(
        f"data.name = {name!r} is unknown: choose {', '.join(NAMES)}, a path that ends in .npz, one that ends in "
        ".csv or .parquet with [data.table], or 'package.module:function'"
    )


def files(name: Literal["mnist", "cifar10"], directory: Path | None) -> list[Path]:
    """Where the files of ``name`` lie in ``directory``; a DataError names those that are missing."""
    if name == "mnist":
        folders = _folders(name, directory, ("", "mnist", "MNIST/raw"))
        return _find(name, {file: (file, f"{file}.gz") for file in _MNIST_FILES}, folders, _MNIST_SOURCE)
    folders = _folders(name, directory, ("cifar-10-batches-py", ""))
    return _find(name, {file: (file,) for file in _CIFAR10_FILES}, folders, _CIFAR10_SOURCE)


@functools.cache
def _digits_as_shipped() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read once: it is text, and takes as long as a round."""
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


def _mnist(directory: Path | None) -> Dataset:
    paths = files("mnist", directory)
    arrays = [readers.read_idx(path, (28, 28) if "images" in path.name else ()) for path in paths]
    train_x, test_x = (_normalised(x[:, None], _MNIST_MEAN, _MNIST_STD) for x in (arrays[0], arrays[2]))
    train_y, test_y = (torch.from_numpy(y.astype(np.int64)) for y in (arrays[1], arrays[3]))
    return Dataset(train_x, train_y, test_x, test_y, classes=10, name="mnist")


def _cifar10(directory: Path | None) -> Dataset:
    batches = [readers.read_cifar_batch(path) for path in files("cifar10", directory)]
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
    """A path for each file, from the folder that has the most of them; of its possible forms the first is preferred."""
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
    """Where the file lies: in the folder, if it is there."""
    path = Path(name).expanduser()
    try:
        return directory / path if directory is not None and (directory / path).is_file() else path
    except (OSError, ValueError):  # a name that no file can have
        return path


def _npz(name: str, directory: Path | None, person: str | None) -> Dataset:
    arrays = readers.read_npz(_placed(name, directory), (*readers.NPZ_ARRAYS, *(() if person is None else (person,))))
    persons = None if person is None else arrays[person]
    return from_arrays(*(arrays[member] for member in readers.NPZ_ARRAYS), name=name, persons=persons)


def _users(name: str, code: str | None) -> Dataset:
    function = plugin.resolve(name, key="data.name", error=DataError, code=code)
    try:
        made = function()
    except DataError:
        raise
    except (Exception, SystemExit) as cause:  # the user's code may raise anything
        raise DataError(f"data.name = {name!r} failed in its own code ({plugin.one_line(cause)})") from cause
    if isinstance(made, Dataset):
        return made
    if isinstance(made, tuple) and len(made) == 4:
        return from_arrays(*made, name=name)
    raise DataError(
        f"data.name = {name!r} returned a {type(made).__name__}: a Dataset or the tuple "
        "(train_x, train_y, test_x, test_y) is needed"
    )
