"""The work of a step on a GPU: which kernel runs on what, in tiles of which size.

Tiles follow from a layer's shape and from the number of agents, never from a batch: the order of every sum, and with it
every bit, is the same whatever a step's batches are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedspa.engine.traced import gpu_kernels, gpu_layers, ops
from fedspa.engine.traced.gpu_stack import TILE, UNITS, Columns, Parameters, RoundBuffers, Shape, Tokens

# Noise is by ChaCha20 (RFC 8439): additions, rotations and xors of 32-bit words. Word 12 is the block counter, 13 the
# local step. A lane turns one 64-byte block into 8 values; LANES neighbouring lanes write 8 runs of LANES values.
LANES = 64
GROUP = 8 * LANES

_TILE = 2048  # columns of a row that a program measures
_USUAL = 32  # examples of an agent, by which tiles are chosen
_PROGRAMS = 132  # that a large GPU runs at a time


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, window: Sequence[int]) -> Tensor:
    """As `ops.convolved`, without dilation and groups."""
    agents, outputs, channels, *kernel = weight.shape
    shape = _Geometry(channels, x.shape[2:], outputs, kernel, window)
    lines, last = len(x) // agents, channels % 16 == outputs % 16 == 0
    out = torch.empty(len(x), outputs, *shape.out, device=x.device)
    x, weight = x.contiguous(), weight.contiguous()
    if last:
        x, weight = _channels_last(x), _turned(weight, ahead=True)
    positions = math.prod(shape.out)
    bm, bn = _tiles(positions, outputs, agents, 128, channels)
    bk = _inner(channels, bm * bn) if last else 32 if channels * math.prod(kernel) <= 32 else 16
    gpu_layers.convolve[(math.ceil(lines * positions / bm), math.ceil(outputs / bn), agents)](
        *(x, weight, x if bias is None else bias.contiguous(), out, lines),
        **shape.sizes, BIAS=bias is not None, LAST=last, PRECISION=_precision(),
        BM=bm, BN=bn, BK=bk, num_warps=8 if bm * bn > 8192 else 4, num_stages=4 if last and bk <= 32 else 3,
    )  # fmt: skip
    return out


def convolved_back(delta: Tensor, weight: Tensor, sides: Sequence[int], window: Sequence[int]) -> Tensor:
    """As `ops.convolved_back`, without dilation and groups."""
    agents, outputs, channels, *kernel = weight.shape
    shape = _Geometry(channels, sides, outputs, kernel, window)
    lines, last = len(delta) // agents, channels % 16 == outputs % 16 == 0
    back = torch.empty(len(delta), channels, *sides, device=delta.device)
    delta, weight = delta.contiguous(), weight.contiguous()
    if last:
        delta, weight = _channels_last(delta), _turned(weight, ahead=False)
    positions = math.prod(sides)
    bm, bn = _tiles(positions, channels, agents, 128 if last else 64, outputs)
    bk = _inner(outputs, bm * bn) if last else 32 if channels <= 16 else 16
    gpu_layers.convolve_back[(math.ceil(lines * positions / bm), math.ceil(channels / bn), agents)](
        *(delta, weight, back, lines), **shape.sizes, LAST=last, PRECISION=_precision(),
        BM=bm, BN=bn, BK=bk, num_warps=8 if bm * bn > 8192 else 4, num_stages=4 if last and bk <= 32 else 3,
    )  # fmt: skip
    return back


def pooled(x: Tensor, window: Sequence[int]) -> list[Tensor]:
    """As `ops.pooled`."""
    x = x.contiguous()
    shape = _Geometry(0, x.shape[2:], 0, window[:2], window[2:])
    out, winner = (torch.empty(*x.shape[:2], *shape.out, dtype=kind, device=x.device) for kind in _POOLED)
    _pooling(gpu_layers.pool, shape, out, x, out, winner)
    return [out, winner]


def pooled_back(delta: Tensor, winner: Tensor, sides: Sequence[int], window: Sequence[int]) -> Tensor:
    """As `ops.pooled_back`."""
    shape = _Geometry(0, sides, 0, window[:2], window[2:])
    back = torch.empty(*delta.shape[:2], *sides, device=delta.device)
    _pooling(gpu_layers.pool_back, shape, back, delta.contiguous(), winner.contiguous(), back)
    return back


_POOLED = torch.float32, torch.int16


def _pooling(kernel: Any, shape: _Geometry, written: Tensor, *given: Tensor) -> None:
    lines, planes = written.shape[:2]
    sizes = {name: size for name, size in shape.sizes.items() if name not in ("C", "N", "PADDED")}
    tiles = math.ceil(math.prod(written.shape[1:]) / 512)
    kernel[(lines, tiles)](*given, **sizes, PLANES=planes, BLOCK=512)


def group_scaled(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> list[Tensor]:
    """As `ops.group_scaled`."""
    x, (lines, channels), positions = x.contiguous(), x.shape[:2], math.prod(x.shape[2:])
    out, size = torch.empty_like(x), channels // groups
    mean, scale = (torch.empty(lines, groups, device=x.device) for _ in range(2))
    gpu_layers.group_norm[(lines, groups)](
        *(x, weight.contiguous(), bias.contiguous(), out, mean, scale, lines // len(weight), positions, eps),
        SIZE=size, BLOCK=power(size * positions, 128, 4096), num_warps=4 if size * positions <= 2048 else 8,
    )  # fmt: skip
    return [out, mean, scale]


def group_scaled_back(
    delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, groups: int
) -> list[Tensor]:
    """As `ops.group_scaled_back`."""
    delta, x, (lines, channels), positions = delta.contiguous(), x.contiguous(), x.shape[:2], math.prod(x.shape[2:])
    back, size, bp = torch.empty_like(x), channels // groups, power(positions, 16, 1024)
    own = [torch.empty(lines, channels, device=x.device) for _ in range(2)]
    gpu_layers.group_norm_back[(lines, groups)](
        *(delta, x, mean, scale, weight.contiguous(), back, *own, lines // len(weight), positions),
        SIZE=size, BC=power(size, 1, max(1, 4096 // bp)), BP=bp, num_warps=4 if size * positions <= 2048 else 8,
    )  # fmt: skip
    return [back, *own]


def layer_scaled(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> list[Tensor]:
    """As `ops.layer_scaled`."""
    x, (lines, length, size) = x.contiguous(), x.shape
    out, each, blocks = torch.empty_like(x), lines // len(weight) * length, _of_rows(length, size)
    mean, scale = (torch.empty(lines, length, device=x.device) for _ in range(2))
    gpu_layers.layer_norm[(math.ceil(lines * length / blocks["ROWS"]),)](
        *(x, weight.contiguous(), bias.contiguous(), out, mean, scale, lines * length, each, size, eps), **blocks
    )
    return [out, mean, scale]


def layer_scaled_back(delta: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> list[Tensor]:
    """As `ops.layer_scaled_back`."""
    delta, x, (lines, length, size) = delta.contiguous(), x.contiguous(), x.shape
    back, own = torch.empty_like(x), [torch.empty(lines, size, device=x.device) for _ in range(2)]
    gpu_layers.layer_norm_back[(lines,)](
        *(delta, x, mean.contiguous(), scale.contiguous(), weight.contiguous(), back, *own),
        *(lines // len(weight), length, size), **_of_rows(length, size),
    )  # fmt: skip
    return [back, *own]


def _of_rows(length: int, size: int) -> dict[str, int]:
    block = power(size, 16, 8192)
    return {"ROWS": power(length, 1, max(1, 2048 // block)), "BLOCK": block, "num_warps": 4 if block <= 2048 else 8}


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As `ops.attended`."""
    q, k, v = (_rows(each) for each in (q, k, v))
    (lines, heads, length, size), others = q.shape, k.shape[2]
    out = torch.empty(lines, length, heads, size, device=q.device)
    strides = (stride for each in (q, k, v) for stride in each.stride()[:3])
    gpu_layers.attend[(lines, heads)](
        *(q, k, v, out, scale, *strides, length, others, size, heads), **_of_attention(length, others, size)
    )
    return out.transpose(1, 2)


