"""idx files, CIFAR-10 batches and .npz: read as they are; anything else is a DataError, and nothing in it runs."""

from __future__ import annotations

import gzip
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspa.data.datasets import NPZ_ARRAYS, read_cifar_batch, read_idx, read_npz
from fedspa.errors import DataError

IMAGES = tiny_files.images(5, (28, 28))
PIXELS = tiny_files.images(3, (3072,))
ARRAYS = {name: np.arange(6.0).reshape(3, 2) for name in NPZ_ARRAYS}
damaged = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Calls:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("called",)


def written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("packed", [True, False])
def test_idx_round_trip(tmp_path: Path, packed: bool) -> None:
    raw = tiny_files.idx(IMAGES)
    path = written(tmp_path / ("file.gz" if packed else "file"), gzip.compress(raw) if packed else raw)
    assert np.array_equal(read_idx(path, (28, 28)), IMAGES)
    with pytest.raises(DataError, match="where"):
        read_idx(path, (28, 27))


@pytest.mark.parametrize(
    "raw",
    [tiny_files.cifar_batch(PIXELS, [1, 2, 3], protocol=4), tiny_files.cifar_batch_of_python_2(PIXELS, [1, 2, 3])],
)
def test_cifar_round_trip(tmp_path: Path, raw: bytes) -> None:
    images, labels = read_cifar_batch(written(tmp_path / "batch", raw))
    assert np.array_equal(images.reshape(3, -1), PIXELS)
    assert labels.tolist() == [1, 2, 3]


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_is_refused_and_does_not_call(
    tmp_path: Path, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = pickle.dumps({b"data": PIXELS, b"labels": [Calls(), 1, 2]}, protocol=protocol)
    with pytest.raises(DataError, match="only numpy arrays are allowed"):
        read_cifar_batch(written(tmp_path / "batch", raw))
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_round_trip(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "own.npz", **ARRAYS, whose=np.array(["a", "b", "a"]))
    found = read_npz(tmp_path / "own.npz", (*NPZ_ARRAYS, "whose"))
    assert found.keys() == {*NPZ_ARRAYS, "whose"}
    assert all(np.array_equal(found[name], values) for name, values in ARRAYS.items())
    with pytest.raises(DataError, match="lacks other"):
        read_npz(tmp_path / "own.npz", (*NPZ_ARRAYS, "other"))
    with pytest.raises(DataError, match="no such file"):
        read_npz(tmp_path / "none.npz")


def test_npz_with_a_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "own.npz", **{**ARRAYS, "y_test": np.array([Calls()], dtype=object)})
    with pytest.raises(DataError, match="of plain arrays"):
        read_npz(tmp_path / "own.npz")
    assert not (tmp_path / "called").exists()


@given(data=st.data())
@damaged
def test_damaged_files_are_data_errors_or_arrays(tmp_path: Path, data: st.DataObject) -> None:
    np.savez(tmp_path / "whole.npz", **ARRAYS)
    kind = data.draw(st.sampled_from(["idx", "idx.gz", "cifar", "npz"]))
    whole = {
        "idx": tiny_files.idx(IMAGES),
        "idx.gz": gzip.compress(tiny_files.idx(IMAGES)),
        "cifar": tiny_files.cifar_batch(PIXELS, [1, 2, 3]),
        "npz": (tmp_path / "whole.npz").read_bytes(),
    }[kind]
    at = data.draw(st.integers(0, len(whole)))
    path = written(tmp_path / kind, whole[:at] + data.draw(st.binary(max_size=4)) + whole[at + 2 :])
    with suppress(DataError):
        if kind.startswith("idx"):
            read_idx(path, (28, 28))
        elif kind == "cifar":
            read_cifar_batch(path)
        else:
            read_npz(path)
