"""Attack: use a batch more than once, or several batches at once, and pay for fresh batches.

The guard charged each step as a fresh Poisson batch and never asked the loader what it had drawn. Four steps on each of
100 batches cost ε = 1.54 in the ledger and 5.01 in truth; two guarded optimisers on the same batches, and the sum of
two batches in one backward pass, were charged too little as well. Each attack here is refused, or charged at least what
it costs.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

import fedspa
from fedspa.errors import PrivacyError

sys.path.insert(0, str(Path(__file__).parents[1]))
from guard.loops import Loop, real, twin

RECORDS, RATE, NOISE, DELTA, DRAWS = 2000, 0.01, 1.0, 1e-4, 100


class Training:
    """A guarded loop that keeps account of what it released: for each release, the draws that it was made of."""

    def __init__(self, make: Callable[..., Loop], path: Path) -> None:
        self.loop, self.other = (make(records=RECORDS, noise=NOISE) for _ in range(2))
        torch.manual_seed(0)
        fedspa.guard.create(path)
        self.guard = fedspa.guard.open(path, agent="north", epsilon=1000.0, delta=DELTA)
        self.released: list[tuple[int, ...]] = []
        self._draws = 0

    def wrap(self, optimizer: Any) -> Any:
        return self.guard.optimizer(optimizer, self.loop.loader, epochs=1)

    def draw(self, loop: Loop | None = None) -> tuple[int, Any]:
        self._draws += 1
        return self._draws, (loop or self.loop).draw()

    def step(self, *draws: int, optimizer: Any = None, clear: bool = True) -> None:
        optimizer = optimizer or self.loop.optimizer
        optimizer.step()
        self.released.append(draws)
        if clear:
            optimizer.zero_grad()

    def train(self, *batches: tuple[int, Any]) -> None:
        self.loop.learn(*(batch for _, batch in batches))
        self.step(*(number for number, _ in batches))

    def true_epsilon(self) -> float:
        """Return ε of the releases. k releases of one draw are one with noise √k times smaller; a record is in each of
        m draws that are summed with probability q, and adds as much for each."""
        accountant = PLDAccountant()
        for (summed, times), count in Counter((len(d), k) for d, k in Counter(self.released).items()).items():
            noise = NOISE / math.sqrt(times)
            if summed == 1:
                event = dp_event.PoissonSampledDpEvent(RATE, dp_event.GaussianDpEvent(noise))
            else:
                times_drawn = range(summed + 1)
                chances = [math.comb(summed, i) * RATE**i * (1 - RATE) ** (summed - i) for i in times_drawn]
                event = dp_event.MixtureOfGaussiansDpEvent(noise, list(times_drawn), chances)
            accountant.compose(event, count)
        return float(accountant.get_epsilon(DELTA))


def several_steps_on_each_batch(training: Training) -> None:
    for _ in range(DRAWS):
        batch = training.draw()
        for _ in range(4):
            training.train(batch)


def two_optimisers_on_each_batch(training: Training) -> None:
    head = training.loop.split()
    training.wrap(head)
    for _ in range(DRAWS):
        number, batch = training.draw()
        training.loop.learn(batch)
        training.step(number)
        training.step(number, optimizer=head)


def two_batches_in_one_backward_pass(training: Training) -> None:
    for _ in range(DRAWS):
        training.train(training.draw(), training.draw())


def two_batches_with_zero_grad_between(training: Training) -> None:
    for _ in range(DRAWS):
        first = training.draw()
        training.loop.learn(first[1])
        training.loop.optimizer.zero_grad()
        training.train(first, training.draw())


def two_batches_in_two_backward_passes(training: Training) -> None:
    for _ in range(DRAWS):
        first, second = training.draw(), training.draw()
        training.loop.learn(first[1])
        training.train(second)
        training.released[-1] = (first[0], second[0])


def two_batches_by_a_skipped_step(training: Training) -> None:
    for _ in range(DRAWS):
        first, second = training.draw(), training.draw()
        training.loop.optimizer.signal_skip_step(True)
        training.loop.learn(first[1])
        training.loop.optimizer.step()
        training.loop.optimizer.zero_grad()
        training.train(second)
        training.released[-1] = (first[0], second[0])


def a_loader_iterated_twice_at_once(training: Training) -> None:
    pairs = zip(training.loop.loader, training.loop.loader, strict=False)
    for i, (first, second) in enumerate(islice(pairs, DRAWS)):
        training.train((2 * i, first), (2 * i + 1, second))


def batches_that_were_kept(training: Training) -> None:
    kept = [training.draw() for _ in range(DRAWS // 4)]
    for _ in range(4):
        for batch in kept:
            training.train(batch)


def batches_that_were_kept_and_fresh_draws(training: Training) -> None:
    kept = [training.draw()]
    training.train(kept[0])
    for _ in range(DRAWS):
        training.draw()
        training.train(kept[0])


def batches_of_another_loader(training: Training) -> None:
    for _ in range(DRAWS):
        batch = training.draw(training.other)
        for _ in range(4):
            training.train(batch)


def epochs_that_begin_with_the_same_seed(training: Training) -> None:
    for _ in range(4):
        torch.manual_seed(0)
        for number, batch in enumerate(islice(training.loop.loader, DRAWS // 4)):
            training.train((number, batch))


def noise_added_twice_to_one_sum(training: Training) -> None:
    for _ in range(DRAWS):
        number, batch = training.draw()
        training.loop.learn(batch)
        training.step(number, clear=False)
        for parameter in training.loop.optimizer.params:
            parameter.summed_grad = parameter.summed_grad.clone()  # Opacus marks tensors that it has used
        training.loop.optimizer.add_noise()
        training.released.append((number,))
        training.loop.optimizer.zero_grad()


def batches_that_are_left_out(training: Training) -> None:
    """Which ones may depend on the records."""
    for _ in range(DRAWS):
        training.draw()
        training.train(training.draw())


def examples_that_are_repeated(training: Training) -> None:
    for _ in range(DRAWS):
        number, batch = training.draw()
        repeated = batch + batch if isinstance(batch[0], int) else [torch.cat([part, part]) for part in batch]
        training.loop.learn(repeated)
        training.step(number, number)


TWO = "2 batches were drawn from the guarded loader for one step"
NONE = "no batch was drawn from the guarded loader for this step"
ATTACKS = {
    several_steps_on_each_batch: NONE,
    two_optimisers_on_each_batch: "this loader is guarded with another optimiser",
    two_batches_in_one_backward_pass: TWO,
    two_batches_with_zero_grad_between: TWO,
    two_batches_in_two_backward_passes: "gradients of 2 batches were added up|not compatible with grad accumulation",
    two_batches_by_a_skipped_step: TWO,
    a_loader_iterated_twice_at_once: TWO,
    batches_that_were_kept: "25 batches were drawn",
    batches_that_were_kept_and_fresh_draws: "and the loader drew",
    batches_of_another_loader: NONE,
    epochs_that_begin_with_the_same_seed: "the loader drew the same batch twice",
    noise_added_twice_to_one_sum: NONE,
    batches_that_are_left_out: TWO,
    examples_that_are_repeated: "and the loader drew",
}


@pytest.fixture(params=["twin", "opacus"])
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Training:
    if request.param == "opacus":
        pytest.importorskip("opacus")
    return Training(twin if request.param == "twin" else real, tmp_path / "ledger.sqlite")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_no_release_is_charged_too_little(attack: Callable[[Training], None], training: Training) -> None:
    training.wrap(training.loop.optimizer)
    refused = ""
    try:
        attack(training)
    except (PrivacyError, ValueError) as error:  # Opacus refuses some itself
        refused = str(error)
    charged = training.guard.total().epsilon
    assert not training.released or charged >= training.true_epsilon() * (1 - 2e-3)
    assert re.search(ATTACKS[attack], refused)


def one_step_for_each_batch(training: Training) -> None:
    for _ in range(DRAWS):
        training.train(training.draw())


def a_fresh_iterator_for_each_batch(training: Training) -> None:
    for number in range(DRAWS):
        training.train((number, next(iter(training.loop.loader))))


@pytest.mark.parametrize("honest", [one_step_for_each_batch, a_fresh_iterator_for_each_batch])
def test_fresh_batches_are_charged_as_such(honest: Callable[[Training], None], training: Training) -> None:
    training.wrap(training.loop.optimizer)
    honest(training)
    assert training.guard.total().epsilon == pytest.approx(training.true_epsilon(), rel=2e-3)
