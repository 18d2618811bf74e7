"""The region proposal network: class-independent object candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
        # Sizes are powers of two: a product with one is not rounded.
        unit = box.cell_anchors(1.0, ANCHOR_RATIOS, maps[0].device)
        for features, size, stride in zip(maps, ANCHOR_SIZES, STRIDES, strict=True):
            grid = (features.shape[2], features.shape[3])
            x = features
            for conv in self.convs:
                x = F.relu(conv(x))
            codes = self.deltas(x).unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2)
            found.anchors.append(box.grid_anchors(size * unit, grid, stride))
            found.logits.append(self.objectness(x).permute(0, 2, 3, 1).flatten(1).float())
            found.codes.append(codes.reshape(len(x), -1, 4).float())
        return found

    def step_forward(self, memory: HeadMemory, maps: Sequence[Tensor]) -> Predictions | None:
        """`forward` in a step of a stream: only what a changed token reaches is computed."""
        parts = (nn.ModuleList, nn.Conv2d)
        if not isinstance(maps, UpdatedMaps) or not plain_parts(self, parts):
            return None
        outputs, count = update_predictions(self, memory, maps), len(ANCHOR_RATIOS)
        unit = box.cell_anchors(1.0, ANCHOR_RATIOS, outputs.device)
        found = Predictions([], [], [])
        for level, (size, stride) in enumerate(zip(ANCHOR_SIZES, STRIDES, strict=True)):
            found.anchors.append(box.grid_anchors(size * unit, maps.levels.sizes[level], stride))
            part = maps.levels.part(outputs, level).flatten(1, 2).float()
            found.logits.append(part[..., :count].flatten(1))
            found.codes.append(part[..., count:].unflatten(2, (count, 4)).flatten(1, 2))
        return found

    def step_bytes(self, grid: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes held for one stream with a grid (h, w) of tokens."""
        channels = self.objectness.in_channels + 5 * len(ANCHOR_RATIOS)
        return pyramid_levels(grid).pixels * channels * dtype.itemsize + 8

    @torch.no_grad()
    def propose(self, found: Predictions, sizes: Tensor) -> box.Padded:
        """The best boxes of each image, inside it, the best first.

        Args:
            sizes: (B, 2), height and width of each image.
        """
        boxes, scores = self._best(found)
        images, levels, _ = scores.shape
        boxes, scores = boxes.flatten(1, 2), scores.flatten(1)
        valid = boxes.isfinite().all(dim=2) & scores.isfinite()
        boxes = box.clip_each(boxes, sizes)
        found_boxes = box.Padded.where(valid & box.nonempty(boxes), boxes)
        sets = (images * levels, -1)
        kept = suppress(
            found_boxes.boxes.reshape(*sets, 4), found_boxes.valid.reshape(sets), self.nms_threshold
        ).reshape(images, -1)
        order = scores.masked_fill(~kept, -torch.inf).argsort(dim=1, descending=True, stable=True)
        order = order[:, : self._counts()[1]]
        return box.Padded.where(kept.gather(1, order), box.rows(boxes, order))

    def _counts(self) -> tuple[int, int]:
        """Proposals of a level that enter NMS, and those of an image that leave it."""
        use = 0 if self.training else 1
        return self.keep_before[use], self.keep_after[use]

    def _best(self, found: Predictions) -> tuple[Tensor, Tensor]:
        """The n best of each level: boxes (B, levels, n, 4) and logits (B, levels, n).

        Levels with fewer are filled up: their last logits are -inf.
        """
        count = self._counts()[0]
        most = min(count, max(logits.shape[1] for logits in found.logits))
        boxes, scores = [], []
        for anchors, logits, codes in zip(found.anchors, found.logits, found.codes, strict=True):
            top, index = logits.topk(min(count, logits.shape[1]), dim=1)
            chosen = box.rows(codes, index)
            decoded = self.coder.decode(anchors[index].flatten(0, 1), chosen.flatten(0, 1))
            missing = most - index.shape[1]
            boxes.append(F.pad(decoded.unflatten(0, index.shape), (0, 0, 0, missing)))
            scores.append(F.pad(top, (0, missing), value=-torch.inf))
        return torch.stack(boxes, dim=1), torch.stack(scores, dim=1)
