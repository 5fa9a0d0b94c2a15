"""The native streams and samplers, word for word those of `fedspa.randomness`, at every instruction set level."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedspa.engine.native.library import LEVELS, library, number
from fedspa.randomness.sampling import draw_batch
from fedspa.randomness.streams import Stream

pytestmark = pytest.mark.skipif(library() is None, reason="the native engine was not built")

levels = st.sampled_from([number(level) for level in LEVELS])
keys = st.binary(min_size=32, max_size=32)


def native() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None
    return loaded


def native_words(key: bytes, level: int, position: int, count: int) -> NDArray[np.uint64]:
    words = np.empty(count, np.uint64)
    native().fedspa_words(key, level, position, count, words.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)))
    return words


@settings(max_examples=60, deadline=None)
@given(keys, levels, st.integers(0, 2**40), st.integers(1, 300))
def test_words_are_the_ciphers(key: bytes, level: int, position: int, count: int) -> None:
    assert np.array_equal(native_words(key, level, position, count), Stream(key, position).uint64(count))


@pytest.mark.parametrize("level", [number(level) for level in LEVELS])
def test_the_ciphers_known_answer(level: int) -> None:
    """AES-256 of the zero block under the zero key, a value of NIST's validation suite (any AES gives it)."""
    block = native_words(bytes(32), level, 0, 2).tobytes()
    assert block.hex() == "dc95c078a2408989ad48a21492842087"


@settings(max_examples=40, deadline=None)
@given(keys, levels, st.integers(0, 2**40), st.sampled_from([1, 2, 3, 5, 15, 16, 17, 8190, 8192, 8193, 20_001]))
def test_gaussians_are_those_of_python(key: bytes, level: int, half: int, count: int) -> None:
    values = np.empty(count)
    native().fedspa_gaussian(key, level, 2 * half, count, values.ctypes.data)
    expected = Stream(key, 2 * half).gaussian(count)
    # The angle of the far side is only known to 4e-16 in float64 itself, and a radius reaches 9.4.
    assert float(np.abs(values - expected).max()) < 1e-14


@settings(max_examples=150, deadline=None)
@given(keys, levels, st.integers(0, 9), st.sampled_from(["poisson", "fixed"]), st.integers(1, 700), st.data())
def test_batches_are_those_of_python(
    key: bytes, level: int, skip: int, sampling: str, population: int, data: st.DataObject
) -> None:
    batch = data.draw(st.integers(1, population))
    chosen = np.empty(population, np.int64)
    count = native().fedspa_draw(
        key, level, skip, ["poisson", "fixed"].index(sampling), population, batch, chosen.ctypes.data
    )
    expected = draw_batch(sampling, batch, batch / population, population, Stream(key, skip))  # type: ignore[arg-type]
    assert np.array_equal(chosen[:count], expected)
