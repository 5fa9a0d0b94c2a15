"""A module as a function of one flat parameter vector θ ∈ ℝ^d.

The layout of θ is the module's `named_parameters()` in order; frozen parameters are constants and no part of θ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parameter import is_lazy

from fedspa.errors import ConfigError
from fedspa.learning.threads import one_example_a_time

# Layer → what to use instead. Batch statistics mix examples, so no example has a gradient of its own to clip; running
# statistics would carry un-noised data out of the agent.
_MIXING = (nn.modules.batchnorm._BatchNorm,)
_RANDOM = (nn.modules.dropout._DropoutNd,)


class FlatModel:
    """Forward pass, loss and parameter layout of a module, without state of its own."""

    def __init__(self, module: nn.Module) -> None:
        _refuse_unsound_layers(module)
        self.module = module
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ConfigError(
                "model.name: the model has no trainable parameters; federated training needs at least one"
            )
        self._alone = _EachAlone(module)
        self._names = list(trained)
        self._shapes = [p.shape for p in trained.values()]
        self._sizes = [p.numel() for p in trained.values()]

    @property
    def sizes(self) -> list[int]:
        """How many coordinates of θ each parameter tensor has, in θ's order."""
        return list(self._sizes)

    @property
    def dimension(self) -> int:
        """d."""
        return sum(self._sizes)

    def flatten(self) -> Tensor:
        """θ as the module holds it now (a copy, float32)."""
        trained = dict(self.module.named_parameters())
        return torch.cat([trained[name].detach().reshape(-1) for name in self._names]).to(torch.float32)

    def load(self, theta: Tensor) -> None:
        """Write θ back into the module."""
        with torch.no_grad():
            for name, value in self._split(theta).items():
                self.module.get_parameter(name).copy_(value)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        return cast(Tensor, functional_call(self.module, self._split(theta), (x,)))

    def mean_loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return _loss(self.logits(theta, x), y)

    def gradient(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Of the mean loss."""
        theta = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.mean_loss(theta, x, y), theta)
        return gradient

    def example_loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Loss of one example, without a batch dimension (what vmap maps over)."""
        return self.mean_loss(theta, x.unsqueeze(0), y.unsqueeze(0))

    def gradients_alone(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Gradients [b, d] of the examples, each taken by itself: of shapes, strides, memory alignment and threads that
        are always the same, so that a row is a function of its example and θ to the bit. In a batch it is not: torch
        chooses the order of a sum by the batch's size and an example's place in it, and where θ makes a sum cancel, its
        rounding is all that is left.

        Where the model raises for an example, that row is NaN: it counts as zero where it is clipped.
        """
        parts = {f"module.{name}": part.clone().requires_grad_() for name, part in self._split(theta.detach()).items()}
        rows = theta.new_empty(len(y), self.dimension)
        with one_example_a_time():
            functional_call(self._alone, parts, (list(parts.values()), x, y, rows))
        return rows

    def per_example_gradients(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """(θ, x[b], y[b]) → gradients [b, d]."""
        return cast(
            Callable[[Tensor, Tensor, Tensor], Tensor],
            torch.func.vmap(torch.func.grad(self.example_loss), in_dims=(None, 0, 0)),
        )

    def _split(self, theta: Tensor) -> dict[str, Tensor]:
        parts = torch.split(theta, self._sizes)
        return {name: part.view(shape) for name, part, shape in zip(self._names, parts, self._shapes)}


def _loss(logits: Tensor, y: Tensor) -> Tensor:
    # torch passes over one label, -100 by default: here each outside the classes is wrong, so that one is out of reach.
    return functional.cross_entropy(logits, y.clamp(min=-1), ignore_index=torch.iinfo(torch.int64).min)


class _EachAlone(nn.Module):
    """Example after example through the module; a module itself, so that θ is put in once for all of them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, parameters: list[Tensor], x: Tensor, y: Tensor, rows: Tensor) -> None:
        for row, one, label in zip(rows, torch.split(x, 1), torch.split(y, 1)):
            try:
                # Copies: a view lies where its neighbours left it room.
                loss = _loss(self.module(one.clone()), label.clone())
                parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
                torch.cat([part.reshape(-1) for part in parts], out=row)
            except MemoryError:
                raise
            except Exception:  # whatever a record makes the model raise must not be told by a refusal
                row.fill_(torch.nan)


def copied(module: nn.Module) -> nn.Module:
    """A deep copy. Tensors that a layer made of its parameters (torch.nn.utils.weight_norm) are copied as values:
    torch has no copy of a tensor with a history, and the layer makes them anew in each forward pass."""
    made = [v for layer in module.modules() for v in vars(layer).values() if isinstance(v, Tensor) and not v.is_leaf]
    return copy.deepcopy(module, {id(value): value.detach().clone() for value in made})


def _refuse_unsound_layers(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        where = f"model.name: layer '{name or '(root)'}' is a {kind}"
        if any(is_lazy(parameter) for parameter in layer.parameters(recurse=False)):
            raise ConfigError(f"{where} whose size is not known yet; pass a record through the model once, or give it")
        if isinstance(layer, _MIXING):
            raise ConfigError(f"{where}, which mixes the examples of a batch; use GroupNorm or LayerNorm instead")
        if isinstance(layer, _RANDOM):
            raise ConfigError(f"{where}, which draws its own randomness in training; leave it out")
        if next(layer.buffers(recurse=False), None) is not None and getattr(layer, "track_running_stats", False):
            raise ConfigError(f"{where} with running statistics of the data; set track_running_stats=False")
