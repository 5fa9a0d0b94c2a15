import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tiny_files as files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspa.data import idx
from fedspa.errors import DataError

VALUES = files.images(6, (28, 28))


def write(folder: Path, raw: bytes, *, packed: bool) -> Path:
    path = folder / ("images.gz" if packed else "images")
    path.write_bytes(gzip.compress(raw, mtime=0) if packed else raw)
    return path


@pytest.mark.parametrize("packed", [True, False])
def test_round_trip(tmp_path: Path, packed: bool) -> None:
    assert np.array_equal(idx.read(write(tmp_path, files.idx(VALUES), packed=packed), (28, 28)), VALUES)
    labels = np.arange(7, dtype=np.uint8)
    assert np.array_equal(idx.read(write(tmp_path, files.idx(labels), packed=packed), ()), labels)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not an idx file"),
        (files.idx(VALUES)[:11], "not an idx file"),
        (files.idx(VALUES[:, 0]), "not an idx file of bytes in 3 dimensions"),
        (b"\0\0\x0d\3" + files.idx(VALUES)[4:], "not an idx file of bytes"),
        (files.idx(VALUES[:, :27]), r"records of shape \(27, 28\), where \(28, 28\) is expected"),
        (files.idx(VALUES) + b"x", "goes on after"),
    ],
)
def test_wrong_bytes(tmp_path: Path, raw: bytes, said: str, packed: bool) -> None:
    with pytest.raises(DataError, match=said):
        idx.read(write(tmp_path, raw, packed=packed), (28, 28))


def test_every_truncation_of_a_gzip_is_noticed(tmp_path: Path) -> None:
    whole = gzip.compress(files.idx(VALUES[:1]), mtime=0)
    for length in range(len(whole)):
        (tmp_path / "x.gz").write_bytes(whole[:length])
        with pytest.raises(DataError):
            idx.read(tmp_path / "x.gz", (28, 28))


def test_a_flipped_bit_fails_the_checksum(tmp_path: Path) -> None:
    raw = bytearray(gzip.compress(files.idx(VALUES), compresslevel=0, mtime=0))
    raw[len(raw) // 2] ^= 1
    (tmp_path / "x.gz").write_bytes(raw)
    with pytest.raises(DataError, match="CRC"):
        idx.read(tmp_path / "x.gz", (28, 28))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("records", [300_000, 2**32 - 1])
def test_a_header_that_claims_too_much_allocates_nothing(tmp_path: Path, packed: bool, records: int) -> None:
    path = write(tmp_path, b"\0\0\x08\3" + struct.pack(">3I", records, 28, 28), packed=packed)
    tracemalloc.start()
    with pytest.raises(DataError, match="more than it can hold"):
        idx.read(path, (28, 28))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    # 64 MiB of zeros behind an honest header: reading stops after the promised values.
    path = write(tmp_path, files.idx(VALUES) + bytes(1 << 26), packed=True)
    tracemalloc.start()
    with pytest.raises(DataError, match="goes on after"):
        idx.read(path, (28, 28))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_folder_or_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "absent.gz"):
        with pytest.raises(DataError):
            idx.read(path, (28, 28))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data(), packed=st.booleans())
def test_damaged_files_are_data_errors_or_arrays(tmp_path: Path, data: st.DataObject, packed: bool) -> None:
    raw = bytearray(files.idx(VALUES[:2]))
    if packed:
        raw = bytearray(gzip.compress(raw, mtime=0))
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)), max_size=4)):
        raw[place] = byte
    path = tmp_path / ("x.gz" if packed else "x")
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        assert idx.read(path, (28, 28)).shape[1:] == (28, 28)
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017
