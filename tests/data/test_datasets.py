import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_files as files
import torch

from fedspa.data.dataset import Dataset
from fedspa.data.datasets import load
from fedspa.data.given import from_arrays
from fedspa.errors import DataError

X, Y = np.random.default_rng(0).random((6, 4)), np.array([0, 1, 2, 0, 1, 2])


def test_digits_are_embedded_stratified_and_fixed() -> None:
    data = load("digits", None)
    assert (data.input_shape, data.classes, data.name) == ((1, 8, 8), 10, "digits")
    assert (len(data.train_x), len(data.test_x)) == (1442, 355)
    assert (float(data.train_x.min()), float(data.train_x.max())) == (0.0, 1.0)
    per_class = data.train_y.bincount() + data.test_y.bincount()
    assert per_class.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(data.test_y.bincount(), per_class // 5)
    again = load("digits", None)
    assert torch.equal(data.test_x, again.test_x)
    # The first held-out record is the first to be the fifth of its class.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    fifth = next(i for i in range(1797) if (bunch.target[: i + 1] == bunch.target[i]).sum() == 5)
    assert np.array_equal(data.test_x[0, 0].numpy(), bunch.images[fifth].astype(np.float32) / 16)


@pytest.mark.parametrize("below", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_from_any_of_its_folders(tmp_path: Path, below: str, packed: bool) -> None:
    made = files.mnist(tmp_path / below, packed=packed)
    data = load("mnist", tmp_path)
    assert (data.input_shape, data.classes, len(data.train_x), len(data.test_x)) == ((1, 28, 28), 10, 12, 5)
    expected = (made["train-images-idx3-ubyte"].astype(np.float64) / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(data.train_x[:, 0].numpy(), expected, atol=1e-5)
    assert data.test_y.tolist() == made["t10k-labels-idx1-ubyte"].tolist()


def test_mnist_says_what_is_missing_where_and_whence(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    said = str(caught.value)
    assert "\n" not in said
    assert all(f"{name} or {name}.gz" in said for name in files.MNIST_FILES)
    assert all(f"'{folder}'" in said for folder in (tmp_path, tmp_path / "mnist", tmp_path / "MNIST/raw"))
    assert "yann.lecun.com" in said


def test_mnist_names_only_the_missing_file(tmp_path: Path) -> None:
    files.mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        DataError,
        match=r"missing t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte\.gz in '.*mnist' \(see data\.dir\); get",
    ):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("train-labels-idx1-ubyte", np.zeros(11, np.uint8), "train has 12 records and 11 labels"),
        ("t10k-labels-idx1-ubyte", np.full(5, 10, np.uint8), r"test has label 10, outside 0\.\.9"),
        ("t10k-images-idx3-ubyte", np.zeros((0, 28, 28), np.uint8), "test has 0 records and 5 labels"),
    ],
)
def test_mnist_files_that_do_not_belong_together(tmp_path: Path, file: str, values: Any, said: str) -> None:
    files.mnist(tmp_path, packed=False)
    (tmp_path / file).write_bytes(files.idx(values))
    with pytest.raises(DataError, match=said):
        load("mnist", tmp_path)


@pytest.mark.parametrize("below", ["cifar-10-batches-py", ""])
def test_cifar10(tmp_path: Path, below: str) -> None:
    files.cifar(tmp_path / below)
    data = load("cifar10", tmp_path)
    assert (data.input_shape, data.classes, len(data.train_x), len(data.test_x)) == ((3, 32, 32), 10, 20, 4)
    first = files.images(4, (3, 32, 32), seed=0).astype(np.float64) / 255
    np.testing.assert_allclose(data.train_x[:4, 2].numpy(), (first[:, 2] - 0.4465) / 0.2616, atol=1e-5)
    assert data.train_y[:5].tolist() == [0, 1, 2, 3, 1]
    assert data.test_y.tolist() == [5, 6, 7, 8]


def test_cifar10_says_what_is_missing_where_and_whence(tmp_path: Path) -> None:
    files.cifar(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(
        DataError,
        match=r"missing data_batch_3 in '.*cifar-10-batches-py' \(see data\.dir\); get them from .*kriz/cifar",
    ):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("label", [10, -1])
def test_cifar10_labels_outside(tmp_path: Path, label: int) -> None:
    files.cifar(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(files.cifar_batch(files.images(2, (3072,)), [0, label]))
    with pytest.raises(DataError, match=rf"train has label {label}, outside 0\.\.9"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"'{name}' needs data\.dir"):
        load(name, None)
    with pytest.raises(DataError, match=r"missing .*absent.* \(see data\.dir\); get them from"):
        load(name, tmp_path / "absent")


def test_an_unknown_name() -> None:
    with pytest.raises(DataError, match=r"data\.name = 'imagenet'.*digits, mnist, cifar10.*\.npz.*package\.module"):
        load("imagenet", None)


def test_an_npz_by_path_or_in_the_folder(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "mine.npz", x_train=X, y_train=Y.astype(np.float32), x_test=X[:2], y_test=Y[:2].astype(np.uint8)
    )
    for data in (load(str(tmp_path / "mine.npz"), None), load("mine.npz", tmp_path)):
        assert (data.classes, data.input_shape) == (3, (4,))
        assert np.array_equal(data.train_x.numpy(), X.astype(np.float32))
        assert data.train_y.tolist() == Y.tolist()


def test_an_npz_of_pickles_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_train=np.array([{}], dtype=object), y_train=Y, x_test=X, y_test=Y)
    with pytest.raises(DataError):
        load(str(tmp_path / "x.npz"), None)


nan, inf = X.copy(), X.copy()
nan[3, 1], inf[5, 3] = np.nan, -np.inf


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train_x": nan}, "train features hold NaN or ∞"),
        ({"test_x": inf}, "test features hold NaN or ∞"),
        ({"train_x": np.full((6, 4), 1e300)}, "train features hold NaN or ∞ .as float32"),
        ({"test_y": np.array([0, np.nan, 1, 1, 1, 1])}, "test labels hold NaN or ∞"),
        ({"test_y": np.array([0, np.inf, 1, 1, 1, 1])}, "test labels hold NaN or ∞"),
        ({"test_y": Y * 1j}, "test: y holds complex numbers"),
        ({"test_y": np.array(list("abcabc"))}, "test: y holds text, as 'a'; .*classes: numpy.unique"),
        ({"train_y": Y + 0.5}, "test: y holds torch.int64 and that of train torch.float32"),
        ({"train_x": X * 1j}, "train: x holds complex"),
        ({"train_x": [[1, 2], [3]]}, r"train: x is ragged: record 0 has shape \(2,\) and record 1 has \(1,\)"),
        ({"train_x": X.astype(object)}, "train: x holds objects"),
        ({"train_y": Y[:5]}, "train: x has 6 records and y has 5"),
        ({"test_x": X[:0], "test_y": Y[:0]}, "test has no records"),
        ({"train_x": X[:, :0]}, r"test: x has shape \(4,\) and that of train has \(0,\)"),
        ({"train_y": np.eye(6, dtype=int)}, r"test: y has shape \(\) and that of train has \(6,\)"),
        ({"train_x": {"a": X, "b": X[:5]}}, "train: x 'b' has 5 examples, and 6 are in 'a'"),
        ({"train_x": {}}, "train: x is an empty dict"),
        ({"train_x": {"a": X}}, "test: x is a tensor and that of train is a dict of .'a'.; they"),
        ({"test_x": X[:, :3]}, r"test: x has shape \(3,\) and that of train has \(4,\)"),
    ],
)
def test_what_arrays_may_not_be(changed: dict[str, Any], said: str) -> None:
    arrays = {"train_x": X, "train_y": Y, "test_x": X, "test_y": Y} | changed
    with pytest.raises(DataError, match=said) as caught:
        from_arrays(**arrays, name="mine")
    assert str(caught.value).startswith("data 'mine'")
    assert "\n" not in str(caught.value)


