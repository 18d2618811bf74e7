"""Triton kernels for CUDA devices: what stock operators do badly on a few tokens of many.

Under TRITON_INTERPRET=1 they run on the CPU too, slowly, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from eventful.ops.reference import (
    ContextMemory,
    ExactMemory,
    Picked,
    PickRule,
    Ragged,
    WindowGrid,
    grey_picture,
    window_too_wide,
)
from eventful.ops.triton.attention import attend, attend_lse, attend_partial
from eventful.ops.triton.candidates import (
    refine_boxes,
    region_levels,
    region_scores,
    take_candidates,
    take_found,
)
from eventful.ops.triton.context import add_context_
from eventful.ops.triton.exact import add_held, exchange_, gate_error, gate_rows, recompute_
from eventful.ops.triton.gates import MOST_TOKENS, error_norm, pick
from eventful.ops.triton.maps import changed_pixels, lift_tokens_, list_changed, update_maps_
from eventful.ops.triton.motion import carry, match_blocks
from eventful.ops.triton.nms import keep_apart, suppress
from eventful.ops.triton.proposals import best_boxes, level_logits, proposal_boxes
from eventful.ops.triton.region_checks import REGION_CHECKS
from eventful.ops.triton.regions import align_regions
from eventful.ops.triton.relative import relative_logits, relative_logits_all
from eventful.ops.triton.row_checks import ROW_CHECKS, too_wide
from eventful.ops.triton.rows import (
    add_norm,
    differs,
    fill_slots_,
    norm_relu,
    renew_rows_,
    swap_rows_,
    take_slots,
    write_rows_,
)
from eventful.ops.triton.scores import (
    MOST_CHANGES,
    contrast,
    estimate_error_,
    follow_change_,
    frame_score,
)
from eventful.ops.triton.windows import attend_windows

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
    "refuse",
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

_KINDS = (torch.float32, torch.bfloat16, torch.float16)
_LONG = 2048  # queries and keys from which on stock attention is faster in half precision


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def refuse(operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> str | None:
    """Why a call cannot be served; None if it can."""
    tensors = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if any(tensor.device.type != "cuda" for tensor in tensors) and not interpreted():
        return "its tensors are not on a CUDA device"
    odd = next((t.dtype for t in floats if t.dtype not in _KINDS), None)
    if odd is not None:
        return f"it has no kernels for {odd}"
    if interpreted() and any(t.dtype is torch.bfloat16 for t in floats):
        return "the interpreter's bf16 products are wrong"
    if any(t.dim() and t.shape[-1] > 1 and t.stride(-1) != 1 for t in floats):
        return "a tensor's last axis is not contiguous"
    check = _CHECKS.get(operation)
    return None if check is None else check(*args, **kwargs)


def yields(operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether a stock operator serves a call faster: attention that fills the device without us."""
    if operation not in ("attend", "attend_lse"):
        return False
    q = args[0]
    assert isinstance(q, Tensor)
    if operation == "attend_lse" and q.shape[-1] % 8:
        return False  # the stock kernels that return a log-sum-exp do not take such heads
    own = ("slots", "relative", "ragged")  # what stock kernels do not know
    if not q.is_cuda or any(kwargs.get(name) is not None for name in own):
        return False
    batch, heads, queries, _ = q.shape
    keys = args[1]
    assert isinstance(keys, Tensor)
    if q.dtype != torch.float32 and min(queries, keys.shape[2]) >= _LONG:
        return True
    units = torch.cuda.get_device_properties(q.device).multi_processor_count
    return batch * heads * -(-queries // 64) >= 4 * units


def _flat(values: tuple[object, ...]) -> list[object]:
    found: list[object] = []
    for value in values:
        if isinstance(value, (ExactMemory, ContextMemory)):
            value = tuple(vars(value).values())
        found += _flat(value) if isinstance(value, tuple) else [value]
    return found


def _error_norm(
    current: Tensor, reference: Tensor, order: float, slots: object = None
) -> str | None:
    if order != 2:
        return f"it has the L2 norm only, not order {order:g}"
    return too_wide(current, "tokens")


def _frame_score(
    error: Tensor,
    contrast: Tensor,
    changes: tuple[Tensor, ...],
    sizes: tuple[Tensor, ...],
    weight: float,
    motion: Tensor | None,
    *rest: object,
    **named: object,
) -> str | None:
    if len(changes) > MOST_CHANGES:
        return f"it follows at most {MOST_CHANGES} layers"
    if len({change.shape for change in changes}) > 1:
        return "the changes differ in shape"
    wide = next((too_wide(change, "tokens") for change in changes), None)  # of one shape
    if wide is not None:
        return wide
    parts = (error, *changes, *([] if motion is None else [motion]))
    return None if all(part.is_contiguous() for part in parts) else "a tensor is not contiguous"


def _estimate_error(
    score: Tensor, contrast: Tensor, picked: Picked, *rest: object, **named: object
) -> str | None:
    if picked.places is None:
        return "it needs the places of the tokens"
    whole = score.is_contiguous() and picked.places.is_contiguous()
    return None if whole else "the scores are not contiguous"


def _follow_change(moved: Tensor, rows: Tensor, *rest: object, **named: object) -> str | None:
    return too_wide(rows, "tokens")


def _pick(error: Tensor, rule: PickRule, width: int | None, *rest: object) -> str | None:
    if width is None:
        return "it needs a fixed number of slots"
    if rule.hold is not None:
        return "it follows the scene of every stream"
    if not error.is_contiguous():
        return "the errors are not contiguous"
    most = error.shape[-1] <= MOST_TOKENS
    return None if most else f"more than {MOST_TOKENS} tokens do not fit one program"


def _add_norm(tokens: Tensor, update: Tensor, *rest: object, **named: object) -> str | None:
    if not (tokens.is_contiguous() and update.is_contiguous()):
        return "the tokens are not contiguous"
    if torch.promote_types(tokens.dtype, update.dtype) != tokens.dtype:
        return "the sum has another dtype than the tokens"
    return too_wide(tokens, "tokens")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    relative: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    ragged: Ragged | None = None,
) -> str | None:
    if bias is not None:
        return "it takes relative position in two parts, not a dense bias"
    if not q.dtype == k.dtype == v.dtype:
        return "queries, keys and values differ in dtype"
    if 0 in q.shape or 0 in k.shape:
        return "there is nothing to attend"
    if q.shape[-1] > 256:
        return "heads are wider than 256"
    if relative is not None and relative[1].shape[-1] > 128:
        return "the key grid is wider than 128"
    return None


