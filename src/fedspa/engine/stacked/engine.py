"""The stacked engine: on a GPU all agents of a round step together; on a CPU one after the other, by the same rules.

On a CPU the loop is `local_steps`, and the noise is that of every other back end to the last bit. On a GPU the loop is
a graph of kernels (`rounds.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspa.engine import Unsupported
from fedspa.engine.local import local_steps, rows_at_once
from fedspa.engine.stacked import engine
from fedspa.engine.stacked.layers import describe
from fedspa.engine.stacked.layers.base import Layer
from fedspa.engine.task import LocalResult, LocalTask, mask_outside, mask_unsorted, strange_labels, strange_record
from fedspa.errors import ConfigError
from fedspa.examples import Tree, tensors
from fedspa.learning.flat import FlatModel
from fedspa.learning.threads import one_example_a_time

if TYPE_CHECKING:
    from fedspa.engine.stacked.rounds import Rounds

_FIRST_WITH_TF32 = (8, 0)


def supports(module: nn.Module, input_shape: tuple[int, ...]) -> Unsupported | None:
    """None if the stacked back end can train this model on records of this shape, else why not."""
    try:
        describe(module, input_shape)
    except Unsupported as why:
        return why
    return None


def device_obstacle(device: torch.device | str, exact: bool) -> Unsupported | None:
    """None if the stacked back end can run on this device, with noise `exact` or without, else why not."""
    kind = torch.device(device).type
    if kind == "cpu":
        return None
    if kind != "cuda":
        return Unsupported(f"it runs on CPUs and CUDA devices, and run.device is {kind!r}")
    if exact:
        return Unsupported("it cannot draw noise 'exact' on a GPU", "privacy.noise = 'secure', in floating point")
    if find_spec("triton") is None:
        return Unsupported("its kernels need Triton, which is not installed", "pip install triton")
    return None


def slows(device: torch.device | str, tf32: bool) -> Unsupported | None:
    """None if it runs as fast there as it can."""
    kind = torch.device(device)
    if tf32 or kind.type != "cuda" or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability(kind) < _FIRST_WITH_TF32:
        return None
    return Unsupported(
        "products are in full float32",
        "run.tf32 = true rounds their factors to 10 bits of mantissa; the guarantee stays as it is",
    )


class LayerGradients:
    """Per-example gradients by the rules of the layers (what `local_steps` asks a back end for)."""

    draws = False  # no layer that it has a rule for does

    def __init__(self, module: nn.Module) -> None:
        self._model = FlatModel(module)
        self._layers: dict[tuple[int, ...], list[Layer]] = {}

    @property
    def dimension(self) -> int:
        return self._model.dimension

    def layers(self, input_shape: tuple[int, ...]) -> list[Layer]:
        if input_shape not in self._layers:
            try:
                self._layers[input_shape] = describe(self._model.module, input_shape)
            except Unsupported as why:
                raise ConfigError(f"run.engine = 'stacked' is not possible for this model: {why}") from why
        return self._layers[input_shape]

    def rows(self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None) -> Iterator[Tensor]:
        x, y = tensors(x, y)
        layers = self.layers(tuple(x.shape[1:]))
        x, y = self.readable(x, y)
        microbatch = rows_at_once(theta)
        rule = _each_alone if theta.device.type == "cpu" else engine.example_gradients
        for x_part, y_part in zip(torch.split(x, microbatch), torch.split(y, microbatch)):
            gradients = rule(layers, theta, x_part, y_part.clamp(min=0))
            gradients.masked_fill_((y_part < 0).unsqueeze(1), torch.nan)
            yield gradients if coordinates is None else gradients[:, coordinates]

    def readable(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Labels and tokens index memory. A record with a label outside the classes or a token outside the Embedding
        has no gradient: its label is then -1, its tokens are words."""
        layers = self.layers(tuple(x.shape[1:]))
        strange = strange_labels(y, layers[-1].outputs)
        x, unreadable = layers[0].readable(x)
        return x, y.masked_fill(strange if unreadable is None else strange | unreadable, -1)

    def mean(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        x, y = tensors(x, y)
        theta = theta.detach().requires_grad_()
        x = self.layers(tuple(x.shape[1:]))[0].as_module_takes(x)
        (gradient,) = torch.autograd.grad(self._model.mean_loss(theta, x, y), theta)
        return gradient


def _each_alone(layers: Sequence[Layer], theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """As `FlatModel.gradients_alone`, by the rules."""
    gradients = theta.new_empty(len(y), len(theta))
    with one_example_a_time():
        for gradient, one, label in zip(gradients, torch.split(x, 1), torch.split(y, 1)):
            gradient.copy_(engine.example_gradients(layers, theta, one.clone(), label.clone())[0])
    return gradients


class StackedEngine:
    """Trains the agents of a round together.

    `tf32` lets a GPU's matrix units round the factors of the convolutions and of the products with a layer's weights to
    10 bits of mantissa: several times faster, gradients off by about 1e-3 of themselves. It is no part of the
    guarantee: clipping and noise come after. On a CPU it has no effect.
    """

    name = "stacked"
    draws = False

    @property
    def separates_records(self) -> bool:
        """On a GPU the kernels do, and what is done over for a number that is not finite does not."""
        return self._device.type == "cpu"

    def __init__(self, module: nn.Module, device: torch.device | str, *, tf32: bool) -> None:
        self._device = torch.device(device)
        obstacle = device_obstacle(self._device, exact=False)
        if obstacle is not None:
            raise ConfigError(f"run.engine = 'stacked' is not possible here: {obstacle}; use 'auto' or 'generic'")
        self._gradients = LayerGradients(module)
        self._rounds: Rounds | None = None
        self.tf32 = tf32 and self._device.type == "cuda"

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        start = theta.detach().to(self._device, torch.float32)
        if start.numel() != self._gradients.dimension:
            raise ConfigError(f"theta has {start.numel()} values; the model has {self._gradients.dimension} parameters")
        moved = [self._moved(task) for task in tasks]
        self._check_values(moved)
        if self._device.type == "cpu":
            results = [local_steps(start, task, self._gradients) for task in moved]
        else:
            if self._rounds is None:
                from fedspa.engine.stacked.rounds import Rounds  # Triton is there on a GPU only

                self._rounds = Rounds(self._gradients, self._device, self.tf32)
            results = self._rounds.train(start, moved)
        return [replace(result, delta=result.delta.to(theta.device, theta.dtype)) for result in results]

    def rows(self, theta: Tensor, x: Tree, y: Tree, coordinates: Tensor | None) -> Iterator[Tensor]:
        """Per-example gradients by the rules in torch, on any device: what algorithms clip and sum by themselves."""
        x, y = tensors(x, y)
        return self._gradients.rows(theta, _values(x, theta.device), y, coordinates)

    def mean(self, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        return self._gradients.mean(theta, x, y)

    def _moved(self, task: LocalTask) -> LocalTask:
        """The task with its tensors on the engine's device, checked for what kernels could not say."""
        device = self._device
        if task.rows is not None:
            x, y = task.tensors
            task = replace(task, x=x[task.rows], y=y[task.rows], rows=None)
        obstacle = device_obstacle(device, task.exact)
        if obstacle is not None:
            raise ConfigError(f"run.engine = 'stacked' is not possible here: {obstacle}; use 'auto' or 'generic'")
        task.require_active(self._gradients.dimension)
        coordinates = None if task.coordinates is None else task.coordinates.to(device, torch.int64)
        x, y = task.tensors
        x, y = self._gradients.readable(_values(x, device), y.to(device, torch.int64))
        return replace(task, x=x, y=y, coordinates=coordinates)

    def _check_values(self, tasks: Sequence[LocalTask]) -> None:
        """Masks index memory; and where nothing is private, a record that has no gradient is an error."""
        if not _all_below([task.tensors[1] for task in tasks if task.plan is None], 2**31):
            raise strange_record()
        d, masks = self._gradients.dimension, [task.coordinates for task in tasks if task.coordinates is not None]
        if not _all_below(masks, d):
            raise mask_outside(d)
        if masks and bool((torch.cat([mask.diff() for mask in masks]) <= 0).any()):
            raise mask_unsorted()


def _all_below(parts: Sequence[Tensor], limit: int) -> bool:
    """Whether all values are at least 0 and below `limit`. The CPU waits for a GPU's answer once, not for each part."""
    values = torch.cat([part.flatten() for part in parts]) if parts else torch.empty(0)
    if not values.numel():
        return True
    least, most = torch.stack(torch.aminmax(values)).tolist()
    return bool(0 <= least <= most < limit)  # NaN fails, too


def _values(x: Tensor, device: torch.device) -> Tensor:
    """Records as the rules and kernels take them; tokens too, which float32 holds exactly up to 2²⁴."""
    return x.detach().to(device, torch.float32)


def loss_gradient(logits: Tensor, y: Tensor) -> Tensor:
    """δ of the cross-entropy of each example by itself."""
    return logits.softmax(dim=1) - functional.one_hot(y, logits.shape[1])


def example_gradients(layers: Sequence[Layer], theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the examples, [b, d]."""
    x, tape = x.flatten(1), []
    for layer in layers:
        x, kept = layer.forward(theta, x)
        tape.append(kept)
    delta = loss_gradient(x, y)
    gradients = torch.empty(len(y), len(theta), dtype=theta.dtype, device=theta.device)
    lowest = next(i for i, layer in enumerate(layers) if layer.start is not None)
    for i in range(len(layers) - 1, lowest - 1, -1):
        layer = layers[i]
        if layer.start is not None:
            gradients[:, layer.start : layer.start + layer.size] = layer.gradients(tape[i], delta)
        if i > lowest:
            delta = layer.backward(theta, tape[i], delta)
    return gradients
