"""Row-wise kernels: writing buffered rows, and a residual sum with its layer norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference.rows import BITS


@triton.jit
def _write_rows(
    first, second, first_rows, second_rows, index, counts, slots,
    width, stride_fb, stride_fn, stride_sb, stride_sn, stride_ab, stride_am, stride_bb, stride_bm,
    slots_per_stream,
    TWO: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
    token = tl.load(index + stream * slots_per_stream + row) if HAS_INDEX else row
    column = tl.arange(0, WIDTH)
    inside = column < width
    if HAS_COUNT:  # rows past the count are padding
        inside = inside & (row < tl.load(counts + stream))
    values = tl.load(first_rows + stream * stride_ab + row * stride_am + column, mask=inside)
    tl.store(first + slot * stride_fb + token * stride_fn + column, values, mask=inside)
    if TWO:
        values = tl.load(second_rows + stream * stride_bb + row * stride_bm + column, mask=inside)
        tl.store(second + slot * stride_sb + token * stride_sn + column, values, mask=inside)


def write_rows_(
    buffers: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    index: Tensor | None,
    count: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """See `reference.write_rows_`; two buffers of the same width at a time."""
    if 0 in rows[0].shape:
        return
    left = sorted(zip(buffers, rows, strict=True), key=lambda pair: pair[1].shape[-1])
    while left:
        (a, x), *left = left
        batch, taken, width = x.shape
        two = bool(left) and left[0][1].shape[-1] == width
        b, y = left.pop(0) if two else (a, x)
        none = a  # any pointer will do for an argument that is not read
        _write_rows[(taken, batch)](
            a, b, x, y,
            none if index is None else index, none if count is None else count,
            none if slots is None else slots,
            width, *a.stride()[:2], *b.stride()[:2], *x.stride()[:2], *y.stride()[:2], taken,
            TWO=two, HAS_INDEX=index is not None, HAS_COUNT=count is not None,
            HAS_SLOTS=slots is not None, WIDTH=triton.next_power_of_2(width),
            num_warps=2 if width <= 1024 else 4,
        )  # fmt: skip


@triton.jit
def _swap_rows(
    first, second, new_first, new_second, old_first, old_second, index, counts, slots,
    width, taken, stride_fb, stride_fn, stride_sb, stride_sn, stride_ab, stride_am,
    stride_bb, stride_bm,
    WIDTH: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64)
    token = tl.load(index + stream * taken + row)
    column = tl.arange(0, WIDTH)
    inside = column < width
    counts_too = inside & (row < tl.load(counts + stream))
    out = (stream * taken + row) * width + column
    at = first + slot * stride_fb + token * stride_fn + column
    tl.store(old_first + out, tl.load(at, mask=inside), mask=inside)
    new = tl.load(new_first + stream * stride_ab + row * stride_am + column, mask=inside)
    tl.store(at, new, mask=counts_too)
    at = second + slot * stride_sb + token * stride_sn + column
    tl.store(old_second + out, tl.load(at, mask=inside), mask=inside)
    new = tl.load(new_second + stream * stride_bb + row * stride_bm + column, mask=inside)
    tl.store(at, new, mask=counts_too)


def swap_rows_(
    buffers: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    index: Tensor,
    count: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `reference.swap_rows_`."""
    (a, b), (x, y) = buffers, rows
    batch, taken, width = x.shape
    old = [torch.empty(batch, taken, width, dtype=a.dtype, device=a.device) for _ in range(2)]
    if taken:
        _swap_rows[(taken, batch)](
            a, b, x, y, *old, index, count, slots, width, taken,
            *a.stride()[:2], *b.stride()[:2], *x.stride()[:2], *y.stride()[:2],
            WIDTH=triton.next_power_of_2(width), num_warps=2 if width <= 1024 else 4,
        )  # fmt: skip
    return old[0], old[1]


@triton.jit
def _add_norm(
    tokens, update, factor, weight, bias, total, normed, width, eps,
    HAS_FACTOR: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    x = tl.load(tokens + row * width + column, mask=inside, other=0.0)
    u = tl.load(update + row * width + column, mask=inside, other=0.0)
    if HAS_FACTOR:  # rounded as the product would be on its own
        f = tl.load(factor + column, mask=inside, other=0.0)
        u = (u.to(tl.float32) * f.to(tl.float32)).to(u.dtype)
    x = (x.to(tl.float32) + u.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + row * width + column, x, mask=inside)
    x = x.to(tl.float32)
    mean = tl.sum(x, axis=0) / width
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    y = centred * scale
    if HAS_WEIGHT:
        y = y * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y = y + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * width + column, y.to(normed.dtype.element_ty), mask=inside)


