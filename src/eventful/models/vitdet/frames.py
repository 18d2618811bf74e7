"""Prepares frames (resize, pad to a square) and maps boxes back to the original frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import ConfigError, FrameError, UnsupportedError
from eventful.models.vitdet import boxes as box

PIXEL_MEAN = (123.675, 116.28, 103.53)
PIXEL_STD = (58.395, 57.12, 57.375)


@dataclass(frozen=True)
class Placement:
    """Where a frame lies in the padded square: at the top left, resized to `content`.

    Attributes:
        original: (height, width) of the frame.
        content: (height, width) it takes in the square.
    """

    original: tuple[int, int]
    content: tuple[int, int]

    def into(self, boxes: Tensor) -> Tensor:
        """Boxes of the frame in pixels of the square."""
        return boxes * self._factors(boxes)

    def back(self, boxes: Tensor) -> Tensor:
        """Boxes of the square in pixels of the frame, cut off at its borders."""
        return box.clip(boxes / self._factors(boxes), self.original)

    def _factors(self, like: Tensor) -> Tensor:
        y, x = (c / o for c, o in zip(self.content, self.original, strict=True))
        return like.new_tensor([x, y, x, y])


@dataclass(frozen=True)
class Detections:
    """Objects found in one frame, best first.

    Attributes:
        boxes: (n, 4) as x1, y1, x2, y2 in pixels.
        scores: (n,).
        labels: (n,) class, from 0.
        masks: (n, 28, 28) probabilities inside each box, if the model has a mask head.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor | None = None

    def __post_init__(self) -> None:
        count = len(self.scores)
        if self.boxes.shape != (count, 4) or self.labels.shape != (count,):
            raise ConfigError(
                f"Detections need boxes ({count}, 4) and labels ({count},) beside {count} scores, "
                f"not {tuple(self.boxes.shape)} and {tuple(self.labels.shape)}."
            )

    @classmethod
    def split(
        cls, boxes: Tensor, scores: Tensor, labels: Tensor, counts: Sequence[int]
    ) -> list[Detections]:
        """The detections of several frames from tensors that hold one frame after the other.

        Args:
            counts: detections of each frame.
        """
        parts = (rows.split(list(counts)) for rows in (boxes, scores, labels))
        return [cls(*frame) for frame in zip(*parts, strict=True)]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Detections:
        """The inverse of `to_dict`."""
        return cls(
            torch.tensor(data["boxes"]).reshape(-1, 4),
            torch.tensor(data["scores"]),
            torch.tensor(data["labels"], dtype=torch.int64),
        )

    def to_dict(self) -> dict[str, Any]:
        """Boxes, scores and labels as lists, for JSON."""
        return {name: getattr(self, name).tolist() for name in ("boxes", "scores", "labels")}

    def boxes_on_cpu(self) -> Detections:
        """The same on the CPU, without masks, as the metrics need them."""
        return Detections(self.boxes.cpu(), self.scores.cpu(), self.labels.cpu())

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, rows: Tensor) -> Detections:
        """Some of the detections, by mask or index."""
        masks = None if self.masks is None else self.masks[rows]
        return Detections(self.boxes[rows], self.scores[rows], self.labels[rows], masks)

    def back(self, placement: Placement) -> Detections:
        """In pixels of the original frame, without boxes that lie outside it."""
        moved = replace(self, boxes=placement.back(self.boxes))
        return moved[box.nonempty(moved.boxes)]


@dataclass(frozen=True)
class Target:
    """Ground truth of one frame, in pixels of the padded square.

    Attributes:
        boxes: (n, 4).
        labels: (n,) class, from 0.
        ignored: (k, 4) regions where detections count as neither right nor wrong: crowds, objects
            without certain annotation.
    """

    boxes: Tensor
    labels: Tensor
    ignored: Tensor | None = None

    def to(self, device: torch.device) -> Target:
        """The same on a device."""
        ignored = None if self.ignored is None else self.ignored.to(device)
        return Target(self.boxes.to(device), self.labels.to(device), ignored)


