"""Random nets and records for tests of the native engine.

Max-pooling and ReLU have kinks: where two pixels or a unit and 0 are closer than float32 can tell, float32 takes
another branch than float64 and the gradients differ for a good reason. Records that come that near a kink (MARGIN, in
float64) are left out before the comparison; they are rare, and a test says how rare.
"""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedspa.engine.local import LocalResult, LocalTask
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.gaussian.plan import GaussianPlan

MARGIN = 2e-5
KEY = bytes(range(32))


def margins(module: nn.Sequential, x: Tensor) -> Tensor:
    """For each record, how near (in float64) its forward pass comes to a kink."""
    nearest = torch.full((len(x),), math.inf, dtype=torch.float64)
    h = x.double()
    for layer in module:
        if isinstance(layer, nn.ReLU):
            # An exact 0 (a window full of padding) is 0 in float32, too.
            distance = torch.where(h == 0, math.inf, h.abs())
            nearest = torch.minimum(nearest, distance.flatten(1).amin(1))
        if isinstance(layer, nn.MaxPool2d):
            kernel, stride, padding = (_pair(v) for v in (layer.kernel_size, layer.stride, layer.padding))
            padded = functional.pad(h, (padding[1], padding[1], padding[0], padding[0]), value=-math.inf)
            windows = padded.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1]).flatten(4)
            if windows.shape[-1] > 1:
                top = windows.topk(2, dim=-1).values
                # An exact tie (zeros behind a ReLU, windows in the padding) is one in float32, too: the first wins.
                gap = top[..., 0] - top[..., 1]
                gap = torch.where(gap == 0, math.inf, gap)
                nearest = torch.minimum(nearest, gap.flatten(1).amin(1))
        h = _double(layer)(h)
    return nearest


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _double(layer: nn.Module) -> nn.Module:
    twin = type(layer).__new__(type(layer))
    twin.__dict__ = dict(layer.__dict__)
    twin._parameters = {
        name: None if p is None else nn.Parameter(p.detach().double()) for name, p in layer._parameters.items()
    }
    return twin


def records(module: nn.Sequential, shape: tuple[int, ...], count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Records away from kinks; their labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * count + 4, *shape, generator=generator)
    x = x[margins(module, x) > MARGIN][:count]
    classes = module(x[:1]).shape[1]
    return x, torch.randint(0, classes, (len(x),), generator=generator)


def same(a: LocalResult, b: LocalResult) -> bool:
    return torch.equal(a.delta, b.delta)


@st.composite
def nets(draw: st.DrawFn) -> tuple[nn.Sequential, tuple[int, ...]]:
    """A random chain: up to three convolutions with strides, paddings, poolings and activations, then linear layers."""
    channels, height, width = draw(st.integers(1, 4)), draw(st.integers(3, 13)), draw(st.integers(3, 13))
    shape = (channels, height, width)
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(0, 3))):
        kernel = (draw(st.integers(1, min(5, height))), draw(st.integers(1, min(5, width))))
        stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
        out = draw(st.sampled_from([1, 3, 8, 10, 17, 20, 33]))
        layers.append(nn.Conv2d(channels, out, kernel, stride, padding, bias=draw(st.booleans())))
        channels = out
        height, width = ((s + 2 * p - k) // t + 1 for s, p, k, t in zip((height, width), padding, kernel, stride))
        behind: list[nn.Module] = draw(st.sampled_from([[], [nn.ReLU()], [nn.Tanh()]]))
        if min(height, width) > 1 and draw(st.booleans()):
            sides = (draw(st.integers(2, min(3, height))), draw(st.integers(2, min(3, width))))
            steps = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
            pads = (draw(st.integers(0, sides[0] // 2)), draw(st.integers(0, sides[1] // 2)))
            pool = nn.MaxPool2d(sides, steps, pads)
            height, width = ((s + 2 * p - k) // t + 1 for s, p, k, t in zip((height, width), pads, sides, steps))
            behind = draw(st.permutations([*behind, pool]))
        layers += behind
    layers.append(nn.Flatten())
    features = channels * height * width
    for _ in range(draw(st.integers(0, 2))):
        out = draw(st.integers(1, 40))
        layers += [nn.Linear(features, out, bias=draw(st.booleans())), draw(st.sampled_from([nn.ReLU(), nn.Tanh()]))]
        features = out
    layers.append(nn.Linear(features, draw(st.integers(2, 12))))
    module = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    with torch.no_grad():
        for p in module.parameters():
            fan = p[0].numel() if p.dim() > 1 else 4
            p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(fan))
    return module, shape


def gradient_scale(module: nn.Module, x: Tensor, y: Tensor, clip: str) -> float:
    """The largest coordinate, or norm, of any record's gradient: what a clip value is chosen relative to."""
    if len(y) == 0:
        return 1.0
    model = FlatModel(module)
    rows = model.per_example_gradients(model.flatten(), x, y)
    return float(rows.abs().max() if clip == "coordinate" else rows.norm(dim=1).max())


def small_net() -> nn.Sequential:
    generator = torch.Generator().manual_seed(5)
    module = nn.Sequential(
        *(nn.Conv2d(1, 6, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 20, 2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(80, 16), nn.ReLU(), nn.Linear(16, 5)),
    )
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return module


def small_task(**changes: object) -> LocalTask:
    module = small_net()
    x, y = records(module, (1, 12, 12), 40, 3)
    d = len(FlatModel(module).flatten())
    settings_ = {
        "clip": "coordinate",
        "sampling": "poisson",
        "mask": None,
        "steps": 8,
        "clip_value": 0.02,
    }
    settings_ |= changes
    mask = settings_["mask"]
    k = d if mask is None else len(mask)  # type: ignore[arg-type]
    sampling = settings_["sampling"]
    relation = "add-remove" if sampling == "poisson" else "replace-one"
    plan = GaussianPlan(
        *(d, k, settings_["clip"], settings_["clip_value"], sampling, 6, len(y), settings_["steps"], 1),  # type: ignore[arg-type]
        *(0.5, relation, 1e-3),  # type: ignore[arg-type]
    )
    return LocalTask(x, y, mask, 1.5, 0.02, plan, KEY)  # type: ignore[arg-type]
