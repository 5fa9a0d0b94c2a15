"""Attack: a server finds a record by what its absence does to the others, at a site that takes records together.

What an engine that takes records together makes of one depends on its place, to the last bit, and a server's θ can be
pure rounding error (test_cancelling_theta.py): then that bit is all there is. So the places of the others must be
independent of whether a record is there. A site says for how many examples at most; each is dealt a place at
random, and a record that is missing leaves its place empty. Without that number a site that samples as Poisson takes no
such engine.

The law is about distributions. A coupling shows it: every way to deal the records of one file goes with one way to deal
those of its neighbour, equally likely, in which all others have the same places. Whole participations are compared
under it: the same bytes leave where the record is not sampled, and where it is they differ by no more than the bound.
"""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import attacked_site
import numpy as np
import torch
from numpy.typing import NDArray
from test_cancelling_theta import CLASSES, bits, case

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import Refusal
from fedspa.algorithms import ALGORITHMS, Agent, Terms
from fedspa.algorithms.cpsgd.plan import BinomialPlan
from fedspa.engine import local
from fedspa.engine.choose import Choice
from fedspa.engine.local import SlotAssignment
from fedspa.engine.per_example import PerExampleEngine
from fedspa.engine.traced import TracedEngine
from fedspa.errors import ConfigError, DataError
from fedspa.examples import blank
from fedspa.flower import trainer
from fedspa.flower.client_app import answer_round
from fedspa.flower.site import Site, read_site
from fedspa.flower.terms import Announcement
from fedspa.learning.tasks import Classification
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import Stream, agent_key, derive_key, draw_batch
from fedspa.runs.sections import Task

NET, THETA, X, _ = case("GroupNorm", 2)  # which no engine takes but those of any module
# Every record has a gradient, by whatever rounding this machine has: its label is the class with a bias far below.
THETA[-1], Y = -1e5, torch.full((len(X),), CLASSES - 1)
D, N, SLOTS, BATCH = len(THETA), 24, 40, 3
STEP = 2.0**24 * float(THETA.abs().max())  # so long that θ's rounding is nothing beside it
POISSON = GaussianPlan(D, D, "l2", 1.0, "poisson", BATCH, 20, 1, 1, 0.8, "add-remove", 1e-5)
FIXED = replace(POISSON, sampling="fixed", neighbours="replace-one")
CPSGD = BinomialPlan(D, 0.1, 4, 9000, "local", 4, BATCH, 20, 1, 1e-5)


def build(shape: object, classes: object) -> torch.nn.Module:
    """The model of the sites below. Its θ is the server's affair."""
    net = case("GroupNorm", 2)[0]
    for layer in net:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return net


def hospital(home: Path, x: Any, y: Any, **node: Any) -> Site:
    """A site whose policy has nothing against the questions below."""
    made = attacked_site.site(home, x, y, model=f"{__name__}:build", classes=CLASSES, **node)
    assert made.policy is not None
    limits: dict[str, Any] = {"min_noise_multiplier": 0.01, "clippings": ("l2", "coordinate"), "epsilon": 1e6}
    return replace(made, policy=replace(made.policy, **limits))


def asked(plan: Any, root: bytes = bytes(32), local_lr: float = STEP) -> Announcement:
    """The server's question, in a run of its own."""
    cpsgd = isinstance(plan, BinomialPlan)
    algorithm, mask, coding = ("cpsgd", "shared", "int") if cpsgd else ("fedspa", "per-agent", "f32")
    terms = Terms(0, mask, bytes(16) if cpsgd else None, 0.1 if cpsgd else local_lr, plan)  # type: ignore[arg-type]
    return Announcement(
        root[16:].hex(), 0, algorithm, "theirs", Task(), CLASSES, "", coding, bytes(16), "secure", terms  # type: ignore[arg-type]
    )  # fmt: skip


def under(site: Site, plan: Any) -> Site:
    assert site.policy is not None
    relation = "add-remove" if plan.sampling == "poisson" else "replace-one"
    return replace(site, policy=replace(site.policy, neighbours=relation))


def engine_of(site: Site, plan: Any, **changes: Any) -> Any:
    return site.trainer(replace(asked(plan), **changes), site.held(0)).engine


def test_without_room_poisson_batches_are_never_taken_together(tmp_path: Path) -> None:
    without, slotted = (hospital(tmp_path / str(more), X[:N], Y[:N], **more) for more in ({}, {"max_records": SLOTS}))
    for noise in ("secure", "exact"):
        alone = engine_of(without, POISSON, noise=noise)
        assert (alone.name, alone.takes_slots) == ("generic", False)
        # Neighbours have equally many records.
        assert engine_of(without, FIXED, noise=noise).takes_slots
        assert engine_of(slotted, POISSON, noise=noise).takes_slots
    choice = without.trainer(asked(POISSON), without.held(0)).training.choice
    assert "under Poisson sampling a site must then state the most that it will hold" in choice.why
    assert any("set max_records in the node-config" in hint for hint in choice.hints)


