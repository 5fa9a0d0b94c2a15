"""Attack: a server draws many answers from one entry of an agent's ledger, by making most of them fail.

It asks for one coordinate at a local rate at which Δ overflows float32 unless the noisy sum lies in a window of its
choice. A failure used to answer `internal` and leave the entry open, and the same question again trained again, with
fresh noise: each failure was a noisy bit for which nobody paid. Measured on that code with the site of
attacked_site.py: 747 of 2,500 attempts fell into the window without the record and 361 of 2,500 with it, so that after
62 attempts on one entry ε ≥ 9.1 (95 % confidence) where the ledger said 5.7; 1,140 attempts of another setting gave
ε ≥ 11.5 where it said 3.1.

Now the rate is refused before anything is paid. And whatever is asked within the limits, an entry has one answer.
"""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import attacked_site
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import Refusal
from fedspa.algorithms import ALGORITHMS
from fedspa.algorithms.algorithm import FED_SPA
from fedspa.flower.client_app import answer_round, app
from fedspa.flower.site import Site
from fedspa.flower.terms import Announcement, TermsError, from_record, to_record

FLOAT32_MAX = float(np.finfo(np.float32).max)
# Δ = −η·(sum + noise)/99 with noise 0.8: it is finite while the noisy sum is within ±0.385 of the noise.
OVERFLOWING = FLOAT32_MAX * 99 / (0.8 * 0.385)


def answer(site: Site, asked: Announcement, theta: torch.Tensor) -> bytes | str:
    """What the server sees of an attempt; whatever else comes out of the agent, it sees as `internal`."""
    try:
        return answer_round(site, asked, theta)
    except Refusal as refusal:
        return refusal.code
    except Exception:
        return "internal"


def over_the_wire(site: Site, asked: Announcement, theta: torch.Tensor) -> dict[str, Any]:
    """The same through the app that a SuperNode runs."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    content = {"theta": ArrayRecord({"theta": Array(theta.numpy())}), "terms": to_record(asked)}
    context = Context(run_id=1, node_id=7, node_config=dict(site.node), state=RecordDict(), run_config={})
    return dict(app(Message(RecordDict(content), 7, "train", ttl=60.0), context).content["update"])


def entries(site: Site) -> int:
    assert site.ledger is not None
    with Ledger.open(site.ledger, create=False) as ledger:
        return sum(ledger.spent("clinic").values())


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each time that an agent trains."""
    done: list[int] = []

    def counted(*arguments: Any) -> Any:
        done.append(1)
        return FED_SPA.respond(*arguments)

    monkeypatch.setitem(ALGORITHMS, "fedspa", replace(FED_SPA, respond=counted))
    return done


@pytest.mark.parametrize("coding", ["f32", "int"])
@pytest.mark.parametrize("local_lr", [OVERFLOWING, 1.0, 1e6], ids=["overflowing", "plain", "largest"])
@pytest.mark.parametrize("present", [False, True])
def test_an_entry_has_one_answer(tmp_path: Path, trainings: list[int], present: bool, local_lr: float, coding: str):
    site, theta = attacked_site.target(tmp_path, present), attacked_site.sure_of_the_others()
    asked = attacked_site.question(local_lr, coding=coding)
    seen = {answer(site, asked, theta) for _ in range(20)}
    # Other words about the same round: another θ, mask or rate is another question on the same entry.
    other = replace(asked, terms=replace(asked.terms, local_lr=local_lr / 2), mask_seed=bytes(range(16)))
    seen |= {answer(site, other, theta * 0.5), answer(site, asked, -theta)}
    assert (len(seen), len(trainings), entries(site)) == (1, 1, 1)
    # An overflow is no failure any more: such values saturate. Only a step that float32 does not have is one, for all.
    assert isinstance(seen.pop(), bytes) == ((local_lr, coding) != (OVERFLOWING, "int"))


def test_such_a_rate_is_refused_before_anything_is_paid(tmp_path: Path, trainings: list[int]):
    site, theta = attacked_site.target(tmp_path, True), attacked_site.sure_of_the_others()
    with pytest.raises(TermsError, match="local_lr"):
        from_record(to_record(attacked_site.question(OVERFLOWING)))
    for rate in (OVERFLOWING, 1.1e6, 1e300, float("inf"), float("nan")):
        assert over_the_wire(site, attacked_site.question(rate), theta) == {"refusal": "terms"}
    assert (len(trainings), entries(site)) == (0, 0)


def test_other_numbers_reach_no_overflow_either(tmp_path: Path, trainings: list[int]):
    """The largest rate with the largest clip and noise, of 2^31 − 1 coordinates: no update is refused for it later."""
    asked = attacked_site.question(1e6)
    plan = replace(asked.terms.plan, clip_value=1e10, noise_multiplier=1e6)
    wild = replace(asked, terms=replace(asked.terms, steps=plan))
    site = attacked_site.target(tmp_path, True)
    seen = Counter(over_the_wire(site, wild, attacked_site.sure_of_the_others()).popitem()[0] for _ in range(3))
    assert seen == {"payload": 3}
    assert len(trainings) == 1


def failing(*_: object) -> Any:
    raise FloatingPointError("the noisy sum is beyond what the server allows")


def test_a_failure_that_the_server_brings_about_is_one_answer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whichever way is left to break a training: it can be had once an entry, and is paid for."""
    site, theta, asked = attacked_site.target(tmp_path, True), torch.zeros(650), attacked_site.question(1.0)
    with monkeypatch.context() as patch:
        patch.setitem(ALGORITHMS, "fedspa", replace(FED_SPA, respond=failing))
        assert over_the_wire(site, asked, theta) == {"refusal": "spent"}
    assert [over_the_wire(site, asked, theta) for _ in range(5)] == [{"refusal": "spent"}] * 5
    assert entries(site) == 1


@pytest.mark.long
def test_what_many_attempts_tell_is_what_one_tells(tmp_path: Path):
    """60 sites with the record and 60 without, 40 attempts each: no answer changes once it was given."""
    theta, asked = attacked_site.sure_of_the_others(), attacked_site.question(OVERFLOWING)
    for number in range(120):
        site = attacked_site.target(tmp_path / str(number), bool(number % 2))
        assert len({answer(site, asked, theta) for _ in range(40)}) == 1
        assert entries(site) == 1
