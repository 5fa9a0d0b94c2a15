"""A record whose numbers are infinite or overflow is in no bit of its neighbours' gradients.

Some libraries take several groups of a convolution as one product with zeros between them, and zero times infinity is
NaN: one record would then cost others their gradients, which no clip bounds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedspa.engine.traced.capture import Untraceable
from fedspa.engine.traced.engine import TracedEngine, repeatable
from fedspa.examples import Examples

DEVICES = [
    torch.device("cpu"),
    pytest.param(torch.device("cuda"), marks=pytest.mark.gpu),
]
BATCH = 9
# Without a rule of their own on a GPU, where the library's groups would be products with zeros between them.
REFUSED_ON_A_GPU = ("Conv1d", "Conv3d", "ConvTranspose2d")

NETS: dict[str, tuple[tuple[int, ...], Callable[[], list[nn.Module]]]] = {
    "Conv1d": ((2, 16), lambda: [nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 4, 3)]),
    "Conv1d, wide": ((8, 16), lambda: [nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 16, 3)]),
    "Conv1d, by channel": ((4, 16), lambda: [nn.Conv1d(4, 4, 3, groups=4), nn.ReLU()]),
    "Conv2d": ((1, 9, 9), lambda: [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)]),
    "Conv2d, grouped": ((4, 9, 9), lambda: [nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)]),
    "Conv2d, strided": ((4, 9, 9), lambda: [nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 1)]),
    "Conv3d": ((2, 6, 6, 6), lambda: [nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Conv3d(4, 4, 2)]),
    "ConvTranspose2d": ((2, 5, 5), lambda: [nn.ConvTranspose2d(2, 4, 3, 2), nn.ReLU(), nn.ConvTranspose2d(4, 4, 3)]),
    "GroupNorm": ((2, 8, 8), lambda: [nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.AvgPool2d(2)]),
    "pools": ((2, 8, 8), lambda: [nn.Conv2d(2, 8, 3, padding=1), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)]),
    "LayerNorm": ((12,), lambda: [nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU()]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NETS)
def test_a_record_without_bounds_is_in_no_bit_of_the_others(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    shape, layers = NETS[name]
    module = nn.Sequential(*layers(), nn.Flatten(), nn.LazyLinear(3))
    module(torch.zeros(2, *shape))
    module.to(device)
    like = Examples(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64))
    if device.type == "cuda" and name.startswith(REFUSED_ON_A_GPU):
        with pytest.raises(Untraceable, match="Conv2d only"):
            TracedEngine(module, like, device=device)
        return
    engine = TracedEngine(module, like, device=device)
    theta = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    x = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1)).to(device)
    y = torch.zeros(BATCH, dtype=torch.int64, device=device)
    with repeatable(device, tf32=False):
        expected = torch.cat(list(engine.rows(theta, x, y, None)))
        assert expected.isfinite().all()
        for place in (0, 4, BATCH - 1):
            for value in (torch.inf, torch.nan, 3e38):
                spoiled = x.clone()
                spoiled[place] = value
                found = torch.cat(list(engine.rows(theta, spoiled, y, None)))
                others = torch.arange(BATCH, device=device) != place
                assert torch.equal(found[others], expected[others])
                assert not torch.equal(found[~others], expected[~others])
