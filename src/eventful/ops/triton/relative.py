"""Kernel of decomposed relative position: logits of queries toward rows and columns of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.triton.attention import precision


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
