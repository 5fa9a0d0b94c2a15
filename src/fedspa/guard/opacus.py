"""Opacus under the guard: an optimiser and its loader, as `PrivacyEngine.make_private` returns them.

Before a step's noise is added, the step is read off the optimiser as it is at that moment: how much noise it will add,
beside the bound that its gradients were clipped to. A step that the newest entry covers uses one of the steps that the
entry paid for; any other is paid for first, with a block of its own. So a scheduler that lowers the noise is seen, and
pays.

What is known to be sound is accepted, by the exact class: flat and per-layer clipping of per-sample gradients, on one
machine, on Poisson batches. Nothing of Opacus is imported here; its objects are known by where their classes come from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fedspa.errors import PrivacyError
from fedspa.guard import given
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.privacy.event import NoiseMode

if TYPE_CHECKING:
    from fedspa.guard.guard import Guard

_MARK = "_fedspa_guard"
# Opacus draws a record where a float32 of 24 random bits falls below the rate.
_DRAWS = 2**24
_REFUSED = {
    "AdaClipDPOptimizer": "its clip follows a count that is divided by the true size of the batch, which nothing hides",
    "DPOptimizerFastGradientClipping": "it takes gradients as they come, and cannot show that they were clipped",
}
_ONE_BATCH = (
    "gradients would be added to those of an earlier batch, and nothing shows that both are parts of one Poisson "
    "batch: a record in two batches counts twice; take a step and then zero_grad() for each whole batch, without "
    "BatchMemoryManager or signal_skip_step; where memory is short, use smaller batches and more noise; after a step "
    "that was skipped, make the optimiser anew"
)
_DISTRIBUTED = "each of its processes sees a part of the batch and one adds the noise, which this guard does not follow"


def watch(guard: Guard, optimizer: Any, data_loader: Any, *, epochs: int, block: int | None) -> Any:
    """`optimizer`, which from now on pays before it steps. Raises where no sound event can be read off the two, or
    where the budget has no room for `epochs` blocks."""
    bound = _bounds(optimizer)
    sampler = _sampler(data_loader)
    if hasattr(optimizer, _MARK):
        raise PrivacyError("this optimiser is guarded already; wrap each optimiser once")
    given.count("epochs", epochs)
    if block is not None:
        given.count("block", block)
    _check_pair(guard, optimizer, sampler)
    watcher = _Watcher(guard, optimizer, sampler, bound, epochs, block or len(sampler))
    guard.require(watcher.block_event(), participations=epochs)
    optimizer.clip_and_accumulate, optimizer.add_noise = watcher.clip_and_accumulate, watcher.add_noise
    optimizer.signal_skip_step = watcher.signal_skip_step
    setattr(optimizer, _MARK, watcher)
    return optimizer


class _Watcher:
    """Stands before those methods of an optimiser that decide privacy."""

    def __init__(
        self, guard: Guard, optimizer: Any, sampler: Any, bound: Callable[[Any], float], epochs: int, block: int
    ) -> None:
        self._guard, self._optimizer, self._sampler, self._bound = guard, optimizer, sampler, bound
        self._epochs, self._block, self._rate = epochs, block, sampler.sample_rate
        self._clip_and_accumulate, self._add_noise = optimizer.clip_and_accumulate, optimizer.add_noise
        self._clipped_to = 0.0  # the bound of the newest batch, as it was when that was clipped
        self._paid: GaussianEvent | None = None
        self._left = 0
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        """A copy would use the steps that were paid for once more."""
        raise PrivacyError("a guarded optimiser cannot be copied or pickled; make another, and guard that")

    def block_event(self) -> GaussianEvent:
        """A block of steps with the optimiser as it is now."""
        return self._event(self._bound(self._optimizer))

    def signal_skip_step(self, do_skip: bool = True) -> NoReturn:
        """Opacus pairs signals with batches by their order alone: after an epoch that was broken off, or a batch that
        was left out, parts of two batches are one step."""
        raise PrivacyError(_ONE_BATCH)

    def clip_and_accumulate(self) -> None:
        if (batches := self._optimizer.accumulated_iterations) != 1:
            raise PrivacyError(
                f"the gradients of {batches} batches were added up for one step: a record in two of them counts twice, "
                "which nothing here prices; take a step for each batch"
            )
        if any(parameter.summed_grad is not None for parameter in self._optimizer.params):
            raise PrivacyError(_ONE_BATCH)
        self._clipped_to = self._bound(self._optimizer)
        self._clip_and_accumulate()

    def add_noise(self) -> None:
        event = self._event(self._clipped_to)
        if os.getpid() != self._process:  # what was paid for belongs to the process that forked
            self._process, self._left = os.getpid(), 0
        if self._left == 0 or self._paid is None or not _covers(self._paid, event):
            self._guard.pay(event, announced=self._epochs, tool="opacus")
            self._paid, self._left = event, self._block
        self._left -= 1
        self._add_noise()

    def _event(self, clipped_to: float) -> GaussianEvent:
        multiplier, norm = float(self._optimizer.noise_multiplier), float(self._optimizer.max_grad_norm)
        if not (math.isfinite(norm) and norm > 0 and math.isfinite(clipped_to) and clipped_to > 0):
            raise PrivacyError(
                f"gradients are clipped to {clipped_to:g} and noise scales with {norm:g}; both must be positive, finite"
            )
        if clipped_to != norm:  # noise scales with max_grad_norm as it is now
            multiplier = multiplier * norm / clipped_to
        if self._sampler.sample_rate != self._rate:  # batches that were drawn ahead may be of either rate
            raise PrivacyError(
                f"the loader's sample rate is {self._sampler.sample_rate}, and it was {self._rate} when the optimiser "
                "was wrapped; make the loader anew"
            )
        rate = _chance(self._rate)
        mode = _noise_mode(self._optimizer, self._sampler)
        batch, records = rate.as_integer_ratio()
        return GaussianEvent("poisson", batch, records, self._block, multiplier, noise=mode)


def _covers(paid: GaussianEvent, now: GaussianEvent) -> bool:
    """Whether a step of `now` costs no more than one that was paid for."""
    return paid.noise == now.noise and paid.noise_multiplier <= now.noise_multiplier


def _flat(optimizer: Any) -> float:
    return float(optimizer.max_grad_norm)


def _per_layer(optimizer: Any) -> float:
    return math.sqrt(math.fsum(float(norm) ** 2 for norm in optimizer.max_grad_norms))


_SOUND: dict[str, Callable[[Any], float]] = {"DPOptimizer": _flat, "DPPerLayerOptimizer": _per_layer}


def _bounds(optimizer: Any) -> Callable[[Any], float]:
    """What gives the bound on a record's clipped gradient, for the optimisers whose bound holds."""
    name = type(optimizer).__name__
    if not _of_opacus(optimizer) or not hasattr(optimizer, "add_noise"):
        raise PrivacyError(
            f"a {name} is no optimiser of Opacus; give what make_private returns, or guard the training by "
            "guard.spend(event)"
        )
    if name not in _SOUND:
        why = _REFUSED.get(name, _DISTRIBUTED if "Distributed" in name or "FSDP" in name else "its clipping is unknown")
        raise PrivacyError(f"{name} is not accepted: {why}; accepted: {', '.join(_SOUND)}")
    return _SOUND[name]


