"""Agents of the native engine: threads and memory that they share, records that are not finite, Ctrl-C."""

from __future__ import annotations

import gc
import math
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from ctypes import c_int32
from dataclasses import replace

import pytest
import torch
from native_nets import KEY, same, small_net, small_task
from plain import plain, unprotected
from torch import nn

from fedspa.engine.local import LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.native import engine as native_engine
from fedspa.engine.per_example import float64_reference
from fedspa.errors import DataError
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.clipping import clip_rows

pytestmark = pytest.mark.skipif(library.library() is None, reason="the native engine was not built")


@pytest.mark.parametrize("level", library.LEVELS)
def test_the_thread_count_changes_no_bit(level: library.Level) -> None:
    theta = FlatModel(small_net()).flatten()
    base = small_task()
    tasks = [
        LocalTask(base.x[i:], base.y[i:], None, 1.0, 0.05, plain("fixed", 6, 5), bytes([i]) * 32) for i in range(7)
    ]
    alone = [NativeEngine(small_net(), 1, level).train(theta, [task])[0] for task in tasks]
    for threads in (1, 2, 5):
        together = NativeEngine(small_net(), threads, level).train(theta, tasks)
        assert all(same(a, b) for a, b in zip(alone, together))


@pytest.mark.parametrize("level", library.LEVELS)
def test_memory_of_earlier_agents_changes_no_bit(level: library.Level) -> None:
    """An engine's agents work in the same memory one after the other, whatever the one before left there."""
    theta = FlatModel(small_net()).flatten()
    mask, half = torch.arange(1, len(theta), 9), torch.arange(0, len(theta), 2)
    one = small_task(clip="l2", mask=mask, steps=2)
    tasks = [
        *(small_task(steps=3), one, unprotected(one), small_task(clip="l2"), small_task(steps=3)),
        *(replace(one, x=one.x * math.nan), one, unprotected(replace(one, coordinates=None)), small_task(mask=mask)),
        *(small_task(), small_task(mask=half, clip="l2"), small_task(mask=half[1:] - 1), small_task(mask=half)),
    ]
    alone = [NativeEngine(small_net(), 1, level).train(theta, [task])[0] for task in tasks]
    assert all(same(a, b) for a, b in zip(alone, NativeEngine(small_net(), 1, level).train(theta, tasks)))


