"""docs/secagg.md: its vectors are those of the code and of its plain Python twin, its tables those of the code."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pedestrian
import pytest
import torch

from fedspa.algorithms import chosen
from fedspa.algorithms.base import Terms
from fedspa.algorithms.session import session_of
from fedspa.errors import PayloadError
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.message import decode, upload
from fedspa.secagg.pads import keystream, masked, pad_key
from fedspa.secagg.roster import Roster
from fedspa.secagg.session import Session
from fedspa.secagg.total import MaskedSum, Reason

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
    assert pad_key(SESSION, first, second, shared).hex() == said["key"] == TWIN.pad_key(first, second, shared).hex()
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


def test_other_ranges() -> None:
    rows = re.findall(r"^\| (−?\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([0-9a-f]{32}) \|$", PAGE, flags=re.M)
    assert len(rows) == 5
    assert {Session(**fields(low=int(low.replace("−", "-")), high=int(high))).bits for low, high, *_ in rows} > {8}
    for low, high, bits, checks, size, digest in rows:
        changed = fields(low=int(low.replace("−", "-")), high=int(high))
        session = Session(**changed)
        message = upload(VALUES["bob"], session, "bob", SecretKey(SECRETS["bob"]))
        assert (session.bits, session.checks, len(message)) == (int(bits), int(checks), int(size))
        assert hashlib.sha256(message).hexdigest()[:32] == digest
        assert pedestrian.Member(**changed).message(VALUES["bob"].tolist(), "bob", SECRETS["bob"]) == message


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


def test_the_roster_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r'^```toml title="roster.toml"\n(.*?)^```$', PAGE, flags=re.M | re.S)
    (tmp_path / "roster.toml").write_text(block)
    roster = Roster.load(tmp_path / "roster.toml")
    assert list(roster.members) == ["clinic-a", "clinic-b"]
    spelt = b"fedspa roster 1" + b"".join(
        bytes([len(name)]) + name.encode() + key for name, key in roster.members.items()
    )
    assert roster.digest == hashlib.sha256(spelt).hexdigest()


def test_every_void_and_refusal_is_listed() -> None:
    refusals = re.search(r"### Refusals\n(.*?)^## Sum\n(.*?)^\*\*What", PAGE, flags=re.M | re.S)
    assert refusals is not None
    first_cells = ["".join(re.findall(r"^\| (`.*?) \|", part, flags=re.M)) for part in refusals.groups()]
    listed, voids = (set(re.findall(r"`([a-z]+)`", cells)) for cells in first_cells)
    assert listed <= PayloadError.CODES
    source = (ROOT / "src/fedspa/secagg/message.py").read_text() + (ROOT / "src/fedspa/secagg/total.py").read_text()
    raised = set(re.findall(r'PayloadError\("([a-z]+)"', source))
    assert listed == raised | {"round", "attempt", "count", "bits"}
    assert voids == set(get_args(Reason))
