"""Algorithm 1 of the paper (Hu, Gong and Guo, IJCAI 2021), whole and in one place: each round, agent and step.

It is slow and obvious, one example at a time, and it is here to be read. No run calls it. A test holds the real path,
whose pieces `fedspa.py` lists, to what it says.

    T rounds · τ local steps · k of d coordinates are active, p = k/d · B records a batch in the mean · η_l, η_g rates

Where it departs from the print: each example's gradient is cut to the mask and clipped before anything is added up (the
paper assumes bounded gradients), batches are Poisson samples, and σ comes from the plan and so from a verified
accountant. What an agent uploads are k float32 values; the mask travels as its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fedspa.mechanisms.clipping import CLIP_MARGIN
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.mask import active_coordinates
from fedspa.randomness.streams import Stream, derive_key

Records = Sequence[tuple[Tensor, Tensor]]
# (θ, one example's x, its y) → the gradient of its loss, d values in float64.
Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]
# (round, agent) → bytes: the public seed of a mask, or the private key of everything that the agent draws.
Dealt = Callable[[int, int], bytes]


def fed_spa(
    theta: Tensor,
    agents: Sequence[Records],
    gradient: Gradient,
    cohorts: Iterable[Sequence[int]],
    plan: GaussianPlan,
    mask_seed: Dealt,
    key: Dealt,
    *,
    local_lr: float,
    server_lr: float,
    beta1: float,
    beta2: float,
    kappa: float,
) -> Iterator[Tensor]:
    """θ₁, θ₂, … from θ₀, by rounds of the given cohorts. `agents[i]` are agent i's examples, pairs of x and y."""
    u, v = torch.zeros_like(theta), torch.full_like(theta, kappa**2)
    for t, cohort in enumerate(cohorts):  # lines 1–3: W is chosen, and gets θ_t
        mean = torch.zeros(plan.dimension, dtype=torch.float64)
        for i in cohort:  # line 4
            mean += local_update(theta, agents[i], gradient, plan, mask_seed(t, i), key(t, i), local_lr) / len(cohort)
        mean = mean.to(theta)
        u = beta1 * u + (1 - beta1) * mean  # line 13
        v = beta2 * v + (1 - beta2) * u**2  # line 14
        theta = theta + server_lr * u / (v.sqrt() + kappa)  # line 15
        yield theta


def local_update(
    theta: Tensor,
    examples: Records,
    gradient: Gradient,
    plan: GaussianPlan,
    mask_seed: bytes,
    key: bytes,
    local_lr: float,
) -> Tensor:
    """One agent's Δ as the server reads it: k float32 values, and exactly 0 on the other coordinates (lines 5–11)."""
    sampling, noise = Stream(derive_key(key, "sampling")), Stream(derive_key(key, "noise"))
    omega = torch.from_numpy(active_coordinates(mask_seed, plan.dimension, plan.active))  # line 5
    p = plan.active / plan.dimension
    start = theta.to(torch.float64)
    local = start.clone()  # line 6
    for _ in range(plan.local_steps):  # line 7
        total = torch.zeros(plan.active, dtype=torch.float64)
        for (x, y), coin in zip(examples, sampling.uniform(len(examples))):  # line 8
            if coin < plan.rate:
                total += clipped(gradient(local, x, y)[omega], plan)
        b = plan.sigma * plan.batch * torch.from_numpy(noise.gaussian(plan.active))
        local[omega] -= local_lr / p * ((total + b) / plan.batch)  # line 9
    delta = torch.zeros(plan.dimension, dtype=torch.float64)
    delta[omega] = (local - start)[omega].to(torch.float32).to(torch.float64)  # line 11
    return delta


def clipped(g: Tensor, plan: GaussianPlan) -> Tensor:
    """One example's gradient on the active coordinates, within the plan's bound; 0 where it is not finite."""
    if not torch.isfinite(g).all():
        return torch.zeros_like(g)
    bound = plan.clip_value * (1 - CLIP_MARGIN)  # a margin for rounding, below what is accounted
    if plan.clip == "coordinate":
        return g.clamp(-bound, bound)
    return g * (bound / max(float(torch.linalg.vector_norm(g)), bound))
