"""Whose forward a module runs.

Adapters rebuild a block from its parts, so they must know that the block computes what its library
wrote, and not what a subclass or a replaced method does.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from eventful.surgery.adapter import Foreign, Mismatch


def forward_of(module: nn.Module) -> str:
    """Full name of the class whose `forward` runs when `module` is called.

    For a subclass without its own forward this is the parent's name. It is "" if a forward was set
    on the instance, as some code does to keep attention maps or to offload weights.
    """
    replaced = vars(module).get("forward")
    # eventful's own forward has the block as an attribute and calls the class's forward.
    if replaced is not None and getattr(replaced, "block", None) is not module:
        return ""
    forward = type(module).forward
    return f"{forward.__module__}.{forward.__qualname__.removesuffix('.forward')}"


def known_attention(block: Foreign, blocks: Sequence[str], attentions: Sequence[str]) -> Foreign:
    """A block's attention, if both run a forward that the adapter describes.

    Args:
        blocks, attentions: full names of the classes whose forward that may be.
    """
    if forward_of(block) not in blocks:
        raise Mismatch(f"its forward is not that of {_listed(blocks)}: attention, then MLP")
    attention = block.attn
    if forward_of(attention) not in attentions:
        raise Mismatch(f"its {type(attention).__name__} is not {_listed(attentions)}")
    if getattr(attention, "gate", None) is not None:
        raise Mismatch("its attention output is gated by the block's input")
    return attention


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names)
