"""Finds lists of transformer blocks in a model, and the part of it that takes frames."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from eventful.surgery.structure.tape import is_linear

_NAME = re.compile(r"att(?:entio)?n|mhsa|msa\b", re.IGNORECASE)
_CHANNELS = 4  # most channels of a frame


@dataclass(frozen=True)
class BlockList:
    """A list of blocks that hold attention and other layers.

    Attributes:
        name: of the list in the model.
        frames: name of the smallest part around it that takes frames.
    """

    name: str
    frames: str


def block_lists(model: nn.Module, taken: list[str]) -> list[BlockList]:
    """The lists of blocks in a model, outside the parts whose names are `taken`."""
    inputs = [name for name, module in model.named_modules() if _is_stem(module)]
    if not inputs:
        inputs = [name for name, module in model.named_modules() if _embeds_flat(module)]
    found: list[BlockList] = []
    for name in _lists(model):
        if any(within(name, known) for known in taken):
            continue
        frames = _lowest(name, inputs)
        # A list beside a known trunk, such as a text encoder's, is fed by something else.
        if frames is None or any(within(known, frames) for known in taken):
            continue
        found.append(BlockList(name, frames))
    parts = {one.frames for one in found}
    return [
        one
        for one in found
        if not any(part != one.frames and within(part, one.frames) for part in parts)
    ]


def within(name: str, outer: str) -> bool:
    """Whether a module's name is that of another or lies inside it."""
    return outer == "" or name == outer or name.startswith(f"{outer}.")


def _lists(model: nn.Module) -> Iterator[str]:
    """The innermost lists whose children look like blocks."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and _holds_blocks(module)
    ]
    for name in found:
        if not any(other != name and within(other, name) for other in found):
            yield name


def _holds_blocks(module: nn.Module) -> bool:
    children = list(module.children())
    kinds = {type(child) for child in children if _looks_like_block(child)}
    return bool(children) and all(type(child) in kinds for child in children)


def _looks_like_block(module: nn.Module) -> bool:
    """Whether a module holds attention, and layers outside it."""
    attention = [name for name, part in module.named_modules() if _attends(part)]
    if "" in attention:
        return len([c for c in module.children() if is_linear(c)]) > 3 and not _named(module)
    if not attention:
        return False
    layers = [name for name, part in module.named_modules() if _is_layer(part)]
    return any(not any(within(name, known) for known in attention) for name in layers)


def _is_layer(module: nn.Module) -> bool:
    return is_linear(module) or isinstance(module, nn.Conv1d | nn.Conv2d)


def _named(module: nn.Module) -> bool:
    return _NAME.search(type(module).__name__) is not None and not _blocky(module)


def _blocky(module: nn.Module) -> bool:
    return re.search(r"block|layer", type(module).__name__, re.IGNORECASE) is not None


def _attends(module: nn.Module) -> bool:
    """Whether a module is attention by its name, or owns layers as attention does."""
    if isinstance(module, nn.MultiheadAttention) or _named(module):
        return True
    linears = [child for child in module.children() if isinstance(child, nn.Linear)]
    taken = {child.in_features for child in linears}
    # A layer that is three times as wide makes q, k and v, unless an MLP's next layer takes it.
    fused = [child for child in linears if child.out_features == 3 * child.in_features]
    if any(child.out_features not in taken for child in fused):
        return True
    sizes = [(child.in_features, child.out_features) for child in linears]
    return any(sizes.count(size) > 2 for size in sizes)


def _is_stem(module: nn.Module) -> bool:
    """Whether a module is the first convolution of a model of frames."""
    if not isinstance(module, nn.Conv2d):
        return False
    return module.in_channels <= _CHANNELS and max(module.kernel_size) > 1 and module.groups == 1


def _embeds_flat(module: nn.Module) -> bool:
    """Whether a module may be a linear layer over flattened patches of three channels."""
    if not isinstance(module, nn.Linear):
        return False
    side = (module.in_features / 3) ** 0.5
    return module.in_features >= 48 and side == int(side)


def _lowest(name: str, inputs: list[str]) -> str | None:
    """The smallest part around a list that also holds a first layer, which is not in the list."""
    outside = [one for one in inputs if not within(one, name)]
    part = name
    while part:
        part = part.rpartition(".")[0]
        if any(within(one, part) for one in outside):
            return part
    return None
