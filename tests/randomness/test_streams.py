"""Streams: known answers, seeking, laws of the distributions, independence.

Statistical tests have fixed keys, so they pass or fail for good; each is set at p = 1e-6 (4.9 standard deviations, two
sides): that is the chance that a sound generator would have failed on the day the key was chosen.
"""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scripted import Scripted

from fedspa.errors import ConfigError, PrivacyError
from fedspa.randomness.streams import KEY_BYTES, Stream, agent_key, derive_key, mask_seed, root_key

ROOT = root_key("seeded", 2021)
FALSE_ALARM = 1e-6
SIGMAS = 4.9

labels = st.lists(st.one_of(st.text(max_size=6), st.integers(-(2**70), 2**70)), max_size=4).map(tuple)


# ---- keys


@given(labels, labels)
def test_different_labels_give_different_keys(a: tuple[str | int, ...], b: tuple[str | int, ...]) -> None:
    assert (derive_key(ROOT, *a) == derive_key(ROOT, *b)) == ([(type(x), x) for x in a] == [(type(x), x) for x in b])


def test_keys_do_not_change_between_versions() -> None:
    assert root_key("seeded", 7).hex() == "ec4493c43f0dfa3cb6d12a18d9afc3a581f8322bfa360e579707aac32cb44ec9"
    assert agent_key(ROOT, 3, 14).hex() == "bce8e24b7ea7a2ce7d3892827130b9af35206e9014cf713a5e71739353b55357"
    assert mask_seed(ROOT, 3, 14).hex() == "6d5a98b777113a240c6027ed5c23b35f"


def test_mask_seeds_are_apart_from_every_private_key() -> None:
    public = {mask_seed(ROOT, t, i) for t in range(30) for i in range(30)}
    private = {derive_key(ROOT, t, i)[:16] for t in range(30) for i in range(30)}
    private |= {agent_key(ROOT, t, i)[:16] for t in range(30) for i in range(30)}
    assert len(public) == 900
    assert len(private) == 1800
    assert not public & private


@pytest.mark.parametrize("mode", ["secure", "exact"])
def test_a_deployment_never_sees_the_same_key_twice(mode: str) -> None:
    keys = {root_key(mode, seed=1) for _ in range(50)}  # type: ignore[arg-type]
    assert len(keys) == 50
    assert {len(key) for key in keys} == {KEY_BYTES}


def test_wrong_modes_and_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="secure, exact, seeded"):
        root_key("philox", 1)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="32"):
        Stream(b"short")
    with pytest.raises(PrivacyError, match="32"):
        derive_key(b"", "noise")


# ---- words


