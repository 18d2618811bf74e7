"""RoIAlign over several maps in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_MAPS = 4


@triton.jit
def _taps(at, length):
    """The two pixels a coordinate lies between, and their weights."""
    inside = tl.where((at >= -1.0) & (at <= length), 1.0, 0.0)
    at = tl.minimum(tl.maximum(at, 0.0), length - 1.0)
    low = tl.floor(at)
    share = at - low
    first = low.to(tl.int32)
    return first, tl.minimum(first + 1, length - 1), (1.0 - share) * inside, share * inside


@triton.jit
def _align_regions(
    a, b, c, d, boxes, levels, out, per_image, channels,
    ha, hb, hc, hd, wa, wb, wc, wd, ia, ib, ic, ie, sa, sb, sc, sd,
    OUTPUT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One bin of one region, all channels."""
    program = tl.program_id(0)
    region = program // (OUTPUT * OUTPUT)
    cell = program % (OUTPUT * OUTPUT)
    level = tl.load(levels + region).to(tl.int32)
    features, height, width, image, scale = a, ha, wa, ia, sa
    if level == 1:
        features, height, width, image, scale = b, hb, wb, ib, sb
    if level == 2:
        features, height, width, image, scale = c, hc, wc, ic, sc
    if level == 3:
        features, height, width, image, scale = d, hd, wd, ie, sd
    x1 = tl.load(boxes + region * 4).to(tl.float32) * scale - 0.5
    y1 = tl.load(boxes + region * 4 + 1).to(tl.float32) * scale - 0.5
    x2 = tl.load(boxes + region * 4 + 2).to(tl.float32) * scale - 0.5
    y2 = tl.load(boxes + region * 4 + 3).to(tl.float32) * scale - 0.5
    side_x, side_y = tl.div_rn(x2 - x1, 1.0 * OUTPUT), tl.div_rn(y2 - y1, 1.0 * OUTPUT)
    # A comparison with NaN is false: such boxes have no samples.
    fine = (level >= 0) & (side_x > 0) & (side_y > 0) & (side_x < 1e9) & (side_y < 1e9)
    across = tl.where(fine, tl.ceil(side_x), 0.0).to(tl.int32)
    down = tl.where(fine, tl.ceil(side_y), 0.0).to(tl.int32)
    column = tl.arange(0, CHANNELS)
    inside = column < channels
    start = features + (region // per_image).to(tl.int64) * image + column
    total = tl.zeros((CHANNELS,), dtype=tl.float32)
    for j in range(0, down):
        part = tl.div_rn(j + 0.5, down.to(tl.float32))
        y = y1 + ((cell // OUTPUT).to(tl.float32) + part) * side_y
        top, bottom, top_weight, bottom_weight = _taps(y, height)
        for i in range(0, across):
            part = tl.div_rn(i + 0.5, across.to(tl.float32))
            x = x1 + ((cell % OUTPUT).to(tl.float32) + part) * side_x
            left, right, left_weight, right_weight = _taps(x, width)
            upper = (top * width).to(tl.int64)
            lower = (bottom * width).to(tl.int64)
            value = tl.load(start + (upper + left) * channels, mask=inside, other=0.0)
            total += value.to(tl.float32) * (top_weight * left_weight)
            value = tl.load(start + (upper + right) * channels, mask=inside, other=0.0)
            total += value.to(tl.float32) * (top_weight * right_weight)
            value = tl.load(start + (lower + left) * channels, mask=inside, other=0.0)
            total += value.to(tl.float32) * (bottom_weight * left_weight)
            value = tl.load(start + (lower + right) * channels, mask=inside, other=0.0)
            total += value.to(tl.float32) * (bottom_weight * right_weight)
    total = total / tl.maximum(across * down, 1).to(tl.float32)
    at = out + program.to(tl.int64) * channels + column
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def align_regions(
    maps: tuple[Tensor, ...],
    scales: tuple[float, ...],
    boxes: Tensor,
    level: Tensor,
    output: int,
) -> Tensor:
    """See `reference.align_regions`."""
    channels, regions = maps[0].shape[-1], level.numel()
    out = torch.empty(regions, output, output, channels, dtype=maps[0].dtype, device=maps[0].device)
    if not out.numel():
        return out
    spare = MOST_MAPS - len(maps)
    maps, scales = maps + maps[:1] * spare, scales + scales[:1] * spare
    block = triton.next_power_of_2(channels)
    _align_regions[(regions * output * output,)](
        *maps, boxes, level, out, level.shape[1], channels,
        *(part.shape[1] for part in maps), *(part.shape[2] for part in maps),
        *(part.stride(0) for part in maps), *scales,
        OUTPUT=output, CHANNELS=block, num_warps=max(1, min(4, block // 128)),
    )  # fmt: skip
    return out
