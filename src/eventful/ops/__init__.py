"""Tensor operations: one public function per operation, served by one of several backends."""

from eventful.ops import reference as _reference
from eventful.ops.reference import (
    Picked,
    PickRule,
    WindowGrid,
    WindowMap,
    gather,
    held,
    join_heads,
    logits,
    merge_partial,
    scatter_,
    split_heads,
    wanted_tokens,
    window_map,
)
from eventful.ops.registry import BACKENDS, forced_backend, operation, use_backend, why_not

add_norm = operation(_reference.add_norm)
attend = operation(_reference.attend)
attend_partial = operation(_reference.attend_partial)
attend_windows = operation(_reference.attend_windows)
error_norm = operation(_reference.error_norm)
pick = operation(_reference.pick)
relative_logits = operation(_reference.relative_logits)
take_slots = operation(_reference.take_slots)
write_rows_ = operation(_reference.write_rows_)

__all__ = [
    "BACKENDS",
    "PickRule",
    "Picked",
    "WindowGrid",
    "WindowMap",
    "add_norm",
    "attend",
    "attend_partial",
    "attend_windows",
    "error_norm",
    "forced_backend",
    "gather",
    "held",
    "join_heads",
    "logits",
    "merge_partial",
    "operation",
    "pick",
    "relative_logits",
    "scatter_",
    "split_heads",
    "take_slots",
    "use_backend",
    "wanted_tokens",
    "why_not",
    "window_map",
    "write_rows_",
]