def test_no_engine_that_takes_records_together_can_be_forced_or_slip_in(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer._TRAINERS.clear()
    given = (f"{__name__}:build", blank(tuple(X.shape[1:])), Classification(CLASSES), None)
    with pytest.raises(ConfigError, match=r"'traced' is not possible here.*set max_records in the node-config"):
        trainer.trainer_for(*given, "traced", 1, False)
    made = TracedEngine(NET, blank(tuple(X.shape[1:])))
    slip = Choice("traced", "by mistake", {}, (), lambda: made)
    monkeypatch.setattr("fedspa.runs.setup.decide", lambda request: slip)
    with pytest.raises(ConfigError, match="'traced' does not keep records apart"):
        trainer.trainer_for(*given, "auto", 1, False)
    assert not trainer._TRAINERS


Dealt = Callable[[int, int, bytes], NDArray[np.int64]]


def removed(line: int) -> tuple[Any, Dealt]:
    """The lines of the neighbour's file, and how its records are dealt."""
    return np.delete(np.arange(N), line), lambda _, count, key: np.delete(DEAL(N, count, key), line)


def moved_to(line: int, other: int) -> tuple[Any, Dealt]:
    """A sorted file in which the record is another: the new one stands elsewhere, and lines between shift."""

    def deal(_: int, count: int, key: bytes) -> NDArray[np.int64]:
        given = DEAL(N, count, key)
        return np.insert(np.delete(given, line), other, given[line])

    return np.insert(np.delete(np.arange(N), line), other, N), deal


DEAL = local.assign_slots
NEIGHBOURS = {
    **{f"Poisson, without {line}": (POISSON, line, *removed(line)) for line in (0, 12, N - 1)},
    "fixed, the last becomes the first": (FIXED, N - 1, *moved_to(N - 1, 0)),
    "fixed, the first becomes the last": (FIXED, 0, *moved_to(0, N - 1)),
    "cpsgd, the first becomes the last": (CPSGD, 0, *moved_to(0, N - 1)),
}


def drawn(plan: Any, root: bytes, line: int) -> tuple[int | None, int]:
    """Where that record stands among those in the participation's batch, if it does, and how many they are."""
    key, count = agent_key(root, 0, 0), SLOTS if plan.sampling == "poisson" else N
    rate = plan.rate if plan.sampling == "poisson" else 0.0
    batch = draw_batch(plan.sampling, BATCH, rate, count, Stream(derive_key(key, "sampling")))
    dealt = DEAL(N, count, key)
    there = batch[np.isin(batch, dealt)].tolist()
    return there.index(dealt[line]) if dealt[line] in there else None, len(there)


def telling(plan: Any, line: int, *, sampled: bool) -> list[bytes]:
    """Roots of participations with that record or without. Where batches have any size, of sizes for which torch takes
    another path with one record fewer: were that the number which is computed, all bits would be others."""
    sizes = (BATCH,) if plan.sampling == "fixed" else (2, 4)
    roots = [number.to_bytes(32, "big") for number in range(1000)]
    found = [(root, *drawn(plan, root, line)) for root in roots]
    return [
        root for size in sizes for root in [r for r, at, n in found if (at is not None) == sampled and n == size][:3]
    ]


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_answer_alike_up_to_what_the_record_adds(tmp_path: Path, monkeypatch, name: str) -> None:
    plan, line, lines, deal = NEIGHBOURS[name]
    sites = (
        (under(hospital(tmp_path / "with", X[:N], Y[:N], max_records=SLOTS), plan), DEAL),
        (under(hospital(tmp_path / "without", X[lines], Y[lines], max_records=SLOTS), plan), deal),
    )
    parts, gradients = TracedEngine.parts, []

    def watched(*given: Any) -> Any:
        _, _, x, y, _, present = given
        if present is not None:  # an empty place holds nobody's record
            assert not x[~present].any()
            assert not y[~present].any()
        for block in parts(*given):
            gradients[-1].append(block.rows())
            yield block

    def answers(root: bytes) -> list[bytes]:
        """Of both, and what their records add in `gradients`."""
        gradients.clear()
        monkeypatch.setattr(Site, "private_root", lambda *_: root)
        found = []
        for site, dealing in sites:
            assert engine_of(site, plan).takes_slots
            monkeypatch.setattr(local, "assign_slots", dealing)
            gradients.append([])
            found.append(answer_round(site, asked(plan, root), THETA))
        return found

    monkeypatch.setattr(TracedEngine, "parts", watched)
    for root in telling(plan, line, sampled=False):
        one, other = answers(root)
        assert one == other
    sizes = []
    for root in telling(plan, line, sampled=True):
        one, other = answers(root)
        [mine], [theirs] = gradients
        at, _ = drawn(plan, root, line)
        others = [row for row in range(len(mine)) if row != at]
        assert torch.equal(bits(mine[others]), bits(theirs if plan is POISSON else theirs[others]))
        sizes.append(np.linalg.norm(decoded(asked(plan), one) - decoded(asked(plan), other)) * BATCH / STEP)
    assert len(sizes) >= 3
    if plan is not CPSGD:  # whose numbers are rounded at random
        assert 0 < max(sizes) <= plan.sensitivity * 1.001


def decoded(question: Announcement, answer: bytes) -> NDArray[np.float64]:
    update = ALGORITHMS[question.algorithm].decode(answer, question.terms, question.coding, bytes(16), ())
    return update.values.astype(np.float64)


@pytest.mark.parametrize("records", [3, 4])
def test_every_way_to_deal_the_records_is_equally_likely(records: int) -> None:
    """Also where no slot stays empty: else a record that leaves it would set the others free."""
    draws, found = 6000, Counter()
    for number in range(draws):
        dealt = SlotAssignment(records, 4, "poisson", number.to_bytes(32, "little"))
        where, there = dealt.records(np.arange(4))
        assert there is not None
        found[tuple(np.where(there, where, -1).tolist())] += 1
    ways = 24
    assert len(found) == ways
    chi2 = sum((times - draws / ways) ** 2 / (draws / ways) for times in found.values())
    assert chi2 < 55  # 23 degrees of freedom: passed once in 5,000 at random


def test_without_a_room_places_are_numbers() -> None:
    """So the simulator and a node that plays its agents draw what they always drew."""
    plain = SlotAssignment(5, None, "poisson", bytes(32))
    where, there = plain.records(np.arange(5))
    assert (plain.count, where.tolist(), there) == (5, [0, 1, 2, 3, 4], None)


WORDS: dict[str, dict[str, Any]] = {
    "Poisson": {},
    "fixed": {"plan": FIXED},
    "cpsgd": {"plan": CPSGD},
    "exact": {"noise": "exact"},
    "another model": {"model": "mlp"},
    "another rate": {"local_lr": 1e-3},
}


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("held", [N, N - 1])
def test_a_site_that_outgrew_its_room_says_so_whatever_is_asked(tmp_path: Path, words: str, held: int) -> None:
    """The server's words decide nothing of that refusal; within max_records there is none."""
    changes = dict(WORDS[words])
    plan, local_lr = changes.pop("plan", POISSON), changes.pop("local_lr", STEP)
    site = under(hospital(tmp_path, X[:held], Y[:held], max_records=N - 1), plan)
    question = replace(asked(plan, local_lr=local_lr), **changes)
    if held < N:
        assert answer_round(site, question, THETA)
        return
    with pytest.raises(Refusal, match=r"max_records is 23, and this site holds 24 records; raise max_records") as no:
        answer_round(site, question, THETA)
    assert no.value.code == "data"
    assert site.ledger is not None
    with Ledger.open(site.ledger, create=False) as ledger:
        assert not ledger.spent("clinic")


def test_room_counts_persons_where_they_are_the_examples(tmp_path: Path) -> None:
    hospital(tmp_path, X[:N], Y[:N])
    np.savez(tmp_path / "records.npz", x=X[:N], y=Y[:N], who=np.arange(N) // 2)
    node = hospital(tmp_path / "other", X[:N], Y[:N]).node
    node = {**node, "data": str(tmp_path / "records.npz"), "person": "who"}
    assert read_site({**node, "max_records": 12}, {}).held(0)
    with pytest.raises(DataError, match="max_records is 11, and this site holds 12 persons"):
        read_site({**node, "max_records": 11}, {}).held(0)


def test_an_engine_that_keeps_records_apart_by_itself_samples_them_all_the_same(tmp_path: Path) -> None:
    """With max_records it leaves out the empty places: batches have the size that they had."""
    site = hospital(tmp_path, X[:N], Y[:N], max_records=SLOTS)
    x, y = site.held(0).examples
    seen: list[int] = []

    class Watched(PerExampleEngine):
        def rows(self, theta: Any, x: Any, y: Any, coordinates: Any) -> Any:
            seen.append(len(y))
            return super().rows(theta, x, y, coordinates)

    member = Agent(0, x[:, :, :4, :4], y, bytes(16), bytes(32), max_records=site.slot_count("poisson", N))
    small = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, CLASSES))
    plan = replace(POISSON, local_steps=400, dimension=99, active=99)
    terms = Terms(0, "per-agent", None, 0.1, plan)
    list(ALGORITHMS["fedspa"].respond(torch.zeros(99), terms, [member], Watched(small)))
    assert abs(sum(seen) / 400 - plan.rate * N) < 0.5
    assert max(seen) <= N