def test_arrays_of_many_kinds() -> None:
    read_only = X.astype(np.float32)
    read_only.flags.writeable = False
    data = from_arrays(
        read_only, torch.from_numpy(Y).float(), torch.ones(2, 4, requires_grad=True), [True, False], name="m"
    )
    assert data.train_x.dtype == data.test_x.dtype == torch.float32
    assert data.train_y.dtype == data.test_y.dtype == torch.int64
    assert not data.test_x.requires_grad
    assert data.test_y.tolist() == [1, 0]


def test_a_dataset_is_checked_however_it_is_made() -> None:
    x, y = torch.zeros(3, 2), torch.tensor([0, 1, 2])
    assert Dataset(x, y, x, y, classes=3, name="mine").input_shape == (2,)
    with pytest.raises(DataError, match=r"label 2, outside 0\.\.1"):
        Dataset(x, y, x, y, classes=2, name="mine")
    with pytest.raises(DataError, match="train is empty"):
        Dataset(x[:0], y[:0], x, y, classes=3, name="mine")
    with pytest.raises(DataError, match=r"train is empty: its features have shape \(3, 0\)"):
        Dataset(x[:, :0], y, x[:, :0], y, classes=3, name="mine")
    with pytest.raises(DataError, match=r"records have shape \(2,\) float32 in train and \(1,\) float32 in test"):
        Dataset(x, y, x[:, :1], y, classes=3, name="mine")
    for owners in ([0, 1, 2], np.array([0, -1, 2]), np.array([0, 1]), np.array([0.0, 1, 2])):
        with pytest.raises(DataError, match="owners must be one number from 0 on per training example"):
            Dataset(x, y, x, y, classes=3, name="mine", owners=owners)
    with pytest.raises(DataError, match="float32, int64 or bool is needed"):
        Dataset(x.double(), y, x, y, classes=3, name="mine")


