"""Opacus under the guard: each step is paid for as it is, whatever was changed since the optimiser was wrapped."""

from __future__ import annotations

import copy
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspa.agent.ledger.report import export
from fedspa.errors import BudgetError, PrivacyError
from fedspa.guard import Guard
from fedspa.guard.opacus import _chance

from .loops import BATCH, RECORDS, Loop, real

EPOCH = RECORDS // BATCH


def spent(path: Path) -> Counter[tuple[int, float]]:
    """How often so many steps were paid for at which noise."""
    events = [entry["event"] for entry in export(path)["entries"]]
    return Counter((event["steps"], event["noise_multiplier"]) for event in events)


def train(loop: Loop, batches: Iterable[Any]) -> None:
    for batch in batches:
        loop.learn(batch)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def test_an_epoch_is_paid_for_whole_before_its_first_step(
    path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    found = loop()
    guard = guarded(run="study")
    assert guard.optimizer(found.optimizer, found.loader, epochs=2) is found.optimizer
    assert spent(path) == {}
    found.step()
    assert spent(path) == {(EPOCH, 2.0): 1}
    found.step(EPOCH - 1)
    assert spent(path) == {(EPOCH, 2.0): 1}
    found.step()
    assert spent(path) == {(EPOCH, 2.0): 2}
    entry = export(path)["entries"][0]
    assert entry["run"] == "opacus:study"
    assert entry["event"]["noise"] == "seeded"
    assert "THE NOISE WAS SEEDED" in str(guard)


def test_the_price_is_that_of_the_plan_that_was_announced(
    guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    found, guard = loop(), guarded()
    guard.optimizer(found.optimizer, found.loader, epochs=3)
    found.step(3 * EPOCH)
    step = dp_accounting.PoissonSampledDpEvent(1 / EPOCH, dp_accounting.GaussianDpEvent(2.0))
    theirs = PLDAccountant().compose(step, 3 * EPOCH).get_epsilon(1e-3)
    assert guard.total().epsilon == pytest.approx(theirs, rel=2e-3)
    assert guard.total().by == "pld (one plan)"


def test_a_run_that_cannot_be_finished_is_refused_before_its_first_step(
    path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    found = loop()
    with pytest.raises(BudgetError, match="5 more participations"):
        guarded(0.6).optimizer(found.optimizer, found.loader, epochs=5)
    assert spent(path) == {}
    assert not hasattr(found.optimizer, "_fedspa_guard")


def test_a_step_beyond_the_budget_gets_no_noise_and_no_gradient(
    guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    found = loop()
    guarded(0.6).optimizer(found.optimizer, found.loader, epochs=1)
    found.step(EPOCH)
    before = [parameter.detach().clone() for parameter in found.optimizer.params]
    found.batch()
    with pytest.raises(BudgetError, match="ask for fewer or noisier"):
        found.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, found.optimizer.params, strict=True))


def test_noise_that_is_lowered_after_wrapping_is_paid_for(
    path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    found = loop()
    guarded().optimizer(found.optimizer, found.loader, epochs=1, block=2)
    found.step()
    found.optimizer.noise_multiplier = 1.0
    found.step()
    assert spent(path) == {(2, 2.0): 1, (2, 1.0): 1}
    found.optimizer.noise_multiplier = 0.1
    found.batch()
    with pytest.raises(BudgetError):
        found.optimizer.step()
    found.optimizer.noise_multiplier = 0.0
    with pytest.raises(PrivacyError, match=r"noise multiplier is 0\.0"):
        found.optimizer.add_noise()
    assert spent(path) == {(2, 2.0): 1, (2, 1.0): 1}


def test_a_clip_that_shrinks_between_clipping_and_noise_is_seen(
    path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    """The batch is clipped to 1, and then noise is scaled by ½."""
    found = loop()
    guarded(50.0).optimizer(found.optimizer, found.loader, epochs=1, block=1)
    found.batch()
    found.optimizer.clip_and_accumulate()
    found.optimizer.max_grad_norm = 0.5
    found.optimizer.add_noise()
    found.optimizer.zero_grad()
    assert spent(path) == {(1, 1.0): 1}
    found.step()  # clipped to ½ as well
    assert spent(path) == {(1, 1.0): 1, (1, 2.0): 1}


def test_a_loader_that_samples_at_another_rate_is_refused(
    path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    found = loop()
    guarded().optimizer(found.optimizer, found.loader, epochs=1)
    found.step()
    (entry,) = export(path)["entries"]
    assert entry["event"]["batch"] / entry["event"]["records"] == pytest.approx(0.1, rel=1e-5)
    found.batch()
    found.optimizer.clip_and_accumulate()
    for rate in (0.2, 0.05):
        found.loader.batch_sampler.sample_rate = rate
        with pytest.raises(PrivacyError, match=f"sample rate is {rate}, and it was 0.1 when"):
            found.optimizer.add_noise()
        with pytest.raises(PrivacyError, match=f"sample rate is {rate}, and it was 0.1 when"):
            next(iter(found.loader))  # nor is it enough to set the rate back before the step


def test_batches_that_are_added_up_are_refused(guarded: Callable[..., Guard], loop: Callable[..., Loop]) -> None:
    found = loop()
    guarded().optimizer(found.optimizer, found.loader, epochs=1)
    for parameter in found.optimizer.params:
        parameter.grad_sample = [torch.ones(2, *parameter.shape), torch.ones(2, *parameter.shape)]
    with pytest.raises(PrivacyError, match="gradients of 2 batches were added up"):
        found.optimizer.step()
    assert all(parameter.summed_grad is None for parameter in found.optimizer.params)  # nor kept for a later step


def test_a_batch_is_not_added_to_a_step_that_was_skipped(
    path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    """As after an epoch that was broken off: a record in both batches would count twice."""
    found = loop()
    found.optimizer.signal_skip_step(True)
    guarded().optimizer(found.optimizer, found.loader, epochs=1)
    found.step()  # skipped: it is clipped and kept
    before = [parameter.summed_grad.clone() for parameter in found.optimizer.params]
    found.batch()
    with pytest.raises(PrivacyError, match="2 batches were drawn from the guarded loader for one step"):
        found.optimizer.step()
    assert all(torch.equal(a, p.summed_grad) for a, p in zip(before, found.optimizer.params, strict=True))
    assert spent(path) == {}


def test_a_sum_is_cleared_before_the_next_batch(guarded: Callable[..., Guard], loop: Callable[..., Loop]) -> None:
    found = loop()
    guarded().optimizer(found.optimizer, found.loader, epochs=1)
    found.batch()
    found.optimizer.step()
    for parameter in found.optimizer.params:  # of zero_grad() the half
        parameter.grad_sample = None
    found.batch()
    with pytest.raises(PrivacyError, match=r"take a step and then zero_grad\(\) for each whole batch"):
        found.optimizer.step()


def test_the_parts_of_a_batch_are_one_step(path: Path, guarded: Callable[..., Guard]) -> None:
    """BatchMemoryManager's parts add up to the sum that the whole batch has."""
    pytest.importorskip("opacus")
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    found = real()
    guarded(50.0).optimizer(found.optimizer, found.loader, epochs=2, block=1)
    updates = parts = 0
    with BatchMemoryManager(data_loader=found.loader, max_physical_batch_size=7, optimizer=found.optimizer) as split:
        for _ in range(2):
            for batch in split:
                found.learn(batch)
                parts += 1
                updates += bool(found.optimizer.pre_step())
                found.optimizer.zero_grad()
    assert parts > 2 * EPOCH
    assert updates == 2 * EPOCH
    assert spent(path) == {(1, 2.0): 2 * EPOCH}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_parts_of_two_batches_are_not(workers: int, path: Path, guarded: Callable[..., Guard]) -> None:
    """An epoch is left in the middle of a batch. With workers the manager draws ahead, which nothing can be held to."""
    pytest.importorskip("opacus")
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    found = real(loading={"num_workers": workers})
    guarded(50.0).optimizer(found.optimizer, found.loader, epochs=2, block=1)
    with BatchMemoryManager(data_loader=found.loader, max_physical_batch_size=5, optimizer=found.optimizer) as split:
        if workers == 0:
            train(found, islice(split, 1))
        with pytest.raises(PrivacyError, match="2 batches were drawn from the guarded loader for one step"):
            train(found, split)
    assert spent(path) == {}


def test_a_part_of_a_batch_is_no_step(path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]) -> None:
    """The signals of skipped steps say when a batch is complete, and are not relied on."""
    found = loop()
    guarded().optimizer(found.optimizer, found.loader, epochs=1)
    batch = found.draw()
    found.learn(batch[:3] if isinstance(batch[0], int) else [part[:3] for part in batch])
    with pytest.raises(PrivacyError, match="has the gradients of 3 examples, and the loader drew"):
        found.optimizer.step()
    assert spent(path) == {}


@pytest.mark.parametrize("loading", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_batches_that_workers_load_ahead(loading: dict[str, Any], path: Path, guarded: Callable[..., Guard]) -> None:
    """A draw counts when its batch is handed out; those of an iterator that is left count for nothing."""
    pytest.importorskip("opacus")
    found = real(loading=loading)
    guarded(50.0).optimizer(found.optimizer, found.loader, epochs=3, block=1)
    for batches in (3, EPOCH, EPOCH):
        train(found, islice(found.loader, batches))
    assert spent(path) == {(1, 2.0): 3 + 2 * EPOCH}


def test_empty_batches_are_steps_too(path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]) -> None:
    found = loop()
    guarded(50.0).optimizer(found.optimizer, found.loader, epochs=1, block=1)
    found.step()
    found.loader.batch_sampler.num_samples = 0
    found.step(3)
    assert spent(path) == {(1, 2.0): 4}


def test_a_block_is_not_used_twice_by_a_copy_or_a_fork(
    path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    found = loop()
    watched = guarded().optimizer(found.optimizer, found.loader, epochs=2)
    found.step()
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivacyError, match="cannot be copied or pickled"):
            copy_of(watched._fedspa_guard)
    found.batch()
    found.optimizer.clip_and_accumulate()
    child = os.fork()
    if child == 0:  # the parent releases this batch
        refused = 1
        try:
            found.optimizer.add_noise()
        except PrivacyError:
            refused = 0
        finally:
            os._exit(refused)
    assert os.waitpid(child, 0)[1] == 0
    found.optimizer.add_noise()
    assert spent(path) == {(EPOCH, 2.0): 1}


def test_clipping_by_layer_has_the_norm_of_its_bounds(
    path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    found = loop(clipping="per_layer")
    guarded(5.0).optimizer(found.optimizer, found.loader, epochs=1)
    found.step()
    ((_, noise),) = spent(path)
    assert noise == pytest.approx(2.0, rel=1e-6)
    found.optimizer.max_grad_norm /= 2  # noise shrinks, the layers' clips stay
    found.step()
    assert min(noise for _, noise in spent(path)) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"poisson": False}, "no Poisson sampling"),
        ({"rand_on_empty": True}, "synthetic record"),
        ({"mode": "ghost"}, "DPOptimizerFastGradientClipping is not accepted: .* cannot show that they were clipped"),
    ],
)
def test_what_is_not_known_to_be_sound(
    given: dict[str, Any], match: str, guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    found = loop(**given)
    with pytest.raises(PrivacyError, match=match):
        guarded().optimizer(found.optimizer, found.loader, epochs=1)


def test_adaptive_clipping_and_several_machines_are_refused(guarded: Callable[..., Guard]) -> None:
    from .loops import DPOptimizer, twin

    class DistributedDPOptimizer(DPOptimizer):
        __module__ = "opacus.optimizers.ddpoptimizer"

    found = twin(clipping="adaptive")
    with pytest.raises(PrivacyError, match="AdaClipDPOptimizer is not accepted: its clip follows a count"):
        guarded().optimizer(found.optimizer, found.loader, epochs=1)
    with pytest.raises(PrivacyError, match="DistributedDPOptimizer is not accepted: each of its processes"):
        guarded().optimizer(DistributedDPOptimizer([], 1.0, 1.0, BATCH), found.loader, epochs=1)


def test_a_loader_of_another_optimiser_is_refused(guarded: Callable[..., Guard], loop: Callable[..., Loop]) -> None:
    with pytest.raises(PrivacyError, match="expects batches of 20, the loader draws 16 on average"):
        guarded().optimizer(loop().optimizer, loop(records=50).loader, epochs=1)


def test_noise_is_secure_where_no_generator_has_a_seed(
    path: Path, guarded: Callable[..., Guard], loop: Callable[..., Loop]
) -> None:
    class FromTheSystem:
        """As torchcsprng's: it has no seed to tell."""

        def initial_seed(self) -> int:
            raise RuntimeError("not implemented")

    def modes(generator: Any, drawn: Any) -> str:
        found = loop()
        found.optimizer.secure_mode, found.optimizer.generator = True, generator
        found.loader.batch_sampler.generator = drawn
        watched = guarded().optimizer(found.optimizer, found.loader, epochs=1)
        return str(watched._fedspa_guard.block_event().noise)

    assert modes(FromTheSystem(), FromTheSystem()) == "secure"
    assert modes(torch.Generator(), FromTheSystem()) == "seeded"
    assert modes(FromTheSystem(), None) == "seeded"


@pytest.mark.parametrize("rate", [1.0, 0.1, 1 / 3, 1 / 60, 1e-4, 1 / 49, 2**-24, 1e-9])
def test_a_record_is_drawn_no_oftener_than_was_paid_for(rate: float) -> None:
    """torch.rand gives multiples of 2⁻²⁴: all of those near the rate are compared as the sampler compares them."""
    paid = _chance(rate)
    numerator = int(paid * 2**24)
    near = torch.arange(max(0, numerator - 3), min(numerator + 3, 2**24), dtype=torch.float32) / 2**24
    drawn = max(0, numerator - 3) + int((near < rate).sum())
    assert drawn <= numerator
    assert float(paid) <= rate + 2**-23


def test_draws_of_torch_have_24_bits() -> None:
    drawn = torch.rand(4096) * 2**24
    assert torch.equal(drawn, drawn.round())


def test_what_is_not_of_opacus_is_refused(guarded: Callable[..., Guard], loop: Callable[..., Loop]) -> None:
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(PrivacyError, match="a SGD is no optimiser of Opacus; give what make_private returns"):
        guarded().optimizer(plain, loop().loader, epochs=1)


def test_another_unit_or_a_second_guard_is_refused(guarded: Callable[..., Guard], loop: Callable[..., Loop]) -> None:
    found = loop()
    with pytest.raises(PrivacyError, match=r"δ = 0.01 promises nothing to 200 records; set it below 1/200"):
        guarded(3.0, 0.01).optimizer(found.optimizer, found.loader, epochs=1)
    with pytest.raises(PrivacyError, match="protects each record, and the guard's unit is the person"):
        guarded(unit="person").optimizer(found.optimizer, found.loader, epochs=1)
    guarded().optimizer(found.optimizer, found.loader, epochs=1)
    with pytest.raises(PrivacyError, match="guarded already"):
        guarded().optimizer(found.optimizer, found.loader, epochs=1)
