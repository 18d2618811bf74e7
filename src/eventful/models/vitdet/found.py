"""The detections of several frames in tensors of fixed shape, which become lists when asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from eventful import ops
from eventful.models.vitdet import boxes as box
from eventful.models.vitdet.frames import Detections, Placement


class Found(Sequence[Detections]):
    """Objects found in B frames: a sequence of their `Detections`.

    The number of places does not depend on what is found, so that the host need not wait for the
    device. It waits once, for all frames, when the first `Detections` are asked for.

    Attributes:
        boxes: (B, n, 4) in pixels, the best first; 0 from the count on, as in the others.
        scores: (B, n).
        labels: (B, n) class, from 0.
        counts: (B,) places that hold a detection.
        masks: (B, n, 28, 28) probabilities inside each box; None without a mask head.
    """

    def __init__(
        self,
        boxes: Tensor,
        scores: Tensor,
        labels: Tensor,
        counts: Tensor,
        masks: Tensor | None = None,
    ) -> None:
        self.boxes, self.scores, self.labels = boxes, scores, labels
        self.counts, self.masks = counts, masks
        self._list: list[Detections] | None = None

    @property
    def valid(self) -> Tensor:
        """(B, n) mask of the places that hold a detection."""
        place = torch.arange(self.scores.shape[1], device=self.scores.device)
        return place < self.counts[:, None]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, as an exported graph returns them."""
        named = {name: getattr(self, name) for name in ("boxes", "scores", "labels", "counts")}
        return named if self.masks is None else {**named, "masks": self.masks}

    def __len__(self) -> int:
        """Frames; the host does not wait."""
        return len(self.scores)

    @overload
    def __getitem__(self, frame: int) -> Detections: ...

    @overload
    def __getitem__(self, frame: slice) -> list[Detections]: ...

    def __getitem__(self, frame: int | slice) -> Detections | list[Detections]:
        """The detections of a frame, or a list of those of some frames."""
        return self._made()[frame]

    def __iter__(self) -> Iterator[Detections]:
        return iter(self._made())

    def __repr__(self) -> str:
        return f"Found(frames={len(self)}, places={self.scores.shape[1]})"

    def _made(self) -> list[Detections]:
        if self._list is None:
            self._list = [
                Detections(
                    self.boxes[frame, :held],
                    self.scores[frame, :held],
                    self.labels[frame, :held],
                    None if self.masks is None else self.masks[frame, :held],
                )
                for frame, held in enumerate(self.counts.tolist())  # the one wait
            ]
        return self._list

    def back(self, placements: Sequence[Placement]) -> Found:
        """In pixels of the original frames, without boxes that lie outside them."""
        factors, sizes = [], []
        for place in placements:
            y, x = (c / o for c, o in zip(place.content, place.original, strict=True))
            factors.append((x, y, x, y))
            sizes.append(place.original)
        device = self.boxes.device
        moved = self.boxes / box.table(factors, device)[:, None]
        moved = box.clip_each(moved, box.table(sizes, device))
        return self._only(moved, self.valid & box.nonempty(moved))

    def _only(self, boxes: Tensor, stays: Tensor) -> Found:
        """Those of the `stays` (B, n), with other boxes, moved up to the first places."""
        places = stays.shape[1]
        target = torch.where(stays, stays.cumsum(dim=1) - 1, places)
        order = torch.arange(places, device=stays.device).expand_as(stays)
        # One place more, for all that go.
        source = torch.zeros_like(target[:, :1]).expand(-1, places + 1)
        source = source.scatter(1, target, order)[:, :places]
        count = stays.sum(dim=1)
        return Found.of(source, count, boxes, self.scores, self.labels, self.masks)

    @classmethod
    def of(
        cls,
        index: Tensor,
        count: Tensor,
        boxes: Tensor,
        scores: Tensor,
        labels: Tensor,
        masks: Tensor | None = None,
    ) -> Found:
        """Of N candidates of each frame those at `index` (B, n), as many as `count` (B,) says."""
        chosen = None
        if masks is not None:
            empty = torch.arange(index.shape[1], device=index.device) >= count[:, None]
            rows = index[..., None, None].expand(-1, -1, *masks.shape[2:])
            chosen = masks.gather(1, rows).masked_fill(empty[..., None, None], 0)
        taken = ops.take_found(index, count, boxes, scores, labels)
        return cls(*taken, count, chosen)


def _flatten(found: Found) -> tuple[list[Any], None]:
    return [found.boxes, found.scores, found.labels, found.counts, found.masks], None


def _unflatten(values: Any, _: None) -> Found:
    return Found(*values)


# A recorded call copies the tensors of its output.
pytree.register_pytree_node(
    Found, _flatten, _unflatten, serialized_type_name="eventful.models.vitdet.found.Found"
)
