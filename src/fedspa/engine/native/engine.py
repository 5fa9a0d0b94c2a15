"""The native engine: one call into the library a round.

It runs all local steps of all agents without Python. An agent's result depends on its own task only: the thread count
changes the time, never a bit of the result. The streams are those of `fedspa.randomness.streams`, word for word.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from ctypes import Array, c_int32, c_int64
from threading import Lock
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspa.engine import Unsupported, combine
from fedspa.engine.local import Engine, LocalResult, LocalTask, invalid_record_error, mask_outside, mask_unsorted
from fedspa.engine.native import library
from fedspa.engine.native.chain import describe
from fedspa.engine.native.library import Level
from fedspa.errors import ConfigError, DataError, PrivacyError
from fedspa.examples import Tree, tensors
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.clipping import CLIP_MARGIN
from fedspa.randomness.streams import derive_key


def supports(module: nn.Module, input_shape: tuple[int, ...]) -> Unsupported | None:
    """Return why the native engine cannot train this model on records of this shape, or None if it can."""
    missing = library.missing()
    faults = [] if missing is None else [missing]
    try:
        describe(module, input_shape)
    except Unsupported as why:
        faults.append(why)
    return combine(faults) if faults else None


class NativeEngine(Engine):
    """Trains agents natively. The first `train` fixes the records' shape."""

    name = "native"
    separates_records = True
    gives_rows = False
    predicts = True

    def __init__(self, module: nn.Module, threads: int, level: Level | None = None) -> None:
        """`level` caps the instruction set (tests); the CPU's best otherwise."""
        if threads < 1:
            raise ConfigError(f"run.threads is {threads}; it must be at least 1")
        loaded = library.library()
        if loaded is None:
            raise ConfigError(f"run.engine = 'native' is not possible here: {library.missing()}")
        self._library = loaded
        self._module = module
        self.threads = threads
        self._level = library.number(level or library.best_level())
        self._dimension = sum(p.numel() for p in module.parameters())
        self._nets: dict[tuple[int, ...], int] = {}
        self._building = Lock()

    def clipped_sum(
        self,
        theta: Tensor,
        x: Tree,
        y: Tree,
        clip: Clipping,
        clip_value: float,
        coordinates: Tensor | None = None,
        rows: Tensor | None = None,
        present: NDArray[np.bool_] | None = None,
        *,
        one_by_one: bool = False,
    ) -> tuple[Tensor, int]:
        assert present is None  # slots are for engines that take examples together
        if one_by_one:
            raise ConfigError("run.engine = 'native' cannot draw noise 'exact'; use run.engine = 'generic'")
        start, held = self._start(theta), _held(x, y, rows)
        mask = None if coordinates is None else coordinates.to("cpu", torch.int64).contiguous()
        active = self._dimension if mask is None else len(mask)
        order = library.Task(
            **held.addresses(),
            batch=held.records,
            coordinates=None if mask is None else mask.data_ptr(),
            active=active,
            clip=library.CLIPPINGS[clip],
            clip_value=clip_value,
            clip_margin=CLIP_MARGIN,
        )
        total, zeroed = torch.empty(active, dtype=torch.int64), c_int64(0)
        net = self._net(held.shape)
        code = self._library.fedspa_sum(
            net, self._level, start.data_ptr(), order, total.data_ptr(), ctypes.byref(zeroed)
        )
        _check(code, len(held.y), self._dimension)
        return total, zeroed.value

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        start, x = self._start(theta), x.detach().to("cpu", torch.float32).contiguous()
        net = self._net(tuple(x.shape[1:]))
        found = torch.empty(len(x), self._library.fedspa_classes(net), dtype=torch.float32)
        where = (start.data_ptr(), x.data_ptr(), len(x), self.threads, found.data_ptr())
        _check(self._library.fedspa_logits(net, self._level, *where))
        return found

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        start, stop = self._start(theta), c_int32(0)
        prepared = [self._prepare(task) for task in tasks]
        agents = (library.Agent * len(tasks))(*(each.agent for each in prepared))
        with ThreadPoolExecutor(1) as beside:  # the main thread waits where Ctrl-C finds it
            try:
                _await(beside.submit(self._call, agents, start, stop, prepared), stop)
            except BaseException:  # also where Ctrl-C came as it was being started
                stop.value = 1
                raise
        # Where one fails, all are stopped: what it says comes first.
        for agent in sorted(agents, key=lambda agent: agent.code == library.STOPPED):
            _check(agent.code, agent.task.held, self._dimension)
        return [
            LocalResult(each.delta.to(theta.device, theta.dtype), agent.zeroed) for each, agent in zip(prepared, agents)
        ]

    def _call(self, agents: Array[library.Agent], start: Tensor, stop: c_int32, kept: Sequence[_Prepared]) -> None:
        """The round. Should Ctrl-C get the main thread out of `train` before its end, it is this frame that still holds
        the memory which the library reads and writes: the engine's nets, theta and `kept`."""
        where = (self._level, start.data_ptr(), self.threads, ctypes.byref(stop))
        self._library.fedspa_train(agents, len(agents), *where)

    def _start(self, theta: Tensor) -> Tensor:
        start = theta.detach().to("cpu", torch.float32).contiguous()
        if start.numel() != self._dimension:
            raise ConfigError(f"theta has {start.numel()} values; the model has {self._dimension} parameters")
        return start

    def _net(self, shape: tuple[int, ...]) -> int:
        """Return the library's net for records of this shape, built once, whichever thread asks first."""
        with self._building:
            if shape not in self._nets:
                self._nets[shape] = self._build(shape)
            return self._nets[shape]

    def _build(self, shape: tuple[int, ...]) -> int:
        try:
            layers = describe(self._module, shape)
        except Unsupported as why:
            raise ConfigError(f"run.engine = 'native' is not possible for this model: {why}") from why
        sides = shape if len(shape) == 3 else (math.prod(shape), 1, 1)
        net: int = self._library.fedspa_net_new(
            (library.Layer * len(layers))(*layers), len(layers), (c_int64 * 3)(*sides), self._dimension
        )
        if not net:
            raise ConfigError("run.engine = 'native' failed to build this model; use run.engine = 'generic'")
        weakref.finalize(self, self._library.fedspa_net_free, net).atexit = False  # a thread may still be at work then
        return net

    def _prepare(self, task: LocalTask) -> _Prepared:
        plan = task.plan
        if task.exact:
            raise ConfigError("run.engine = 'native' cannot draw noise 'exact'; use run.engine = 'generic'")
        if task.optimizer.name != "sgd":
            raise ConfigError("run.engine = 'native' takes plain gradient steps; use run.engine = 'generic'")
        if task.sampling == "fixed" and task.batch > task.records:
            raise PrivacyError(f"{task.batch} of {task.records} cannot be drawn without replacement; lower the batch")
        held = _held(task.x, task.y, task.rows)
        coordinates = None if task.coordinates is None else task.coordinates.to("cpu", torch.int64).contiguous()
        active = task.require_active(self._dimension)
        delta = torch.empty(active, dtype=torch.float32)
        agent = library.Agent(
            net=self._net(held.shape),
            task=library.Task(**held.addresses()),
            delta=delta.data_ptr(),
            code=library.STOPPED,  # until somebody has trained it
        )
        order = agent.task
        order.coordinates, order.active = None if coordinates is None else coordinates.data_ptr(), active
        order.steps, order.batch, order.rate = task.local_steps, task.batch, task.rate
        order.sampling = library.SAMPLINGS[task.sampling]
        order.clip = library.CLIPPINGS[None if plan is None else plan.clip]
        order.step_size = task.local_lr * task.scale
        order.sampling_key[:], order.noise_key[:] = (derive_key(task.key, label) for label in ("sampling", "noise"))
        if plan is not None:
            order.clip_value, order.clip_margin = plan.clip_value, CLIP_MARGIN
            order.noise_per_clip = plan.noise_multiplier * plan.clip_norm / plan.clip_value
        return _Prepared(agent, delta, (*held, coordinates))


