"""Attention as one product after another, on CPUs where the fused kernel is slow.

The fused kernel of torch multiplies through MKL, which does not use the wide registers of a
processor of AMD. oneDNN does. On these processors two products and a softmax for each head, in
pieces that stay in the cache, take 0.5 to 0.9 of the time of the fused kernel, although they write
the weights of the attention down in between. A relative position is added in the cache, too: the
fused kernel needs it written out for all pairs.

oneDNN makes code for every shape and keeps it, so numbers that change from frame to frame are
rounded up (see `packed`).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from eventful.ops.packed import ONEDNN, onednn_offers, served_rows
from eventful.ops.scratch import keep_freed, scratch

VARIABLE = "EVENTFUL_CPU_ATTENTION"  # `fused` or `products`; anything else chooses by the CPU
LEAST = 100_000  # pairs of a query and a key in one head; for fewer the fused kernel is faster
PIECE = 1 << 19  # pairs at once: 2 MB of fp32
MOST_THREADS = 8  # more threads do not share out the work of one head well
MOST_WEIGHT = 1e30  # of one key, so that its product with a value is finite
_OTHERS = ("AuthenticAMD", "HygonGenuine")


def serves(q: Tensor, k: Tensor, bias: Tensor | None = None) -> bool:
    """Whether these queries (B, H, M, d) and keys (B, H, N, d) are served faster here."""
    return (
        q.device.type == "cpu"
        and (q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and _multiplies_bf16()))
        and (bias is None or bias.is_floating_point())
        and q.shape[2] * k.shape[2] >= LEAST
        and chosen()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def chosen() -> bool:
    """Whether attention on this CPU is computed by products, where they serve."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "fused" or not onednn_offers("_linear_pointwise"):
        return False
    return torch.get_num_threads() <= MOST_THREADS and (asked == "products" or _vendor() in _OTHERS)


@lru_cache(maxsize=1)
def _multiplies_bf16() -> bool:
    """Whether oneDNN has a product in bf16 for this processor; without AVX-512 it has none."""
    asked = getattr(ONEDNN, "_is_mkldnn_bf16_supported", None)
    return asked is not None and bool(asked())


@lru_cache(maxsize=1)
def _vendor() -> str:
    """Who made the processor, as it says itself; "" if it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [f"vendor_id : {platform.processor()}"]  # ends with the vendor on Windows
    named = [line.rpartition(":")[2] for line in lines if line.startswith("vendor_id")]
    words = named[0].replace(",", " ").split() if named else []
    return words[-1] if words else ""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    relative: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `reference.attend`; (B, H, M, d) over (B, H, N, d). Logits and softmax are fp32."""
    return _attention(q, k, v, scale, bias, relative, full=False, lse=False)[0]


def attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    relative: tuple[Tensor, Tensor] | None = None,
    *,
    full: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same with the log-sum-exp of the logits (B, H, M), in fp32.

    Args:
        full: the output and the weights of the values are fp32, too.
    """
    out, sums = _attention(q, k, v, scale, bias, relative, full=full, lse=True)
    assert sums is not None
    return out, sums


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    relative: tuple[Tensor, Tensor] | None,
    *,
    full: bool,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    batch, heads, count, width = q.shape
    keys = k.shape[2]
    k, v = (part.expand(batch, -1, -1, -1) for part in (k, v))
    if relative is not None:
        bias = None  # as in `whole_bias`
    bias = None if bias is None else bias.expand(batch, heads, count, keys)
    served = served_rows(keys) if relative is None else keys  # a grid, whose size stays
    rows, pieces = _pieces(count, served)
    kind = torch.float32 if full else q.dtype
    # oneDNN is a thousand times slower where rows have gaps, so those of a head are put together.
    queries = _room("queries", (heads, rows * pieces, width))
    held = _room("keys", (heads, served, width))
    values = _room("values", (heads, served, v.shape[-1]), kind)
    queries[:, count:], held[:, keys:], values[:, keys:] = 0, 0, 0
    out = torch.empty(batch, count, heads, v.shape[-1], dtype=kind, device="cpu")
    top, share = (_floats(batch, heads, count) for _ in range(2))
    for stream in range(batch):
        parts = [
            part.expand(batch, -1, -1, -1)[stream].transpose(0, 1) for part in relative or ()
        ]  # (H, M, ...)
        # In fp32: with `out` the product would be rounded to the dtype of `q` first.
        torch.mul(q[stream].float(), scale, out=queries[:, :count])
        held[:, :keys], values[:, :keys] = k[stream], v[stream]
        for head, here, piece in _each(heads, count, rows):
            many = here.stop - here.start
            pairs = _product(queries[head, piece], held[head])
            if served > keys:
                pairs[:, keys:] = -torch.inf
            if bias is not None:
                pairs[:many, :keys] += bias[stream, head, here]
            if relative is not None:
                grid = pairs[:many].view(many, *(part.shape[-1] for part in parts))
                grid += parts[0][head, here, :, None]
                grid += parts[1][head, here, None, :]
            masked = None
            if lse or bias is not None:
                torch.amax(pairs[:many], dim=-1, out=top[stream, head, here])
                masked = top[stream, head, here] == -torch.inf
            torch.softmax(pairs, -1, out=pairs)  # in place: a row is read before it is written
            if masked is not None and bool(masked.any()):
                pairs[:many][masked] = 0  # as the fused kernel has it
            if lse:
                torch.amax(pairs[:many], dim=-1, out=share[stream, head, here])
            out[stream, here, head] = _product(pairs.to(kind), values[head].T)[:many]
    if not lse:
        return out.transpose(1, 2), None
    return out.transpose(1, 2), torch.where(top == -torch.inf, top, top - share.log())


def context_change(
    q: Tensor,
    lse: Tensor,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    scale: float,
    relative: tuple[Tensor, Tensor] | None,
    index: Tensor | None,
    bias: Tensor | None,
) -> Tensor | None:
    """What some keys do to the attention of one stream, see `reference.add_context_`, in fp32.

    The weights are exp(logit - log-sum-exp) of one product: the log-sum-exp is one more number of
    each query, and so are the two parts of a relative position.

    Args:
        q: (1, H, N, d).
        lse: (1, H, N).
        new, old: keys and values (1, H, J, d).
        relative, index, bias: as in `reference.add_context_`, of one stream.

    Returns:
        (N, H, d), or None if the weights are too large for fp32.
    """
    (_, heads, count, width), keys, out = q.shape, new[0].shape[2], new[1].shape[-1]
    bias = None if bias is None else bias.expand(1, heads, count, keys)
    served = served_rows(keys)
    rows, pieces = _pieces(count, served)
    parts = [] if relative is None else [part[0].transpose(0, 1) for part in relative]
    more = [*parts, -lse[0, :, :, None]]
    ends = _floats(keys, 1).fill_(1)
    if relative is not None:
        assert index is not None
        ends = torch.cat([_ones(index, *(part.shape[-1] for part in parts)), ends], dim=1)
    queries = _room("queries", (heads, rows * pieces, width + ends.shape[1]))
    held = _room("keys", (heads, served, width + ends.shape[1]))
    values = _room("values", (heads, served, out))
    queries[:, count:], held[:, keys:], values[:, keys:] = 0, 0, 0
    torch.mul(q[0].float(), scale, out=queries[:, :count, :width])
    queries[:, :count, width:] = torch.cat([part.float() for part in more], dim=-1)
    made, weights = _room("context", (2, count, heads, out)), _floats(2, heads, count)
    for side, (k, v) in enumerate((new, old)):
        held[:, :keys, :width], held[:, :keys, width:] = k[0], ends
        values[:, :keys] = v[0]
        for head, here, piece in _each(heads, count, rows):
            pairs = _product(queries[head, piece], held[head])
            many = here.stop - here.start
            if bias is not None:
                pairs[:many, :keys] += bias[0, head, here]
            pairs.exp_()
            torch.sum(pairs[:many, :keys], dim=-1, out=weights[side, head, here])
            made[side, here, head] = _product(pairs, values[head].T)[:many]
    if not bool(weights.max() < MOST_WEIGHT):  # nor where it is not a number
        return None
    made /= weights.clamp_min(1).transpose(1, 2)[..., None]
    return torch.sub(made[0], made[1])


def _pieces(count: int, keys: int) -> tuple[int, int]:
    """Rows of a piece and number of pieces, all of one size, so that oneDNN makes code once."""
    keep_freed()  # of products that torch allocates
    pieces = -(-count * keys // PIECE)
    rows = served_rows(-(-count // pieces))
    return rows, -(-count // rows)


def _each(heads: int, count: int, rows: int) -> Iterator[tuple[int, slice, slice]]:
    """Each piece of each head: which of the rows it has, and the same with those filled up."""
    for head in range(heads):
        for first in range(0, count, rows):
            yield head, slice(first, min(first + rows, count)), slice(first, first + rows)


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """Rows (m, d) by the transpose of a weight (n, d), whose rows or columns are without gaps."""
    made: Tensor = ONEDNN._linear_pointwise(rows, weight, None, "none", [], "")
    return made


def _ones(index: Tensor, tall: int, wide: int) -> Tensor:
    """Rows (N, kh + kw) that take the two parts of a relative position at places of the grid.

    A product with ones and zeros is exact for finite numbers, and faster than gathering.
    """
    ones = _floats(len(index), tall + wide).zero_()
    ones.scatter_(1, torch.stack([index // wide, tall + index % wide], dim=1), 1.0)
    return ones


def _floats(*shape: int) -> Tensor:
    """Fresh memory, whatever the process has for its default dtype and device."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _room(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    keep_freed()  # the products themselves are allocated by torch
    room = scratch(f"attention {name}", shape, torch.empty(0, dtype=dtype, device="cpu"))
    return torch.empty(shape, dtype=dtype, device="cpu") if room is None else room
