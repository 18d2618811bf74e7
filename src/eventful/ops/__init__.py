"""Tensor operations: one public function per operation, served by one of several backends."""

from eventful.ops import reference as _reference
from eventful.ops.reference import (
    CELL,
    REPORT,
    SAMPLE,
    UNIT,
    Changed,
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
    Weights,
    WindowGrid,
    WindowMap,
    area,
    border_bias,
    box_rows,
    boxes_inside,
    by_level,
    candidates,
    centred,
    clip_each,
    decode_boxes,
    differing,
    fit_rows,
    follow_level,
    gather,
    held,
    indices_of,
    intersection,
    iou,
    join_heads,
    level_parts,
    logits,
    merge_partial,
    nonempty,
    pyramid_level,
    roi_align,
    sample,
    scatter_,
    share_out,
    split_heads,
    table,
    wanted_tokens,
    window_map,
    window_too_wide,
)
from eventful.ops.registry import (
    BACKENDS,
    fixed_shapes,
    forced_backend,
    operation,
    use_backend,
    why_not,
)
from eventful.ops.scratch import TemporaryBuffers, scratch

add_context_ = operation(_reference.add_context_)
add_held = operation(_reference.add_held)
add_norm = operation(_reference.add_norm)
align_regions = operation(_reference.align_regions)
attend = operation(_reference.attend)
attend_lse = operation(_reference.attend_lse)
attend_partial = operation(_reference.attend_partial)
attend_windows = operation(_reference.attend_windows)
best_boxes = operation(_reference.best_boxes)
carry = operation(_reference.carry)
changed_pixels = operation(_reference.changed_pixels)
contrast = operation(_reference.contrast)
differs = operation(_reference.differs)
error_norm = operation(_reference.error_norm)
estimate_error_ = operation(_reference.estimate_error_)
exchange_ = operation(_reference.exchange_)
fill_slots_ = operation(_reference.fill_slots_)
follow_change_ = operation(_reference.follow_change_)
frame_score = operation(_reference.frame_score)
gate_error = operation(_reference.gate_error)
gate_rows = operation(_reference.gate_rows)
grey_picture = operation(_reference.grey_picture)
keep_apart = operation(_reference.keep_apart)
level_logits = operation(_reference.level_logits)
lift_tokens_ = operation(_reference.lift_tokens_)
list_changed = operation(_reference.list_changed)
match_blocks = operation(_reference.match_blocks)
norm_relu = operation(_reference.norm_relu)
pick = operation(_reference.pick)
proposal_boxes = operation(_reference.proposal_boxes)
recompute_ = operation(_reference.recompute_)
refine_boxes = operation(_reference.refine_boxes)
region_levels = operation(_reference.region_levels)
region_scores = operation(_reference.region_scores)
relative_logits = operation(_reference.relative_logits)
relative_logits_all = operation(_reference.relative_logits_all)
renew_rows_ = operation(_reference.renew_rows_)
suppress = operation(_reference.suppress)
swap_rows_ = operation(_reference.swap_rows_)
take_candidates = operation(_reference.take_candidates)
take_found = operation(_reference.take_found)
take_slots = operation(_reference.take_slots)
update_maps_ = operation(_reference.update_maps_)
write_rows_ = operation(_reference.write_rows_)


__all__ = [
    "BACKENDS",
    "CELL",
    "REPORT",
    "SAMPLE",
    "UNIT",
    "Changed",
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
    "TemporaryBuffers",
    "Weights",
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
    "best_boxes",
    "border_bias",
    "box_rows",
    "boxes_inside",
    "by_level",
    "candidates",
    "carry",
    "centred",
    "changed_pixels",
    "clip_each",
    "contrast",
    "decode_boxes",
    "differing",
    "differs",
    "error_norm",
    "estimate_error_",
    "exchange_",
    "fill_slots_",
    "fit_rows",
    "fixed_shapes",
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
    "level_logits",
    "level_parts",
    "lift_tokens_",
    "list_changed",
    "logits",
    "match_blocks",
    "merge_partial",
    "nonempty",
    "norm_relu",
    "operation",
    "pick",
    "proposal_boxes",
    "pyramid_level",
    "recompute_",
    "refine_boxes",
    "region_levels",
    "region_scores",
    "relative_logits",
    "relative_logits_all",
    "renew_rows_",
    "roi_align",
    "sample",
    "scatter_",
    "scratch",
    "share_out",
    "split_heads",
    "suppress",
    "swap_rows_",
    "table",
    "take_candidates",
    "take_found",
    "take_slots",
    "update_maps_",
    "use_backend",
    "wanted_tokens",
    "why_not",
    "window_map",
    "window_too_wide",
    "write_rows_",
]
