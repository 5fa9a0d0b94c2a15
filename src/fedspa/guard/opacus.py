"""Opacus under the guard: an optimiser and its loader, as `PrivacyEngine.make_private` returns them.

The ledger charges each step as one fresh Poisson batch. So the guard counts the batches that the loader hands out, and
each step must use exactly one of them, with one gradient for each record that was drawn.

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
import threading
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np

from fedspa.errors import PrivacyError
from fedspa.guard.guard import Guard, check_count
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.event import NoiseMode

_MARK = "_fedspa_guard"
# Opacus draws a record where a float32 of 24 random bits falls below the rate.
_DRAWS = 2**24
_NEVER = -60  # log2 of a probability
_REFUSED = {
    "AdaClipDPOptimizer": "its clip follows a count that is divided by the true size of the batch, which nothing hides",
    "DPOptimizerFastGradientClipping": "it takes gradients as they come, and cannot show that they were clipped",
}
_NO_BATCH = (
    "no batch was drawn from the guarded loader for this step: its batch was used for a step before, or comes from "
    "another loader, and either costs more than the fresh Poisson batch that the ledger charges; take exactly one step "
    "for each batch of the guarded loader"
)
_DISTRIBUTED = "each of its processes sees a part of the batch and one adds the noise, which this guard does not follow"


def watch(guard: Guard, optimizer: Any, data_loader: Any, *, epochs: int, block: int | None) -> Any:
    """`optimizer`, which from now on pays before it steps. Raises where no sound event can be read off the two, or
    where the budget does not cover `epochs` blocks."""
    bound = _bounds(optimizer)
    sampler = _sampler(data_loader)
    if hasattr(optimizer, _MARK):
        raise PrivacyError("this optimiser is guarded already; wrap each optimiser once")
    if hasattr(sampler, _MARK):
        raise PrivacyError(
            "this loader is guarded with another optimiser: both would release the same batches, and each would be "
            "charged as a fresh sample; train all parameters by one optimiser (with parameter groups), or give each "
            "optimiser a loader of its own by make_private"
        )
    check_count("epochs", epochs)
    if block is not None:
        check_count("block", block)
    _check_pair(guard, optimizer, sampler)
    watcher = _Watcher(guard, optimizer, sampler, bound, epochs, block or len(sampler))
    guard.require(watcher.block_event(), participations=epochs)
    watcher.draws.count(data_loader)
    optimizer.clip_and_accumulate, optimizer.add_noise = watcher.clip_and_accumulate, watcher.add_noise
    setattr(optimizer, _MARK, watcher)
    setattr(sampler, _MARK, watcher)
    return optimizer


class _Draws:
    """The sizes of the batches that the training loop was given and that no step has used yet.

    A batch counts when it is handed out. A loader with worker processes draws ahead, so the draws of a loader's
    iterator wait in its queue until then. Draws that others take from the sampler, such as BatchMemoryManager, count at
    once.
    """

    def __init__(self, sampler: Any) -> None:
        self.unused: deque[int] = deque()
        self.rate = sampler.sample_rate
        self._sampler = sampler
        self._drawn: set[int] = set()
        self._starting = threading.local()  # the queue of the iterator that this thread is making

    def count(self, data_loader: Any) -> None:
        """Count what the loader and its sampler hand out from now on."""
        batches_of, draws_of = type(data_loader).__iter__, type(self._sampler).__iter__

        def iterate_loader(loader: Any) -> Iterator[Any]:
            self._starting.queue = queue = deque[int]()
            try:
                batches = batches_of(loader)
            finally:
                self._starting.queue = None
            return self._hand_out(batches, queue)

        def iterate_sampler(sampler: Any) -> Iterator[list[int]]:
            queue = getattr(self._starting, "queue", None)
            return self._draw(draws_of(sampler), self.unused if queue is None else queue)

        _set_iter(data_loader, iterate_loader)
        _set_iter(self._sampler, iterate_sampler)

    def check_rate(self) -> None:
        """Raise where the sampler no longer draws at the rate that steps are charged at."""
        if self._sampler.sample_rate != self.rate:
            raise PrivacyError(
                f"the loader's sample rate is {self._sampler.sample_rate}, and it was {self.rate} when the optimiser "
                "was wrapped; make the loader anew"
            )

    def _check_fresh(self, drawn: list[int]) -> None:
        """Raise for a batch that was drawn before, unless it is so small or so likely that chance may repeat it."""
        kept, left = len(drawn), self._sampler.num_samples - len(drawn)
        if self.rate < 1 and kept * math.log2(self.rate) + left * math.log2(1 - self.rate) < _NEVER:
            if (name := hash(tuple(drawn))) in self._drawn:
                raise PrivacyError(
                    "the loader drew the same batch twice: its generator was set to the same seed again, and noise may "
                    "repeat with it; set the seed once, before training"
                )
            self._drawn.add(name)

    def _draw(self, draws: Iterator[list[int]], sizes: deque[int]) -> Iterator[list[int]]:
        for drawn in draws:
            self.check_rate()
            self._check_fresh(drawn)
            sizes.append(len(drawn))
            yield drawn

    def _hand_out(self, batches: Iterator[Any], queue: deque[int]) -> Iterator[Any]:
        for batch in batches:
            if not queue:  # an iterator with persistent workers starts over for the next one that is asked for
                raise PrivacyError("the guarded loader is iterated twice at once; finish one iterator before the next")
            self.unused.append(queue.popleft())
            yield batch


def _set_iter(iterable: Any, method: Callable[[Any], Iterator[Any]]) -> None:
    """Give one object an `__iter__` of its own. Python looks that method up in the class: it gets a class of its own,
    under the same name."""
    kind = type(iterable)
    iterable.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__iter__": method})


class _Watcher:
    """Stands before those methods of an optimiser that decide privacy."""

    def __init__(
        self, guard: Guard, optimizer: Any, sampler: Any, bound: Callable[[Any], float], epochs: int, block: int
    ) -> None:
        self.draws = _Draws(sampler)
        self._guard, self._optimizer, self._sampler, self._bound = guard, optimizer, sampler, bound
        self._epochs, self._block = epochs, block
        self._clip_and_accumulate, self._add_noise = optimizer.clip_and_accumulate, optimizer.add_noise
        self._examples = 0  # gradients of the current batch that were clipped and summed, in one part or several
        self._clipped_to = 0.0  # the largest bound that they were clipped to
        self._paid: GaussianEvent | None = None
        self._left = 0
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        """A copy would use the steps that were paid for once more."""
        raise PrivacyError("a guarded optimiser cannot be copied or pickled; make another, and guard that")

    def block_event(self) -> GaussianEvent:
        """A block of steps with the optimiser as it is now."""
        return self._event(self._bound(self._optimizer))

    def clip_and_accumulate(self) -> None:
        """Clip and add up a batch, or a part of one: each record of the draw once, and nothing else."""
        if (batches := self._optimizer.accumulated_iterations) != 1:
            raise PrivacyError(
                f"the gradients of {batches} batches were added up for one step: a record in two of them counts twice, "
                "which nothing here prices; take a step for each batch"
            )
        drawn = self._drawn()
        if self._examples == 0 and any(parameter.summed_grad is not None for parameter in self._optimizer.params):
            raise PrivacyError(
                "gradients would be added to those of an earlier batch: a record in both counts twice; take a step and "
                "then zero_grad() for each whole batch"
            )
        found = {len(parameter.grad_sample) for parameter in self._optimizer.params}
        examples = self._examples + max(found)
        if len(found) > 1 or examples > drawn:
            raise PrivacyError(_wrong_number(" or ".join(map(str, sorted(found))), drawn))
        bound = self._bound(self._optimizer)
        self._clip_and_accumulate()
        self._clipped_to = bound if self._examples == 0 else max(self._clipped_to, bound)
        self._examples = examples

    def add_noise(self) -> None:
        """Pay for the step where no entry covers it, then add its noise."""
        drawn = self._drawn()
        if self._examples != drawn:
            raise PrivacyError(_wrong_number(str(self._examples), drawn))
        event = self._event(self._clipped_to)
        if self._left == 0 or self._paid is None or not _covers(self._paid, event):
            self._guard.pay(event, announced=self._epochs, tool="opacus")
            self._paid, self._left = event, self._block
        self._left -= 1
        self.draws.unused.clear()
        self._examples = 0
        self._add_noise()

    def _drawn(self) -> int:
        """Return the size of the one batch that this step may use."""
        if os.getpid() != self._process:  # its copy of the batch, and of torch's generator, is the parent's too
            raise PrivacyError(
                "this optimiser was guarded in another process, which may release the same batch; make and guard the "
                "optimiser in the process that trains"
            )
        if not self.draws.unused:
            raise PrivacyError(_NO_BATCH)
        if (batches := len(self.draws.unused)) > 1:
            raise PrivacyError(
                f"{batches} batches were drawn from the guarded loader for one step, and nothing shows which of them "
                "the step uses; take exactly one step for each batch, empty ones too; stop early after a step, as by "
                "itertools.islice(loader, n); load ahead by num_workers, and with BatchMemoryManager not at all; to "
                "train on, make the optimiser and the loader anew and guard those"
            )
        return self.draws.unused[0]

    def _event(self, clipped_to: float) -> GaussianEvent:
        multiplier, norm = float(self._optimizer.noise_multiplier), float(self._optimizer.max_grad_norm)
        if not (math.isfinite(norm) and norm > 0 and math.isfinite(clipped_to) and clipped_to > 0):
            raise PrivacyError(
                f"gradients are clipped to {clipped_to:g} and noise scales with {norm:g}; both must be positive, finite"
            )
        if clipped_to != norm:  # noise scales with max_grad_norm as it is now
            multiplier = multiplier * norm / clipped_to
        self.draws.check_rate()
        rate = _chance(self.draws.rate)
        mode = _noise_mode(self._optimizer, self._sampler)
        batch, records = rate.as_integer_ratio()
        return GaussianEvent("poisson", batch, records, self._block, multiplier, noise=mode)


def _wrong_number(found: str, drawn: int) -> str:
    return (
        f"the step has the gradients of {found} examples, and the loader drew {drawn} records: each record of the "
        "batch must have exactly one gradient; use the whole batch once, without dropping, splitting or repeating "
        "examples (BatchMemoryManager may split it)"
    )


def _covers(paid: GaussianEvent, now: GaussianEvent) -> bool:
    """Return whether a step of `now` costs no more than one that was paid for."""
    return paid.noise == now.noise and paid.noise_multiplier <= now.noise_multiplier


_SOUND: dict[str, Callable[[Any], float]] = {
    "DPOptimizer": lambda optimizer: float(optimizer.max_grad_norm),
    "DPPerLayerOptimizer": lambda optimizer: math.sqrt(
        math.fsum(float(norm) ** 2 for norm in optimizer.max_grad_norms)
    ),
}


def _bounds(optimizer: Any) -> Callable[[Any], float]:
    """Return what gives the bound on a record's clipped gradient, for the optimisers whose bound holds."""
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
            "the loader fills empty batches with a synthetic record (rand_on_empty=True): one record more then "
            "changes a sum by twice the clip; leave rand_on_empty out"
        )
    if not getattr(data_loader, "in_order", True):
        raise PrivacyError(
            "the loader hands out batches in another order than it draws them (in_order=False), so that a step cannot "
            "be held against its draw; leave in_order out"
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
    """`secure` where noise and samples come from the operating system, as under Opacus's secure_mode; else an
    adversary who learns the state of torch's generator can subtract the noise."""
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
