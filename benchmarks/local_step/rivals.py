"""The same step in plain PyTorch, in `torch.func` and in Opacus: one agent after another, as lean as we can write it.

Noise comes from torch's ordinary generator and batches are drawn with replacement: both are cheaper than what our
engines do, and neither is private.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspa.learning.models import build
from local_step.cases import CLIP, LEARNING_RATE, NOISE, Case, clipping
from local_step.grouped import grouped_sgd, stacked
from local_step.mechanism import Mechanism, opacus_rows
from local_step.ours import agent

Step = Callable[[], int]
Batch = Callable[[], tuple[Tensor, Tensor]]


def rival(name: str, case: Case, seed: int) -> Step:
    """One local step when called; returns the number of agent-steps (only grouped agents take several at once)."""
    task = agent(case, name, seed, 1)
    module = build(case.model, case.shape, 10, 0)
    generator = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        index = torch.randint(0, case.records, (case.batch,), generator=generator)
        x, y = task.tensors
        return x[index], y[index]

    if name == "sgd-grouped":
        layers = list(module.children())
        return grouped_sgd(layers, stacked(layers), batch, LEARNING_RATE)
    if name.startswith("sgd"):
        return plain_sgd(module, batch, channels_last=name == "sgd-channels-last")
    clip = clipping(name)
    mechanism = Mechanism(module, task.coordinates, clip, CLIP[clip], NOISE, LEARNING_RATE / case.batch, generator)
    mode = name.removesuffix("-l2").removeprefix("opacus-")
    if mode == "vmap":
        return vmap_step(module, batch, mechanism)
    return ghost_step(module, batch, mechanism) if mode == "ghost" else opacus_step(module, batch, mechanism, mode)


def plain_sgd(module: nn.Module, batch: Batch, channels_last: bool) -> Step:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module = module.to(memory_format=layout)  # type: ignore[call-overload]
    parameters: list[Tensor] = list(module.parameters())

    def step() -> int:
        x, y = batch()
        loss = functional.cross_entropy(module(x.to(memory_format=layout)), y)
        gradients = torch.autograd.grad(loss, parameters)  # 7 % faster than torch.optim.SGD on the MNIST CNN
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-LEARNING_RATE)
        return 1

    return step


def vmap_step(module: nn.Module, batch: Batch, mechanism: Mechanism) -> Step:
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(module, values, x[None]), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def step() -> int:
        rows = gradients(parameters, *batch())
        mechanism([rows[name] for name in parameters], list(parameters.values()))
        return 1

    return step


def opacus_step(module: nn.Module, batch: Batch, mechanism: Mechanism, mode: str) -> Step:
    rows, parameters = opacus_rows(module, mode), list(module.parameters())

    def step() -> int:
        mechanism(rows(*batch()), parameters)
        return 1

    return step


def ghost_step(module: nn.Module, batch: Batch, mechanism: Mechanism) -> Step:
    """Opacus's ghost clipping: norms in a first backward pass, the scaled sum in a second; no per-example gradient."""
    from opacus.grad_sample import wrap_model

    wrapped = wrap_model(module, grad_sample_mode="ghost", loss_reduction="sum", max_grad_norm=CLIP["l2"])
    parameters = list(module.parameters())
    warnings.filterwarnings("ignore", message="Full backward hook is firing")

    def step() -> int:
        x, y = batch()
        wrapped.zero_grad(set_to_none=True)
        losses = functional.cross_entropy(wrapped(x), y, reduction="none")
        losses.sum().backward(retain_graph=True)
        factors = wrapped.get_clipping_coef()
        wrapped.zero_grad(set_to_none=True)
        wrapped.disable_hooks()
        (factors * losses).sum().backward()
        wrapped.enable_hooks()
        mechanism.step([p.grad.view(-1) for p in parameters if p.grad is not None], parameters)
        return 1

    return step
