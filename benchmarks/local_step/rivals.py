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

from fedspa.examples import tensors
from local_step.cases import CLIP, LEARNING_RATE, NOISE, Case, clipping
from local_step.grouped import grouped_sgd, stacked
from local_step.mechanism import Mechanism, opacus_rows, trained
from local_step.ours import agent

Step = Callable[[], int]
Batch = Callable[[], tuple[Tensor, Tensor]]
AT_ONCE = ("ghost", "fast", "fastdp")  # they clip by the norm of all coordinates: no mask


def rival(name: str, case: Case, seed: int) -> Step:
    """One local step when called; returns the number of agent-steps (only grouped agents take several at once)."""
    module = case.row.build().to(case.device)
    task = agent(case, name, seed, sum(p.numel() for p in trained(module)))
    generator = torch.Generator(case.device).manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        index = torch.randint(0, case.records, (case.batch,), generator=generator, device=case.device)
        x, y = tensors(task.x, task.y)
        return x[index], y[index]

    if name == "sgd-grouped":
        layers = list(module.children())
        return grouped_sgd(layers, stacked(layers), batch, LEARNING_RATE)
    if name.startswith("sgd"):
        return plain_sgd(module, batch, channels_last=name == "sgd-channels-last")
    clip, mode = clipping(name), name.removesuffix("-l2").removeprefix("opacus-")
    mask = None if mode in AT_ONCE else task.coordinates
    mechanism = Mechanism(module, mask, clip, CLIP[clip], NOISE, LEARNING_RATE / case.batch, generator)
    if mode == "vmap":
        return vmap_step(module, batch, mechanism)
    if mode == "fastdp":
        return fastdp_step(module, batch, case)
    if mode in AT_ONCE:
        return ghost_step(module, batch, mechanism, ghost=mode == "ghost")
    return opacus_step(module, batch, mechanism, mode)


def plain_sgd(module: nn.Module, batch: Batch, channels_last: bool) -> Step:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module = module.to(memory_format=layout)  # type: ignore[call-overload]
    parameters: list[Tensor] = [*trained(module)]

    def step() -> int:
        x, y = batch()
        loss = functional.cross_entropy(module(x.to(memory_format=layout)), y)
        gradients = torch.autograd.grad(loss, parameters)  # 7 % faster than torch.optim.SGD on the MNIST CNN
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-LEARNING_RATE)
        return 1

    return step


def vmap_step(module: nn.Module, batch: Batch, mechanism: Mechanism) -> Step:
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(module, values, x[None]), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def step() -> int:
        rows = gradients(parameters, *batch())
        mechanism([rows[name] for name in parameters], list(parameters.values()))
        return 1

    return step


def opacus_step(module: nn.Module, batch: Batch, mechanism: Mechanism, mode: str) -> Step:
    rows, parameters = opacus_rows(module, mode), trained(module)

    def step() -> int:
        mechanism(rows(*batch()), parameters)
        return 1

    return step


def fastdp_step(module: nn.Module, batch: Batch, case: Case) -> Step:
    """Book-keeping in its hybrid form (Bu et al. 2023), with the library's own noise and torch's SGD. fastDP is no
    package on PyPI: its repository's folder on the path serves."""
    from fastDP import PrivacyEngine

    optimizer = torch.optim.SGD(trained(module), lr=LEARNING_RATE)
    engine = PrivacyEngine(
        module,
        batch_size=case.batch,
        sample_size=case.records,
        num_steps=1000,
        noise_multiplier=NOISE,
        max_grad_norm=CLIP["l2"],
        clipping_fn="Abadi",
        clipping_mode="MixOpt",
        clipping_style="all-layer",
        loss_reduction="mean",
    )
    engine.attach(optimizer)

    def step() -> int:
        x, y = batch()
        functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1

    return step


def ghost_step(module: nn.Module, batch: Batch, mechanism: Mechanism, ghost: bool) -> Step:
    """Opacus's ghost clipping: norms in a first backward pass, the scaled sum in a second; no per-example gradient.
    Without `ghost` its fast gradient clipping, which makes those of one layer at a time."""
    from opacus.grad_sample import wrap_model

    wrapped = wrap_model(
        module, grad_sample_mode="ghost", loss_reduction="sum", max_grad_norm=CLIP["l2"], use_ghost_clipping=ghost
    )
    parameters = trained(module)
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
