"""Attack: a server that shows members different cohorts, rounds or terms, to get the sum of a part of a cohort.

It has every message of every session, keeps them all, and adds them up with any signs. The check words tell it when all
masks are gone: then they are 0. They must be so for whole cohorts of one session and for nothing else, because a part
of a cohort holds fewer shares of noise than the members paid for.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cohorts import secrets_of, session_of, values_of
from numpy.typing import NDArray

from fedspa.secagg.masking import decode, upload
from fedspa.secagg.session import Session

SECRETS = secrets_of(4)
WHOLE = session_of(SECRETS, count=3)


def without(*names: str) -> Session:
    return replace(WHOLE, members={name: key for name, key in WHOLE.members.items() if name not in names})


Messages = dict[tuple[bytes, str], NDArray[np.int64]]


def heard(session: Session, names: list[str]) -> Messages:
    """The messages of those who were shown this session."""
    values = values_of(session)
    return {
        (session.binding, name): decode(upload(values[name], session, name, SECRETS[name]), session).astype(np.int64)
        for name in names
    }


def unmasked(messages: Messages) -> list[set[tuple[bytes, str]]]:
    """Every set of messages that, with some signs, has only zeros in its check words."""
    names, rows = list(messages), np.array([words[3:] for words in messages.values()])
    signs = np.array(list(itertools.product((-1, 0, 1), repeat=len(names))))
    zero = ((signs @ rows) % 2**WHOLE.bits == 0).all(axis=1) & signs.any(axis=1)
    return [{name for name, sign in zip(names, row) if sign} for row in signs[zero]]


CASES = {
    "two cohorts": [(WHOLE, ["site-0", "site-1"]), (without("site-3"), ["site-2"]), (without("site-0"), ["site-3"])],
    "one silent": [(WHOLE, ["site-0", "site-1", "site-2"])],
    "one silent, then the rest": [
        (WHOLE, ["site-0", "site-1", "site-2"]),
        (replace(without("site-3"), attempt=2), ["site-0", "site-1", "site-2"]),
    ],
    "other terms": [(WHOLE, ["site-0", "site-1"]), (replace(WHOLE, terms=bytes(32)), ["site-2", "site-3"])],
    "other rounds": [(replace(WHOLE, round=t), ["site-0", "site-1", "site-2"]) for t in (1, 2, 3)],
    "another attempt": [(replace(WHOLE, attempt=t), ["site-0", "site-1", "site-2", "site-3"]) for t in (1, 2)],
    "a pair each": [
        (without("site-2", "site-3"), ["site-0"]),
        (without("site-0", "site-3"), ["site-1"]),
        (without("site-1", "site-3"), ["site-2"]),
        (WHOLE, ["site-3"]),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_only_whole_cohorts_lose_their_masks(case: str) -> None:
    messages: Messages = {}
    cohorts = {}
    for session, names in CASES[case]:
        messages |= heard(session, names)
        cohorts[session.binding] = set(session.members)
    found = unmasked(messages)
    whole = [binding for binding, cohort in cohorts.items() if all((binding, name) in messages for name in cohort)]
    assert len(found) == 3 ** len(whole) - 1  # each whole cohort with either sign or left out
    for taken in found:
        for binding in {binding for binding, _ in taken}:
            assert {name for of, name in taken if of == binding} == cohorts[binding]


def test_the_search_finds_what_is_there() -> None:
    """Masks that are bound to a pair alone would cancel over two cohorts: the search must see that."""
    pads = {pair: np.random.default_rng(number).integers(0, 256, 11) for number, pair in enumerate(("ab", "ac", "bc"))}
    messages = {(b"1", "a"): pads["ab"] + pads["ac"], (b"2", "b"): -pads["ab"], (b"3", "c"): -pads["ac"]}
    assert len(unmasked(messages)) == 2
