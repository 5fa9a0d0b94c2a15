"""The native streams and samplers, word for word those of `fedspa.randomness`, at every instruction set level."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedspa.engine.native import library as native_library
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


CSRC = Path(native_library.__file__).with_name("csrc")
COMPILER = shutil.which("cc")
CPU = Path("/proc/cpuinfo")
TARGETS = {0: "", 1: "avx2,fma", 2: "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"}
# Reads radius and angle, and writes both values: each pair in every lane.
PAIRS = """
#include <stdio.h>
#include "simd.h"
#include "gauss.h"
int main(void) {
    uint64_t words[2];
    while (fread(words, 8, 2, stdin) == 2) {
        L radii = {0}, angles = {0};
        D first, second;
        radii += (int64_t)words[0], angles += (int64_t)words[1];
        box_muller(radii, angles, &first, &second);
        for (int i = 1; i < LANES / 2; i++)
            if (first[i] != first[0] || second[i] != second[0]) return 1;
        double pair[2] = {first[0], second[0]};
        fwrite(pair, 8, 2, stdout);
    }
    return 0;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("level", TARGETS)
def test_the_far_tail_is_that_of_python(level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that no test ever draws: the smallest radii, whose last bits are the angle's. What accountants assume of
    the end of the noise (`mechanisms/gaussian/tail.py`) holds for this sampler, too."""
    if not set(TARGETS[level].split(",")) <= {"", *(CPU.read_text("ascii").split() if CPU.exists() else ())}:
        pytest.skip("this CPU has no such level")
    target = f'#pragma GCC target("{TARGETS[level]}")\n' if level else ""
    (tmp_path / "pairs.c").write_text(f"{target}#define LEVEL {level}\n{PAIRS}")
    program = tmp_path / "pairs"
    command = [str(COMPILER), "-std=gnu11", "-O2", "-Wno-psabi", "-I", str(CSRC), "pairs.c", "-o", "pairs", "-lm"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    radii = [0, 1, 2, 3, 2**11, 2**40, 2**53 + 1, 2**64 - 1]
    angles = [0, 1, 2, 1023, 2047, 2048, 2**64 - 1, 2**63 + 5]
    words = np.array([(radius, angle) for radius in radii for angle in angles], dtype=np.uint64)
    done = subprocess.run([str(program)], input=words.tobytes(), capture_output=True, check=True)
    found = np.frombuffer(done.stdout).reshape(-1, 2)
    monkeypatch.setattr(Stream, "uint64", lambda self, n: words.T.flatten())
    expected = Stream(bytes(32)).gaussian(words.size).reshape(2, -1).T
    # The largest radius words leave u within rounding of 1, where the logarithm keeps an absolute error.
    assert np.allclose(found, expected, rtol=1e-14, atol=3e-8)
    assert np.allclose(np.hypot(*found.T)[:-8], np.hypot(*expected.T)[:-8], rtol=1e-14)
    assert np.hypot(*found.T).max() > 10.19
