"""inspect: what `convert` would do to a model, without doing it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from eventful.config import PRESETS, Config
from eventful.cost.counting import BlockShape
from eventful.cost.footprint import state_bytes
from eventful.errors import ConfigError
from eventful.rules.kernels import dense_instead, missing_kernels, wide_windows
from eventful.surgery.adapters import Adapter
from eventful.surgery.heads import head_bytes
from eventful.surgery.matching import (
    BlockMatch,
    block_matches,
    known_trunks,
    mismatch_of,
    refuse_wrapped,
)
from eventful.surgery.wrappers import checked_model
from eventful.tokens.layout import TokenLayout


@dataclass(frozen=True)
class Inspection:
    """What `convert` would do to a model.

    Attributes:
        size: frame size (height, width) the numbers are for; None if there is no known trunk.
        tokens: N per frame, by trunk.
        state_bytes: bytes per stream, by preset, without tapped layers; with the maps of heads.
        on_gpu: how steps run on a CUDA device, by preset: `resident`, `dense` (every frame, because
            there are no kernels), or `host` (usually slower than dense).
        notes: what is to be said about it.
    """

    blocks: list[BlockMatch]
    size: tuple[int, int] | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    state_bytes: dict[str, int] = field(default_factory=dict)
    on_gpu: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def matched(self) -> int:
        """How many blocks can be made eventful."""
        return sum(block.matched for block in self.blocks)

    def __str__(self) -> str:
        if not self.blocks:
            return "No known vision transformer inside (docs/adapters.md)."
        families = ", ".join(sorted({block.adapter for block in self.blocks}))
        size = "x".join(map(str, self.size or ()))
        state = ", ".join(f"{name} {n / 1e6:,.1f} MB" for name, n in self.state_bytes.items())
        lines = [
            f"{self.matched} of {len(self.blocks)} blocks can be made eventful ({families}).",
            f"Tokens of a frame of {size} px: {sum(self.tokens.values())}.",
            f"State of one stream: {state}.",
        ]
        missed = [block for block in self.blocks if not block.matched]
        lines += [f"Not {block.name} ({block.type}): {block.reason}." for block in missed]
        lines += [f"On a GPU: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__  # a notebook shows this


def inspect(model: nn.Module, size: tuple[int, int] | int | None = None) -> Inspection:
    """A dry run of `convert`: which blocks match, which do not and why, and the size of the state.

    Args:
        size: frame size in pixels; the model's own if left out.
    """
    refuse_wrapped(checked_model(model, "inspect"))
    tokens: dict[str, int] = {}
    layouts: dict[str, TokenLayout] = {}
    total = dict.fromkeys(PRESETS, 0)
    pixels = None if size is None else _checked_size(size)
    for name, trunk, adapter in known_trunks(model):
        here = pixels or adapter.default_size(trunk)
        pixels = here if any(here) else None  # a trunk that is refused may have no size
        layout = layouts[name] = adapter.layout(trunk, here)
        tokens[name] = layout.tokens
        for preset in PRESETS:
            total[preset] += _trunk_bytes(trunk, adapter, layout, Config.preset(preset))
            if len(tokens) == 1:  # heads are fed by the first trunk
                total[preset] += _heads_bytes(model, trunk, layout, Config.preset(preset))
    if not tokens:
        return Inspection(block_matches(model), pixels, tokens, total)
    ways, notes = _ways_on_gpu(model, layouts)
    return Inspection(block_matches(model), pixels or (0, 0), tokens, total, ways, notes)


def _ways_on_gpu(
    model: nn.Module, layouts: dict[str, TokenLayout]
) -> tuple[dict[str, str], list[str]]:
    """How steps of each preset run on a CUDA device, and what is to be said about it."""
    found = [
        (adapter.spec(trunk, block), layouts[name])
        for name, trunk, adapter in known_trunks(model)
        for _, block in adapter.blocks(trunk)
        if mismatch_of(adapter, trunk, block) is None
    ]
    on_host = wide_windows(found) is not None or len(layouts) > 1
    plain = all(spec.plain for spec, _ in found)
    ways, notes = {}, []
    for preset in PRESETS:
        config = Config.preset(preset)
        why = dense_instead(config, global_only=lambda: plain)
        missing = missing_kernels(config, global_only=lambda: plain)
        ways[preset] = "host" if missing or on_host else "resident"
        if why is not None:
            ways[preset] = "dense"
            notes.append(why)
    return ways, notes


def _checked_size(size: object) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else size
    sides = tuple(pair) if isinstance(pair, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ConfigError(f"size is one side or (height, width) in pixels, got {size!r}.")
    return sides[0], sides[1]


def block_shapes(
    model: nn.Module, size: tuple[int, int] | int, config: Config
) -> tuple[BlockShape, ...]:
    """Shapes of the blocks that `convert` would convert, in order, for counting operations.

    Args:
        size: frame size in pixels.
    """
    pixels = _checked_size(size)
    return tuple(
        shape
        for _, trunk, adapter in known_trunks(model)
        for shape in _trunk_shapes(trunk, adapter, adapter.layout(trunk, pixels), config)
    )


def _trunk_shapes(
    trunk: nn.Module, adapter: Adapter, layout: TokenLayout, config: Config
) -> list[BlockShape]:
    return [
        adapter.spec(trunk, block).shape(layout, config)
        for _, block in adapter.blocks(trunk)
        if mismatch_of(adapter, trunk, block) is None
    ]


def _trunk_bytes(trunk: nn.Module, adapter: Adapter, layout: TokenLayout, config: Config) -> int:
    return state_bytes(_trunk_shapes(trunk, adapter, layout, config), config, _dtype(trunk))


def _heads_bytes(model: nn.Module, trunk: nn.Module, layout: TokenLayout, config: Config) -> int:
    return head_bytes(model, layout.grid, config, _dtype(trunk))


def _dtype(trunk: nn.Module) -> torch.dtype:
    return next((p.dtype for p in trunk.parameters() if p.is_floating_point()), torch.float32)