def add_norm(
    tokens: Tensor,
    update: Tensor,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See `reference.add_norm`."""
    total, normed = torch.empty_like(tokens), torch.empty_like(tokens)
    width = tokens.shape[-1]
    rows = tokens.numel() // max(width, 1)
    if rows == 0:
        return total, normed
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        tokens, update, tokens if scale is None else scale,
        tokens if weight is None else weight, tokens if bias is None else bias,
        total, normed, width, eps, HAS_FACTOR=scale is not None,
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, WIDTH=block,
        num_warps=2 if block <= 1024 else 4,
    )  # fmt: skip
    return total, normed


@triton.jit
def _take_slots(memory, slots, out, size, BLOCK: tl.constexpr):
    stream = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(memory + slot * size + at, mask=at < size)
    tl.store(out + stream * size + at, values, mask=at < size)


def take_slots(memory: Tensor, slots: Tensor) -> Tensor:
    """See `reference.take_slots`."""
    out = torch.empty(len(slots), *memory.shape[1:], dtype=memory.dtype, device=memory.device)
    size = memory[0].numel()
    block = 4096
    if size:
        _take_slots[(triton.cdiv(size, block), len(slots))](
            memory, slots, out, size, BLOCK=block, num_warps=8
        )
    return out


@triton.jit
def _fill_slots(memory, values, slots, good, size, HAS_GOOD: tl.constexpr, BLOCK: tl.constexpr):
    stream = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if HAS_GOOD:
        inside = inside & (tl.load(good + stream) != 0)
    found = tl.load(values + stream * size + at, mask=inside)
    tl.store(memory + slot * size + at, found.to(memory.dtype.element_ty), mask=inside)


def fill_slots_(memory: Tensor, values: Tensor, slots: Tensor, good: Tensor | None = None) -> None:
    """See `reference.fill_slots_`."""
    size = memory[0].numel()
    if not size or not len(slots):
        return
    block = min(4096, triton.next_power_of_2(size))
    _fill_slots[(triton.cdiv(size, block), len(slots))](
        memory, values.contiguous(), slots, slots if good is None else good.view(torch.int8), size,
        HAS_GOOD=good is not None, BLOCK=block, num_warps=8 if block > 256 else 1,
    )  # fmt: skip


@triton.jit
def _renew_rows(
    memory, rows, slots, good, changed, count, width, stride_mb, stride_rb, stride_rn,
    HAS_GOOD: tl.constexpr, FEW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64)
    row = tl.program_id(0) * FEW + tl.arange(0, FEW)
    column = tl.arange(0, WIDTH)
    own = row < count
    taken = own
    if HAS_GOOD:
        taken = own & (tl.load(good + stream) != 0)
    inside = taken[:, None] & (column < width)[None, :]
    at = rows + stream * stride_rb + row.to(tl.int64)[:, None] * stride_rn + column[None, :]
    new = tl.load(at, mask=inside, other=0)
    at = memory + slot * stride_mb + row.to(tl.int64)[:, None] * width + column[None, :]
    old = tl.load(at, mask=inside, other=0)
    tl.store(at, new, mask=inside)
    hit = tl.max((new != old).to(tl.int32), axis=1) != 0
    tl.store(changed + stream * count + row, hit.to(tl.int8), mask=own)


def renew_rows_(memory: Tensor, rows: Tensor, slots: Tensor, good: Tensor | None = None) -> Tensor:
    """See `reference.renew_rows_`."""
    batch, count, width = rows.shape
    changed = torch.empty(batch, count, dtype=torch.bool, device=rows.device)
    if not changed.numel():
        return changed
    bits = BITS[rows.dtype.itemsize]
    block = triton.next_power_of_2(width)
    few = max(1, 4096 // block)
    _renew_rows[(triton.cdiv(count, few), batch)](
        memory.view(bits), rows.view(bits), slots,
        slots if good is None else good.view(torch.int8), changed.view(torch.int8), count, width,
        memory.stride(0), rows.stride(0), rows.stride(1),
        HAS_GOOD=good is not None, FEW=few, WIDTH=block, num_warps=8,
    )  # fmt: skip
    return changed


@triton.jit
def _norm_relu(
    rows, weight, bias, out, count, width, eps, FEW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * FEW + tl.arange(0, FEW)).to(tl.int64)
    column = tl.arange(0, WIDTH)
    fits = column < width
    inside = (row < count)[:, None] & fits[None, :]
    at = row[:, None] * width + column[None, :]
    x = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    centred = x - (tl.sum(x, axis=1) / width)[:, None]
    centred = tl.where(inside, centred, 0.0)
    spread = tl.sum(centred * centred, axis=1) / width
    x = centred * tl.rsqrt(spread + eps)[:, None]
    x = x * tl.load(weight + column, mask=fits, other=0.0).to(tl.float32)[None, :]
    x = x + tl.load(bias + column, mask=fits, other=0.0).to(tl.float32)[None, :]
    x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


def norm_relu(rows: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `reference.norm_relu`."""
    rows = rows.contiguous()
    out, (count, width) = torch.empty_like(rows), rows.shape
    if not out.numel():
        return out
    block = triton.next_power_of_2(width)
    few = max(1, 2048 // block)
    _norm_relu[(triton.cdiv(count, few),)](
        rows, weight, bias, out, count, width, eps, FEW=few, WIDTH=block, num_warps=4
    )
    return out


@triton.jit
def _differs(addresses, before, out, count, N: tl.constexpr, BITS: tl.constexpr):
    if BITS == 8:
        kind = tl.pointer_type(tl.int8)
    elif BITS == 16:
        kind = tl.pointer_type(tl.int16)
    elif BITS == 32:
        kind = tl.pointer_type(tl.int32)
    else:
        kind = tl.pointer_type(tl.int64)
    found = tl.zeros([N], dtype=tl.int32)
    for start in range(0, count, N):
        place = start + tl.arange(0, N)
        real = place < count
        now = tl.load(tl.load(addresses + place, mask=real, other=0).to(kind), mask=real, other=0)
        found |= (now != tl.load(before + place, mask=real, other=0)).to(tl.int32)
    tl.store(out, (tl.max(found, axis=0) != 0).to(tl.int8))


def differs(pieces: tuple[Tensor, ...], before: Tensor, addresses: Tensor) -> Tensor:
    """See `reference.differs`; reads by address, in one launch."""
    out = torch.empty((), dtype=torch.bool, device=before.device)
    _differs[(1,)](
        addresses, before, out.view(torch.int8), len(before), N=1024,
        BITS=8 * before.element_size(), num_warps=8,
    )  # fmt: skip
    return out
