"""The tensors inside what a module gets or returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """A tensor, or those inside a mapping, a tuple or a list, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def first_tensor(value: Any) -> Tensor | None:
    """The first of them; None without any."""
    return next(tensors_in(value), None)


def real_tensors(value: Any) -> list[Tensor]:
    """Those of real numbers."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]
