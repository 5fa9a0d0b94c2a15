"""The primitives as the protocol calls them, and as its plain Python twin spells them out, against the RFCs."""

from __future__ import annotations

from collections.abc import Callable

import pedestrian
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.secagg.keys import SecretKey

h = bytes.fromhex
NINE = (9).to_bytes(32, "little")


def x25519(secret: bytes, public: bytes) -> bytes:
    return SecretKey(secret).shared(public)


def chacha20(key: bytes, nonce: bytes, length: int, counter: int = 0) -> bytes:
    start = counter.to_bytes(4, "little") + nonce
    return Cipher(algorithms.ChaCha20(key, start), mode=None).encryptor().update(bytes(length))


def hkdf(secret: bytes, info: bytes, length: int = 32, salt: bytes | None = None) -> bytes:
    return HKDF(SHA256(), length=length, salt=salt, info=info).derive(secret)


@pytest.mark.parametrize("agree", [x25519, pedestrian.x25519])
def test_x25519_of_rfc_7748(agree: Callable[[bytes, bytes], bytes]) -> None:
    scalar, u = (
        "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
        ("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c"),
    )
    assert agree(h(scalar), h(u)) == h("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552")
    alice = h("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = h("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    of_alice = h("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    of_bob = h("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    assert (agree(alice, NINE), agree(bob, NINE)) == (of_alice, of_bob)
    assert (SecretKey(alice).public, SecretKey(bob).public) == (of_alice, of_bob)
    shared = h("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert agree(alice, of_bob) == agree(bob, of_alice) == shared


@pytest.mark.parametrize("agree", [x25519, pedestrian.x25519])
def test_x25519_a_thousand_times(agree: Callable[[bytes, bytes], bytes]) -> None:
    """RFC 7748, section 5.2: the result becomes the scalar, and the scalar the point."""
    k, u = agree(NINE, NINE), NINE
    assert k == h("422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079")
    for _ in range(999):
        k, u = agree(k, u), k
    assert k == h("684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51")


@pytest.mark.parametrize("stream", [chacha20, pedestrian.chacha20])
def test_chacha20_of_rfc_8439(stream: Callable[[bytes, bytes, int, int], bytes]) -> None:
    block = stream(bytes(range(32)), h("000000090000004a00000000"), 64, 1)  # 2.3.2
    assert block == h(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    # A.1, vectors 1 and 2: key, counter and nonce of 0, as pads have counter and nonce; the second block follows.
    assert stream(bytes(32), bytes(12), 128, 0) == h(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )


@pytest.mark.parametrize("derive", [hkdf, pedestrian.hkdf])
def test_hkdf_of_rfc_5869(derive: Callable[..., bytes]) -> None:
    secret = bytes([0x0B] * 22)
    assert derive(secret, h("f0f1f2f3f4f5f6f7f8f9"), 42, h("000102030405060708090a0b0c")) == h(
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    # A.3, without salt, as pads are derived.
    assert derive(secret, b"", 42) == h(
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
@settings(max_examples=30, deadline=None)
def test_both_agree_on_keys(one: bytes, other: bytes) -> None:
    assert SecretKey(one).public == pedestrian.x25519(one, NINE)
    assert x25519(one, SecretKey(other).public) == pedestrian.x25519(other, SecretKey(one).public)
