"""The operations that stock fused kernels serve better than the reference arithmetic."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.ops import products, reference
from eventful.ops.eager_attention import attend_lse, attend_windows, key_bias, whole_bias
from eventful.ops.eager_boxes import suppress
from eventful.ops.eager_maps import lift_tokens_, update_maps_
from eventful.ops.eager_motion import carry, match_blocks
from eventful.ops.reference import (
    ContextMemory,
    ExactMemory,
    LayerNorm,
    Picked,
    PickRule,
    Ragged,
    add_held,
    add_norm,
    align_regions,
    best_boxes,
    changed_pixels,
    differs,
    estimate_error_,
    fill_slots_,
    follow_change_,
    gather,
    grey_picture,
    join_heads,
    keep_apart,
    level_logits,
    list_changed,
    norm_relu,
    proposal_boxes,
    refine_boxes,
    region_levels,
    region_scores,
    relative_logits,
    relative_logits_all,
    renew_rows_,
    scatter_,
    split_heads,
    swap_rows_,
    take_candidates,
    take_found,
    take_slots,
)

__all__ = [
    "add_context_",
    "add_held",
    "add_norm",
    "align_regions",
    "attend",
    "attend_lse",
    "attend_partial",
    "attend_windows",
    "best_boxes",
    "carry",
    "changed_pixels",
    "contrast",
    "differs",
    "error_norm",
    "estimate_error_",
    "exchange_",
    "fill_slots_",
    "follow_change_",
    "frame_score",
    "gate_error",
    "gate_rows",
    "grey_picture",
    "keep_apart",
    "level_logits",
    "lift_tokens_",
    "list_changed",
    "match_blocks",
    "norm_relu",
    "pick",
    "proposal_boxes",
    "recompute_",
    "refine_boxes",
    "region_levels",
    "region_scores",
    "relative_logits",
    "relative_logits_all",
    "renew_rows_",
    "suppress",
    "swap_rows_",
    "take_candidates",
    "take_found",
    "take_slots",
    "update_maps_",
    "write_rows_",
]


_CHUNK = 128  # tokens whose errors stay in a core's cache


def error_norm(
    current: Tensor, reference_: Tensor, order: float, slots: Tensor | None = None
) -> Tensor:
    """See `reference.error_norm`; on a CPU a few tokens at a time, without a tensor of errors."""
    tokens = current.shape[1]
    if current.device.type != "cpu" or slots is not None or tokens <= _CHUNK:
        return reference.error_norm(current, reference_, order, slots)
    norms = torch.empty(current.shape[:2], dtype=torch.float32)
    for start in range(0, tokens, _CHUNK):
        part = slice(start, start + _CHUNK)
        norms[:, part] = reference.error_norm(current[:, part], reference_[:, part], order)
    return norms


def _row_norm(memory: Tensor, slots: Tensor | None = None) -> Tensor:
    """See `reference.row_norm`; on a CPU without a copy of the memory, in fp32 or as it is."""
    if memory.device.type != "cpu":
        return reference.row_norm(memory, slots)
    if slots is not None:
        streams = [_row_norm(memory[slot : slot + 1]) for slot in slots.tolist()]
        return torch.cat(streams) if streams else memory.new_zeros(0, memory.shape[1]).float()
    if memory.dtype == torch.float32:
        return reference.row_norm(memory)
    norms = torch.empty(memory.shape[:2], dtype=torch.float32)
    for start in range(0, memory.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        norms[:, part] = reference.row_norm(memory[:, part])
    return norms


def contrast(patches: Tensor) -> Tensor:
    """See `reference.contrast`; on a CPU not channel by channel, which is slow there."""
    if patches.device.type != "cpu":
        return reference.contrast(patches)
    drawn = reference.spread_sample(patches).float()
    apart = drawn - drawn[:, :1]  # so that equal patches have no contrast at all
    apart -= apart.mean(dim=1, keepdim=True)
    total: Tensor = torch.linalg.vector_norm(apart, dim=(1, 2)) / math.sqrt(drawn.shape[1])
    return total


def frame_score(
    error: Tensor,
    contrast: Tensor,
    changes: tuple[Tensor, ...],
    sizes: tuple[Tensor, ...],
    weight: float,
    motion: Tensor | None,
    prefix: int,
    slots: Tensor | None,
) -> Tensor:
    """See `reference.frame_score`; the norms of changes without a copy of the memories."""
    norms = [_row_norm(change, slots) for change in changes]
    held = [reference.held(size, slots) for size in sizes]
    return reference.score_of(error, contrast, norms, held, weight, motion, prefix)


def pick(error: Tensor, rule: PickRule, width: int | None, report: Tensor) -> Picked:
    """See `reference.pick`; without a width the host counts, and most of the work falls away.

    Then only the first gate looks for bad frames: a step with one is undone.
    """
    if width is not None:
        return reference.pick(error, rule, width, report)
    if rule.counts is not None and len(set(rule.counts)) == 1:
        return _pick_counted(error, rule, rule.counts[0], report)
    if len(error) > 1 or error.device.type != "cpu":
        return reference.pick(error, rule, width, report)
    return _pick_one(error, rule, report)


def _ranked(error: Tensor, forced: Tensor | None) -> Tensor:
    """(B, N) tokens by falling error, forced ones first; of equals the first is ahead."""
    ranked = error if forced is None else error.masked_fill(forced, torch.inf)
    return ranked.argsort(dim=-1, descending=True, stable=True)


def _pick_counted(error: Tensor, rule: PickRule, count: int, report: Tensor) -> Picked:
    """The same number of tokens in every stream, known to the host: nothing is waited for."""
    order = _ranked(error, rule.forced(error.shape[1]) if rule.forces else None)
    if rule.leading:
        finite = torch.isfinite(error).all(dim=-1)
        report[:, 0], report[:, 1], report[:, 3] = count, finite, count
        report[:, 2] = 0 if rule.scene is None else reference.follow_scene(error, rule, finite)
    counts = torch.full((len(error),), count, device=error.device)
    return Picked(order[:, :count].sort(dim=-1).values, counts, None, full=True)


def _pick_one(error: Tensor, rule: PickRule, report: Tensor) -> Picked:
    """The tokens of one stream, in the host's memory."""
    tokens, level, cap = error.shape[1], float(rule.level), int(rule.cap)
    forced = rule.forced(tokens) if rule.forces else None
    numbers = report[0].tolist()
    finite = bool(torch.isfinite(error).all()) if rule.leading else numbers[1] > 0
    least = 0 if forced is None else int(forced.sum())
    above = _above(error, level, forced)
    if rule.low is not None and rule.floor is not None and above < int(rule.floor):
        above = max(above, min(_above(error, float(rule.low), forced), int(rule.floor)))
    allowed = least + min(cap, above) if finite else 0
    if rule.leading:
        known = torch.tensor([finite])
        cut = 0 if rule.scene is None else int(reference.follow_scene(error, rule, known))
        wanted = allowed if level == -torch.inf or not finite else least + above
        report[0, :4] = torch.tensor([wanted, finite, cut, allowed])
    elif allowed > numbers[3]:
        report[0, 3] = allowed
    index = _ranked(error, forced)[:, :allowed].sort(dim=-1).values
    return Picked(index, torch.tensor([allowed]), None, full=True)


