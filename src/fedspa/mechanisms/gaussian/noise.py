"""Gaussian noise on a sum of clipped gradients, for the noise modes `secure` and `seeded`.

The two differ by where the stream's key comes from (`streams.root_key`), not here. This noise is made on the CPU; a
GPU's own generator (Philox) is not cryptographic, so the stacked engine brings one of its own there. `exact` is the
mode that floating point cannot leak from, see `exact.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedspa.randomness.streams import Stream

if TYPE_CHECKING:
    from torch import Tensor


def add_noise(total: Tensor, sigma_sum: float, stream: Stream) -> Tensor:
    """`total` [k] plus N(0, sigma_sum²) in each coordinate: added in float64, returned in the dtype of `total`.

    `sigma_sum` is the noise on the *sum*, in gradient units: `plan.sigma * plan.batch`. Rounding to float32 comes after
    the noise and is post-processing.
    """
    import torch

    noise = torch.from_numpy(stream.gaussian(total.numel())).mul_(sigma_sum)
    return (total.to(torch.float64) + noise.to(total.device)).to(total.dtype)