USERS = """
import numpy as np, torch
from fedspa import Dataset
x, y = np.zeros((4, 2)), np.array([0, 1, 0, 1])
def arrays(): return x, y, x, y
def tensors(): return tuple(map(torch.from_numpy, arrays()))
def ready():
    t, l = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    return Dataset(t, l, t, l, classes=7, name="theirs")
def three(): return x, y, x
def listed(): return [x, y, x, y]
def fails(): raise KeyError("first\\nsecond")
def takes(n): return arrays()
def bad(): return x * np.nan, y, x, y
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "fedspa_users_data", raising=False)
    (tmp_path / "fedspa_users_data.py").write_text(USERS)
    return "fedspa_users_data"


@pytest.mark.parametrize(("function", "classes"), [("arrays", 2), ("tensors", 2), ("ready", 7)])
def test_the_users_own(users: str, function: str, classes: int) -> None:
    data = load(f"{users}:{function}", None)
    assert (data.classes, data.input_shape, len(data.test_y)) == (classes, (2,), 4)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("three", r"returned a tuple: .*\(train_x, train_y, test_x, test_y\)"),
        ("listed", "returned a list"),
        ("fails", r"failed in its own code \(KeyError: "),
        ("takes", r"failed in its own code \(TypeError"),
        ("bad", "NaN or ∞"),
        ("absent", "has no 'absent'"),
    ],
)
def test_what_a_user_may_get_wrong(users: str, function: str, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        load(f"{users}:{function}", None)
    assert f"{users}:{function}" in str(caught.value)
    assert "\n" not in str(caught.value)


def real(name: str, file: str) -> Dataset:
    folder = os.environ.get("FEDSPA_DATA")
    if folder is None or not next(Path(folder).rglob(file), None):
        pytest.skip(f"set FEDSPA_DATA to a folder with {name}'s files to run this test")
    return load(name, Path(folder))


def test_the_real_mnist() -> None:
    data = real("mnist", "train-images-idx3-ubyte*")
    assert data.train_x.shape == (60_000, 1, 28, 28)
    assert data.test_y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert float(data.train_x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(data.train_x.std()) == pytest.approx(1, abs=1e-3)


def test_the_real_cifar10() -> None:
    data = real("cifar10", "data_batch_1")
    assert data.train_x.shape == (50_000, 3, 32, 32)
    assert data.train_y.bincount().tolist() == [5000] * 10
    assert data.test_y.bincount().tolist() == [1000] * 10
    # Copies with lossy pixels differ a little from the constants.
    assert data.train_x.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=0.01)
    assert data.train_x.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=0.02)
