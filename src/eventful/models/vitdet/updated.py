"""The pyramid and the proposal network in a stream: only what a changed token reaches is computed.

Of each level two maps are kept: what enters its 3 x 3 convolution, and its output. Of the proposal
network what its first convolution made, and the predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from eventful import ops
from eventful.ops import Lift, MapLayer, MapLevels
from eventful.rules.local import HeadMemory, conv_taps, lift_weight

if TYPE_CHECKING:
    from eventful.models.vitdet.pyramid import ConvNorm, SimpleFeaturePyramid
    from eventful.models.vitdet.rpn import RPN

SCALES = (4.0, 2.0, 1.0, 0.5, 0.25)  # pixels of p2 to p6 to a token side
REACH_MAPS, _REACH_MID, _REACH_OUT = 1, 2, 3  # of a token, in pixels of each level


class UpdatedMaps(list[Tensor]):
    """The maps p2 to p6 (B, C, h, w) as views of a stream's memory, which the next frame changes.

    Attributes:
        name: of the pyramid in the model, whose memory `name/maps` (S, P, C) they are.
        changed: (B, h, w) tokens that changed since the maps of the last frame.
        levels: how the maps lie in the memory.
    """

    def __init__(
        self, maps: Sequence[Tensor], name: str, changed: Tensor, levels: MapLevels
    ) -> None:
        super().__init__(maps)
        self.name, self.changed, self.levels = name, changed, levels


def pyramid_levels(grid: tuple[int, int]) -> MapLevels:
    """Sizes of p2 to p6 over a grid (h, w) of tokens."""
    high, wide = grid
    half = (high // 2, wide // 2)
    fine = [(high * scale, wide * scale) for scale in (4, 2, 1)]
    return MapLevels((*fine, half, ((half[0] + 1) // 2, (half[1] + 1) // 2)))


def update_pyramid(pyramid: SimpleFeaturePyramid, memory: HeadMemory, image: Tensor) -> UpdatedMaps:
    """The maps of features (B, D, h, w), brought up to date."""
    grid = (image.shape[2], image.shape[3])
    levels = pyramid_levels(grid)
    tokens = image.flatten(2).transpose(1, 2)
    changed = memory.compare(tokens).unflatten(1, grid)
    pre = _update_inputs(pyramid, memory, tokens, changed, levels)
    moved = ops.changed_pixels(changed, levels, SCALES, REACH_MAPS)
    maps = memory.open("maps", moved, pre.shape[2], pre)
    convolved = MapLevels(levels.sizes[:4])  # p6 is made of p5
    smoothed = ops.list_changed(moved, convolved.sizes)
    layer, slots = _smooth_layer(pyramid, memory), memory.state.slots
    ops.update_maps_(maps, pre, layer, smoothed, convolved, slots)
    memory.note("maps", layer.weight[0].numel(), convolved.pixels, smoothed.count)
    _subsample_(maps, moved, levels, slots)
    held = memory.maps("maps")
    views = [levels.part(held, level).permute(0, 3, 1, 2) for level in range(len(SCALES))]
    return UpdatedMaps(views, memory.name, changed, levels)


def _smooth_layer(pyramid: SimpleFeaturePyramid, memory: HeadMemory) -> MapLayer:
    """The 3 x 3 convolutions of p2 to p5 with their norms."""

    def make() -> MapLayer:
        stages: list[Any] = [pyramid.p2, pyramid.p3, pyramid.p4, pyramid.p5]
        convs: list[ConvNorm] = [stage[-1] for stage in stages]
        norm = (
            torch.stack([conv.norm.weight for conv in convs]),
            torch.stack([conv.norm.bias for conv in convs]),
            convs[0].norm.eps,
        )
        return MapLayer(torch.stack([conv_taps(conv) for conv in convs]), norm=norm)

    layer: MapLayer = memory.constant("smooth", make)
    return layer


def _update_inputs(
    pyramid: SimpleFeaturePyramid,
    memory: HeadMemory,
    tokens: Tensor,
    changed: Tensor,
    levels: MapLevels,
) -> Tensor:
    """What enters the 3 x 3 convolutions of p2 to p5, brought up to date: (S, P, C)."""
    grid, slots = (changed.shape[1], changed.shape[2]), memory.state.slots
    finer = changed.repeat_interleave(2, 1).repeat_interleave(2, 2)
    halved = ops.changed_pixels(changed, MapLevels((levels.sizes[3],)), (0.5,), 0)
    first, *lifts = memory.constant("lifts", lambda: _lifts(pyramid))
    every = ops.changed_pixels(changed, levels, SCALES, 0)
    pre = memory.open("pre", every, lifts[0].weight.shape[1] // 4, tokens)
    dim = first.weight.shape[1] // 4
    room = ops.scratch("pyramid p2", (len(tokens), 4 * tokens.shape[1], dim), tokens)
    between = tokens.new_empty(len(tokens), 4 * tokens.shape[1], dim) if room is None else room
    moved = ops.list_changed(changed.flatten(1), (grid,))
    ops.lift_tokens_(between, tokens, first, moved, grid, 0)
    memory.note("p2 first", first.weight.numel(), tokens.shape[1], moved.count)
    inputs = (
        ("p2", between, ops.list_changed(finer.flatten(1), levels.sizes[1:2])),
        ("p3", tokens, moved),
        ("p4", tokens, moved),
        ("p5", _pooled(tokens, grid), ops.list_changed(halved, levels.sizes[3:4])),
    )
    for level, (name, x, some) in enumerate(inputs):
        lift, (size,) = lifts[level], some.sizes
        ops.lift_tokens_(pre, x, lift, some, size, levels.offsets[level], slots)
        memory.note(name, lift.weight.numel(), some.mask.shape[1], some.count)
    return pre


def _pooled(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """The largest of each 2 x 2 tokens (B, n, D), in rows; a last odd row or column is left out."""
    high, wide = grid[0] // 2, grid[1] // 2
    even = tokens.unflatten(1, grid)[:, : 2 * high, : 2 * wide]
    taller = torch.maximum(even[:, ::2], even[:, 1::2])  # faster than a reduction over four
    return torch.maximum(taller[:, :, ::2], taller[:, :, 1::2]).flatten(1, 2)


def _lifts(pyramid: SimpleFeaturePyramid) -> tuple[Lift, ...]:
    """Products: the first of p2, then what makes the input of each 3 x 3 convolution.

    A transposed convolution and the 1 x 1 convolution that follows it at once are one product.
    """
    p2, p3, p4, p5 = (
        cast(Any, stage) for stage in (pyramid.p2, pyramid.p3, pyramid.p4, pyramid.p5)
    )

    def norm(of: Any) -> tuple[Tensor, Tensor, float]:
        return of.weight, of.bias, of.eps

    return (
        Lift(*lift_weight(p2[0]), norm(p2[1]), gelu=True, scale=2),
        Lift(*lift_weight(p2[3], p2[4]), norm(p2[4].norm), scale=2),
        Lift(*lift_weight(p3[0], p3[1]), norm(p3[1].norm), scale=2),
        Lift(conv_taps(p4[0])[0], norm=norm(p4[0].norm)),
        Lift(conv_taps(p5[1])[0], norm=norm(p5[1].norm)),
    )


def _subsample_(maps: Tensor, moved: Tensor, levels: MapLevels, slots: Tensor | None) -> None:
    """p6: every other pixel of p5 (S, P, C), where `moved` (B, P)."""
    rows = ops.held(maps[:, levels.offsets[3] :], slots)
    tail = MapLevels(levels.sizes[3:])
    finer = tail.part(rows, 0)[:, ::2, ::2].flatten(1, 2)
    kept = torch.where(moved[:, levels.span(4), None], finer, rows[:, tail.span(1)])
    own = torch.arange(len(moved), device=maps.device) if slots is None else slots
    maps[:, levels.span(4)].index_copy_(0, own, kept)


def update_predictions(
    rpn: RPN, memory: HeadMemory, maps: UpdatedMaps
) -> tuple[Tensor, Tensor | None]:
    """Objectness and box codes of every anchor, brought up to date.

    Returns:
        (S, P, 5 * anchors), and the slots (B,) of the streams in it, None if it has a row for each.
    """
    state, levels = memory.state, maps.levels
    changed = memory.follow(maps.name, maps.changed)
    first, second, last = memory.constant("layers", lambda: _prediction_layers(rpn))
    moved = ops.changed_pixels(changed, levels, SCALES, _REACH_MID)
    mid = memory.update("mid", state.raw(f"{maps.name}/maps"), first, moved, levels)
    reached = ops.list_changed(
        ops.changed_pixels(changed, levels, SCALES, _REACH_OUT), levels.sizes
    )
    room = ops.scratch("rpn", mid.shape, mid)
    between = torch.empty_like(mid) if room is None else room
    ops.update_maps_(between, mid, second, reached, levels, state.slots)
    memory.note("second", second.weight[0].numel(), levels.pixels, reached.count)
    out = memory.update("out", between, last, reached, levels)
    return (out.clone(), None) if state.slots is None else (out, state.slots)


def _prediction_layers(rpn: RPN) -> tuple[MapLayer, MapLayer, MapLayer]:
    convs, ends = cast(Any, rpn.convs), cast(Any, (rpn.objectness, rpn.deltas))
    first, second = (MapLayer(conv_taps(conv)[None], conv.bias[None], relu=True) for conv in convs)
    weight = torch.cat([conv_taps(conv) for conv in ends], dim=-1)
    bias = torch.cat([conv.bias for conv in ends])
    return first, second, MapLayer(weight[None], bias[None])
