"""The region proposal network: class-independent object candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from eventful import ops
from eventful.models.vitdet import boxes as box
from eventful.models.vitdet.regions import suppress
from eventful.models.vitdet.updated import UpdatedMaps, pyramid_levels, update_predictions
from eventful.rules.local import HeadMemory, plain_parts

ANCHOR_SIZES = (32, 64, 128, 256, 512)
ANCHOR_RATIOS = (0.5, 1.0, 2.0)
STRIDES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Predictions:
    """Predictions for every anchor, by level.

    Attributes:
        anchors: (n, 4) each.
        logits: (B, n) each, objectness.
        codes: (B, n, 4) each, boxes relative to the anchors.
    """

    anchors: list[Tensor]
    logits: list[Tensor]
    codes: list[Tensor]


# For those who run the network elsewhere, as a function of tensors (`eventful.bench.dense`).
pytree.register_pytree_node(
    Predictions,
    lambda found: ([found.anchors, found.logits, found.codes], None),
    lambda values, _: Predictions(*values),
    serialized_type_name="eventful.models.vitdet.rpn.Predictions",
)


@dataclass(frozen=True)
class PredictionRows:
    """The same in a step of a stream: views of its memory, which the next frame changes.

    Attributes:
        rows: (S, P, 5 * anchors) of each pixel of all levels the logits, then the codes.
        slots: (B,) the row of each image; None if image b has row b.
        levels: how the pixels lie.
    """

    rows: Tensor
    slots: Tensor | None
    levels: ops.MapLevels

    @property
    def anchors(self) -> list[Tensor]:
        """(n, 4) of each level."""
        return anchors_of(self.levels.sizes, self.rows.device)

    @property
    def logits(self) -> list[Tensor]:
        """(B, n) of each level, as copies."""
        return ops.level_parts(ops.held(self.rows, self.slots), self.levels)[0]

    @property
    def codes(self) -> list[Tensor]:
        """(B, n, 4) of each level, as copies."""
        return ops.level_parts(ops.held(self.rows, self.slots), self.levels)[1]


# Of the first few sizes, all levels in one. None is given up again: recorded work may read it for
# ever.
_anchors: dict[tuple[Any, torch.device], Tensor] = {}
_MOST_ANCHORS = 8

Grids = tuple[tuple[int, int], ...]


def all_anchors(grids: Grids, device: torch.device) -> Tensor:
    """The anchors (n, 4) of maps of these sizes (h, w), level after level; usually made once."""
    known = _anchors.get((grids, device))
    if known is not None:
        return known
    with torch.inference_mode(False):
        # Sizes are powers of two: a product with one is not rounded.
        unit = box.cell_anchors(1.0, ANCHOR_RATIOS, device)
        parts = zip(ANCHOR_SIZES, grids, STRIDES, strict=True)
        made = torch.cat(
            [box.grid_anchors(size * unit, grid, stride) for size, grid, stride in parts]
        )
    # Work that is being recorded has no value before its first replay, and compiled code no memory.
    recorded = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    plain = type(made) is Tensor and not torch.compiler.is_compiling()
    if plain and not recorded and len(_anchors) < _MOST_ANCHORS:
        _anchors[grids, device] = made
    return made


def anchors_of(grids: Grids, device: torch.device) -> list[Tensor]:
    """The anchors (n, 4) of each level of maps of these sizes (h, w)."""
    counts = [len(ANCHOR_RATIOS) * high * wide for high, wide in grids]
    return list(all_anchors(grids, device).split(counts))


class RPN(nn.Module):
    """Two convolutions shared by all levels, then objectness and box codes per anchor.

    Args:
        keep_before: proposals of each level that enter NMS, in training and in use.
        keep_after: proposals that leave it, in training and in use.
    """

    coder = box.BoxCoder()

    def __init__(
        self,
        channels: int = 256,
        *,
        keep_before: tuple[int, int] = (2000, 1000),
        keep_after: tuple[int, int] = (1000, 1000),
        nms_threshold: float = 0.7,
    ) -> None:
        super().__init__()
        anchors = len(ANCHOR_RATIOS)
        self.keep_before, self.keep_after = keep_before, keep_after
        self.nms_threshold = nms_threshold
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.objectness = nn.Conv2d(channels, anchors, 1)
        self.deltas = nn.Conv2d(channels, 4 * anchors, 1)
        for layer in (*self.convs, self.objectness, self.deltas):
            nn.init.trunc_normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, maps: Sequence[Tensor]) -> Predictions:
        """Predictions on the maps p2 to p6."""
        grids = tuple((features.shape[2], features.shape[3]) for features in maps)
        found = Predictions(anchors_of(grids, maps[0].device), [], [])
        for x in maps:
            for conv in self.convs:
                x = F.relu(conv(x))
            codes = self.deltas(x).unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2)
            found.logits.append(self.objectness(x).permute(0, 2, 3, 1).flatten(1).float())
            found.codes.append(codes.reshape(len(x), -1, 4).float())
        return found

    def step_forward(self, memory: HeadMemory, maps: Sequence[Tensor]) -> PredictionRows | None:
        """`forward` in a step of a stream: only what a changed token reaches is computed."""
        parts = (nn.ModuleList, nn.Conv2d)
        if not isinstance(maps, UpdatedMaps) or not plain_parts(self, parts):
            return None
        return PredictionRows(*update_predictions(self, memory, maps), maps.levels)

    def step_bytes(self, grid: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes held for one stream with a grid (h, w) of tokens."""
        channels = self.objectness.in_channels + 5 * len(ANCHOR_RATIOS)
        return pyramid_levels(grid).pixels * channels * dtype.itemsize + 8

    @torch.no_grad()
    def propose(self, found: Predictions | PredictionRows, sizes: Tensor) -> box.Padded:
        """The best boxes of each image, inside it, the best first.

        Args:
            sizes: (B, 2), height and width of each image.
        """
        boxes, valid, scores = self._best(found, sizes)
        kept = suppress(boxes.flatten(0, 1), valid.flatten(0, 1), self.nms_threshold)
        kept = kept.view_as(valid).flatten(1)
        limit = self._counts()[1]
        return box.Padded(*ops.best_boxes(boxes.flatten(1, 2), scores.flatten(1), kept, limit))

    def _counts(self) -> tuple[int, int]:
        """Proposals of a level that enter NMS, and those of an image that leave it."""
        use = 0 if self.training else 1
        return self.keep_before[use], self.keep_after[use]

    def _best(
        self, found: Predictions | PredictionRows, sizes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The n best of each level: boxes (B, levels, n, 4), which are one, and their logits.

        Levels with fewer are filled up: their last logits are -inf.
        """
        count = self._counts()[0]
        if isinstance(found, PredictionRows) and _on_device(found.rows):
            rows, levels, slots = found.rows, found.levels, found.slots
            logits = ops.level_logits(rows, levels, slots)
            top, index = logits.topk(min(count, logits.shape[2]), dim=2)
            anchors = all_anchors(levels.sizes, rows.device)
            boxes, valid = ops.proposal_boxes(rows, top, index, anchors, levels, sizes, slots)
            return boxes, valid, top
        top, index = _best_of_levels(found.logits, count)
        codes, anchors = torch.cat(found.codes, dim=1), torch.cat(found.anchors)
        chosen = box.rows(codes, index.flatten(1))
        decoded = self.coder.decode(anchors[index].flatten(0, 2), chosen.flatten(0, 1))
        boxes, valid = ops.boxes_inside(decoded.unflatten(0, index.shape), top, sizes)
        return boxes, valid, top


def _on_device(rows: Tensor) -> bool:
    """Whether all levels are handled at once: a device needs as long for one as for all."""
    return rows.is_cuda or ops.forced_backend() is not None


def _best_of_levels(logits: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The `count` best logits of each level and their numbers among all anchors: (B, levels, n).

    Levels with fewer are filled up with -inf, at the first anchor.
    """
    most = min(count, max(part.shape[1] for part in logits))
    first = list(accumulate((part.shape[1] for part in logits), initial=0))
    if logits[0].is_cuda:  # all levels at once, see `_on_device`
        width = max(part.shape[1] for part in logits)
        shape = (len(logits[0]), len(logits), width)
        padded = torch.full(shape, -torch.inf, device=logits[0].device)
        for level, part in enumerate(logits):
            padded[:, level, : part.shape[1]] = part
        top, index = padded.topk(most, dim=2)
        for level, start in enumerate(first[1:-1], start=1):
            index[:, level] += start
    else:
        found = [part.topk(min(most, part.shape[1]), dim=1) for part in logits]
        top, index = (
            torch.stack([F.pad(part, (0, most - part.shape[1]), value=fill) for part in parts], 1)
            for parts, fill in (
                ([values for values, _ in found], -torch.inf),
                ([places + first[level] for level, (_, places) in enumerate(found)], 0),
            )
        )
    return top, index.masked_fill(top == -torch.inf, 0)
