"""NMS on a CPU, which may wait for how many boxes are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from eventful.ops import reference

_CHUNK = 256  # boxes of each set that are compared with one another


def suppress(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """See `reference.suppress`; some boxes at a time, compared with those that were kept.

    Most boxes are not kept, so this is a part of the pairs, and the kept boxes are the same.
    """
    if boxes.device.type != "cpu" or boxes.shape[1] <= _CHUNK or not len(boxes):
        return reference.suppress(boxes, valid, threshold)
    columns = boxes.transpose(1, 2).contiguous().transpose(1, 2)  # each corner in a row of its own
    kept, counts = columns[:, :0], valid[:, :0]
    found = []
    for some, free in zip(
        torch.split(columns, _CHUNK, 1), torch.split(valid, _CHUNK, 1), strict=True
    ):
        over = (reference.iou(kept, some) > threshold) & counts[..., None]
        stays = reference.suppress(some, free & ~over.any(dim=1), threshold)
        found.append(stays)
        most = int(stays.sum(dim=1).max())
        first = stays.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        corners = first[:, None].expand(-1, 4, -1)
        more = some.transpose(1, 2).gather(2, corners).transpose(1, 2)
        kept = torch.cat([kept.transpose(1, 2), more.transpose(1, 2)], dim=2).transpose(1, 2)
        counts = torch.cat([counts, stays.gather(1, first)], dim=1)
    return torch.cat(found, dim=1)
