"""Tensor operations: one public function per operation."""

from eventful.ops.eager import attend, attend_partial
from eventful.ops.reference import (
    error_norm,
    gather,
    join_heads,
    logits,
    merge_partial,
    relative_bias,
    scatter_,
    split_heads,
)

__all__ = [
    "attend",
    "attend_partial",
    "error_norm",
    "gather",
    "join_heads",
    "logits",
    "merge_partial",
    "relative_bias",
    "scatter_",
    "split_heads",
]
