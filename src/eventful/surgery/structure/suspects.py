"""Parts of a block that a description has no place for, to be named in a refusal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from eventful.surgery.structure.tape import is_linear

_TABLES = re.compile(r"bias_table|attention_biases|rel_pos|relative|cpb")
_POOLS = ("q_pool", "q_stride", "pool_q", "pool_k", "sr", "mask_unit_attn")
_MOST = 3


def suspects(block: nn.Module) -> str:
    """What is unusual about a block, with the names of the parts; empty if nothing is."""
    found = list(dict.fromkeys(_found(block)))[:_MOST]
    return f". It has {', '.join(found)}" if found else ""


def _found(block: nn.Module) -> Iterator[str]:
    for name, module in block.named_modules():
        dot = f"{name}." if name else ""
        if _positive(getattr(module, "shift_size", 0)):
            yield f"shifted windows (`{dot}shift_size`)"
        elif _positive(getattr(module, "window_size", 0)):
            yield f"windows (`{dot}window_size`)"
        for key in _POOLS:
            if isinstance(getattr(module, key, None), nn.Module) or _pools(module, key):
                yield f"pooled queries or keys (`{dot}{key}`)"
        for key, _ in module.named_parameters(recurse=False):
            if _TABLES.search(key):
                yield f"a bias by position (`{dot}{key}`)"
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield f"a convolution (`{name}`)"
        heads = getattr(module, "num_heads", None)
        for key, child in module.named_children():
            if heads and is_linear(child) and child.in_features == heads == child.out_features:
                yield f"a layer across heads (`{dot}{key}`)"
        if hasattr(module, "temperature") or "channel" in type(module).__name__.lower():
            yield f"attention over channels (`{name or type(module).__name__}`)"
        if "gating_param" in module._parameters:
            yield f"gated positional attention (`{dot}gating_param`)"


def _pools(module: nn.Module, key: str) -> bool:
    value = getattr(module, key, None)
    sides = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(side, int) and side > 1 for side in sides)


def _positive(value: object) -> bool:
    sides = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(side, int) and side > 0 for side in sides)
