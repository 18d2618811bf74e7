"""What the zoos of tiny models share: an entry for each model to run in a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """A model to run in a stream.

    Attributes:
        make: a random model in eval mode; seed torch first.
        size: frame height and width.
        output: the tensor to compare, from what the model returns.
        call: runs a model or a stream on a frame (B, 3, H, W).
        still: how near the outputs of a still video are, see `tolerances`; heads that divide by
            small numbers make rounding larger.
    """

    make: Callable[[], nn.Module]
    size: tuple[int, int] = (32, 40)
    output: Callable[[Any], Tensor] = lambda result: result
    call: Callable[[Callable[..., Any], Tensor], Any] = lambda run, frame: run(frame)
    still: str = "step"
