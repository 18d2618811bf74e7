"""Rows of tokens in plain PyTorch: gather, write, sum and norm, split into heads."""

from __future__ import annotations

import torch
from torch import Tensor


def take_slots(memory: Tensor, slots: Tensor) -> Tensor:
    """A copy (B, ...) of the rows `slots` (B,) of a memory (S, ...)."""
    return memory.index_select(0, slots)


def fill_slots_(memory: Tensor, values: Tensor, slots: Tensor, good: Tensor | None = None) -> None:
    """Write values (B, ...) to the rows `slots` (B,) of a memory (S, ...).

    Args:
        good: (B,) streams that are written; None for all.
    """
    if good is not None:
        keep = good.view(-1, *[1] * (values.dim() - 1))
        values = torch.where(keep, values.to(memory.dtype), memory.index_select(0, slots))
    memory.index_copy_(0, slots, values.to(memory.dtype))


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(rows: Tensor, before: Tensor) -> Tensor:
    """Which rows (B, N, D) differ in any bit from others of the same kind; (B, N)."""
    bits = BITS[rows.dtype.itemsize]
    found: Tensor = (rows.contiguous().view(bits) != before.view(bits)).any(dim=-1)
    return found


def renew_rows_(memory: Tensor, rows: Tensor, slots: Tensor, good: Tensor | None = None) -> Tensor:
    """Write rows (B, N, D) as `fill_slots_` does; returns those that differ in any bit, (B, N).

    In a stream that is not written none does. Rows and memory are of one kind.
    """
    changed = differing(rows, memory.index_select(0, slots))
    fill_slots_(memory, rows, slots, good)
    return changed if good is None else changed & good[:, None]


def norm_relu(rows: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """ReLU of the layer norm of rows (n, D)."""
    normed = torch.nn.functional.layer_norm(rows, rows.shape[-1:], weight, bias, eps)
    return torch.nn.functional.relu(normed)


def differs(pieces: tuple[Tensor, ...], before: Tensor, addresses: Tensor) -> Tensor:
    """Whether the elements of some tensors, one after another, differ from `before`: a bool ().

    Args:
        pieces: integers of one kind, on one device.
        before: (n,) of the same kind.
        addresses: (n,) int64, where in memory each element is.
    """
    return (torch.cat(pieces) != before).any()


def held(memory: Tensor, slots: Tensor | None) -> Tensor:
    """The rows of a memory (S, ...) that B streams own: row `slots[b]`, or row b without slots."""
    return memory if slots is None else take_slots(memory, slots)


def indices_of(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """The places where `mask` (B, N) is true, ascending, (B, M); M is the longest row's number.

    Short rows are padded by repeating their first place. Asks the host how many there are.

    Returns:
        The places, and (B,) how many of a row count; None where all do.
    """
    count = mask.sum(dim=-1)
    longest = int(count.max()) if len(mask) else 0
    index = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[:, :longest]
    if longest == 0 or int(count.min()) == longest:
        return index, None
    valid = torch.arange(longest, device=mask.device) < count[:, None]
    return torch.where(valid, index, index[:, :1]), count


def _expand(index: Tensor, like: Tensor, dim: int) -> Tensor:
    """Index (B, M) broadcast to the shape of `like` with M along `dim`."""
    shape = [1] * like.dim()
    shape[0], shape[dim] = index.shape
    target = list(like.shape)
    target[dim] = index.shape[1]
    return index.reshape(shape).expand(target)


def gather(source: Tensor, index: Tensor, dim: int = 1) -> Tensor:
    """Entries `index` (B, M) of `source` along `dim`."""
    if source.dim() == 3 and dim == 1 and source.shape[0] == 1:
        return source[0].index_select(0, index[0])[None]
    return source.gather(dim, _expand(index, source, dim))


def scatter_(destination: Tensor, index: Tensor, values: Tensor, dim: int = 1) -> None:
    """Write `values` to the entries `index` (B, M) of `destination` along `dim`."""
    values = values.to(destination.dtype)
    if destination.dim() == 3 and dim == 1 and destination.shape[0] == 1:
        destination[0].index_copy_(0, index[0], values[0])
        return
    destination.scatter_(dim, _expand(index, destination, dim), values)


def write_rows_(
    buffers: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    index: Tensor | None,
    count: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Write rows (B, M, D) to the tokens `index` (B, M) of each buffer (S, N, D).

    Args:
        index: None for all tokens in order.
        count: (B,) rows that count; the others are padding. None if all do. With no
            index, a stream of count 0 is left as it was.
        slots: (B,) row of the buffers that belongs to each stream; None if row b does.
    """
    for buffer, values in zip(buffers, rows, strict=True):
        batch, taken, _ = values.shape
        at = torch.arange(taken, device=values.device).expand(batch, taken)
        token = at if index is None else index
        own = torch.arange(batch, device=values.device) if slots is None else slots
        own = own[:, None].expand_as(token)
        if count is None:
            buffer[own, token] = values.to(buffer.dtype)
        else:
            valid = at < count[:, None]
            buffer[own[valid], token[valid]] = values.to(buffer.dtype)[valid]


def swap_rows_(
    buffers: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    index: Tensor,
    count: Tensor | None,
    slots: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Write rows (B, M, D) as `write_rows_` does, and return what stood there before.

    A padded slot of the result holds what its twin's place held, before or after the write.
    """
    old = [gather(held(buffer, slots), index) for buffer in buffers]
    write_rows_(buffers, rows, index, count, slots)
    return old[0], old[1]


def add_norm(
    tokens: Tensor,
    update: Tensor,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """A residual sum and its layer norm, both (..., D).

    Args:
        scale: (D,) on the update, None without.
        weight, bias: (D,) of the norm, None without.
    """
    total = tokens + (update if scale is None else update * scale)
    return total, torch.nn.functional.layer_norm(total, total.shape[-1:], weight, bias, eps)


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """(B, N, H*d) to (B, H, N, d), a view."""
    batch, count, width = tokens.shape
    return tokens.view(batch, count, heads, width // heads).transpose(1, 2)


def join_heads(tokens: Tensor) -> Tensor:
    """(B, H, N, d) to (B, N, H*d)."""
    return tokens.transpose(1, 2).flatten(2)
