"""A box head in a step on a device: pixels stay in rows of channels from one layer to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful import ops
from eventful.rules.local import HeadMemory

if TYPE_CHECKING:
    from eventful.models.vitdet.heads import BoxStage
    from eventful.models.vitdet.pyramid import ConvNorm


@dataclass(frozen=True, eq=False)
class _Weights:
    """Weights in the order in which the pixels of a region lie: row by row, channels last."""

    convs: list[Tensor]
    fc: Tensor


def _prepared(stage: BoxStage) -> _Weights:
    convs = [cast("ConvNorm", conv) for conv in stage.convs]
    fc = stage.fc.weight
    if convs:
        channels = convs[-1].out_channels
        fc = fc.unflatten(1, (channels, -1)).transpose(1, 2).flatten(1).contiguous()
    kept = [conv.weight.contiguous(memory_format=torch.channels_last) for conv in convs]
    return _Weights(kept, fc)


def run_stage(
    stage: BoxStage, memory: HeadMemory, name: str, regions: Tensor
) -> tuple[Tensor, Tensor]:
    """What `stage(regions)` returns, with a norm and its ReLU in one operation.

    Args:
        name: of the stage, for its weights in another order, which are kept.
        regions: (n, C, 7, 7), channels last in memory.
    """
    if not len(stage.convs):
        made: tuple[Tensor, Tensor] = stage(regions)
        return made
    weights: _Weights = memory.constant((name, "weights"), lambda: _prepared(stage))
    x = regions
    for module, weight in zip(stage.convs, weights.convs, strict=True):
        conv = cast("ConvNorm", module)
        y = F.conv2d(x, weight, padding=conv.padding).permute(0, 2, 3, 1)
        norm = conv.norm
        rows = ops.norm_relu(y.flatten(0, 2), norm.weight, norm.bias, norm.eps)
        x = rows.view(y.shape).permute(0, 3, 1, 2)
    flat = x.permute(0, 2, 3, 1).flatten(1)
    return stage.ends(F.relu(F.linear(flat, weights.fc, stage.fc.bias)))