def test_words_are_aes_256_ctr() -> None:
    """NIST SP 800-38A, F.5.5: the key stream is plaintext xor ciphertext, from the given counter on."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
    plain = "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    cipher = "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
    expected = (int(plain, 16) ^ int(cipher, 16)).to_bytes(32, "big")
    assert Stream(key, 2 * counter).uint64(4).tobytes() == expected


@settings(max_examples=50)
@given(st.lists(st.integers(0, 20_000), max_size=5), st.integers(0, 50_000))
def test_words_depend_on_their_position_only(sizes: list[int], start: int) -> None:
    whole = Stream(ROOT).uint64(start + sum(sizes))
    stream = Stream(ROOT, start)
    pieces = [stream.uint64(n) for n in sizes]
    assert stream.position == start + sum(sizes)
    assert np.array_equal(np.concatenate([np.empty(0, np.uint64), *pieces]), whole[start:])
    stream.seek(start)
    assert np.array_equal(stream.uint64(sum(sizes)), whole[start:])


def test_a_stream_does_not_show_its_key() -> None:
    key = derive_key(ROOT, "shown")
    assert repr(key) not in repr(Stream(key))
    assert key.hex() not in str(Stream(key))


# ---- uniform


def test_uniform_has_53_bits_and_its_law() -> None:
    values = Stream(derive_key(ROOT, "uniform")).uniform(300_000)
    assert values.min() >= 0
    assert values.max() < 1
    scaled = values * 2.0**53
    assert np.array_equal(scaled, np.floor(scaled))
    assert 0.4 < np.mean(scaled % 2) < 0.6  # the last bit is in use
    assert stats.kstest(values, "uniform").pvalue > FALSE_ALARM


# ---- gaussian


def test_gaussian_is_box_muller_to_the_last_digits() -> None:
    """Against 40 digits, on random words and on the extreme ones."""
    words = [0, 1, 2**64 - 1, 2**63, *Stream(ROOT).uint64(96).tolist()]
    angles = [0, 2**63, 2**64 - 1, 2**62, *Stream(ROOT, 1000).uint64(96).tolist()]
    values = Scripted(words + angles).gaussian(200)
    with mpmath.workdps(40):
        for i, (word, angle) in enumerate(zip(words, angles)):
            u = ((word >> 1) + (mpmath.mpf(angle & 2047) + 0.5) / 2**11) / 2**63
            radius = mpmath.sqrt(-2 * mpmath.log(u))
            turn = mpmath.pi * (angle - 2**64 * (angle >= 2**63)) / 2**63
            # Where u is within 2^-53 of 1 float64 can't hold log(u): there an absolute error of 1e-8 must do.
            tolerance = 1e-14 if u < 0.99 else 3e-8
            assert abs(values[i] - float(radius * mpmath.cos(turn))) < tolerance
            assert abs(values[100 + i] - float(radius * mpmath.sin(turn))) < tolerance


def test_gaussian_reaches_beyond_ten_sigma_and_is_finite() -> None:
    values = Scripted([0, 2**64 - 1, 0, 0]).gaussian(4)
    assert values[0] == pytest.approx(math.sqrt(150 * math.log(2)))
    assert values[0] > 10
    assert values[1] == 0.0
    assert np.isfinite(values).all()


def test_gaussian_law() -> None:
    n = 2_000_000
    values = Stream(derive_key(ROOT, "gaussian")).gaussian(n)
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    # moments 1 to 4 and their standard errors
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(np.mean(values**power) - mean) < SIGMAS * math.sqrt(variance / n)
    # tails: counts beyond 3, 4 and 5 sigma on each side
    for limit, side in itertools.product([3, 4, 5], [1, -1]):
        count = int(np.sum(side * values > limit))
        expected = n * stats.norm.sf(limit)
        assert stats.poisson.sf(count - 1, expected) > FALSE_ALARM
        assert stats.poisson.cdf(count, expected) > FALSE_ALARM


def test_the_two_values_of_a_pair_are_independent() -> None:
    """Of a block of 8192 words the first half are radii, the second angles; both values of a pair share both."""
    values = Stream(derive_key(ROOT, "pairs")).gaussian(8192 * 100).reshape(100, 2, 4096)
    first, second = values[:, 0].ravel(), values[:, 1].ravel()
    for f, g in [(np.sign, np.sign), (np.abs, np.abs), (np.square, np.square), (np.array, np.array)]:
        assert abs(np.corrcoef(f(first), g(second))[0, 1]) < SIGMAS / math.sqrt(first.size)
    table = np.histogram2d(stats.norm.cdf(first), stats.norm.cdf(second), bins=16, range=[[0, 1]] * 2)[0]
    assert stats.chisquare(table.ravel()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("n", [1, 3, 8193, 20_001])
def test_gaussian_of_any_length(n: int) -> None:
    stream = Stream(ROOT)
    values = stream.gaussian(n)
    assert values.shape == (n,)
    assert stream.position == n + n % 2
    assert np.unique(values).size == n
    assert np.array_equal(values, Stream(ROOT).gaussian(n))


# ---- independence


def test_streams_of_agents_rounds_and_purposes_are_unrelated() -> None:
    """24 streams, all 276 pairs: correlations of values and of squares; false alarm 276·2·p in total."""
    keys = [agent_key(ROOT, t, i) for t in range(3) for i in range(4)]
    streams = [Stream(derive_key(key, purpose, 0)) for key in keys for purpose in ("noise", "sampling")]
    values = np.stack([stream.gaussian(50_000) for stream in streams])
    for matrix in (np.corrcoef(values), np.corrcoef(values**2)):
        apart = matrix[np.triu_indices(len(streams), 1)]
        assert np.abs(apart).max() < SIGMAS / math.sqrt(50_000)


# ---- integers and subsets


def test_integers_below_are_uniform_where_rejection_matters() -> None:
    """Unrejected, words modulo 3·2^61 would fall into the first two thirds 3/8 of the time each."""
    values = Stream(derive_key(ROOT, "below")).integers_below(60_000, 3 * 2**61)
    assert values.min() >= 0
    assert values.max() < 3 * 2**61
    assert stats.chisquare(np.bincount(values // 2**61, minlength=3)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("bound", [1, 2, 3, 600, 2**63])
def test_integers_stay_below(bound: int) -> None:
    values = Stream(ROOT).integers_below(5000, bound)
    assert values.min() >= 0
    assert int(values.max()) < bound
    if 1 < bound <= 600:
        assert stats.chisquare(np.bincount(values, minlength=bound)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("bound", [0, -1, 2**63 + 1])
def test_impossible_bounds_are_refused(bound: int) -> None:
    with pytest.raises(PrivacyError, match="bound"):
        Stream(ROOT).integers_below(1, bound)


@given(st.integers(0, 300).flatmap(lambda m: st.tuples(st.just(m), st.integers(0, m))), st.integers(0, 2**32))
def test_subsets_are_subsets(sizes: tuple[int, int], seed: int) -> None:
    population, size = sizes
    chosen = Stream(derive_key(ROOT, seed)).choice_without_replacement(population, size)
    assert chosen.shape == (size,)
    assert np.array_equal(chosen, np.unique(chosen))
    assert size == 0 or (chosen[0] >= 0 and chosen[-1] < population)


@pytest.mark.parametrize("size", [2, 4])
def test_every_subset_is_equally_likely(size: int) -> None:
    stream = Stream(derive_key(ROOT, "subsets", size))
    subsets = dict.fromkeys(itertools.combinations(range(6), size), 0)
    for _ in range(200 * len(subsets)):
        subsets[tuple(stream.choice_without_replacement(6, size).tolist())] += 1
    assert stats.chisquare(list(subsets.values())).pvalue > FALSE_ALARM


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(PrivacyError, match="without replacement"):
        Stream(ROOT).choice_without_replacement(5, 6)
