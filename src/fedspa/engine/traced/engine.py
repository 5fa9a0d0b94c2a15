"""The engine for any module that torch can trace. On a CPU agents run in threads of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedspa.engine import Unsupported
from fedspa.engine.local import Engine, LocalResult, LocalTask, local_steps, mask_outside, mask_unsorted
from fedspa.engine.traced.capture import Untraceable
from fedspa.engine.traced.program import DRAWN, Cuts, Program, take, trace, without_draws
from fedspa.errors import first_line
from fedspa.examples import Examples, Tree, count, in_order, leaves, taken
from fedspa.learning.agreement import Disagreement, Rows, require_agreement, synthetic_examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import Modes, in_float32, in_modes, modes, torch_threads
from fedspa.learning.tasks import PerPerson, Task
from fedspa.learning.tasks.base import require_seeds
from fedspa.mechanisms.clipping import GradientBlock

if TYPE_CHECKING:
    from fedspa.engine.traced.gpu_rounds import Rounds

# Bytes that a block of examples may take in one tensor, and as gradients that are cut.
BLOCK_BUDGET = 128 * 2**20
# Blocks come in multiples of this: torch prepares a convolution for each new size.
_STEP = 4


def trace_engine(
    module: nn.Module,
    like: Examples,
    task: Task | None,
    threads: int,
    device: torch.device | str = "cpu",
    *,
    tf32: bool = False,
) -> TracedEngine | Unsupported:
    """Return the engine for this model and examples of the layout of `like`, or why there is none."""
    try:
        return TracedEngine(module, like, task, threads=threads, device=device, tf32=tf32)
    except Untraceable as why:
        return Unsupported(f"torch cannot trace this model: {why}")
    except Exception as error:  # torch is asked for much here, of a module that may be anything
        return Unsupported(f"torch cannot trace this model ({type(error).__name__}: {first_line(error)})")


class TracedEngine(Engine):
    """Examples of a batch are computed together, each at its slot (`SlotAssignment`), in blocks whose sizes
    follow from the number of slots alone."""

    name = "traced"
    separates_records = True
    takes_slots = True

    def __init__(
        self,
        module: nn.Module,
        like: Examples,
        task: Task | None = None,
        *,
        threads: int = 1,
        device: torch.device | str = "cpu",
        tf32: bool = False,
    ) -> None:
        """Raises `Untraceable`. `tf32` lets a GPU's matrix units round the factors of products to 10 bits."""
        self._model, self._modes = FlatModel(module, task), modes(module)
        self._like, self._device = like, torch.device(device)
        self._threads = threads if self._device.type == "cpu" else 1
        self.tf32 = tf32 and self._device.type == "cuda"
        with repeatable(self._device, self.tf32):
            self._program = trace(self._model, self._modes, like, take)
        self._cuts = lru_cache(maxsize=threads + 1)(lambda mask: Cuts(self._program.layers, mask, self._device))
        self._rounds: Rounds | None = None
        self._lock = Lock()
        with torch_threads(1), repeatable(self._device, tf32=False):
            verify(self._model, self._modes, like, self._keeping_all)

    @property
    def draws(self) -> bool:
        return self._program.draws

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        start = theta.detach().to(self._device)
        stacked = [i for i, task in enumerate(tasks) if self._stacks(task)]
        others = [i for i in range(len(tasks)) if i not in stacked]
        results: dict[int, LocalResult] = {}
        with repeatable(self._device, self.tf32):
            if stacked:
                results.update(zip(stacked, self._in_stacks(start, [tasks[i] for i in stacked])))
            with torch_threads(1), ThreadPoolExecutor(self._threads) as pool:
                alone = pool.map(lambda i: local_steps(start, self._moved(tasks[i]), self), others)
                results.update(zip(others, alone))
        return [replace(results[i], delta=results[i].delta.to(theta)) for i in range(len(tasks))]

    def _stacks(self, task: LocalTask) -> bool:
        """Return whether agents step together: on a GPU, where their noise can be made there."""
        plain = task.optimizer.name == "sgd" and not task.exact and not self.draws
        return self._device.type == "cuda" and task.plan is not None and plain

    def _in_stacks(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        if self._rounds is None:
            from fedspa.engine.traced.gpu_rounds import Rounds  # Triton is there on a GPU only

            self._rounds = Rounds(self._trace_agents, self._like, self._model.dimension, self._device)
        return self._rounds.train(theta, [self._moved(task) for task in tasks])

    def _trace_agents(self, agents: int | None) -> Program:
        from fedspa.engine.traced.gpu_stack import keep

        return trace(self._model, self._modes, self._like, keep, agents, factors=True)

    def _moved(self, task: LocalTask) -> LocalTask:
        """Return the task with its mask on the engine's device, checked."""
        task.require_active(self._model.dimension)
        if task.coordinates is None:
            return task
        _require_mask(task.coordinates, self._model.dimension)
        if self._device.type == "cpu":
            return task
        return replace(task, coordinates=task.coordinates.to(self._device))

    def parts(
        self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None, present: Tensor | None
    ) -> Iterator[GradientBlock]:
        return self._parts(theta, *self._unseeded(x), y, coordinates, present)

    def _parts(
        self,
        theta: Tensor,
        x: Tree,
        generator: torch.Generator | None,
        y: Tree,
        coordinates: Tensor | None,
        present: Tensor | None = None,
    ) -> Iterator[GradientBlock]:
        cuts, parameters = self._cuts(coordinates), list(self._model.parts(theta).values())
        for index, there in self._blocks(count(y), cuts.width):
            if present is not None:
                there = there & present[index]
            block = [leaf for tree, like in zip((x, y), self._like) for leaf in self._block(tree, like, index)]
            with torch.no_grad(), torch_threads(1):
                made, readable = self._program.run(len(index), cuts, generator, *parameters, *block)
            yield GradientBlock(made, cuts.width, readable, None if there.all() else there)

    def _block(self, tree: Tree, like: Tree, index: Tensor) -> list[Tensor]:
        """Return those examples, in the order of the program's arguments. A person has all slots here, of which those
        that are added hold anything."""
        found = in_order(taken(tree, index), like)
        if not isinstance(self._model.task, PerPerson):
            return found
        return [_widened(leaf, wanted.shape[1:2]) for leaf, wanted in zip(found, leaves(like))]

    def _keeping_all(self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor) -> Tensor:
        return torch.cat([block.rows() for block in self._parts(theta, x, None, y, coordinates)])

    def mean(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        """By autograd, one caller at a time: they share the module. What it does may depend on the size of a batch, and
        then there is no graph for all; in a private step it never sees more than one example."""
        x, generator = self._unseeded(x)
        with self._lock, in_modes(self._modes), torch.random.fork_rng(devices=[], enabled=self.draws):
            if generator is not None:
                torch.default_generator.manual_seed(generator.initial_seed())
            return self._model.gradient(theta, x, y)

    def _unseeded(self, x: Tree) -> tuple[Tree, torch.Generator | None]:
        """What a forward pass draws is drawn place by place, from one seed: places are of no record's making."""
        require_seeds(self.draws, x)
        if not self.draws:
            return x, None
        assert isinstance(x, tuple)
        assert isinstance(x[1], Tensor)
        return x[0], torch.Generator(self._device).manual_seed(int(x[1][0]))

    def _blocks(self, examples: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Which examples to take together, and which of them are there for their own sake and not to fill up."""
        if not examples:
            return
        most = max(1, BLOCK_BUDGET // (4 * (self._program.largest + width)))
        size = -(-examples // -(-examples // most))
        size = size if size <= _STEP else -(-size // _STEP) * _STEP
        for start in range(0, examples, size):
            index = torch.arange(start, start + size, device=self._device)
            yield index.clamp(max=examples - 1), index < examples


def _widened(leaf: Tensor, slots: tuple[int, ...]) -> Tensor:
    """Return a leaf of persons with that many slots, if it has any."""
    if not slots or leaf.shape[1] == slots[0]:
        return leaf
    return leaf[:, torch.arange(slots[0], device=leaf.device).clamp(max=leaf.shape[1] - 1)]


def _require_mask(coordinates: Tensor, dimension: int) -> None:
    """A coordinate that came twice would be released twice, and clipped as one."""
    if not len(coordinates):
        return
    if int(coordinates.min()) < 0 or int(coordinates.max()) >= dimension:
        raise mask_outside(dimension)
    if bool((coordinates.diff() <= 0).any()):
        raise mask_unsorted()


# Other numbers of examples than those of the trace, below them and above.
_SIZES = 1, 7


def verify(model: FlatModel, modes: Modes, like: Examples, rows: Rows) -> None:
    """Raise `Untraceable` unless `rows`, under `_checked`, are the gradients of single examples."""
    examples = synthetic_examples(like, model.module, model.task)
    try:
        with in_modes(modes):
            require_agreement(model, examples, rows, sizes=_SIZES, mode=_checked)
    except Disagreement as error:
        raise Untraceable(
            f"its gradients of examples that are taken together are not those of single ones (parameters {error})"
        ) from error


@contextmanager
def _checked() -> Iterator[None]:
    """How a trace and its module are compared: draws keep everything, and numbers of a lower precision are computed in
    float32. Their rounding depends on the number of examples, and a wrong trace would look the same."""
    with in_float32(), _KeepAll():  # type: ignore[no-untyped-call]
        yield


class _KeepAll(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws are those of a program without a generator: Dropout keeps everything."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in DRAWN:
            return without_draws(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


@contextmanager
def repeatable(device: torch.device, tf32: bool) -> Iterator[None]:
    """Kernels that add in one order, and products of 10 or of 23 bits. On a CPU nothing has to be changed."""
    if device.type != "cuda":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        matmul.allow_tf32,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    matmul.allow_tf32 = tf32
    try:
        with cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]  # type: ignore[attr-defined]
        matmul.allow_tf32 = before[3]