def _above(error: Tensor, level: float, forced: Tensor | None) -> int:
    """How many errors are above a level, forced tokens not counted."""
    over = error > level
    return int((over if forced is None else over & ~forced).sum())


def gate_error(
    current: Tensor,
    reference_: Tensor,
    slots: Tensor | None,
    norm: LayerNorm | None = None,
    update: Tensor | None = None,
    stored: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `reference.gate_error`; the errors as `error_norm` makes them."""
    if slots is not None:
        return reference.gate_error(current, reference_, slots, norm, update, stored)
    tokens = current if update is None else current + update
    seen = tokens.to(reference_.dtype)
    seen = seen if norm is None else norm.apply(seen)
    return tokens, error_norm(seen, reference_, 2.0)


def gate_rows(
    current: Tensor,
    reference_: Tensor,
    index: Tensor,
    count: Tensor | None,
    slots: Tensor | None,
    norm: LayerNorm | None = None,
    stored: bool = False,
) -> Tensor:
    """See `reference.gate_rows`; without slots and padding one copy writes the rows."""
    if slots is not None or count is not None:
        return reference.gate_rows(current, reference_, index, count, slots, norm, stored)
    rows = gather(current, index).to(reference_.dtype)
    rows = rows if norm is None else norm.apply(rows)
    scatter_(reference_, index, rows)
    return rows


def write_rows_(
    buffers: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    index: Tensor | None,
    count: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """See `reference.write_rows_`; without slots and padding one copy writes the rows."""
    if slots is not None or count is not None or index is None:
        reference.write_rows_(buffers, rows, index, count, slots)
        return
    for buffer, values in zip(buffers, rows, strict=True):
        scatter_(buffer, index, values)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    relative: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    ragged: Ragged | None = None,
) -> Tensor:
    """See `reference.attend`; through SDPA, or by products (see `products`)."""
    if 0 in q.shape:  # some fused kernels crash on nothing to do
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    k, v = reference.held(k, slots), reference.held(v, slots)
    if products.serves(q, k, bias):
        return products.attention(q, k, v, scale, bias, relative)
    mask = whole_bias(bias, relative)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def attend_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with its log-sum-exp, both fp32, by products or through the CPU's flash kernel."""
    if q.device.type != "cpu" or 0 in q.shape or 0 in k.shape:  # the kernel crashes on no work
        return reference.attend_partial(q, k, v, scale, bias, valid)
    if valid is None and products.serves(q, k, bias):
        return products.attention_lse(q, k, v, scale, bias, full=True)
    mask = None if bias is None else bias.float()
    if valid is not None:
        blocked = torch.zeros(valid.shape).masked_fill(~valid, -torch.inf)[:, None, None]
        mask = blocked.expand(*q.shape[:3], -1) if mask is None else mask + blocked
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.float(), k.float(), v.float(), 0.0, False, attn_mask=mask, scale=scale
    )
    if valid is not None:  # the kernel reports 0 for a row without keys
        lse = lse.masked_fill(~valid.any(dim=-1)[:, None, None], -torch.inf)
    return out, lse


