"""Data by name: scikit-learn's digits, MNIST, CIFAR-10, an ``.npz``, or the user's ``package.module:function``.

A Dataset is checked when it is made: whatever leaves this module has finite features and labels within its classes.
MNIST and CIFAR-10 are normalised by the constants that the field has used for years. They are public, so using them
spends no privacy budget; a mean computed from the agents' own records would.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedspa.data import cifar, idx, npz, plugin
from fedspa.errors import DataError, quoted

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


@dataclass(frozen=True)
class Dataset:
    """Records for the agents (train) and held out for evaluation (test).

    x: float32, (records, *shape of a record), finite. y: int64, (records,), within 0..classes-1.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    classes: int
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise DataError(f"the name of a Dataset is {quoted(self.name)}: a text is needed")
        parts = (self.train_x, self.train_y, self.test_x, self.test_y)
        if not all(isinstance(part, torch.Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise DataError(f"data {self.name!r} is made of {kinds}: fedspa.from_arrays makes a Dataset of arrays")
        if not isinstance(self.classes, int):
            raise DataError(f"data {self.name!r}: classes is {quoted(self.classes)}: their number is needed")
        if self.classes < 2:
            raise DataError(f"data {self.name!r} has {self.classes} class(es): a classifier needs at least 2")
        for split, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            _check(f"data {self.name!r}: {split}", x, y, self.classes)
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            train, test = tuple(self.train_x.shape[1:]), tuple(self.test_x.shape[1:])
            raise DataError(f"data {self.name!r}: records have shape {train} in train and {test} in test")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one record."""
        return tuple(self.train_x.shape[1:])


def load(name: str, directory: Path | None) -> Dataset:
    """The data called ``name``; the files of mnist, cifar10 or an .npz are looked for in ``directory`` (data.dir)."""
    if name.endswith(".npz") and not name.startswith(plugin.GIVEN):
        return _npz(name, directory)
    if plugin.is_plugin(name):
        return _users(name)
    match name:
        case "digits":
            return _digits()
        case "mnist":
            return _mnist(directory)
        case "cifar10":
            return _cifar10(directory)
    raise DataError(
        f"data.name = {name!r} is unknown: choose {', '.join(NAMES)}, a path that ends in .npz, "
        "or 'package.module:function'"
    )


def files(name: Literal["mnist", "cifar10"], directory: Path | None) -> list[Path]:
    """Where the files of ``name`` lie in ``directory``; a DataError names those that are missing."""
    if name == "mnist":
        folders = _folders(name, directory, ("", "mnist", "MNIST/raw"))
        return _find(name, {file: (file, f"{file}.gz") for file in _MNIST_FILES}, folders, _MNIST_SOURCE)
    folders = _folders(name, directory, ("cifar-10-batches-py", ""))
    return _find(name, {file: (file,) for file in _CIFAR10_FILES}, folders, _CIFAR10_SOURCE)


def from_arrays(train_x: Any, train_y: Any, test_x: Any, test_y: Any, *, name: str) -> Dataset:
    """A Dataset from four arrays or tensors. Features are taken as they are; classes are 0 to the largest label."""
    if not isinstance(name, str):
        raise DataError(f"the name of the data is {quoted(name)}: a text is needed")
    ys = [_labels(y, f"data {name!r}: {split} labels") for split, y in (("train", train_y), ("test", test_y))]
    xs = [_features(x, f"data {name!r}: {split} features") for split, x in (("train", train_x), ("test", test_x))]
    classes = 1 + max((int(y.max()) for y in ys if y.numel()), default=0)
    records = sum(y.numel() for y in ys)
    if classes > max(records, 2):  # a stray label must not decide the size of the model
        raise DataError(f"data {name!r}: label {classes - 1} among {records} records: labels must be 0..classes-1")
    return Dataset(xs[0], ys[0], xs[1], ys[1], classes=classes, name=name)


def _check(what: str, x: torch.Tensor, y: torch.Tensor, classes: int) -> None:
    if x.dtype != torch.float32 or y.dtype != torch.int64:
        raise DataError(f"{what} has features {x.dtype} and labels {y.dtype}: float32 and int64 are needed")
    if x.ndim < 2 or y.ndim != 1:
        raise DataError(
            f"{what} has features of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}: "
            "(records, ...) and (records,) are needed"
        )
    if len(x) != len(y):
        raise DataError(f"{what} has {len(x)} records and {len(y)} labels: one label a record is needed")
    if not x.numel():
        raise DataError(f"{what} is empty: its features have shape {tuple(x.shape)}")
    # aminmax carries NaN through and needs no memory of the data's size.
    if not all(bool(bound.isfinite()) for bound in torch.aminmax(x)):
        raise DataError(f"{what} features hold NaN or ∞ (as float32): clean the data first")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise DataError(f"{what} has label {low if low < 0 else high}, outside 0..{classes - 1}")


def _features(x: Any, what: str) -> torch.Tensor:
    tensor = _tensor(x, what, "real numbers are needed")
    if tensor.is_complex():
        raise DataError(f"{what} are complex numbers: real ones are needed")
    return tensor.to(torch.float32)


def _labels(y: Any, what: str) -> torch.Tensor:
    tensor = _tensor(y, what, "number the classes 0, 1, 2 …, as numpy.unique(labels, return_inverse=True)[1] does")
    whole = not tensor.is_floating_point() or bool(((tensor == tensor.floor()) & (tensor.abs() < 2**31)).all())
    if tensor.is_complex() or not whole:
        raise DataError(f"{what} are not whole numbers: classes are numbered 0, 1, 2 … (regression is not offered)")
    return tensor.to(torch.int64)


def _tensor(value: Any, what: str, advice: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().to_dense()
    try:
        array = np.ascontiguousarray(value)
    except Exception as cause:  # a foreign object's own conversion may raise anything
        raise DataError(f"{what} are not an array of numbers ({plugin.one_line(cause)}): {advice}") from cause
    if array.dtype.kind not in "biufc":
        kind = {"U": "text", "S": "bytes", "M": "dates", "m": "durations"}.get(array.dtype.kind, "objects")
        example = f", as in {quoted(array.flat[0], 60)}" if array.size else ""
        raise DataError(f"{what} are {kind}{example}: {advice}")
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as cause:
        raise DataError(f"{what} are not an array of numbers ({plugin.one_line(cause)}): {advice}") from cause


def _digits() -> Dataset:
    from sklearn.datasets import load_digits  # heavy, and wanted by this one name only

    bunch = load_digits()
    x = torch.from_numpy(bunch.images).to(torch.float32).div_(16).unsqueeze(1)
    y = torch.from_numpy(bunch.target).to(torch.int64)
    # Every fifth record of each class is held out: stratified, and the same whatever the library's version.
    held_out = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        held_out[torch.nonzero(y == label).squeeze(1)[4::5]] = True
    return Dataset(x[~held_out], y[~held_out], x[held_out], y[held_out], classes=10, name="digits")


def _mnist(directory: Path | None) -> Dataset:
    paths = files("mnist", directory)
    arrays = [idx.read(path, (28, 28) if "images" in path.name else ()) for path in paths]
    train_x, test_x = (_normalised(x[:, None], _MNIST_MEAN, _MNIST_STD) for x in (arrays[0], arrays[2]))
    train_y, test_y = (torch.from_numpy(y.astype(np.int64)) for y in (arrays[1], arrays[3]))
    return Dataset(train_x, train_y, test_x, test_y, classes=10, name="mnist")


def _cifar10(directory: Path | None) -> Dataset:
    batches = [cifar.read(path) for path in files("cifar10", directory)]
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


def _npz(name: str, directory: Path | None) -> Dataset:
    path = Path(name).expanduser()
    if directory is not None and (directory / path).is_file():
        path = directory / path
    arrays = npz.read(path)
    return from_arrays(*(arrays[member] for member in npz.MEMBERS), name=name)


def _users(name: str) -> Dataset:
    function = plugin.resolve(name, key="data.name", error=DataError)
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