def _attend_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    valid: Tensor | None = None,
) -> str | None:
    if valid is not None:
        return "it attends to every key"
    return _attend(q, k, v, scale, bias)


def _attend_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float = 1.0,
    windows: WindowGrid | None = None,
    *rest: object,
    **named: object,
) -> str | None:
    wide = None if windows is None else window_too_wide(windows.window)
    if wide is not None:
        return wide
    if not q.dtype == k.dtype == v.dtype:
        return "queries, keys and values differ in dtype"
    return None if q.shape[-1] <= 256 else "heads are wider than 256"


def _add_context(
    memory: ContextMemory,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    count: Tensor | None,
    scale: float,
    slots: Tensor | None,
    relative: object = None,
    index: object = None,
    bias: Tensor | None = None,
) -> str | None:
    if bias is not None:
        return "it takes relative position in two parts, not a dense bias"
    if any(part.dtype != memory.query.dtype for part in (*new, *old)):
        return "queries, keys and values differ in dtype"
    if memory.query.shape[-1] // memory.heads > 256:
        return "heads are wider than 256"
    whole = all(part.is_contiguous() for part in vars(memory).values())
    return None if whole else "the memory is not contiguous"


def _swap_rows(
    buffers: object, rows: object, index: Tensor, count: Tensor | None, slots: Tensor | None
) -> str | None:
    return _NO_SLOTS if slots is None or count is None else None


def _gate(current: Tensor, reference_: Tensor, *rest: object, **named: object) -> str | None:
    return _tokens(current, reference_)


def _gate_error(
    current: Tensor, reference_: Tensor, slots: Tensor | None, *rest: object, **named: object
) -> str | None:
    return _tokens(current, reference_) if slots is not None else _NO_SLOTS


def _gate_rows(
    current: Tensor,
    reference_: Tensor,
    index: Tensor,
    count: Tensor | None,
    slots: Tensor | None,
    *rest: object,
    **named: object,
) -> str | None:
    return _NO_SLOTS if slots is None or count is None else _tokens(current, reference_)


_NO_SLOTS = "it needs slots and counts"


def _tokens(current: Tensor, reference_: Tensor) -> str | None:
    if not (current.is_contiguous() and reference_.is_contiguous()):
        return "the tokens are not contiguous"
    return too_wide(current, "tokens")


def _exchange(
    memory: ExactMemory,
    new: object,
    old: object,
    picked: object,
    scale: float,
    rebase: float,
    slots: Tensor | None,
    width: int,
    bias: Tensor | None = None,
) -> str | None:
    return _exact(memory, slots, bias)


def _recompute(
    memory: ExactMemory,
    rows: object,
    scale: float,
    slots: Tensor | None,
    bias: Tensor | None = None,
) -> str | None:
    return _exact(memory, slots, bias)


def _exact(memory: ExactMemory, slots: Tensor | None, bias: Tensor | None) -> str | None:
    if slots is None:
        return _NO_SLOTS
    if bias is not None:
        return "it knows no relative position"
    if memory.query.shape[-1] // memory.heads > 256:
        return "heads are wider than 256"
    whole = all(part.is_contiguous() for part in vars(memory).values())
    return None if whole else "the memory is not contiguous"


def _match_blocks(
    now: Tensor, before: Tensor, slots: Tensor | None, hint: Tensor | None = None
) -> str | None:
    if not (now.is_contiguous() and before.is_contiguous()):
        return "the pictures are not contiguous"
    return None if hint is None or hint.is_contiguous() else "the hint is not contiguous"


def _carry(memory: Tensor, motion: Tensor, *rest: object, **named: object) -> str | None:
    return None if motion.is_contiguous() else "the motion is not contiguous"


_CHECKS: dict[str, Callable[..., str | None]] = {
    **REGION_CHECKS,
    **ROW_CHECKS,
    "error_norm": _error_norm,
    "frame_score": _frame_score,
    "estimate_error_": _estimate_error,
    "follow_change_": _follow_change,
    "add_context_": _add_context,
    "pick": _pick,
    "add_norm": _add_norm,
    "attend": _attend,
    "attend_lse": _attend,
    "attend_partial": _attend_partial,
    "attend_windows": _attend_windows,
    "match_blocks": _match_blocks,
    "carry": _carry,
    "add_held": _gate,
    "swap_rows_": _swap_rows,
    "gate_error": _gate_error,
    "gate_rows": _gate_rows,
    "exchange_": _exchange,
    "recompute_": _recompute,
}
