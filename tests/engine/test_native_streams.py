"""The native streams and samplers, word for word those of `fedspa.randomness`, at every instruction set level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_probe import probe
from numpy.typing import NDArray

from fedspa.engine.native.library import LEVELS, Level, number
from fedspa.randomness.streams import Stream, draw_batch

every_level = pytest.mark.parametrize("level", LEVELS)
keys = st.binary(min_size=32, max_size=32)


def words(key: bytes, level: Level, position: int, count: int) -> NDArray[np.uint64]:
    found = np.empty(count, np.uint64)
    probe(level).probe_words(key, number(level), position, count, found.ctypes.data)
    return found


@every_level
@settings(max_examples=30, deadline=None)
@given(key=keys, position=st.integers(0, 2**40), count=st.integers(1, 300))
def test_words_are_the_ciphers(level: Level, key: bytes, position: int, count: int) -> None:
    assert np.array_equal(words(key, level, position, count), Stream(key, position).uint64(count))


@every_level
def test_the_ciphers_known_answer(level: Level) -> None:
    """AES-256 of the zero block under the zero key, a value of NIST's validation suite (any AES gives it)."""
    assert words(bytes(32), level, 0, 2).tobytes().hex() == "dc95c078a2408989ad48a21492842087"


@every_level
@settings(max_examples=20, deadline=None)
@given(
    key=keys,
    half=st.integers(0, 2**40),
    count=st.sampled_from([1, 2, 3, 5, 15, 16, 17, 8190, 8192, 8193, 20_001]),
)
def test_gaussians_are_those_of_python(level: Level, key: bytes, half: int, count: int) -> None:
    values = np.empty(count)
    probe(level).probe_gaussian(key, number(level), 2 * half, count, values.ctypes.data)
    # The angle of the far side is only known to 4e-16 in float64 itself, and a radius reaches 9.4.
    assert float(np.abs(values - Stream(key, 2 * half).gaussian(count)).max()) < 1e-14


@settings(max_examples=150, deadline=None)
@given(keys, st.integers(0, 9), st.sampled_from(["poisson", "fixed"]), st.integers(1, 700), st.data())
def test_batches_are_those_of_python(
    key: bytes, skip: int, sampling: str, population: int, data: st.DataObject
) -> None:
    batch = data.draw(st.integers(1, population))
    chosen, room, seen = (np.empty(3 * (population + 10), kind) for kind in (np.int64, np.uint64, np.uint8))
    fixed = int(sampling == "fixed")
    given_room = (chosen.ctypes.data, room.ctypes.data, seen.ctypes.data)
    count = probe("plain").probe_draw(key, 0, skip, fixed, population, batch, *given_room)
    expected = draw_batch(sampling, batch, batch / population, population, Stream(key, skip))  # type: ignore[arg-type]
    assert np.array_equal(chosen[:count], expected)


@every_level
def test_the_far_tail_is_that_of_python(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that no test ever draws: the smallest radii, whose last bits are the angle's. What accountants assume of
    the end of the noise (`mechanisms/gaussian/plan.py`) holds for this sampler, too."""
    radii = [0, 1, 2, 3, 2**11, 2**40, 2**53 + 1, 2**64 - 1]
    angles = [0, 1, 2, 1023, 2047, 2048, 2**64 - 1, 2**63 + 5]
    pairs = np.array([(radius, angle) for radius in radii for angle in angles], dtype=np.uint64)
    found = np.empty(pairs.shape)
    assert probe(level).probe_pairs(pairs.ctypes.data, len(pairs), found.ctypes.data) == 0
    monkeypatch.setattr(Stream, "uint64", lambda self, n: pairs.T.flatten())
    expected = Stream(bytes(32)).gaussian(pairs.size).reshape(2, -1).T
    # The largest radius words leave u within rounding of 1, where the logarithm keeps an absolute error.
    assert np.allclose(found, expected, rtol=1e-14, atol=3e-8)
    assert np.allclose(np.hypot(*found.T)[:-8], np.hypot(*expected.T)[:-8], rtol=1e-14)
    assert np.hypot(*found.T).max() > 10.19
