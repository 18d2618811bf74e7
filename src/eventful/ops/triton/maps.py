"""Kernels for maps of pixels of which few change: convolutions and products of those alone.

The changed pixels of all streams are listed on the device, level by level. Every few places of a
list have a program, and one beyond the end of its list ends at once. So the host does not have to
know how many there are, and the same launch serves any pattern of change. Tables of these parts
are kept for ever (they are small), because recorded work reads them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference.maps import Changed, Lift, MapLayer, MapLevels
from eventful.ops.triton.attention import precision
from eventful.ops.triton.tiles import Tile, fitting

_CHUNK = 1024  # pixels that a program lists
_FEW = 32  # pixels that a program looks around
_TILES: tuple[Tile, ...] = (
    {"rows": 128, "lanes": 64, "num_warps": 8, "num_stages": 3},
    {"rows": 64, "lanes": 64, "num_warps": 8, "num_stages": 3},
    {"rows": 64, "lanes": 32, "num_warps": 8, "num_stages": 2},
    {"rows": 32, "lanes": 16, "num_warps": 8, "num_stages": 1},
)


@cache
def _parts(
    sizes: tuple[tuple[int, int], ...], batch: int, step: int, device: torch.device
) -> Tensor:
    """(n, 5) parts of the levels of some streams: level, first pixel, height, width, part.

    A part is `step` of the places of a level, which has as many in each stream as it has pixels.
    """
    rows, first = [], 0
    for level, (height, width) in enumerate(sizes):
        parts = -(-batch * height * width // step)
        rows += [[level, first, height, width, part] for part in range(parts)]
        first += height * width
    return torch.tensor(rows, dtype=torch.int32).to(device)


@triton.jit
def _list_changed(
    changed, listed, counts, table, pixels, streams, levels, CHUNK: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * 5
    stream = tl.program_id(1)
    level = tl.load(row)
    first = tl.load(row + 1)
    size = tl.load(row + 2) * tl.load(row + 3)
    place = tl.load(row + 4) * CHUNK + tl.arange(0, CHUNK)
    at = stream * pixels + first + place
    hit = tl.load(changed + at, mask=place < size, other=0).to(tl.int32)
    total = tl.sum(hit, axis=0)
    if total == 0:
        return
    base = tl.atomic_add(counts + level, total)
    tl.atomic_add(counts + levels + stream, total)
    to = first * streams + base + tl.cumsum(hit, axis=0) - 1
    tl.store(listed + to, at, mask=hit != 0)


def list_changed(mask: Tensor, sizes: tuple[tuple[int, int], ...]) -> Changed:
    """See `reference.list_changed`.

    The list of a level starts at its first pixel times B. Its order is not always the same. Behind
    it, in the second tensor, how many each level has.
    """
    batch, pixels = mask.shape
    listed = torch.empty(batch * pixels, dtype=torch.int32, device=mask.device)
    counts = torch.zeros(len(sizes) + batch, dtype=torch.int32, device=mask.device)
    table = _parts(sizes, 1, _CHUNK, mask.device)
    _list_changed[(len(table), batch)](
        mask, listed, counts, table, pixels, batch, len(sizes), CHUNK=_CHUNK, num_warps=4
    )
    return Changed(mask, counts[len(sizes) :], sizes, (listed, counts))


def _listed(changed: Changed, sizes: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    if changed.listed is None or changed.sizes != sizes:
        changed = list_changed(changed.mask, sizes)
    assert changed.listed is not None
    return changed.listed


@triton.jit
def _epilogue(
    acc, bias, gain, shift, n, eps, C: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RELU: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Bias, layer norm over the C columns, and an activation."""
    fits = n < C
    if BIAS:
        acc += tl.load(bias + n, mask=fits, other=0.0).to(tl.float32)[None, :]
    if NORM:
        mean = tl.sum(acc, axis=1) / C  # columns of padding are zero
        centred = acc - mean[:, None]
        if C != N:
            centred = tl.where(fits[None, :], centred, 0.0)
        spread = tl.sum(centred * centred, axis=1) / C
        acc = centred * (1.0 / tl.sqrt(spread + eps))[:, None]
        acc = acc * tl.load(gain + n, mask=fits, other=0.0).to(tl.float32)[None, :]
        acc = acc + tl.load(shift + n, mask=fits, other=0.0).to(tl.float32)[None, :]
    if RELU:
        acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if GELU:
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    return acc