def _sampler(data_loader: Any) -> Any:
    sampler = getattr(data_loader, "batch_sampler", None)
    if sampler is None:
        raise PrivacyError(
            f"a {type(data_loader).__name__} does not say how its batches are drawn; give the DataLoader that "
            "make_private returns, itself and not what it yields"
        )
    if not (_of_opacus(sampler) and type(sampler).__name__ == "UniformWithReplacementSampler"):
        raise PrivacyError(
            f"the loader draws its batches by {type(sampler).__name__}, which is no Poisson sampling: no ε that is "
            "computed for Poisson holds for shuffled batches; give the loader that make_private returns with "
            "poisson_sampling=True"
        )
    if getattr(data_loader.collate_fn, "rand_on_empty", False):
        raise PrivacyError(
            "the loader fills empty batches with a made-up record (rand_on_empty=True): one record more then changes a "
            "sum by twice the clip; leave rand_on_empty out"
        )
    return sampler


def _check_pair(guard: Guard, optimizer: Any, sampler: Any) -> None:
    if guard.unit != "record":
        raise PrivacyError(
            f"Opacus clips each example, which protects each record, and the guard's unit is the {guard.unit}; where "
            "each example is all that there is of one, spend the event yourself by guard.spend"
        )
    records = int(sampler.num_samples)
    if guard.cap.delta * records >= 1:
        raise PrivacyError(
            f"the guard's δ = {guard.cap.delta:g} promises nothing to {records} records; set it below 1/{records}"
        )
    expected = int(records * (1 / len(sampler)))  # as make_private has it
    if optimizer.expected_batch_size is not None and optimizer.expected_batch_size != expected:
        raise PrivacyError(
            f"the optimiser expects batches of {optimizer.expected_batch_size}, the loader draws {expected} on "
            "average: give the loader that make_private returned with this optimiser"
        )


def _chance(rate: float) -> Fraction:
    """The chance that a record is drawn: a little above the rate that was asked for, since draws have 24 bits."""
    rate = max(float(rate), float(np.float32(rate)))
    if not 0 < rate <= 1:
        raise PrivacyError(f"the loader's sample rate is {rate}; it must be above 0 and at most 1")
    return Fraction(min(math.ceil(Fraction(rate) * _DRAWS), _DRAWS), _DRAWS)


def _noise_mode(optimizer: Any, sampler: Any) -> NoiseMode:
    """`secure` where noise and samples come from the operating system, as under Opacus's secure_mode; else whoever
    learns the state of torch's generator can subtract the noise."""
    drawn = (optimizer.generator, sampler.generator)
    return "secure" if optimizer.secure_mode and all(map(_has_no_seed, drawn)) else "seeded"


def _has_no_seed(generator: Any) -> bool:
    if generator is None:  # torch's own
        return False
    try:
        generator.initial_seed()
    except Exception:  # a generator without a state of its own has none to tell
        return True
    return False


def _of_opacus(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] == "opacus"
