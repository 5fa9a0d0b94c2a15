import os
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_files as files
import torch

from fedspa.data.dataset import Dataset
from fedspa.data.datasets import load
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


@pytest.mark.parametrize(
    ("name", "below", "mean", "deviation"),
    [
        ("mnist", "", 0.1307, 0.3081),
        ("mnist", "MNIST/raw", 0.1307, 0.3081),
        ("fashion-mnist", "FashionMNIST/raw", 0.2860, 0.3530),
        ("fashion-mnist", "fashion-mnist", 0.2860, 0.3530),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_and_its_like_from_any_of_their_folders(
    tmp_path: Path, name: str, below: str, mean: float, deviation: float, packed: bool
) -> None:
    made = files.mnist(tmp_path / below, packed=packed)
    data = load(name, tmp_path)
    assert (data.name, data.input_shape, data.classes) == (name, (1, 28, 28), 10)
    assert (len(data.train_x), len(data.test_x)) == (12, 5)
    expected = (made["train-images-idx3-ubyte"].astype(np.float64) / 255 - mean) / deviation
    np.testing.assert_allclose(data.train_x[:, 0].numpy(), expected, atol=1e-5)
    assert data.test_y.tolist() == made["t10k-labels-idx1-ubyte"].tolist()


@pytest.mark.parametrize("below", ["cifar-10-batches-py", ""])
def test_cifar10(tmp_path: Path, below: str) -> None:
    files.cifar(tmp_path / below)
    data = load("cifar10", tmp_path)
    assert (data.input_shape, data.classes, len(data.train_x), len(data.test_x)) == ((3, 32, 32), 10, 20, 4)
    first = files.images(4, (3, 32, 32), seed=0).astype(np.float64) / 255
    np.testing.assert_allclose(data.train_x[:4, 2].numpy(), (first[:, 2] - 0.4465) / 0.2616, atol=1e-5)
    assert data.train_y[:5].tolist() == [0, 1, 2, 3, 1]
    assert data.test_y.tolist() == [5, 6, 7, 8]


def test_an_npz_by_path_or_in_the_folder(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "mine.npz", x_train=X, y_train=Y.astype(np.float32), x_test=X[:2], y_test=Y[:2].astype(np.uint8)
    )
    for data in (load(str(tmp_path / "mine.npz"), None), load("mine.npz", tmp_path)):
        assert (data.classes, data.input_shape) == (3, (4,))
        assert np.array_equal(data.train_x.numpy(), X.astype(np.float32))
        assert data.train_y.tolist() == Y.tolist()


nan, inf = X.copy(), X.copy()
nan[3, 1], inf[5, 3] = np.nan, -np.inf


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
