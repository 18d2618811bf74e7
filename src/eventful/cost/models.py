"""The paper's two systems as shapes by hand, and what they cost over a clip or a video.

`eventful.models.shapes` reads the same shapes off the modules themselves; a test holds the two
against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from eventful.cost.counting import BlockShape, BlockWork, Operations, Rule, count_backbone

_WIDTH, _HEADS, _DEPTH, _PATCH = 768, 12, 12, 16

VITDET_GLOBAL = (2, 5, 8, 11)
VITDET_WINDOW = (14, 14)
# Fitted: the paper does not state it. With 269 to 271 every row of Table C prints as published.
CLIP_FRAMES = 270

VIVIT_VIEWS = 12
VIVIT_STEPS = 16
VIVIT_TEMPORAL_DEPTH = 4


def vitdet_b(size: int, *, pool: int = 1) -> tuple[BlockShape, ...]:
    """ViTDet-B on `size` x `size` pixels; `pool` applies to its global blocks."""
    side = size // _PATCH
    windowed = _plain(side * side, grid=(side, side), window=VITDET_WINDOW, relative=True)
    everywhere = _plain(side * side, grid=(side, side), relative=True, pool=pool)
    return tuple(everywhere if i in VITDET_GLOBAL else windowed for i in range(_DEPTH))


def vivit_b_spatial(size: int) -> tuple[BlockShape, ...]:
    """The spatial model of factorised ViViT-B: patch tokens and a class token."""
    return (_plain((size // _PATCH) ** 2 + 1),) * _DEPTH


def vivit_b_temporal() -> tuple[BlockShape, ...]:
    """The temporal model of ViViT-B, never eventful: one token per step and a class token."""
    return (_plain(VIVIT_STEPS + 1),) * VIVIT_TEMPORAL_DEPTH


def count_clip(
    shapes: Sequence[BlockShape],
    rule: Rule | None = None,
    work: BlockWork | None = None,
    *,
    frames: int = CLIP_FRAMES,
) -> Operations:
    """A clip whose first frame is a flush and whose other frames do `work` in every block."""
    flush = count_backbone(shapes)
    if rule is None or work is None:
        return flush * frames
    return flush + count_backbone(shapes, rule, [work] * len(shapes)) * (frames - 1)


def count_video(
    spatial: Sequence[BlockShape],
    temporal: Sequence[BlockShape],
    rule: Rule | None = None,
    work: BlockWork | None = None,
) -> Operations:
    """One video through ViViT: each view flushes its first step, then runs the temporal model."""
    steps = count_clip(spatial, rule, work, frames=VIVIT_STEPS)
    return (steps + count_backbone(temporal)) * VIVIT_VIEWS


def _plain(
    tokens: int,
    grid: tuple[int, int] | None = None,
    window: tuple[int, int] | None = None,
    relative: bool = False,
    pool: int = 1,
) -> BlockShape:
    return BlockShape.plain(
        tokens=tokens,
        dim=_WIDTH,
        heads=_HEADS,
        grid=grid,
        window=window,
        relative=relative,
        pool=pool,
    )
