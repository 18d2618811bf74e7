"""Making models without weights, where shapes are all that is needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def made_on(weightless: bool, make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` returns, on the meta device if `weightless` and if its constructor allows it."""
    if weightless:
        try:
            with torch.device("meta"):
                return make()
        except (NotImplementedError, RuntimeError):
            pass  # some constructors read numbers from tensors, which the meta device has not
    return make()
