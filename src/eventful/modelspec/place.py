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
                return _without_stray_memory(make())
        except (NotImplementedError, RuntimeError):
            pass  # some constructors read numbers from tensors, which the meta device has not
    return make()


def _without_stray_memory(model: nn.Module) -> nn.Module:
    """Zero what a constructor put elsewhere, as torch.Tensor(n) does: nothing has filled it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.zero_()
    return model