@triton.jit
def _update_maps(
    out, x, weight, bias, gain, shift, listed, counts, slots, table,
    streams, pixels, eps, stride_ob, stride_xb, last_w, last_b, last_n,
    C_IN: tl.constexpr, C: tl.constexpr, N: tl.constexpr, TAPS: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, RELU: tl.constexpr,
    HAS_SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * 5
    level = tl.load(row)
    count = tl.load(counts + level)
    begin = tl.load(row + 4) * M
    if begin >= count:
        return
    first = tl.load(row + 1)
    height = tl.load(row + 2)
    width = tl.load(row + 3)
    place = begin + tl.arange(0, M)
    real = place < count
    number = tl.load(listed + first * streams + place, mask=real, other=0)
    stream = number // pixels
    pixel = number % pixels
    y = (pixel - first) // width
    z = (pixel - first) % width
    slot = (tl.load(slots + stream) if HAS_SLOTS else stream).to(tl.int64)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    fits = n < C
    x += slot * stride_xb + pixel.to(tl.int64) * C_IN
    weight += tl.minimum(level, last_w).to(tl.int64) * (TAPS * C_IN * C)
    acc = tl.zeros([M, N], dtype=tl.float32)
    for part in range(TAPS * (C_IN // K)):
        tap = part // (C_IN // K)
        lane = (part % (C_IN // K)) * K + k
        if TAPS == 9:
            down = tap // 3 - 1
            aside = tap % 3 - 1
            there = (y + down >= 0) & (y + down < height) & (z + aside >= 0) & (z + aside < width)
            at = x + (down * width + aside) * C_IN
            rows = tl.load(at[:, None] + lane[None, :], mask=(there & real)[:, None], other=0.0)
        else:
            rows = tl.load(x[:, None] + lane[None, :], mask=real[:, None], other=0.0)
        columns = weight + (tap * C_IN + lane)[:, None] * C + n[None, :]
        if C == N:  # noqa: SIM108 - chosen by the compiler
            columns = tl.load(columns)
        else:
            columns = tl.load(columns, mask=fits[None, :], other=0.0)
        acc = tl.dot(rows, columns, acc, input_precision=PRECISION)
    bias += tl.minimum(level, last_b) * C
    gain += tl.minimum(level, last_n) * C
    shift += tl.minimum(level, last_n) * C
    acc = _epilogue(acc, bias, gain, shift, n, eps, C, N, BIAS, NORM, RELU, False)
    at = out + (slot * stride_ob + pixel.to(tl.int64) * C)[:, None] + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=real[:, None] & fits[None, :])


def update_maps_(
    out_: Tensor,
    x: Tensor,
    layer: MapLayer,
    changed: Changed,
    levels: MapLevels,
    slots: Tensor | None = None,
) -> None:
    """See `reference.update_maps_`."""
    taps, before, after = layer.weight.shape[-3:]
    gain, shift, eps = (out_, out_, 0.0) if layer.norm is None else layer.norm
    bias = out_ if layer.bias is None else layer.bias
    listed, counts = _listed(changed, levels.sizes)
    batch, pixels = changed.mask.shape

    def launch(rows: int, lanes: int, num_warps: int, num_stages: int) -> None:
        table = _parts(levels.sizes, batch, rows, out_.device)
        _update_maps[(len(table),)](
            out_, x, layer.weight, bias, gain, shift, listed, counts,
            counts if slots is None else slots, table,
            batch, pixels, eps, out_.stride(0), x.stride(0),
            len(layer.weight) - 1, len(bias) - 1, len(gain) - 1,
            C_IN=before, C=after, N=max(16, triton.next_power_of_2(after)), TAPS=taps, M=rows,
            K=_lanes(before, lanes), BIAS=layer.bias is not None, NORM=layer.norm is not None,
            RELU=layer.relu, HAS_SLOTS=slots is not None, PRECISION=precision(x.dtype),
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip

    fitting(("maps", out_.device, x.dtype, before, after, taps), _TILES, launch)


def _lanes(channels: int, most: int) -> int:
    """How many input channels a product takes at once: as many as divide them."""
    while channels % most:
        most //= 2
    return most


@triton.jit
def _lift(
    out, x, weight, bias, gain, shift, listed, counts, slots,
    width, tokens, place, eps, stride_ob, stride_xb, stride_xn,
    C_IN: tl.constexpr, C: tl.constexpr, N: tl.constexpr, SCALE: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, GELU: tl.constexpr,
    HAS_SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * M
    count = tl.load(counts)
    if begin >= count:
        return
    sub = tl.program_id(1)  # which of the pixels of a token
    real = begin + tl.arange(0, M) < count
    number = tl.load(listed + begin + tl.arange(0, M), mask=real, other=0)
    stream = number // tokens
    token = number % tokens
    slot = (tl.load(slots + stream) if HAS_SLOTS else stream).to(tl.int64)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    fits = n < C
    x += stream.to(tl.int64) * stride_xb + token.to(tl.int64) * stride_xn
    weight += sub * C
    acc = tl.zeros([M, N], dtype=tl.float32)
    for part in range(C_IN // K):
        rows = tl.load(x[:, None] + (part * K + k)[None, :], mask=real[:, None], other=0.0)
        columns = weight + (part * K + k)[:, None] * (SCALE * SCALE * C) + n[None, :]
        if C == N:  # noqa: SIM108 - chosen by the compiler
            columns = tl.load(columns)
        else:
            columns = tl.load(columns, mask=fits[None, :], other=0.0)
        acc = tl.dot(rows, columns, acc, input_precision=PRECISION)
    acc = _epilogue(acc, bias, gain, shift, n, eps, C, N, BIAS, NORM, False, GELU)
    y = (token // width) * SCALE + sub // SCALE
    z = (token % width) * SCALE + sub % SCALE
    pixel = place + y * width * SCALE + z
    at = out + (slot * stride_ob + pixel.to(tl.int64) * C)[:, None] + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=real[:, None] & fits[None, :])


def lift_tokens_(
    out_: Tensor,
    tokens: Tensor,
    lift: Lift,
    changed: Changed,
    grid: tuple[int, int],
    place: int,
    slots: Tensor | None = None,
) -> None:
    """See `reference.lift_tokens_`."""
    batch, count, before = tokens.shape
    after = lift.weight.shape[-1] // lift.scale**2
    gain, shift, eps = (out_, out_, 0.0) if lift.norm is None else lift.norm
    listed, counts = _listed(changed, (grid,))

    def launch(rows: int, lanes: int, num_warps: int, num_stages: int) -> None:
        _lift[(triton.cdiv(batch * count, rows), lift.scale**2)](
            out_, tokens, lift.weight, out_ if lift.bias is None else lift.bias, gain, shift,
            listed, counts, counts if slots is None else slots,
            grid[1], count, place, eps, out_.stride(0), tokens.stride(0), tokens.stride(1),
            C_IN=before, C=after, N=max(16, triton.next_power_of_2(after)), SCALE=lift.scale,
            M=rows, K=_lanes(before, lanes), BIAS=lift.bias is not None,
            NORM=lift.norm is not None, GELU=lift.gelu, HAS_SLOTS=slots is not None,
            PRECISION=precision(tokens.dtype), num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip

    # Few tokens change: the tile of 128 rows was slower when measured, whatever the width.
    fitting(("lift", out_.device, tokens.dtype, before, after), _TILES[1:], launch)


@cache
def _spread_table(
    sizes: tuple[tuple[int, int], ...], scales: tuple[float, ...], device: torch.device
) -> Tensor:
    """(n, 6) parts of the levels: first place, size, width, part, pixels to a token, stride.

    Where a pixel covers 2 x 2 tokens, the pixels to a token are 0, and the stride says whether the
    map is all of them (1) or every other one (2).
    """
    rows, first = [], 0
    for (height, width), scale in zip(sizes, scales, strict=True):
        fine = round(scale) if scale >= 1 else 0
        size, stride = height * width, 2 if scale == 0.25 else 1
        parts = -(-size // _FEW)
        rows += [[first, size, width, part, fine, stride] for part in range(parts)]
        first += size
    return torch.tensor(rows, dtype=torch.int32).to(device)


@triton.jit
def _any_token(
    tokens, width, real, top, bottom, left, right, span, FEW: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Whether a token between the borders of each pixel changed; at most `span` and SPAN apart."""
    column = left[:, None] + tl.arange(0, SPAN)[None, :]
    inside = real[:, None] & (column <= right[:, None])
    column = tokens + column
    found = tl.zeros([FEW, SPAN], dtype=tl.int32)
    down = span * 0
    while down < span:
        at = top + down
        there = inside & (at <= bottom)[:, None]
        found |= tl.load(column + at[:, None] * width, mask=there, other=0).to(tl.int32)
        down += 1
    return tl.max(found, axis=1) != 0


@triton.jit
def _changed_pixels(
    tokens, out, table, height, width, pixels, reach, FEW: tl.constexpr, NEAR: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * 6
    stream = tl.program_id(1)
    first = tl.load(row)
    across = tl.load(row + 2)
    place = tl.load(row + 3) * FEW + tl.arange(0, FEW)
    real = place < tl.load(row + 1)
    fine = tl.load(row + 4)
    stride = tl.load(row + 5)
    y = place // across
    x = place % across
    tokens += stream * height * width
    out += stream * pixels + first
    if fine > 0:  # tokens of `fine` pixels a side
        top = tl.maximum(y - reach, 0) // fine
        bottom = tl.minimum((y + reach) // fine, height - 1)
        left = tl.maximum(x - reach, 0) // fine
        right = tl.minimum((x + reach) // fine, width - 1)
        span = reach * 2 // fine + 2
        hit = _any_token(tokens, width, real, top, bottom, left, right, span, FEW, NEAR)
        tl.store(out + place, hit, mask=real)
    else:  # pixels of two tokens a side; a last odd row or column belongs to none
        far = tl.where(stride == 1, reach, tl.maximum(2 * reach - 1, 0))
        top = tl.maximum(y * stride - far, 0) * 2
        bottom = tl.minimum(y * stride + far, height // 2 - 1) * 2 + 1
        left = tl.maximum(x * stride - far, 0) * 2
        right = tl.minimum(x * stride + far, width // 2 - 1) * 2 + 1
        span = 2 * (2 * far + 1)
        hit = _any_token(tokens, width, real, top, bottom, left, right, span, FEW, SPAN)
        tl.store(out + place, hit, mask=real)


def changed_pixels(
    tokens: Tensor, levels: MapLevels, scales: tuple[float, ...], reach: int
) -> Tensor:
    """See `reference.changed_pixels`."""
    batch, height, width = tokens.shape
    out = torch.empty(batch, levels.pixels, dtype=torch.bool, device=tokens.device)
    table = _spread_table(levels.sizes, scales, tokens.device)
    _changed_pixels[(len(table), batch)](
        tokens, out, table, height, width, levels.pixels, reach, FEW=_FEW,
        NEAR=triton.next_power_of_2(2 * reach + 2),
        SPAN=triton.next_power_of_2(2 * (4 * reach + 1)), num_warps=4,
    )  # fmt: skip
    return out
