"""The tensor operations of an eventful step in plain PyTorch: readable, any device, the oracle.

Tokens are (B, N, D); heads are split as (B, H, N, d) only inside attention. Memories are
(S, N, D): with `slots`, stream b owns row slots[b]; without, row b. A trailing underscore
means an argument is written.
"""

from eventful.ops.reference.attention import (
    attend,
    attend_lse,
    attend_partial,
    logits,
    merge_partial,
    relative_logits,
    whole_bias,
)
from eventful.ops.reference.context import ContextMemory, add_context_, context_part, key_bias
from eventful.ops.reference.exact import (
    ExactMemory,
    LayerNorm,
    add_held,
    exchange_,
    gate_error,
    gate_rows,
    lost_rows,
    recompute_,
)
from eventful.ops.reference.gates import (
    REPORT,
    SAMPLE,
    Picked,
    PickRule,
    error_norm,
    follow_level,
    follow_scene,
    pick,
    row_norm,
    sample,
    wanted_tokens,
)
from eventful.ops.reference.motion import (
    CELL,
    carry,
    grey_picture,
    lost_tokens,
    match_blocks,
)
from eventful.ops.reference.pool import Pool, share_out
from eventful.ops.reference.rows import (
    add_norm,
    gather,
    held,
    indices_of,
    join_heads,
    scatter_,
    split_heads,
    swap_rows_,
    take_slots,
    write_rows_,
)
from eventful.ops.reference.scores import (
    UNIT,
    contrast,
    estimate_error_,
    follow_change_,
    frame_score,
    score_of,
)
from eventful.ops.reference.windows import WindowGrid, WindowMap, attend_windows, window_map

__all__ = [
    "CELL",
    "REPORT",
    "SAMPLE",
    "UNIT",
    "ContextMemory",
    "ExactMemory",
    "LayerNorm",
    "PickRule",
    "Picked",
    "Pool",
    "WindowGrid",
    "WindowMap",
    "add_context_",
    "add_held",
    "add_norm",
    "attend",
    "attend_lse",
    "attend_partial",
    "attend_windows",
    "carry",
    "context_part",
    "contrast",
    "error_norm",
    "estimate_error_",
    "exchange_",
    "follow_change_",
    "follow_level",
    "follow_scene",
    "frame_score",
    "gate_error",
    "gate_rows",
    "gather",
    "grey_picture",
    "held",
    "indices_of",
    "join_heads",
    "key_bias",
    "logits",
    "lost_rows",
    "lost_tokens",
    "match_blocks",
    "merge_partial",
    "pick",
    "recompute_",
    "relative_logits",
    "row_norm",
    "sample",
    "scatter_",
    "score_of",
    "share_out",
    "split_heads",
    "swap_rows_",
    "take_slots",
    "wanted_tokens",
    "whole_bias",
    "window_map",
    "write_rows_",
]
