"""What the kernels for rows of tokens and pixels cannot serve, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eventful.ops.reference import Changed, Lift, MapLayer, MapLevels

_WIDEST = 8192  # channels of a row that a kernel holds at once


def too_wide(rows: Tensor, what: str = "rows") -> str | None:
    """Why kernels do not take rows of so many channels; None if they do."""
    return None if rows.shape[-1] <= _WIDEST else f"{what} are wider than {_WIDEST}"


def _take_slots(memory: Tensor, slots: Tensor) -> str | None:
    return None if memory.is_contiguous() else "the memory is not contiguous"


def _fill_slots(memory: Tensor, *rest: object) -> str | None:
    return None if memory.is_contiguous() else "the memory is not contiguous"


def _renew_rows(memory: Tensor, rows: Tensor, *rest: object) -> str | None:
    if not memory.is_contiguous() or memory.dtype != rows.dtype:
        return "the memory is not contiguous or of another dtype"
    return too_wide(rows)


def _norm_relu(rows: Tensor, *rest: object) -> str | None:
    return too_wide(rows)


def _relative_all(query: Tensor, heads: int, rows: Tensor, *rest: object) -> str | None:
    return None if rows.shape[-1] <= 256 else "heads are wider than 256"


def _list_changed(mask: Tensor, *rest: object) -> str | None:
    return None if mask.is_contiguous() else "the mask is not contiguous"


def _update_maps(
    out_: Tensor, x: Tensor, layer: MapLayer, changed: Changed, levels: MapLevels, *rest: object
) -> str | None:
    before, after = layer.weight.shape[-2:]
    parts = (out_, x, layer.weight, changed.mask)
    return _channels(out_, x, before, after, layer.weight.dtype, parts)


def _lift_tokens(
    out_: Tensor, tokens: Tensor, lift: Lift, changed: Changed, *rest: object
) -> str | None:
    weight, after = lift.weight, lift.weight.shape[-1] // lift.scale**2
    if tokens.stride(-1) != 1:
        return "the tokens' last axis is not contiguous"
    return _channels(
        out_, tokens, tokens.shape[-1], after, weight.dtype, (out_, weight, changed.mask)
    )


def _channels(
    out_: Tensor, x: Tensor, before: int, after: int, kind: torch.dtype, parts: tuple[Tensor, ...]
) -> str | None:
    if not out_.dtype == x.dtype == kind:
        return "maps and weights differ in dtype"
    if before % 16 or after > 512:
        return "it takes a multiple of 16 channels, and makes at most 512"
    return None if all(part.is_contiguous() for part in parts) else "a tensor is not contiguous"


def _changed_pixels(tokens: Tensor, *rest: object) -> str | None:
    return None if tokens.is_contiguous() else "the mask is not contiguous"


ROW_CHECKS: dict[str, Callable[..., str | None]] = {
    "update_maps_": _update_maps,
    "lift_tokens_": _lift_tokens,
    "changed_pixels": _changed_pixels,
    "take_slots": _take_slots,
    "fill_slots_": _fill_slots,
    "renew_rows_": _renew_rows,
    "norm_relu": _norm_relu,
    "relative_logits_all": _relative_all,
    "list_changed": _list_changed,
}
