"""Working memory that is kept: on a CPU, fresh large tensors cost more to page in than to fill."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_kept = threading.local()


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor | None:
    """Room for an intermediate result of this thread, until the next call of the same name.

    Returns:
        A tensor to be filled, or None where torch should allocate: on devices with an
        allocator of their own, and where gradients are recorded.
    """
    if like.device.type != "cpu" or torch.is_grad_enabled():
        return None
    size = math.prod(shape)
    rooms: dict[tuple[str, torch.dtype], Tensor] = vars(_kept).setdefault("rooms", {})
    key = (name, like.dtype)
    if key not in rooms or rooms[key].numel() < size:
        with torch.inference_mode(False):
            rooms[key] = torch.empty(size, dtype=like.dtype)
    return rooms[key][:size].view(*shape)