@pytest.mark.parametrize("channels", [9, 10])
def test_picks_of_earlier_chunks_change_no_bit(channels: int) -> None:
    """What an earlier chunk picked must not be in the words of picks of a later one."""
    module = nn.Sequential(
        *(nn.Conv2d(1, channels, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()), nn.Linear(16 * channels, 5)
    )
    theta = FlatModel(module).flatten()
    x, y = torch.randn(30, 1, 12, 12, generator=torch.Generator().manual_seed(2)), torch.arange(30) % 5
    engine = NativeEngine(module, 1)
    for i in range(len(y)):
        row = slice(i, i + 1)
        again = engine.clipped_sum(theta, x[row], y[row], "coordinate", 0.1)[0]
        alone = NativeEngine(module, 1).clipped_sum(theta, x[row], y[row], "coordinate", 0.1)[0]
        assert torch.equal(again, alone)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_records_among_those_of_others_are_the_same_records(sampling: str, kind: torch.dtype) -> None:
    """Other types than the library's are converted, those of others are never trained on."""
    theta = FlatModel(small_net()).flatten()
    base = small_task(sampling=sampling)
    rows = torch.randperm(100, generator=torch.Generator().manual_seed(1))[: len(base.y)]
    x = torch.full((100, 1, 12, 12), math.nan, dtype=kind)
    y = torch.full((100,), 99, dtype=torch.int64 if kind is torch.float32 else torch.int32)
    x[rows], y[rows] = base.x.to(kind), base.y.to(y.dtype)
    for task in (base, unprotected(base)):
        scattered = replace(task, x=x, y=y, rows=rows)
        assert scattered.records == len(base.y)
        for engine in (NativeEngine(small_net(), 2), float64_reference(small_net())):
            if engine.name == "native" or kind is torch.float32:
                assert same(engine.train(theta, [scattered])[0], engine.train(theta, [task])[0])


@pytest.mark.parametrize("clip", ["coordinate", "l2"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38])
def test_a_record_that_is_not_finite_counts_as_zero(clip: str, poison: float) -> None:
    theta = FlatModel(small_net()).flatten()
    base = small_task(clip=clip, sampling="fixed", steps=1)
    x = base.x[:6].clone()
    assert base.plan is not None
    plan = replace(base.plan, records=6)
    task = LocalTask(x, base.y[:6], None, 1.0, 1000.0, plan, KEY)
    whole = NativeEngine(small_net(), 1).train(theta, [task])[0].delta
    x[2, 0, 4, 4] = poison
    without = NativeEngine(small_net(), 1).train(theta, [task])[0].delta
    assert torch.isfinite(without).all()
    assert not torch.equal(whole, without)
    keep = torch.tensor([0, 1, 3, 4, 5])
    model = FlatModel(small_net())
    rows = model.per_example_gradients(theta, base.x[:6], base.y[:6])
    # What left the sum is the poisoned record's clipped gradient, and nothing else.
    gone = clip_rows(rows, plan.clip, plan.clip_value).sum(0) - clip_rows(rows[keep], plan.clip, plan.clip_value).sum(0)
    assert float(((without - whole) * 6 / 1000 - gone).abs().max()) < 1e-5 * plan.clip_value + 1e-6


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what it puts in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_agents_at_their_next_step() -> None:
    base = small_task()
    task = LocalTask(base.x, base.y, None, 1.0, 0.0, plain("poisson", 6, 10**9), KEY)  # days of work
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        NativeEngine(small_net(), 2).train(FlatModel(small_net()).flatten(), [task] * 3)
    assert time.monotonic() - start < 10


def test_ctrl_c_pressed_again_waits_for_the_agents_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    call: Future[None] = Future()
    stop, presses = c_int32(0), iter(range(3))

    def wait(calls: list[Future[None]]) -> None:
        if next(presses, None) is not None:
            raise KeyboardInterrupt
        assert stop.value == 1
        call.set_result(None)

    monkeypatch.setattr(native_engine, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        native_engine._await(call, stop)
    assert call.done()


def test_what_the_library_works_on_outlives_a_main_thread_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as the pool starts its thread, which the pool then does not know of and does not wait for."""
    engine, theta = NativeEngine(small_net(), 1), FlatModel(small_net()).flatten()
    task = replace(small_task(), x=small_task().x.double())  # converted: only the engine holds what the library reads
    engine.train(theta, [task])
    held: list[weakref.ref[torch.Tensor]] = []
    found: list[bool] = []
    left, prepare, start = threading.Event(), engine._prepare, threading.Thread.start

    def watched(task: LocalTask) -> object:
        made = prepare(task)
        held.extend(weakref.ref(tensor) for tensor in (made.delta, *made.kept) if tensor is not None)
        return made

    class Library:
        def fedspa_train(self, *_: object) -> None:
            left.wait(10)
            gc.collect()
            found.extend(reference() is not None for reference in held)

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_prepare", watched)
    monkeypatch.setattr(engine, "_library", Library())
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        engine.train(theta, [task])
    left.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert found == [True] * len(held)
    assert held


@pytest.mark.parametrize("wrong", [-1, 40])
def test_records_that_are_not_there_are_refused(wrong: int) -> None:
    task = replace(small_task(), rows=torch.tensor([0, wrong]))
    with pytest.raises(DataError, match="numbered beyond the 40"):
        NativeEngine(small_net(), 1).train(FlatModel(small_net()).flatten(), [task])


def test_fedavg_shows_a_broken_record() -> None:
    base = small_task()
    x = base.x.clone()
    x[:, 0, 4, 4] = math.nan
    task = LocalTask(x, base.y, None, 1.0, 0.1, plain("fixed", 6, 1), KEY)
    assert NativeEngine(small_net(), 1).train(FlatModel(small_net()).flatten(), [task])[0].delta.isnan().all()
