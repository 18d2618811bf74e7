"""An example frame of the size and type that a model takes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eventful.errors import UnsupportedError
from eventful.surgery.matching import known_trunks


def example_frame(model: nn.Module, size: int | tuple[int, int] | None = None) -> Tensor:
    """A frame (1, 3, height, width) of noise.

    Args:
        size: side, or height and width, in pixels; the model's own if left out.

    Raises:
        UnsupportedError: no size is given and the model has none.
    """
    if size is None:
        found = [(trunk, adapter) for _, trunk, adapter in known_trunks(model)]
        if not found:
            raise UnsupportedError(
                f"No known vision transformer inside {type(model).__name__}: see what "
                "`eventful inspect` says of it."
            )
        trunk, adapter = found[0]
        size = adapter.default_size(trunk)
    height, width = (size, size) if isinstance(size, int) else size
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), None)
    draw = torch.Generator().manual_seed(0)
    return torch.rand(1, 3, height, width, generator=draw).to(dtype or torch.float32)
