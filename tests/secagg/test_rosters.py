"""Rosters: what stands in one, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import ConfigError
from fedspa.secagg.keys import Roster, SecretKey

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