def _await(call: Future[None], stop: c_int32) -> None:
    """Waits until nobody works on our memory any more. Ctrl-C lets agents stop at their next local step, and is passed
    on once they have; pressing it again changes nothing."""
    pressed: BaseException | None = None
    while not call.done():
        try:
            wait([call])
        except BaseException as error:
            stop.value, pressed = 1, error
    if pressed is not None:
        raise pressed
    call.result()


class _Prepared(NamedTuple):
    """An agent as the library takes it, and the tensors that its addresses lead into."""

    agent: library.Agent
    delta: Tensor
    kept: tuple[Tensor | None, ...]


class _Held(NamedTuple):
    """Examples as the library reads them: `numbers` are those of the agent's own among them, or None: all are. `counts`
    are given where an example is a person: how many of its slots in x and y hold a record."""

    x: Tensor
    y: Tensor
    numbers: Tensor | None
    counts: Tensor | None

    @property
    def records(self) -> int:
        """Return the number of the agent's examples."""
        return len(self.y) if self.numbers is None else len(self.numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a record."""
        return tuple(self.x.shape[1 if self.counts is None else 2 :])

    def addresses(self) -> dict[str, int | None]:
        """Return the task's fields for the addresses and the number of the examples."""
        where = {name: None if each is None else each.data_ptr() for name, each in zip(self._fields, self)}
        slots = 1 if self.counts is None else self.y.shape[1]
        return {**where, "records": self.records, "held": len(self.y), "slots": slots}


def _held(x: Tree, y: Tree, rows: Tensor | None) -> _Held:
    counts = cast(Tensor, x["count"]) if isinstance(x, dict) else None
    x, y = tensors(x["records"] if isinstance(x, dict) else x, y)
    if len(x) != len(y):
        raise DataError(f"{len(x)} records have {len(y)} labels; there must be one each")
    numbers = None
    if rows is not None:
        if rows.dtype != torch.int64 or rows.ndim != 1:
            raise DataError("an agent's records are given by their numbers, as one line of int64")
        numbers = rows.to("cpu").contiguous()
        if not _readable(x, y):  # then only the agent's own are converted
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(y):
                raise _record_numbers_error(len(y))
            x, y, counts, numbers = x[numbers], y[numbers], None if counts is None else counts[numbers], None
    x, y = x.detach().to("cpu", torch.float32).contiguous(), y.to("cpu", torch.int64).contiguous()
    return _Held(x, y, numbers, None if counts is None else counts.to("cpu", torch.int64).contiguous())


def _readable(x: Tensor, y: Tensor) -> bool:
    """Return whether the library reads all records as they are."""
    return all(
        records.device.type == "cpu" and records.dtype == dtype and records.is_contiguous()
        for records, dtype in zip((x, y), (torch.float32, torch.int64))
    )


def _check(code: int, held: int = 0, dimension: int = 0) -> None:
    if code == library.STOPPED:
        raise KeyboardInterrupt("local training was stopped half-way: there is no update")
    if code == library.MEMORY:
        raise MemoryError("the native engine could not allocate its buffers")
    if code == library.LABEL:
        raise invalid_record_error()
    if code == library.MASK:
        raise mask_outside(dimension)
    if code == library.ORDER:
        raise mask_unsorted()
    if code == library.RECORD:
        raise _record_numbers_error(held)
    if code == library.COUNT:
        raise DataError("a person has no record, or more than there are slots for them")
    assert code == library.OK


def _record_numbers_error(held: int) -> DataError:
    return DataError(f"an agent's records are numbered beyond the {held} that there are")
