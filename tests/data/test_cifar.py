import os
import pickle
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tiny_files as files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedspa.data import cifar
from fedspa.errors import DataError

DATA = files.images(3, (3072,))
LABELS = [0, 9, 4]


def read(folder: Path, raw: bytes) -> tuple[np.ndarray, np.ndarray]:
    path = folder / "data_batch_1"
    path.write_bytes(raw)
    return cifar.read(path)


@pytest.mark.parametrize(
    "raw",
    [
        files.cifar_batch_of_python_2(DATA, LABELS),
        files.cifar_batch(DATA, LABELS, protocol=3),
        files.cifar_batch(DATA, LABELS, protocol=4),
        files.cifar_batch(np.asfortranarray(DATA), LABELS, protocol=4),
        pickle.dumps({"labels": LABELS, "data": DATA, "extra": {"a": [(1, None, True, 2**40)]}}, protocol=4),
    ],
)
def test_agrees_with_pickle_on_honest_files(tmp_path: Path, raw: bytes) -> None:
    images, labels = read(tmp_path, raw)
    trusted = {str(key, "ascii") if isinstance(key, bytes) else key: value
               for key, value in pickle.loads(raw, encoding="bytes").items()}  # fmt: skip
    assert np.array_equal(images, trusted["data"].reshape(-1, 3, 32, 32))
    assert np.array_equal(images, DATA.reshape(-1, 3, 32, 32))
    assert labels.tolist() == trusted["labels"] == LABELS


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_calls_is_refused_and_does_not_call(tmp_path: Path, protocol: int) -> None:
    raw = pickle.dumps({"data": DATA, "labels": Evil(tmp_path / "pwned")}, protocol=protocol)
    with pytest.raises(DataError, match="not a CIFAR-10 batch") as caught:
        read(tmp_path, raw)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()
    pickle.loads(raw)  # the bait is real
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "damaged pickle"),
        (b"hello", "never remembered"),
        (b"\xff", "damaged pickle"),
        (b"\x80\x02cbuiltins\neval\n.", "asks for 'builtins eval'"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "asks for 'posix system'"),
        (b"\x80\x02cnumpy\nload\n.", "asks for 'numpy load'"),
        (b"\x80\x04K\x01K\x02\x93.", "name is not a string"),
        (b"\x80\x02(i__main__\nx\n.", "INST is not allowed"),
        (b"\x80\x02(cnumpy\ndtype\no.", "OBJ is not allowed"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "NEWOBJ is not allowed"),
        (b"\x80\x02\x82\x01.", "EXT1 is not allowed"),
        (b"\x80\x02Pid\n.", "PERSID is not allowed"),
        (b"\x80\x05\x97.", "NEXT_BUFFER is not allowed"),
        (b"\x80\x02cnumpy\ndtype\n(U\x01OtR.", "holds a _Dtype, not a dict"),
        (b"\x80\x02cnumpy\nndarray\nK\x01\x85R.", "calls something"),
        (b"\x80\x02K\x01K\x01\x85R.", "calls something"),
        (b"\x80\x02}K\x01K\x02s.", "not keys and values"),
        (b"\x80\x02}(K\x01u.", "not keys and values"),
        (b"\x80\x02]K\x01K\x02s.", "nothing to work on|not keys and values"),
        (b"\x80\x02}K\x01a.", "not a list"),
        (b"\x80\x02R.", "nothing to work on"),
        (b"\x80\x02K\x01(\x85.", "nothing to work on"),
        (b"\x80\x02t.", "no mark"),
        (b"\x80\x02h\x05.", "never remembered"),
        (b"\x80\x02}K\x01b.", "sets the state"),
        (b"\x80\x02.", "nothing to work on"),
        (b"\x80\x02]q\x00h\x00a.", "holds a list"),
        (pickle.dumps({"data": DATA.astype(np.int64), "labels": LABELS}, protocol=4), "not an array of bytes"),
        (pickle.dumps({"data": np.array([{}], dtype=object), "labels": LABELS}, protocol=4), "not an array of bytes"),
        (pickle.dumps({"labels": LABELS}, protocol=4), "no array 'data'"),
        (pickle.dumps({"data": DATA.tolist(), "labels": LABELS}, protocol=4), "no array 'data'"),
        (pickle.dumps({"data": DATA[:, 1:], "labels": LABELS}, protocol=4), "no array 'data'.*3072 columns"),
        (pickle.dumps({"data": DATA}, protocol=4), "no list 'labels'"),
        (pickle.dumps({"data": DATA, "labels": [True, "a", 1]}, protocol=4), "no list 'labels'"),
        (pickle.dumps({"data": DATA, "labels": [2**70, 1, 1]}, protocol=4), "no list 'labels'"),
        (pickle.dumps({"data": DATA, "labels": {0: 1}}, protocol=4), "not keys and values"),
    ],
)
def test_refusals_by_name(tmp_path: Path, raw: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        read(tmp_path, raw)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def state(shape: bytes, raw: bytes) -> bytes:
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return b"\x80\x02" + array + b"(K\x01" + shape + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89" + raw + b"tb."


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (b"J\xff\xff\xff\xffM\x00\x0c\x86", "impossible shape"),
        (b"J\xff\xff\xff\x7fM\x00\x0c\x86", "has 1 bytes"),
        (b"\x88\x85", "impossible shape"),
        (b"(K\x01K\x01K\x01K\x01K\x01t", "impossible shape"),
        (b"U\x01a\x85", "impossible shape"),
    ],
)
def test_arrays_that_lie_about_their_shape(tmp_path: Path, shape: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(tmp_path, state(shape, b"U\x01x"))


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",  # BINBYTES8 of a terabyte
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",  # BYTEARRAY8
        b"\x80\x02T" + struct.pack("<I", (1 << 31) - 1) + b"x.",  # BINSTRING
        b"\x80\x02}r" + struct.pack("<I", (1 << 32) - 1) + b".",  # LONG_BINPUT: a C unpickler makes room up to it
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"K\x01.",  # FRAME
        b"\x80\x02" + b"}" * 3_000_000 + b".",  # too many objects
        b"\x80\x02" + b"(" * 3_000_000 + b".",
    ],
)
def test_memory_is_bounded(tmp_path: Path, raw: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(DataError):
        read(tmp_path, raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_a_nest_of_shared_tuples_is_not_hashed(tmp_path: Path) -> None:
    nest = b")" + b"".join(b"q\x00h\x00\x86" for _ in range(60))
    start = time.perf_counter()
    with pytest.raises(DataError, match="not keys and values"):
        read(tmp_path, b"\x80\x02}" + nest + b"K\x01s.")
    assert time.perf_counter() - start < 5


def test_a_file_too_large(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: nothing is written
    with pytest.raises(DataError, match=r"more than the \d+ that a CIFAR-10 batch can have"):
        cifar.read(path)


def test_a_folder_or_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match="cannot be read"):
            cifar.read(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    for raw in (files.cifar_batch_of_python_2(DATA[:1], [1]), files.cifar_batch(DATA[:1], [1])):
        for length in [*range(400), *range(len(raw) - 400, len(raw))]:
            with pytest.raises(DataError):
                read(tmp_path, raw[:length])


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # pickletools reads an argument before we see its name
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=500)
@given(data=st.data())
def test_damaged_files_are_data_errors_or_arrays(tmp_path: Path, data: st.DataObject) -> None:
    small = DATA[:1, :0]  # no pixels: damage falls on instructions
    raw = bytearray(data.draw(st.sampled_from([
        files.cifar_batch_of_python_2(small, [1]), files.cifar_batch(small, [1]), files.cifar_batch(small, [1], 3),
    ])))  # fmt: skip
    places = st.integers(0, len(raw) - 1)
    for place, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=5)):
        raw[place] = byte
    with pytest.raises(DataError) as caught:  # even undamaged it has too few columns
        read(tmp_path, bytes(raw))
    assert "\n" not in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=500)
@given(
    raw=st.lists(st.sampled_from([bytes([b]) for b in b"()}]atuesbR.0NK\x01q\x00h\x00\x85\x86\x87\x88\x89\x93\x94"]))
)
def test_random_programs_are_data_errors(tmp_path: Path, raw: list[bytes]) -> None:
    with pytest.raises(DataError):
        read(tmp_path, b"\x80\x04" + b"".join(raw) + b".")
