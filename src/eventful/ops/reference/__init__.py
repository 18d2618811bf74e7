"""The tensor operations of an eventful step in plain PyTorch: readable, any device, the oracle.

Tokens are (B, N, D); heads are split as (B, H, N, d) only inside attention. Memories are
(S, N, D): with `slots`, stream b owns row slots[b]; without, row b. A trailing underscore
means an argument is written.
"""

from eventful.ops.reference.attention import (
    attend,
    attend_partial,
    logits,
    merge_partial,
    relative_logits,
    whole_bias,
)
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
from eventful.ops.reference.windows import WindowGrid, WindowMap, attend_windows, window_map

__all__ = [
    "CELL",
    "REPORT",
    "SAMPLE",
    "ExactMemory",
    "LayerNorm",
    "PickRule",
    "Picked",
    "WindowGrid",
    "WindowMap",
    "add_held",
    "add_norm",
    "attend",
    "attend_partial",
    "attend_windows",
    "carry",
    "error_norm",
    "exchange_",
    "follow_level",
    "follow_scene",
    "gate_error",
    "gate_rows",
    "gather",
    "grey_picture",
    "held",
    "indices_of",
    "join_heads",
    "logits",
    "lost_rows",
    "lost_tokens",
    "match_blocks",
    "merge_partial",
    "pick",
    "recompute_",
    "relative_logits",
    "sample",
    "scatter_",
    "split_heads",
    "swap_rows_",
    "take_slots",
    "wanted_tokens",
    "whole_bias",
    "window_map",
    "write_rows_",
]
