"""What a module has and does not learn, in five numbers, by which two ends can tell whether they have the same.

θ travels; frozen parameters and buffers do not. Sites that train beside another frozen body than the server's would
learn something that fits no model, and nothing else would show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

_SUMS = 4
NUMBERS = 1 + _SUMS
_CHUNK = 2**18
# Far below what another body differs by, far above what rounding on another processor does.
_TOLERANCE = 1e-3


def sketch(module: nn.Module) -> tuple[float, ...]:
    """The norm of all that is constant, and its sums under four rows of public random signs; empty where nothing is.

    Values count by asinh(10⁴·v), so that no mask of −10³⁸ hides the weights beside it.
    """
    if not (constants := list(_constants(module))):
        return ()
    signs, squares, sums = np.random.PCG64(0), 0.0, torch.zeros(_SUMS, dtype=torch.float64)
    for values in constants:
        for chunk in torch.split(values.detach().reshape(-1), _CHUNK):
            shown = chunk.to("cpu", torch.float64).nan_to_num().clamp(-1e30, 1e30).mul(1e4).asinh()
            words = signs.random_raw(_SUMS * -(-len(shown) // 64))
            bits = np.unpackbits(words.view(np.uint8)).reshape(_SUMS, -1)[:, : len(shown)]
            sums += (2.0 * torch.from_numpy(bits).double() - 1.0) @ shown
            squares += float(shown @ shown)
    return (math.sqrt(squares), *sums.tolist())


def alike(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether two sketches can be of the same values."""
    if len(ours) != len(theirs):
        return False
    return all(abs(a - b) <= _TOLERANCE * ours[0] for a, b in zip(ours, theirs))


def _constants(module: nn.Module) -> Iterator[Tensor]:
    for values in (*(p for p in module.parameters() if not p.requires_grad), *module.buffers()):
        yield torch.view_as_real(values) if values.is_complex() else values
