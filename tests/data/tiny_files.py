"""Tiny data files in the formats of MNIST and CIFAR-10, for the tests that read them."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR_FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def idx(values: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def images(records: int, shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (records, *shape), dtype=np.uint8)


def mnist(folder: Path, *, packed: bool = True, records: tuple[int, int] = (12, 5)) -> dict[str, NDArray[np.uint8]]:
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, count in zip(MNIST_FILES, (records[0], records[0], records[1], records[1])):
        made[name] = images(count, (28, 28)) if "images" in name else (np.arange(count) % 10).astype(np.uint8)
        raw = idx(made[name])
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(raw, mtime=0) if packed else raw)
    return made


def cifar_batch(data: NDArray[np.uint8], labels: list[int], protocol: int = 4) -> bytes:
    batch = {b"batch_label": b"x", b"labels": labels, b"data": data, b"filenames": [b"a.png"] * len(labels)}
    return pickle.dumps(batch, protocol=protocol)


def cifar_batch_of_python_2(data: NDArray[np.uint8], labels: list[int]) -> bytes:
    """The official files are protocol 2, written by Python 2: str is BINSTRING, and numpy lives in numpy.core."""

    def short(text: str) -> bytes:
        return b"U" + bytes([len(text)]) + text.encode()

    rows, columns = data.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85q\x03" + short("b") + b"\x87Rq\x04"
        b"(K\x01" + b"M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86q\x05"
        b"cnumpy\ndtype\nq\x06" + short("u1") + b"K\x00K\x01\x87Rq\x07"
        b"(K\x03" + short("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<I", data.size) + data.tobytes() + b"tb"
    )
    listed = b"]q\x08(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}q\x00(" + short("data") + array + short("labels") + listed + b"u."


def cifar(folder: Path, records: int = 4) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(CIFAR_FILES):
        labels = [(seed + i) % 10 for i in range(records)]
        (folder / name).write_bytes(cifar_batch(images(records, (3072,), seed), labels))
