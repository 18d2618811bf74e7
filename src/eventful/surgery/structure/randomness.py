"""Notices random numbers that a run draws from torch, and puts torch's generators back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Draws(TorchDispatchMode):
    """Sees the operators of this thread that draw random numbers.

    Generators that Python's own code draws from (`random`, numpy) do not show here.

    Attributes:
        seen: whether there was such an operator.
        shared: the kinds of device whose own generator was drawn from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self.shared: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _seeded(func):
            given = {argument.name: argument.default_value for argument in func._schema.arguments}
            given = {**given, **dict(zip(given, args, strict=False)), **kwargs}
            if _draws(given):
                self.seen = True
                if given.get("generator") is None:
                    self.shared.add(_device(given))
        return func(*args, **kwargs)


@lru_cache(maxsize=4096)
def _seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _draws(given: dict[str, Any]) -> bool:
    """Whether an operator that may draw random numbers does so with these arguments."""
    if "dropout_p" in given or "dropout" in given:
        return bool(given.get("dropout_p", given.get("dropout")))
    off = [given[name] for name in ("train", "training") if name in given]
    return False not in off


def _device(given: dict[str, Any]) -> str:
    known = given.get("device") or next(
        (value.device for value in given.values() if isinstance(value, Tensor)), "cpu"
    )
    return torch.device(known).type


@contextmanager
def same_random_state() -> Iterator[None]:
    """The generators of torch are afterwards as they were, where the code inside drew from them.

    Where it did not, they are not touched: another thread may use them.
    """
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    kept = torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else []
    draws = Draws()
    try:
        with draws:
            yield
    finally:
        if "cpu" in draws.shared:
            torch.set_rng_state(kept[0])
        if "cuda" in draws.shared and kept[1]:
            torch.cuda.set_rng_state_all(kept[1])
