"""Private loops for tests: Opacus's own, and a twin of the part of it that the guard meets.

The twin's classes say that they are Opacus's, as the guard knows them by that. Whatever the tests ask of it, they ask
of Opacus itself too where that is installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

RECORDS, BATCH, NOISE = 200, 20, 2.0


@dataclass
class Loop:
    """An optimiser with its loader. `learn` computes the gradients of a batch, or of several by one backward pass;
    `split` takes the last parameter away from the optimiser and returns an optimiser of its own for it."""

    optimizer: Any
    loader: Any
    learn: Callable[..., None]
    split: Callable[[], Any]
    _batches: Iterator[Any] = field(default_factory=lambda: iter(()))

    def draw(self) -> Any:
        """Return the next batch; a new epoch begins where one ends."""
        while (batch := next(self._batches, None)) is None:
            self._batches = iter(self.loader)
        return batch

    def batch(self) -> None:
        """Draw a batch and have its gradients computed."""
        self.learn(self.draw())

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.batch()
            self.optimizer.step()
            self.optimizer.zero_grad()


def real(
    *,
    poisson: bool = True,
    clipping: str = "flat",
    mode: str = "hooks",
    records: int = RECORDS,
    noise: float = NOISE,
    loading: dict[str, Any] | None = None,
    **more: Any,
) -> Loop:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model: Any = nn.Linear(3, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(torch.randn(records, 3), torch.randint(2, (records,)))
    loader: Any = DataLoader(dataset, batch_size=BATCH, **(loading or {}))
    norm = [1.0, 1.0] if clipping == "per_layer" else 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, *_, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=norm,
            poisson_sampling=poisson,
            clipping=clipping,
            grad_sample_mode=mode,
            **more,
        )

    def learn(*batches: tuple[Tensor, Tensor]) -> None:
        torch.stack([nn.functional.cross_entropy(model(x), y) for x, y in batches]).sum().backward()

    def split() -> Any:
        plain = torch.optim.SGD([optimizer.param_groups[0]["params"].pop()], lr=0.1)
        return type(optimizer)(
            plain, noise_multiplier=noise, max_grad_norm=1.0, expected_batch_size=optimizer.expected_batch_size
        )

    return Loop(optimizer, loader, learn, split)


def twin(
    *,
    poisson: bool = True,
    clipping: str = "flat",
    mode: str = "hooks",
    records: int = RECORDS,
    noise: float = NOISE,
    **more: Any,
) -> Loop:
    steps = -(-records // BATCH)
    sampler = (
        UniformWithReplacementSampler(records, 1 / steps) if poisson else torch.utils.data.BatchSampler([], 1, False)
    )
    loader = DPDataLoader(sampler, **more)
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2))]
    norm: Any = [1.0, 1.0] if clipping == "per_layer" else 1.0
    kind = {"flat": DPOptimizer, "per_layer": DPPerLayerOptimizer, "adaptive": AdaClipDPOptimizer}[clipping]
    kind = DPOptimizerFastGradientClipping if mode == "ghost" else kind
    optimizer = kind(list(parameters), noise, norm, int(records * (1 / steps)))
    generator = torch.Generator().manual_seed(0)

    def learn(*batches: list[int]) -> None:
        """As Opacus's hooks do: several forward passes before a backward pass are added up by position."""
        for parameter in parameters:
            fresh = torch.randn(max(map(len, batches)), *parameter.shape, generator=generator)
            before = parameter.grad_sample
            parameter.grad_sample = fresh if before is None else [before, fresh]  # type: ignore[attr-defined]

    def split() -> Any:
        return kind([optimizer.params.pop()], noise, norm, optimizer.expected_batch_size)

    return Loop(optimizer, loader, learn, split)


class UniformWithReplacementSampler:
    __module__ = "opacus.utils.uniform_sampler"

    def __init__(self, num_samples: int, sample_rate: float) -> None:
        self.num_samples, self.sample_rate, self.generator = num_samples, sample_rate, None

    def __len__(self) -> int:
        return int(1 / self.sample_rate)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield (torch.rand(self.num_samples) < self.sample_rate).nonzero().reshape(-1).tolist()


class DPDataLoader:
    __module__ = "opacus.data_loader"

    def __init__(self, batch_sampler: Any, rand_on_empty: bool = False) -> None:
        self.batch_sampler = batch_sampler
        self.collate_fn: Any = lambda batch: batch
        self.collate_fn.rand_on_empty = rand_on_empty

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


class DPOptimizer:
    __module__ = "opacus.optimizers.optimizer"

    def __init__(self, parameters: list[Any], noise_multiplier: float, max_grad_norm: Any, expected: int) -> None:
        self.params, self.noise_multiplier, self.max_grad_norm = parameters, noise_multiplier, max_grad_norm
        self.expected_batch_size = expected
        self.generator, self.secure_mode = None, False
        self._skips: list[bool] = []
        self._skipped = False
        for parameter in parameters:
            parameter.summed_grad = parameter.grad_sample = None

    @property
    def accumulated_iterations(self) -> int:
        return len(self.params[0].grad_sample) if isinstance(self.params[0].grad_sample, list) else 1

    def signal_skip_step(self, do_skip: bool = True) -> None:
        self._skips.append(do_skip)

    def _samples(self, parameter: Any) -> Tensor:
        found = parameter.grad_sample
        return torch.cat(found) if isinstance(found, list) else found

    def _factors(self) -> list[Tensor]:
        norms = [self._samples(p).flatten(1).norm(dim=1) for p in self.params]
        factor = (self.max_grad_norm / (torch.stack(norms, 1).norm(dim=1) + 1e-6)).clamp(max=1)
        return [factor for _ in self.params]

    def clip_and_accumulate(self) -> None:
        for parameter, factor in zip(self.params, self._factors(), strict=True):
            total = torch.einsum("i,i...", factor, self._samples(parameter))
            parameter.summed_grad = total if parameter.summed_grad is None else parameter.summed_grad + total

    def add_noise(self) -> None:
        for parameter in self.params:
            noise = torch.normal(0, self.noise_multiplier * self.max_grad_norm, parameter.summed_grad.shape)
            parameter.grad = parameter.summed_grad + noise

    def step(self) -> None:
        self.clip_and_accumulate()
        self._skipped = bool(self._skips and self._skips.pop(0))
        if not self._skipped:
            self.add_noise()

    def zero_grad(self) -> None:
        for parameter in self.params:
            parameter.grad_sample = None
            if not self._skipped:
                parameter.summed_grad = None


class DPPerLayerOptimizer(DPOptimizer):
    __module__ = "opacus.optimizers.perlayeroptimizer"

    def __init__(self, parameters: list[Any], noise_multiplier: float, norms: list[float], expected: int) -> None:
        self.max_grad_norms = norms
        super().__init__(parameters, noise_multiplier, torch.tensor(norms).norm().item(), expected)

    def _factors(self) -> list[Tensor]:
        return [
            (norm / (self._samples(p).reshape(len(self._samples(p)), -1).norm(dim=1) + 1e-6)).clamp(max=1)
            for p, norm in zip(self.params, self.max_grad_norms, strict=True)
        ]


class AdaClipDPOptimizer(DPOptimizer):
    __module__ = "opacus.optimizers.adaclipoptimizer"


class DPOptimizerFastGradientClipping(DPOptimizer):
    __module__ = "opacus.optimizers.optimizer_fast_gradient_clipping"
