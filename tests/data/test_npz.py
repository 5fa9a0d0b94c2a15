import io
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspa.data import npz
from fedspa.errors import DataError

ARRAYS: dict[str, Any] = {
    "x_train": np.arange(12.0).reshape(6, 2),
    "y_train": np.array([0, 1, 2, 0, 1, 2]),
    "x_test": np.zeros((2, 2)),
    "y_test": np.array([0, 1]),
}


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def archive(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, raw in members.items():
            made.writestr(f"{name}.npy", raw)
    return path


HONEST = {name: npy(array) for name, array in ARRAYS.items()}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_reads_what_numpy_saved(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "x.npz", other=1, **ARRAYS)
    read = npz.read(tmp_path / "x.npz")
    assert list(read) == list(npz.MEMBERS)
    assert all(np.array_equal(read[name], ARRAYS[name]) for name in read)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_npy(tmp_path: Path, version: tuple[int, int]) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, ARRAYS["x_train"], version=version)
    read = npz.read(archive(tmp_path / "x.npz", HONEST | {"x_train": file.getvalue()}))
    assert np.array_equal(read["x_train"], ARRAYS["x_train"])


def test_missing_file_and_arrays(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        npz.read(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", x_train=np.zeros((2, 2)), y_test=np.zeros(2))
    with pytest.raises(DataError, match=r"lacks y_train, x_test: .* x_train, y_train, x_test, y_test"):
        npz.read(tmp_path / "x.npz")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x93NUMPY",
        b"hello",
        npy(np.array([{}, print], dtype=object)),
        HONEST["x_train"] + b"more",
        HONEST["x_train"][:-1],
        HONEST["x_train"].replace(b"(6, 2)", b"(6,-2)"),
        HONEST["x_train"].replace(b"(6, 2)", b"(9, 9)"),
        HONEST["x_train"].replace(b"(6, 2)", b"(((((("),
        HONEST["x_train"].replace(b"'<f8'", b"'zz8'"),
    ],
)
def test_wrong_members(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(DataError) as caught:
        npz.read(archive(tmp_path / "x.npz", HONEST | {"x_train": raw}))
    assert "\n" not in str(caught.value)


def header(shape: str, descr: str = "|u1") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def refused_without_memory(path: Path) -> None:
    tracemalloc.start()
    with pytest.raises(DataError, match="not what it holds"):
        npz.read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_member_that_claims_more_than_it_holds_allocates_nothing(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", HONEST | {"x_train": header("(1000000000, 3)") + b"x"})
    refused_without_memory(path)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_of_the_claimed_size_does_not_run(tmp_path: Path) -> None:
    # An object array of 100 pointers has 800 bytes; a pickle padded to that length passes the check of sizes.
    bait = pickle.dumps(Evil(tmp_path / "pwned"), protocol=2)
    member = header("(100,)", "|O") + bait.ljust(800)
    with pytest.raises(DataError, match="Object arrays cannot be loaded"):
        npz.read(archive(tmp_path / "x.npz", HONEST | {"x_train": member}))
    assert not (tmp_path / "pwned").exists()
    pickle.loads(bait.ljust(800))  # the bait is real
    assert (tmp_path / "pwned").exists()


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    # The directory of the archive promises 3.75 GiB for a member of a few bytes.
    path = archive(tmp_path / "x.npz", HONEST)
    size = len(HONEST["y_test"]).to_bytes(4, "little")
    raw = path.read_bytes()
    at = raw.rindex(size)
    path.write_bytes(raw[:at] + b"\0\0\0\xf0" + raw[at + 4 :])
    assert zipfile.ZipFile(path).getinfo("y_test.npy").file_size == 0xF0000000
    refused_without_memory(path)


def test_too_large_in_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "_MAX_BYTES", 500)
    with pytest.raises(DataError, match=r"unpacks to \d+ bytes.*package\.module:function"):
        npz.read(archive(tmp_path / "x.npz", HONEST))


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="never uses"):
        npz.read(archive(tmp_path / "x.npz", HONEST, zipfile.ZIP_LZMA))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data(), compression=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
def test_damaged_files_are_data_errors_or_arrays(tmp_path: Path, data: st.DataObject, compression: int) -> None:
    path = archive(tmp_path / "x.npz", HONEST, compression)
    raw = bytearray(path.read_bytes())
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=6)):
        raw[place] = byte
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    try:
        assert set(npz.read(path)) == set(npz.MEMBERS)
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017
