"""Data by name: scikit-learn's digits, MNIST, CIFAR-10, an ``.npz``, or the user's ``package.module:function``.

A Dataset is checked when it is made: whatever leaves this module has finite features and labels within its classes.
MNIST and CIFAR-10 are normalised by the constants that the field has used for years. They are public, so using them
spends no privacy budget; a mean computed from the agents' own records would.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedspa.data import cifar, idx, npz, plugin
from fedspa.errors import DataError, quoted
from fedspa.examples import (
    TARGETS,
    Examples,
    Tree,
    blanks,
    count,
    layout,
    leaves,
    mapped,
    named_leaves,
    require_aligned,
)

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
    """Examples for the agents (train) and held out for evaluation (test): inputs x and targets y.

    Each is a tensor, or a dict or tuple of tensors, whose first dimension counts the examples: float32, int64 or bool,
    and finite. `classes` is how many there are where a target is a class, numbered from 0. `key` is where the targets
    lay in a dict that held all; None where inputs and targets came apart. `owners` says which agent holds each training
    example, `persons` whom it belongs to, by numbers from 0; without, they are dealt out, and each is a person's own.
    """

    train_x: Tree
    train_y: Tree
    test_x: Tree
    test_y: Tree
    classes: int | None
    name: str
    key: str | None = None
    owners: NDArray[np.int64] | None = None
    persons: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise DataError(f"the name of a Dataset is {quoted(self.name)}: a text is needed")
        for split, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            _check(f"data {self.name!r}: {split}", x, y)
        for what, train, test in (("records", self.train_x, self.test_x), ("targets", self.train_y, self.test_y)):
            if layout(train) != layout(test):
                raise DataError(
                    f"data {self.name!r}: {what} have shape {layout(train)} in train and {layout(test)} in test"
                )
        if self.classes is not None:
            if not isinstance(self.classes, int):
                raise DataError(f"data {self.name!r}: classes is {quoted(self.classes)}: their number is needed")
            if self.classes < 2:
                raise DataError(f"data {self.name!r} has {self.classes} class(es): a classifier needs at least 2")
            for split, y in (("train", self.train_y), ("test", self.test_y)):
                _check_labels(f"data {self.name!r}: {split}", y, self.classes)
        for what, numbers in (("owners", self.owners), ("persons", self.persons)):
            if numbers is not None and (numbers.shape != (count(self.train_y),) or numbers.min() < 0):
                raise DataError(f"data {self.name!r}: {what} must be one number from 0 on per training example")

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """The shape of one record, where it is one tensor."""
        return tuple(self.train_x.shape[1:]) if isinstance(self.train_x, torch.Tensor) else None

    @property
    def like(self) -> Examples:
        """One example of zeros, made as all of them are."""
        return Examples(blanks(self.train_x), blanks(self.train_y))


def load(name: str, directory: Path | None, person: str | None = None) -> Dataset:
    """The data called ``name``; the files of mnist, cifar10 or an .npz are looked for in ``directory`` (data.dir).

    ``person`` names what says whose a training record is (data.person), where the data has it beside the records.
    """
    if name.endswith(".npz") and not name.startswith(plugin.GIVEN):
        return _npz(name, directory, person)
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


def from_arrays(
    train_x: Any, train_y: Any, test_x: Any, test_y: Any, *, name: str, persons: Any | None = None
) -> Dataset:
    """A Dataset from four arrays or tensors, or dicts or tuples of them, taken as they are: integers stay integers.

    Where each target is one whole number, they are classes, from 0 to the largest. Where both targets are None they lie
    among the inputs, in a dict with `labels`, `label`, `target`, `targets` or `y`; or there are none, as for a language
    model. ``persons`` says by an id, a whole number or a text, whose each training record is: each person is then
    protected, and not each record.
    """
    if not isinstance(name, str):
        raise DataError(f"the name of the data is {quoted(name)}: a text is needed")
    xs = [_tree(x, f"data {name!r}: {split} features") for split, x in (("train", train_x), ("test", test_x))]
    if train_y is None and test_y is None:
        return _with_targets_inside(xs, name, persons)
    ys = [_tree(y, f"data {name!r}: {split} labels") for split, y in (("train", train_y), ("test", test_y))]
    return _dataset(xs, ys, name, None, persons)


def from_examples(
    train: Mapping[str, Any],
    test: Mapping[str, Any],
    *,
    name: str,
    target: str | None = None,
    persons: Any | None = None,
) -> Dataset:
    """A Dataset from two dicts of arrays that hold their targets, as a tokenizer's output with `labels` in it does.

    `target` is the targets' key, by default the one of labels, label, target, targets and y that is there; "" says that
    there are none, as for texts whose next token is learned. A module gets the rest as keyword arguments, and a task of
    one's own gets the dict whole.
    """
    if not isinstance(name, str):
        raise DataError(f"the name of the data is {quoted(name)}: a text is needed")
    xs, ys, key = [], [], target
    for split, given in (("train", train), ("test", test)):
        what = f"data {name!r}: {split}"
        if not isinstance(given, Mapping):
            raise DataError(f"{what} is a {type(given).__name__}: a dict of arrays is needed, or fedspa.from_arrays")
        key = _target(given, key, what)
        x = _tree({field: part for field, part in given.items() if field != key}, f"{what} features")
        if not x:
            raise DataError(f"{what} has nothing but its targets {key!r}: a model needs something to learn them from")
        xs.append(x)
        # Without targets there is still a row for each example, with nothing in it.
        ys.append(_tree(given[key], f"{what} labels") if key else torch.zeros(count(x), 0, dtype=torch.int64))
    return _dataset(xs, ys, name, key, persons)


def _target(given: Mapping[str, Any], key: str | None, what: str) -> str:
    found = [field for field in (TARGETS if key is None else (key,)) if field in given]
    if len(found) == 1 or key == "":
        return found[0] if found else ""
    wanted = f"just one of {', '.join(TARGETS)}" if key is None else f"{key!r}"
    raise DataError(
        f"{what} has the keys {', '.join(map(str, given))}: {wanted} must be among them; target= names another, and "
        "target='' says that there are no targets"
    )


def _dataset(xs: list[Tree], ys: list[Tree], name: str, key: str | None, persons: Any | None) -> Dataset:
    if all(_whole(y) for y in ys):
        ys = [mapped(lambda leaf: leaf.to(torch.int64), y) for y in ys]
    numbers = None if persons is None else _persons(persons, f"data {name!r}: persons")
    return Dataset(xs[0], ys[0], xs[1], ys[1], classes=_classes(ys), name=name, key=key, persons=numbers)


def _persons(ids: Any, what: str) -> NDArray[np.int64]:
    """Ids as numbers from 0 on. A record without an id is nobody's and could be anybody's: it is refused, since a
    person in two places would be protected in neither."""
    ids = ids.detach().cpu() if isinstance(ids, torch.Tensor) else ids
    try:
        # numpy makes the text "nan" of a missing one among texts: so each by itself, and only then as numpy would.
        array = np.asarray(ids) if hasattr(ids, "dtype") else np.array(list(ids), dtype=object)
        kinds = {type(one) for one in array.flat} if array.dtype.kind == "O" else set()
        if any(kinds <= {kind} for kind in (str, bytes, int)):
            array = np.asarray(array.tolist() or array)
    except Exception as cause:  # a foreign object's own conversion may raise anything
        raise DataError(f"{what} are not an array of ids ({plugin.one_line(cause)})") from cause
    if array.dtype.kind not in "iuUS" or array.ndim != 1 or (array.dtype.kind in "US" and not array.all()):
        raise DataError(
            f"{what} are {array.dtype} of shape {array.shape}: one id per training record is needed, a whole number "
            "or a text, and none may be missing"
        )
    return np.unique(array, return_inverse=True)[1].astype(np.int64)


def _with_targets_inside(xs: list[Tree], name: str, persons: Any | None) -> Dataset:
    found = [[key for key in TARGETS if isinstance(x, dict) and key in x] for x in xs]
    if found[0] != found[1] or len(found[0]) > 1:
        given = " in train and ".join(", ".join(keys) or "none" for keys in found)
        raise DataError(f"data {name!r}: targets lie under {given} in test: one key is needed, the same in both")
    key = found[0][0] if found[0] else ""
    parts: list[Tree] = []
    for x in xs:
        if isinstance(x, dict) and key:
            parts += [{other: part for other, part in x.items() if other != key}, x[key]]
        else:
            parts += [x, torch.zeros(count(x), 0)]
    return replace(from_arrays(*parts, name=name, persons=persons), key=key)


def _whole(y: Tree) -> bool:
    """Whether every target is one whole number."""
    if not isinstance(y, torch.Tensor) or y.ndim != 1 or not y.numel():
        return False
    return not y.is_floating_point() or bool(((y == y.floor()) & (y.abs() < 2**31)).all())


def _classes(ys: Sequence[Tree]) -> int | None:
    labels = [y for y in ys if isinstance(y, torch.Tensor) and y.dtype == torch.int64 and y.ndim == 1 and y.numel()]
    if len(labels) < len(ys) or any(int(y.min()) < 0 for y in labels):
        return None
    classes, records = 1 + max(int(y.max()) for y in labels), sum(map(len, labels))
    # A stray label must not decide the size of a model; numbers far apart are counts or amounts.
    return classes if 2 <= classes <= max(records, 2) else None


def _check(what: str, x: Tree, y: Tree) -> None:
    for part, tree in (("features", x), ("labels", y)):
        kinds = [type(leaf).__name__ for _, leaf in named_leaves(tree) if not isinstance(leaf, torch.Tensor)]
        if kinds:
            raise DataError(f"{what} is made of {', '.join(kinds)}: fedspa.from_arrays makes a Dataset of arrays")
        require_aligned(tree, f"{what} {part}")
        for name, leaf in named_leaves(tree):
            if leaf.dtype not in (torch.float32, torch.int64, torch.bool):
                raise DataError(
                    f"{what} {part} has {name or 'values'} of {leaf.dtype}: float32, int64 or bool is needed"
                )
            # aminmax carries NaN through and needs no memory of the data's size.
            if leaf.is_floating_point() and leaf.numel() and not all(map(torch.isfinite, torch.aminmax(leaf))):
                raise DataError(f"{what} {part} hold NaN or ∞ (as float32): clean the data first")
    if count(x) != count(y):
        raise DataError(f"{what} has {count(x)} records and {count(y)} labels: one label per record is needed")
    if not count(x) or not any(leaf.numel() for leaf in leaves(x)):
        raise DataError(f"{what} is empty: its features have shape {tuple(next(leaves(x)).shape)}")


def _check_labels(what: str, y: Tree, classes: int) -> None:
    if not isinstance(y, torch.Tensor) or y.dtype != torch.int64 or y.ndim != 1:
        raise DataError(f"{what} has labels {layout(y)}: with `classes`, one whole number per record is needed")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise DataError(f"{what} has label {low if low < 0 else high}, outside 0..{classes - 1}")


def _tree(value: Any, what: str) -> Tree:
    """Arrays as tensors: floats as float32, whole numbers as int64, bools as they are."""
    if isinstance(value, Mapping):
        return {str(key): _tree(part, f"{what} {key!r}") for key, part in value.items()}
    if isinstance(value, tuple) and any(hasattr(part, "shape") or isinstance(part, Mapping) for part in value):
        return tuple(_tree(part, f"{what} {place}") for place, part in enumerate(value))
    tensor = _tensor(value, what, "numbers are needed; for classes, numpy.unique(labels, return_inverse=True)[1]")
    if tensor.is_complex():
        raise DataError(f"{what} are complex numbers: real ones are needed")
    if tensor.is_floating_point():
        return tensor.to(torch.float32)
    return tensor if tensor.dtype == torch.bool else tensor.to(torch.int64)


def _tensor(value: Any, what: str, advice: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().to_dense()
    try:
        array = np.ascontiguousarray(value)
    except Exception as cause:  # a foreign object's own conversion may raise anything
        raise DataError(f"{what} are not an array of numbers ({plugin.one_line(cause)}): {advice}") from cause
    if array.dtype.kind not in "biufc":
        kind = {"U": "text", "S": "bytes", "M": "dates", "m": "durations"}.get(array.dtype.kind, "objects")
        example = f", as in {quoted(array.ravel()[:1].tolist()[0], 60)}" if array.size else ""
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


def _npz(name: str, directory: Path | None, person: str | None) -> Dataset:
    path = Path(name).expanduser()
    if directory is not None and (directory / path).is_file():
        path = directory / path
    arrays = npz.read(path, () if person is None else (person,))
    persons = None if person is None else arrays[person]
    return from_arrays(*(arrays[member] for member in npz.MEMBERS), name=name, persons=persons)


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