@dataclass(frozen=True)
class Targets:
    """Ground truth of B frames, padded to the same number of places.

    Attributes:
        objects: (B, n) places, n at least 1; those with an object first. A box without area is
            none: no candidate can be matched to it.
        labels: (B, n) class.
        ignored: (B, k, 4), zero where there is none.
    """

    objects: box.Padded
    labels: Tensor
    ignored: Tensor

    @classmethod
    def of(cls, targets: Sequence[Target], device: torch.device) -> Targets:
        """The targets of all frames, without a wait for the device."""
        counts = [len(target.boxes) for target in targets]
        places = _places(counts, max([1, *counts]), device)
        boxes = _padded([target.boxes for target in targets], places).float()
        labels = _padded([target.labels for target in targets], places).long()
        first = (~box.nonempty(boxes)).byte().argsort(dim=1, stable=True)
        boxes, labels = box.rows(boxes, first), labels.gather(1, first)
        spared = [t.boxes[:0] if t.ignored is None else t.ignored for t in targets]
        counts = [len(part) for part in spared]
        ignored = _padded(spared, _places(counts, max([0, *counts]), device)).float()
        return cls(box.Padded.where(box.nonempty(boxes), boxes), labels, ignored)

    def __getitem__(self, images: slice) -> Targets:
        objects = box.Padded(self.objects.boxes[images], self.objects.valid[images])
        return Targets(objects, self.labels[images], self.ignored[images])


def _places(counts: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Rows (B, width) of each image among those of all images; where it has none, the last."""
    held, place = torch.tensor(list(counts))[:, None], torch.arange(width)
    rows = torch.where(place < held, held.cumsum(0) - held + place, sum(counts))
    return rows.to(device, non_blocking=True)


def _padded(parts: Sequence[Tensor], places: Tensor) -> Tensor:
    """The rows of all images, and one of zeros, at their `places`."""
    return torch.cat([*parts, parts[0].new_zeros(1, *parts[0].shape[1:])]).to(places.device)[places]


def fitted_size(original: tuple[int, int], short: int, long: int) -> tuple[int, int]:
    """The size at which the short edge is `short`, unless the long one would pass `long`."""
    height, width = original
    scale = short / min(original)
    if round_half_up(scale * max(original)) > long:
        scale = long / max(original)
    return max(1, round_half_up(height * scale)), max(1, round_half_up(width * scale))


def round_half_up(value: float) -> int:
    """To the nearest whole number; halves go up, where Python's `round` goes to the even one."""
    return int(value + 0.5)


def prepare(frame: Tensor, size: int, short: int | None = None) -> tuple[Tensor, Placement]:
    """A frame as the model takes it: resized, normalised, padded bottom right to a square.

    Args:
        frame: (3, H, W) RGB from 0 to 255, uint8 or floating point.
        size: side of the square.
        short: length of the short edge; `size` if left out. The long edge is at most `size`.

    Returns:
        Pixels (1, 3, size, size), and where the frame lies in them.
    """
    if frame.dim() != 3 or frame.shape[0] != 3 or 0 in frame.shape:
        raise FrameError(
            f"prepare takes one RGB frame (3, height, width), got {tuple(frame.shape)}."
        )
    original = (int(frame.shape[1]), int(frame.shape[2]))
    content = fitted_size(original, short or size, size)
    image = frame.float()[None]
    if content != original:
        image = F.interpolate(image, content, mode="bilinear", antialias=True)
    mean, std = (image.new_tensor(values).reshape(1, 3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    image = (image - mean) / std
    padding = (0, size - content[1], 0, size - content[0])
    return F.pad(image, padding), Placement(original, content)


def paste_masks(detections: Detections, size: tuple[int, int], threshold: float = 0.5) -> Tensor:
    """Masks (n, height, width) of detections in their frame."""
    (height, width), device = size, detections.boxes.device
    if detections.masks is None:
        raise UnsupportedError("These detections have no masks: their model has no mask head.")
    if not len(detections):
        return torch.zeros(0, height, width, dtype=torch.bool, device=device)
    x1, y1, x2, y2 = (detections.boxes[:, i, None] for i in range(4))
    x = (torch.arange(width, device=device) + 0.5 - x1) / (x2 - x1) * 2 - 1
    y = (torch.arange(height, device=device) + 0.5 - y1) / (y2 - y1) * 2 - 1
    shape = (len(detections), height, width)
    places = torch.stack([x[:, None, :].expand(shape), y[:, :, None].expand(shape)], dim=-1)
    values = F.grid_sample(detections.masks[:, None], places, align_corners=False)
    return values[:, 0] >= threshold
