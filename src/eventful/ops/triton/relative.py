"""Kernel of decomposed relative position: logits of queries toward rows and columns of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.triton.attention import precision


@triton.jit
def relative_at(below, aside, y, x, DOWN: tl.constexpr, ACROSS: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """Relative position of a tile of queries to keys in rows `y` and columns `x`, in fp32.

    A product with ones where a key is. It is exact for finite numbers, but for TF32 where the user
    allows it, and several times faster than gathering: the keys are anywhere.

    Args:
        below, aside: (M, DOWN) and (M, ACROSS), logits toward every row and column.
    """
    row = (tl.arange(0, DOWN)[:, None] == y[None, :]).to(below.dtype)
    column = (tl.arange(0, ACROSS)[:, None] == x[None, :]).to(aside.dtype)
    bias = tl.dot(below, row, input_precision=PRECISION)
    return tl.dot(aside, column, bias, input_precision=PRECISION)


@triton.jit
def _relative_logits(
    q, rows, columns, index, down, across,
    heads, queries, grid_width, stride_qb, stride_qh, stride_qm,
    KEY_HEIGHT: tl.constexpr, KEY_WIDTH: tl.constexpr, HEIGHT_PAD: tl.constexpr,
    WIDTH_PAD: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1).to(tl.int64)
    token = tl.load(index + stream * queries + m)
    head = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, HEAD_PAD)
    fits = d < HEAD
    query = tl.load(
        q + stream * stride_qb + m * stride_qm + head[:, None] * stride_qh + d[None, :],
        mask=(head < heads)[:, None] & fits[None, :], other=0.0,
    )  # fmt: skip
    place = (stream * queries + m) * heads + head
    line = tl.arange(0, HEIGHT_PAD)
    vectors = tl.load(
        rows + ((token // grid_width) * KEY_HEIGHT + line[None, :]) * HEAD + d[:, None],
        mask=(line < KEY_HEIGHT)[None, :] & fits[:, None], other=0.0,
    ).to(query.dtype)  # fmt: skip
    found = tl.dot(query, vectors, input_precision=PRECISION)
    tl.store(
        down + place[:, None] * KEY_HEIGHT + line[None, :], found.to(down.dtype.element_ty),
        mask=(head < heads)[:, None] & (line < KEY_HEIGHT)[None, :],
    )  # fmt: skip
    line = tl.arange(0, WIDTH_PAD)
    vectors = tl.load(
        columns + ((token % grid_width) * KEY_WIDTH + line[None, :]) * HEAD + d[:, None],
        mask=(line < KEY_WIDTH)[None, :] & fits[:, None], other=0.0,
    ).to(query.dtype)  # fmt: skip
    found = tl.dot(query, vectors, input_precision=PRECISION)
    tl.store(
        across + place[:, None] * KEY_WIDTH + line[None, :], found.to(across.dtype.element_ty),
        mask=(head < heads)[:, None] & (line < KEY_WIDTH)[None, :],
    )  # fmt: skip


@triton.jit
def _relative_line(
    query, table, slots, out, tokens, heads, across_count, width,
    DOWN: tl.constexpr, KEYS: tl.constexpr, KEYS_PAD: tl.constexpr, HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr, M: tl.constexpr, HAS_SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries of one row (DOWN) or column of the grid, which share their vectors."""
    line = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
    r = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    real = r < across_count * heads
    token = line * width + r // heads if DOWN else (r // heads) * width + line
    place = token * heads + r % heads
    d = tl.arange(0, HEAD_PAD)
    fits = d < HEAD
    rows = tl.load(
        query + slot * tokens * heads * HEAD + place[:, None] * HEAD + d[None, :],
        mask=real[:, None] & fits[None, :], other=0.0,
    )  # fmt: skip
    k = tl.arange(0, KEYS_PAD)
    vectors = tl.load(
        table + (line * KEYS + k[None, :]) * HEAD + d[:, None],
        mask=(k < KEYS)[None, :] & fits[:, None], other=0.0,
    ).to(rows.dtype)  # fmt: skip
    found = tl.dot(rows, vectors, input_precision=PRECISION)
    tl.store(
        out + (stream * tokens * heads + place)[:, None] * KEYS + k[None, :],
        found.to(out.dtype.element_ty), mask=real[:, None] & (k < KEYS)[None, :],
    )  # fmt: skip


def relative_logits_all(
    query: Tensor, heads: int, rows: Tensor, columns: Tensor, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.relative_logits_all`."""
    query = query.contiguous()
    batch, tokens = len(query) if slots is None else len(slots), query.shape[1]
    head, lines = query.shape[2] // heads, (rows.shape[0], columns.shape[0])
    found = []
    for down, table in ((True, rows), (False, columns)):
        keys = table.shape[1]
        out = torch.empty(batch, tokens, heads, keys, dtype=query.dtype, device=query.device)
        along, across = lines if down else lines[::-1]
        if out.numel():
            _relative_line[(along, triton.cdiv(across * heads, 128), batch)](
                query, table.contiguous(), query if slots is None else slots, out,
                tokens, heads, across, lines[1],
                DOWN=down, KEYS=keys, KEYS_PAD=max(16, triton.next_power_of_2(keys)), HEAD=head,
                HEAD_PAD=max(16, triton.next_power_of_2(head)), M=128,
                HAS_SLOTS=slots is not None, PRECISION=precision(query.dtype), num_warps=4,
            )  # fmt: skip
        found.append(out)
    return found[0], found[1]


def relative_logits(
    q: Tensor, rows: Tensor, columns: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.relative_logits`."""
    batch, heads, queries, head = q.shape
    key_height, key_width = rows.shape[1], columns.shape[1]
    down = torch.empty(batch, queries, heads, key_height, dtype=q.dtype, device=q.device)
    across = torch.empty(batch, queries, heads, key_width, dtype=q.dtype, device=q.device)
    if queries:
        _relative_logits[(queries, batch)](
            q, rows.contiguous(), columns.contiguous(), index.expand(batch, -1).contiguous(),
            down, across, heads, queries, columns.shape[0], q.stride(0), q.stride(1), q.stride(2),
            KEY_HEIGHT=key_height, KEY_WIDTH=key_width,
            HEIGHT_PAD=max(16, triton.next_power_of_2(key_height)),
            WIDTH_PAD=max(16, triton.next_power_of_2(key_width)),
            HEADS_PAD=max(16, triton.next_power_of_2(heads)), HEAD=head,
            HEAD_PAD=max(16, triton.next_power_of_2(head)), PRECISION=precision(q.dtype),
            num_warps=4,
        )  # fmt: skip
    return down, across
