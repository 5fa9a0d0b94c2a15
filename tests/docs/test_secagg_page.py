"""docs/secagg.md: its vectors are those of the code and of its plain Python twin, its tables those of the code."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pedestrian
import pytest
import torch

from fedspa.algorithms import chosen
from fedspa.algorithms.base import Terms, session_of
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.masking import MaskedSum, decode, keystream, mask_key, masked, upload
from fedspa.secagg.recovery import Progress, RecoverableSum, Step, answer
from fedspa.secagg.session import Session

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "secagg.md").read_text("utf-8")
VECTORS: dict[str, Any] = {}
for block in re.findall(r"^```toml\n(.*?)^```$", PAGE, flags=re.M | re.S):
    VECTORS |= tomllib.loads(block)
SECRETS = {name: bytes.fromhex(member["secret"]) for name, member in VECTORS["members"].items()}
VALUES = {name: np.array(member["values"]) for name, member in VECTORS["members"].items()}


def fields(**changed: int) -> dict[str, Any]:
    given = {name: VECTORS["session"][name] for name in ("run", "round", "attempt", "low", "high", "count")}
    given["terms"] = bytes.fromhex(VECTORS["session"]["terms"])
    given["members"] = {name: bytes.fromhex(member["public"]) for name, member in VECTORS["members"].items()}
    return given | changed


SESSION, TWIN = Session(**fields()), pedestrian.Member(**fields())


def test_the_session() -> None:
    said = VECTORS["session"]
    assert said["terms"] == hashlib.sha256(b"terms").hexdigest()
    assert TWIN.preimage.hex() == said["encoded"]
    assert hashlib.sha256(bytes.fromhex(said["encoded"])).hexdigest() == said["binding"] == SESSION.binding.hex()
    assert (SESSION.bits, SESSION.checks) == (said["bits"], said["check_words"])


@pytest.mark.parametrize("pair", VECTORS["pairs"])
def test_a_pair(pair: str) -> None:
    said = VECTORS["pairs"][pair]
    first, second = pair.split("-")
    shared = SecretKey(SECRETS[first]).shared(SESSION.members[second])
    assert shared.hex() == said["shared"] == pedestrian.x25519(SECRETS[second], SESSION.members[first]).hex()
    assert mask_key(SESSION, first, second, shared).hex() == said["key"] == TWIN.mask_key(first, second, shared).hex()
    assert keystream(SESSION, first, second, shared).tobytes().hex() == said["keystream"]


@pytest.mark.parametrize("name", VECTORS["members"])
def test_a_member(name: str) -> None:
    said, secret = VECTORS["members"][name], SecretKey(SECRETS[name])
    assert secret.public.hex() == said["public"]
    assert masked(VALUES[name], SESSION, name, secret).tolist() == said["words"]
    assert upload(VALUES[name], SESSION, name, secret).hex() == said["message"]
    assert TWIN.message(said["values"], name, SECRETS[name]).hex() == said["message"]
    assert decode(bytes.fromhex(said["message"]), SESSION).tolist() == said["words"]


def test_the_sum() -> None:
    total = MaskedSum(SESSION)
    for name, said in VECTORS["members"].items():
        total.add(name, bytes.fromhex(said["message"]))
    listed = ", ".join(map(str, total.values())).replace("-", "−")
    assert f"The sum is {listed}, and seven zeros." in PAGE


def test_a_recovered_sum() -> None:
    said, numbers = VECTORS["recovery"], {"threshold": 2, "least": 2}
    session, twin = Session(**fields(), **numbers), pedestrian.Member(**fields(), **numbers)
    assert session.binding.hex() == said["binding"] == twin.binding.hex()
    survivors = ("alice", "bob")
    question = bytes.fromhex(said["survivors"])
    total, asked = RecoverableSum(session), []
    for name in survivors:
        member = said[name]
        seed, coefficient = (int.from_bytes(bytes.fromhex(member[key]), "little") for key in ("seed", "coefficient"))
        message = twin.message(VALUES[name].tolist(), name, SECRETS[name], seed, [coefficient])
        assert message.hex() == member["message"]
        total.add(name, message)

    def ask(step: Step, questions: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        for name, body in questions.items():
            assert body[:1] == question
            reply = answer(session, name, SecretKey(SECRETS[name]), Progress(survivors), step, body)
            assert reply.hex() == said[name][step]
            asked.append((name, step))
            yield name, reply

    total.recover(ask)
    assert total.values().tolist() == [-200, 0, 3, 200, -43]
    assert len(asked) == 6


def test_the_terms() -> None:
    plan = DiscreteGaussianPlan(4, 2, 0.5, 100, 5, 2048, "add-remove", 0.001, 3, 1, 3)
    terms, theta = Terms(7, "shared", bytes(range(16)), 0.1, plan), torch.tensor([0.0, 1.0, -2.5, 0.1])
    algorithm, members = chosen("fedspa", "secure-aggregation"), fields()["members"]
    session = session_of("example", 1, members, algorithm, terms, theta, "int", "secure")
    (block,) = re.findall(r"^```json\n(.*?)^```$", PAGE, flags=re.M | re.S)
    digest = hashlib.sha256(block.replace("\n", "").encode("ascii"))
    assert f"its SHA-256 is `{digest.hexdigest()}`" in PAGE
    assert session.terms == digest.digest()
    assert json.loads(block)["theta"] == hashlib.sha256(struct.pack("<4f", 0.0, 1.0, -2.5, 0.1)).hexdigest()
    for other in (replace(terms, local_lr=0.2), replace(terms, mask_seed=bytes(16)), replace(terms, mask="fixed")):
        assert session_of("example", 1, members, algorithm, other, theta, "int", "secure").terms != session.terms
    theta[0] = -0.0
    assert session_of("example", 1, members, algorithm, terms, theta, "int", "secure").terms != session.terms
