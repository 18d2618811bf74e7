"""Whose forward a module runs: adapters rebuild blocks from their parts, so they must know."""

from __future__ import annotations

from torch import nn


def forward_of(module: nn.Module) -> str:
    """Full name of the class whose `forward` runs when `module` is called.

    A subclass without a forward of its own goes by its parent's name. One that was replaced on
    the instance, as code that records attention maps or offloads weights does, has none: "".
    """
    replaced = vars(module).get("forward")
    # eventful's own forward knows its block; it stands in for the class's.
    if replaced is not None and getattr(replaced, "block", None) is not module:
        return ""
    forward = type(module).forward
    return f"{forward.__module__}.{forward.__qualname__.removesuffix('.forward')}"
