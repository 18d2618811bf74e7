"""The region proposal network: class-independent object candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.models.vitdet import boxes as box
from eventful.models.vitdet.regions import grouped_nms, nms_padded
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
        found = Predictions([], [], [])
        for features, size, stride in zip(maps, ANCHOR_SIZES, STRIDES, strict=True):
            grid = (features.shape[2], features.shape[3])
            cells = box.cell_anchors(size, ANCHOR_RATIOS)
            cells = cells.to(features.device, non_blocking=True)
            x = features
            for conv in self.convs:
                x = F.relu(conv(x))
            codes = self.deltas(x).unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2)
            found.anchors.append(box.grid_anchors(cells, grid, stride))
            found.logits.append(self.objectness(x).permute(0, 2, 3, 1).flatten(1).float())
            found.codes.append(codes.reshape(len(x), -1, 4).float())
        return found

    def step_forward(self, memory: HeadMemory, maps: Sequence[Tensor]) -> Predictions | None:
        """`forward` in a step of a stream: only what a changed token reaches is computed."""
        parts = (nn.ModuleList, nn.Conv2d)
        if not isinstance(maps, UpdatedMaps) or not plain_parts(self, parts):
            return None
        outputs, count = update_predictions(self, memory, maps), len(ANCHOR_RATIOS)

        def anchors() -> list[Tensor]:
            sizes = zip(ANCHOR_SIZES, maps.levels.sizes, STRIDES, strict=True)
            return [
                box.grid_anchors(
                    box.cell_anchors(size, ANCHOR_RATIOS).to(outputs.device), grid, stride
                )
                for size, grid, stride in sizes
            ]

        found = Predictions(list(memory.constant(("anchors", maps.levels), anchors)), [], [])
        for level in range(len(STRIDES)):
            part = maps.levels.part(outputs, level).flatten(1, 2).float()
            found.logits.append(part[..., :count].flatten(1))
            found.codes.append(part[..., count:].unflatten(2, (count, 4)).flatten(1, 2))
        return found

    def step_bytes(self, grid: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes held for one stream with a grid (h, w) of tokens."""
        channels = self.objectness.in_channels + 5 * len(ANCHOR_RATIOS)
        return pyramid_levels(grid).pixels * channels * dtype.itemsize + 8

    @torch.no_grad()
    def propose(self, found: Predictions, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The best boxes (n, 4) of each image, inside its `sizes` (height, width)."""
        candidates, scores, levels = self._best(found)
        return [
            self._suppress(candidates[image], scores[image], levels, size)
            for image, size in enumerate(sizes)
        ]

    @torch.no_grad()
    def propose_padded(self, found: Predictions, sizes: Tensor) -> box.Padded:
        """`propose` for all images at once: the same boxes, the best first, for training.

        Args:
            sizes: (B, 2), height and width of each image.
        """
        boxes, scores, _ = self._best(found)
        valid = boxes.isfinite().all(dim=2) & scores.isfinite()
        boxes = box.clip_each(boxes, sizes)
        valid &= box.nonempty(boxes)
        before, after = self._counts()
        counts = [min(before, logits.shape[1]) for logits in found.logits]
        kept = nms_padded(boxes, valid, counts, self.nms_threshold)
        order = scores.masked_fill(~kept, -torch.inf).argsort(dim=1, descending=True, stable=True)
        order = order[:, :after]
        return box.Padded.where(kept.gather(1, order), box.rows(boxes, order))

    def _counts(self) -> tuple[int, int]:
        """Proposals of a level that enter NMS, and those of an image that leave it."""
        use = 0 if self.training else 1
        return self.keep_before[use], self.keep_after[use]

    def _best(self, found: Predictions) -> tuple[Tensor, Tensor, Tensor]:
        """The best of each level: boxes (B, n, 4), logits (B, n) and levels (n,)."""
        count = self._counts()[0]
        boxes, scores, levels = [], [], []
        for level, (anchors, logits, codes) in enumerate(
            zip(found.anchors, found.logits, found.codes, strict=True)
        ):
            top, index = logits.topk(min(count, logits.shape[1]), dim=1)
            chosen = box.rows(codes, index)
            decoded = self.coder.decode(anchors[index].flatten(0, 1), chosen.flatten(0, 1))
            boxes.append(decoded.unflatten(0, index.shape))
            scores.append(top)
            levels.append(torch.full((index.shape[1],), level, device=index.device))
        return torch.cat(boxes, dim=1), torch.cat(scores, dim=1), torch.cat(levels)

    def _suppress(
        self, boxes: Tensor, scores: Tensor, levels: Tensor, size: tuple[int, int]
    ) -> Tensor:
        fine = boxes.isfinite().all(dim=1) & scores.isfinite()
        boxes = box.clip(boxes, size)
        fine &= box.nonempty(boxes)
        boxes, scores, levels = boxes[fine], scores[fine], levels[fine]
        kept = grouped_nms(boxes, scores, levels, self.nms_threshold)
        return boxes[kept[: self._counts()[1]]]