def attended_back(delta: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
    """As `ops.attended_back`."""
    delta, q, k, v = (_rows(each) for each in (delta, q, k, v))
    (lines, heads, length, size), others = q.shape, k.shape[2]
    made = [torch.empty(lines, rows, heads, size, device=q.device) for rows in (length, others, others)]
    strides = (stride for each in (delta, q, k, v) for stride in each.stride()[:3])
    gpu_layers.attend_back[(lines, heads)](
        *(delta, q, k, v, *made, scale, *strides, length, others, size, heads), **_of_attention(length, others, size)
    )
    return [each.transpose(1, 2) for each in made]


def _rows(values: Tensor) -> Tensor:
    """With neighbouring values in the last dimension."""
    return values if values.stride(3) == 1 else values.contiguous()


def _of_attention(length: int, others: int, size: int) -> dict[str, Any]:
    blocks = {"BT": power(length, 16, 128), "BS": power(others, 16, 128), "BD": power(size, 16, 128)}
    return {**blocks, "PRECISION": _precision(), "num_warps": 8 if max(blocks.values()) > 64 else 4}


def held(index: Tensor, size: int, allowed: int | None) -> tuple[Tensor, Tensor]:
    """`ops.within`, and of each line [n, …] whether all of it was inside."""
    index = index.contiguous()
    found, good = torch.empty_like(index), torch.empty(len(index), dtype=torch.bool, device=index.device)
    values = math.prod(index.shape[1:])
    gpu_layers.hold[(len(index),)](
        *(index, found, good.view(torch.uint8), size, allowed or 0, values),
        ALLOWED=allowed is not None, BLOCK=power(values, 16, 1024), num_warps=1,
    )  # fmt: skip
    return found, good


def class_delta(scores: Tensor, classes: Tensor, delta: Tensor, ignored: int) -> Tensor:
    """As `ops.class_delta`."""
    scores = scores.contiguous()
    out, block = torch.empty_like(scores), power(scores.shape[1], 16, 1 << 20)
    gpu_layers.class_delta[(len(scores),)](
        *(scores, classes.contiguous(), delta.contiguous(), out, ignored), C=scores.shape[1], BLOCK=block
    )
    return out


class _Geometry:
    """A convolution's sizes, by the names that the kernels have for them."""

    def __init__(
        self, channels: int, sides: Sequence[int], outputs: int, kernel: Sequence[int], window: Sequence[int]
    ) -> None:
        stride, padding = window[:2], window[2:4]
        self.out = [(sides[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in range(2)]
        self.sizes = {"C": channels, "H": sides[0], "W": sides[1], "N": outputs, "KH": kernel[0], "KW": kernel[1],
                          "SH": stride[0], "SW": stride[1], "PH": padding[0], "PW": padding[1],
                          "OH": self.out[0], "OW": self.out[1], "PADDED": any(padding)}  # fmt: skip
        # Whether its patches are pieces of images that are moved by whole columns, and begin at whole vectors there.
        self.as_wide = (
            tuple(stride) == (1, 1) and self.out[1] == sides[1] and sides[1] % 4 == 0 and math.prod(kernel) > 1
        )


def _tiles(positions: int, outputs: int, agents: int, most: int, inner: int) -> tuple[int, int]:
    """Rows and columns of a tile: smaller ones where there would be fewer tiles than the GPU runs at a time. Below 64,
    wide layers lose more by reading each number several times."""
    bm, bn, least = most, power(outputs, 16, 128), 64 if inner % 64 == 0 else 32

    def count() -> int:
        return math.ceil(_USUAL * positions / bm) * math.ceil(outputs / bn) * agents

    while count() < _PROGRAMS and max(bm, bn) > least:
        bm, bn = (bm // 2, bn) if bm > bn else (bm, bn // 2)
    return bm, bn


def _inner(channels: int, tile: int) -> int:
    """Channels of a block."""
    if channels % 64 == 0 and tile <= 4096:
        return 64
    return 32 if channels % 32 == 0 else 16


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _turned(weight: Tensor, *, ahead: bool) -> Tensor:
    agents, outputs, channels, *kernel = weight.shape
    out, taps = torch.empty_like(weight), math.prod(kernel)
    gpu_layers.turn_weights[(math.ceil(outputs / 32), math.ceil(channels / 32), agents)](
        weight, out, N=outputs, C=channels, TAPS=taps, AHEAD=ahead, BLOCK=32
    )
    return out


def _channels_last(images: Tensor) -> Tensor:
    out, (lines, channels), positions = torch.empty_like(images), images.shape[:2], math.prod(images.shape[2:])
    tiles = math.ceil(channels / 32) * math.ceil(positions / 32)
    gpu_layers.channels_last[(lines, tiles)](images, out, C=channels, P=positions, BLOCK=32)
    return out


def _shifted(images: Tensor, shape: _Geometry) -> Tensor:
    (lines, channels, height, width), kernel = images.shape, shape.sizes["KW"]
    rows = height + 2 * shape.sizes["PH"]
    out = torch.empty(lines, kernel, channels, rows, width, device=images.device)
    gpu_kernels.shift_columns[(math.ceil(channels * rows * width / 1024), lines)](
        *(images, out, channels, height, width, shape.sizes["PH"], shape.sizes["PW"]), KW=kernel, BLOCK=1024
    )
    return out


def power(value: int, low: int, high: int) -> int:
    """The power of two that is not below `value`, within [low, high]."""
    return min(high, max(low, 1 << max(0, value - 1).bit_length()))


def _tile_of_gradients(outputs: int, inputs: int, inner: int) -> dict[str, int]:
    """Outputs, inputs and positions of a tile, and how many loads are under way: by trials on an H200."""
    bo, bj = power(outputs, 16, 64), power(inputs, 32, 32 if inner <= 16 else 64)
    if inner <= 64:  # all positions at once
        return {"BO": bo, "BJ": bj, "BQ": power(inner, 16, 64), "num_stages": 2 if inner > 32 else 3}
    return {"BO": bo, "BJ": bj, "BQ": 64 if bo < 64 else 32, "num_stages": 3 if bo < 64 else 4}


class Kernels:
    """What does a step's work on a GPU. `tests/engine/gpu_twins.py` has its twin in torch."""

    def __init__(self, held: RoundBuffers, shape: Shape) -> None:
        self._held, self._shape = held, shape

    def draw_noise(self) -> None:
        held, s = self._held, self._shape
        grid = (math.ceil(s.active / GROUP), s.agents)
        gpu_kernels.noise[grid](held.keys, held.step, held.noise, s.active, LANES=LANES, num_warps=2)

    def spread(self, parameters: Parameters) -> None:
        tiles = parameters.tiles
        gpu_kernels.spread[(len(tiles),)](
            self._held.theta, tiles, parameters.whole, self._shape.dimension, BLOCK=TILE, num_warps=4
        )

    def gather(self, pool: Tensor, start: int, size: int) -> Tensor:
        held, s = self._held, self._shape
        out = torch.empty(s.agents, size, *pool.shape[2:], dtype=pool.dtype, device=pool.device)
        values, block = math.prod(pool.shape[2:]), power(math.prod(pool.shape[2:]), 16, 1024)
        source, to = (each.view(torch.uint8) if each.dtype == torch.bool else each for each in (pool, out))
        gpu_kernels.gather[(math.ceil(values / block), s.agents * size)](
            *(source, held.index, held.counts, held.step, to, s.agents, s.capacity, s.records, size, start),
            SIZE=values, BLOCK=block,
        )  # fmt: skip
        return out

    def cut(self, columns: Columns, at: int, rows: Tensor, made: Tensor) -> None:
        self._cut(columns, at, rows, made.contiguous(), made, 1, outer=False)

    def cut_factors(self, columns: Columns, at: int, rows: Tensor, delta: Tensor, x: Tensor) -> None:
        part, s = columns.parts[at], self._shape
        assert part.factors is not None
        operator, *rest = part.factors
        delta, x = delta.contiguous(), x.contiguous()
        if operator is ops.product_weights_node and delta.shape[1] == 1:
            self._cut(columns, at, rows, delta, x, x.shape[2], outer=True)
        elif operator is ops.convolved_weights_node and ops.has_kernel(rest[1]):
            shape, outputs = _Geometry(x.shape[1], x.shape[2:], delta.shape[1], *rest), delta.shape[1]
            inputs = part.size // outputs
            tile = _tile_of_gradients(outputs, inputs, math.prod(shape.out))
            programs = math.ceil(outputs / tile["BO"]) * math.ceil(inputs / tile["BJ"])
            split = power(math.ceil(8 * _PROGRAMS / (programs * s.agents)), 1, 32)
            shifted = shape.as_wide
            gpu_kernels.cut_convolved[(programs, split, s.agents)](
                *(delta, _shifted(x, shape) if shifted else x, rows),
                *(columns.of_number[:, part.first :] if s.masked else rows, columns.firsts),
                *(s.width, columns.of_number.shape[1], at, rows.shape[1]),
                **shape.sizes, SHIFTED=shifted, MASKED=s.masked, PRECISION=_precision(), SPLIT=split,
                **tile, num_warps=4,
            )  # fmt: skip
        else:  # a library's product and a cut of it are faster than a kernel that does both
            self.cut(columns, at, rows, ops.plain[operator](delta, x, *rest).flatten(1))

    def _cut(
        self, columns: Columns, at: int, rows: Tensor, made: Tensor, x: Tensor, inputs: int, *, outer: bool
    ) -> None:
        part, s, examples = columns.parts[at], self._shape, rows.shape[1]
        share = math.ceil(1.25 * part.size * s.active / s.dimension)  # of its numbers that are active, about
        block = power(share, 64, 256)
        groups = math.ceil(examples / 8)
        gpu_kernels.cut[(math.ceil(share / block), groups, s.agents)](
            *(made, x, rows, columns.number, columns.firsts, s.width, columns.lines_of(columns.number)),
            *(columns.lines_of(columns.firsts), at, examples),
            SIZE=part.size, K=inputs, OUTER=outer, EXAMPLES=8, BLOCK=block,
        )  # fmt: skip

    def weigh(self, columns: Columns, rows: Tensor, tokens: Sequence[Tokens], readable: Tensor, start: int) -> Tensor:
        held, s, (agents, examples, width) = self._held, self._shape, rows.shape
        sizes = [math.prod(each.values.shape[2:]) for each in tokens]
        tiles = [math.ceil(size / _TILE) for size in (width, *sizes)]
        squares = torch.empty(agents, examples, sum(tiles), dtype=torch.float64, device=rows.device)
        whole = [torch.full((1,), size, dtype=torch.int32, device=rows.device) for size in sizes]
        used = columns.lines_of(columns.firsts)
        first = 0
        for values, ends, size, several, parts in zip(
            (rows, *(each.values for each in tokens)), (columns.ends, *whole), (width, *sizes), tiles,
            (used, *[0] * len(sizes)),
        ):  # fmt: skip
            gpu_kernels.measure[(several, agents * examples)](
                values, ends, squares, size, examples, sum(tiles), first, parts, BLOCK=_TILE
            )
            first += several
        factors = torch.empty(agents, examples, dtype=torch.float64, device=rows.device)
        gpu_kernels.weigh[(agents * examples,)](
            *(squares, readable.contiguous().view(torch.uint8), held.index, held.counts, held.step),
            *(held.clips, factors, held.zeroed, agents, s.capacity, examples, start, sum(tiles)),
            L2=s.clip == "l2", BLOCK=128, num_warps=1,
        )  # fmt: skip
        return factors

    def add(self, columns: Columns, rows: Tensor, factors: Tensor, more: bool) -> None:
        held, (agents, examples, width) = self._held, rows.shape
        block = 256 if width * agents > 1 << 16 else 64
        gpu_kernels.add[(math.ceil(width / block), agents)](
            *(rows, factors, held.clips, columns.coordinate, columns.ends, held.sums, width, examples),
            *(self._shape.dimension, columns.lines_of(columns.coordinate), columns.lines_of(columns.firsts)),
            CLAMP=self._shape.clip == "coordinate", MORE=more, ROWS=8, BLOCK=block,
        )  # fmt: skip

    def scatter(self, tokens: Tokens, factors: Tensor, more: bool) -> None:
        if not more:
            tokens.whole.zero_()
        size = math.prod(tokens.values.shape[2:])
        gpu_kernels.scatter[(math.ceil(size / 512), factors.numel())](
            *(tokens.values, tokens.tokens, factors, self._held.clips, tokens.whole),
            *(factors.shape[1], tokens.words, tokens.values.shape[3], size),
            CLAMP=self._shape.clip == "coordinate", UNITS=UNITS, BLOCK=512,
        )  # fmt: skip

    def step(self) -> None:
        held, s = self._held, self._shape
        gpu_kernels.take_step[(math.ceil(s.active / 256), s.agents)](
            *(held.theta, held.coordinates, held.sums, held.noise, held.clips, held.sigmas, held.batches, held.sizes),
            *(s.dimension, s.active), MASKED=s.masked, BLOCK=256,
        )  # fmt: skip
        held.step.add_(1)
