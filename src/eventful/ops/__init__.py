"""Tensor operations: one public function per operation, served by one of several backends."""

from eventful.ops import reference as _reference
from eventful.ops.reference import (
    CELL,
    REPORT,
    SAMPLE,
    UNIT,
    ContextMemory,
    ExactMemory,
    LayerNorm,
    Lift,
    MapLayer,
    MapLevels,
    Picked,
    PickRule,
    Pool,
    Ragged,
    WindowGrid,
    WindowMap,
    area,
    by_level,
    fit_rows,
    follow_level,
    gather,
    held,
    indices_of,
    intersection,
    iou,
    join_heads,
    logits,
    merge_partial,
    roi_align,
    sample,
    scatter_,
    share_out,
    split_heads,
    wanted_tokens,
    window_map,
)
from eventful.ops.registry import BACKENDS, forced_backend, operation, use_backend, why_not
from eventful.ops.scratch import scratch

add_context_ = operation(_reference.add_context_)
add_held = operation(_reference.add_held)
add_norm = operation(_reference.add_norm)
align_regions = operation(_reference.align_regions)
attend = operation(_reference.attend)
attend_lse = operation(_reference.attend_lse)
attend_partial = operation(_reference.attend_partial)
attend_windows = operation(_reference.attend_windows)
carry = operation(_reference.carry)
changed_pixels = operation(_reference.changed_pixels)
contrast = operation(_reference.contrast)
differs = operation(_reference.differs)
error_norm = operation(_reference.error_norm)
estimate_error_ = operation(_reference.estimate_error_)
exchange_ = operation(_reference.exchange_)
follow_change_ = operation(_reference.follow_change_)
frame_score = operation(_reference.frame_score)
gate_error = operation(_reference.gate_error)
gate_rows = operation(_reference.gate_rows)
grey_picture = operation(_reference.grey_picture)
keep_apart = operation(_reference.keep_apart)
lift_tokens_ = operation(_reference.lift_tokens_)
match_blocks = operation(_reference.match_blocks)
pick = operation(_reference.pick)
recompute_ = operation(_reference.recompute_)
relative_logits = operation(_reference.relative_logits)
suppress = operation(_reference.suppress)
swap_rows_ = operation(_reference.swap_rows_)
take_slots = operation(_reference.take_slots)
update_maps_ = operation(_reference.update_maps_)
write_rows_ = operation(_reference.write_rows_)

__all__ = [
    "BACKENDS",
    "CELL",
    "REPORT",
    "SAMPLE",
    "UNIT",
    "ContextMemory",
    "ExactMemory",
    "LayerNorm",
    "Lift",
    "MapLayer",
    "MapLevels",
    "PickRule",
    "Picked",
    "Pool",
    "Ragged",
    "WindowGrid",
    "WindowMap",
    "add_context_",
    "add_held",
    "add_norm",
    "align_regions",
    "area",
    "attend",
    "attend_lse",
    "attend_partial",
    "attend_windows",
    "by_level",
    "carry",
    "changed_pixels",
    "contrast",
    "differs",
    "error_norm",
    "estimate_error_",
    "exchange_",
    "fit_rows",
    "follow_change_",
    "follow_level",
    "forced_backend",
    "frame_score",
    "gate_error",
    "gate_rows",
    "gather",
    "grey_picture",
    "held",
    "indices_of",
    "intersection",
    "iou",
    "join_heads",
    "keep_apart",
    "lift_tokens_",
    "logits",
    "match_blocks",
    "merge_partial",
    "operation",
    "pick",
    "recompute_",
    "relative_logits",
    "roi_align",
    "sample",
    "scatter_",
    "scratch",
    "share_out",
    "split_heads",
    "suppress",
    "swap_rows_",
    "take_slots",
    "update_maps_",
    "use_backend",
    "wanted_tokens",
    "why_not",
    "window_map",
    "write_rows_",
]
