"""Keys: their file, their text, and the public keys that are none."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pedestrian
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import ConfigError
from fedspa.secagg.keys import Roster, SecretKey, fingerprint, public_key

PRIME = 2**255 - 19

# The points of small order, and their other spellings: https://cr.yp.to/ecdh.html#validate.
ORDER_8 = (
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)

SMALL = [0, 1, PRIME - 1, *ORDER_8]

OTHER_SPELLINGS = [PRIME, PRIME + 1, 2**255, 2**255 + 9, 2**256 - 1, PRIME + 18, ORDER_8[0] + 2**255]


def as_bytes(number: int) -> bytes:
    return number.to_bytes(32, "little")


def one_line(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert "Error" not in text
    return text


@pytest.mark.parametrize("point", SMALL)
def test_a_point_of_small_order_is_refused(point: int) -> None:
    assert pedestrian.x25519(bytes(range(32)), as_bytes(point)) == bytes(32)
    with pytest.raises(ConfigError, match="same secret with everybody") as error:
        SecretKey.generate().shared(as_bytes(point))
    one_line(error)
    with pytest.raises(ConfigError, match="same secret with everybody"):
        public_key(as_bytes(point).hex())


@pytest.mark.parametrize("point", OTHER_SPELLINGS)
def test_a_second_spelling_of_a_point_is_refused(point: int) -> None:
    with pytest.raises(ConfigError, match="2\\^255 − 19"):
        public_key(as_bytes(point).hex())
    with pytest.raises(ConfigError, match="2\\^255 − 19"):
        SecretKey.generate().shared(as_bytes(point))


@given(st.text(max_size=80) | st.from_regex(r"[0-9A-Fa-f]{60,70}", fullmatch=True))
@settings(max_examples=60)
def test_any_text_is_a_public_key_or_refused_in_one_line(text: str) -> None:
    try:
        assert public_key(text).hex() == text
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_a_key_comes_back_from_its_file(tmp_path: Path) -> None:
    key, path = SecretKey.generate(), tmp_path / "key"
    key.save(path)
    assert SecretKey.load(path).public == key.public
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_wide_umask_opens_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        SecretKey.generate().save(tmp_path / "key")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "key"
    SecretKey.generate().save(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="File exists") as error:
        SecretKey.generate().save(path)
    one_line(error)
    assert path.read_bytes() == before
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="File exists"):
        SecretKey.generate().save(link)


def test_a_full_disk_leaves_no_half_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:40]))
    with pytest.raises(ConfigError, match="No space left"):
        SecretKey.generate().save(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    SecretKey.generate().save(path)
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            SecretKey.load(path)


@pytest.mark.parametrize("content", [b"", b"fedspa-x25519-secret-1 00", b"a" * 5000])
def test_a_file_that_holds_no_key(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="it holds no secret key") as error:
        SecretKey.load(path)
    assert "fedspa site keygen" in one_line(error)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        SecretKey.load(tmp_path / "key")
    with pytest.raises(ConfigError, match="Is a directory"):
        SecretKey.load(tmp_path)
    with pytest.raises(ConfigError, match="not a plain file"):
        SecretKey.load(Path("/dev/null"))
    with pytest.raises(ConfigError, match="No such file"):
        SecretKey.generate().save(tmp_path / "folder" / "key")


def test_nothing_prints_the_secret(tmp_path: Path) -> None:
    key = SecretKey.generate()
    key.save(tmp_path / "key")
    secret = (tmp_path / "key").read_text().split()[1]
    for text in (repr(key), str(key), f"{key!r}", repr({"key": key})):
        assert secret not in text
    assert fingerprint(key.public) in repr(key)


def test_a_key_travels_between_processes_without_what_it_remembers() -> None:
    key, other = SecretKey.generate(), SecretKey.generate()
    shared = key.shared(other.public)
    assert key.shared(other.public) == shared  # out of its memory
    copy = pickle.loads(pickle.dumps(key))
    assert copy.public == key.public
    assert copy.shared(other.public) == shared
    assert shared not in pickle.dumps(key)


# Rosters: what stands in one, and what is refused.

A, B, C = (SecretKey(bytes([number] * 32)).public for number in (1, 2, 3))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "roster.toml"
    path.write_text(text, "utf-8")
    return path


def test_a_roster_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    path = written(tmp_path, f'[members]\nclinic-b = "{B.hex()}"\n"clinic.a" = "{A.hex()}"\nClinic-c = "{C.hex()}"\n')
    roster = Roster.load(path)
    assert list(roster.members.items()) == [("Clinic-c", C), ("clinic-b", B), ("clinic.a", A)]
    assert roster.cohort(["clinic.a", "clinic-b"]) == {"clinic.a": A, "clinic-b": B}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "one table"),
        ('[members]\na = 3\nb = "x"', "one table"),
        (f'[members]\na = "{A.hex()}"', "1 members"),
        (f'[members]\na = "{A.hex()}"\nb = "{A.hex()}"', "'a' and 'b' have the same public key"),
        (f'[members]\na = "{A.hex()}"\nA = "{B.hex()}"', "capital letters"),
        (f'[members]\n"a b" = "{A.hex()}"\nb = "{B.hex()}"', "'a b' is not a member's name"),
        (f'[members]\n"-a" = "{A.hex()}"\nb = "{B.hex()}"', "not a member's name"),
        (f'[members]\na = "{A.hex().upper()}"\nb = "{B.hex()}"', "is not a public key"),
        (f'[members]\na = "{"0" * 64}"\nb = "{B.hex()}"', "same secret with everybody"),
        (f'[members]\na = "{"f" * 64}"\nb = "{B.hex()}"', "2\\^255"),
        (f'x = 1\n[members]\na = "{A.hex()}"\nb = "{B.hex()}"', "and not 'x'"),
        ("[members", "not TOML"),
    ],
)
def test_what_is_no_roster(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as error:
        Roster.load(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_who_is_not_in_it_is_in_no_cohort() -> None:
    roster = Roster({"a": A, "b": B})
    with pytest.raises(ConfigError, match="'c' is not in the roster"):
        roster.cohort(["a", "c"])
    with pytest.raises(ConfigError, match="twice"):
        roster.cohort(["a", "a"])


def test_its_digest_is_of_names_and_keys_and_of_no_order() -> None:
    digest = Roster({"a": A, "b": B}).digest
    assert digest == Roster({"b": B, "a": A}).digest
    others: list[dict[str, bytes]] = [{"a": B, "b": A}, {"a": A, "b": C}, {"a": A, "c": B}, {"a": A, "b": B, "c": C}]
    assert len({digest, *(Roster(members).digest for members in others)}) == 5


@given(st.binary(max_size=300) | st.dictionaries(st.text(max_size=10), st.text(max_size=70)).map(lambda d: _toml(d)))
@settings(max_examples=50)
def test_any_file_is_a_roster_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("roster") / "roster.toml"
    path.write_bytes(content)
    refused_in_one_line(lambda: Roster.load(path))


def _toml(members: dict[str, str]) -> bytes:
    import tomli_w

    return tomli_w.dumps({"members": members}).encode("utf-8", errors="replace")


def refused_in_one_line(read: Callable[[], object]) -> None:
    try:
        read()
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017