def add_context_(
    memory: ContextMemory,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    count: Tensor | None,
    scale: float,
    slots: Tensor | None,
    relative: tuple[Tensor, Tensor] | None = None,
    index: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """See `reference.add_context_`; on a CPU one stream at a time, without its padding."""
    if new[0].device.type != "cpu":
        reference.add_context_(memory, new, old, count, scale, slots, relative, index, bias)
        return
    batch, taken = new[0].shape[:2]
    rows = list(range(batch)) if slots is None else slots.tolist()
    counts = [taken] * batch if count is None else count.tolist()
    for stream, (row, valid) in enumerate(zip(rows, counts, strict=True)):
        if valid == 0:
            continue
        own, keys = slice(stream, stream + 1), slice(valid)
        q = split_heads(memory.query[row : row + 1], memory.heads)
        lse = memory.lse[row : row + 1].transpose(1, 2)
        mask = None if bias is None else bias[own, :, :, keys]
        sides = [
            (split_heads(k[own, keys], memory.heads), split_heads(v[own, keys], memory.heads))
            for k, v in (new, old)
        ]
        places, at = None, None
        if relative is not None and index is not None:
            places, at = (relative[0][own], relative[1][own]), index[stream, keys]
        made = None
        if products.serves(q, sides[0][0], mask):
            made = products.context_change(q, lse, sides[0], sides[1], scale, places, at, mask)
        if made is not None:
            memory.change[row].add_(made.flatten(1))
            continue
        if places is not None and at is not None:
            mask = key_bias(*places, at)
        parts = [
            reference.context_part(attend_partial(q, k, v, scale, mask), lse) for k, v in sides
        ]
        memory.change[row].add_(join_heads(parts[0].sub_(parts[1]))[0])


def exchange_(
    memory: ExactMemory,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    picked: Picked,
    scale: float,
    rebase: float,
    slots: Tensor | None,
    width: int,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.exchange_`; without slots only the rows that did not change are computed.

    Args:
        bias: (B, H, R, J), of those rows in ascending order.
    """
    if slots is not None:
        return reference.exchange_(memory, new, old, picked, scale, rebase, slots, width, bias)
    assert picked.places is not None
    heads, stays = memory.heads, (picked.places >= 0) | (picked.count == 0)[:, None]
    index, count = reference.indices_of(~stays)
    if index.shape[1] == 0:
        return index, picked.count * 0

    def taken(part: Tensor) -> Tensor:
        return split_heads(gather(part, index), heads)

    valid = torch.arange(new[0].shape[1], device=index.device) < picked.count[:, None]
    ragged = None if bool(valid.all()) else valid
    q = taken(memory.query)
    parts = [
        attend_partial(q, split_heads(k, heads), split_heads(v, heads), scale, bias, ragged)
        for k, v in (new, old)
    ]
    held = (taken(memory.out), taken(memory.lse)[..., 0], taken(memory.condition)[..., 0])
    out, lse, condition = reference.merge_partial(held, parts[0], parts[1])
    lost = condition.isinf()  # what is left of such a row is not a number
    rows = (
        join_heads(torch.where(lost[..., None], held[0], out)),
        torch.where(lost, held[1], lse).transpose(1, 2),
        condition.transpose(1, 2),
    )
    write_rows_((memory.out, memory.lse, memory.condition), rows, index, count)
    lost, many = reference.lost_rows(memory.lse, memory.condition, stays, rebase, width)
    return lost[:, : int(many.max())], many  # on the host it costs nothing to ask how many


def recompute_(
    memory: ExactMemory,
    rows: tuple[tuple[Tensor, Tensor], ...],
    scale: float,
    slots: Tensor | None,
    bias: Tensor | None = None,
) -> None:
    """See `reference.recompute_`; lists without rows are left out."""
    heads = memory.heads
    k, v = (split_heads(reference.held(x, slots), heads) for x in (memory.key, memory.value))
    for index, count in rows:
        if index.shape[1] == 0:
            continue
        q = gather(reference.held(memory.query, slots), index)
        out, lse = attend_partial(split_heads(q, heads), k, v, scale, bias)
        found = lse.transpose(1, 2)
        kept = (join_heads(out), found, 1 + found.abs())
        taken: Tensor | None = count.clamp_max(index.shape[1])
        if slots is None and bool((count >= index.shape[1]).all()):
            taken = None
        write_rows_((memory.out, memory.lse, memory.condition), kept, index, taken, slots)
