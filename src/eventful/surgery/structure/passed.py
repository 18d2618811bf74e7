"""Tokens on their way from one block to the next, which nothing else may use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eventful.errors import UnsupportedError

# What may be read of tokens that are a selection: it is the same for all tokens.
_SAME_FOR_ALL = frozenset({"device", "dtype", "ndim", "requires_grad", "is_cuda", "layout"})


def reads_tokens(func: Any) -> bool:
    """Whether a call of torch depends on which tokens a tensor has, e.g. `.shape` and `.mT` do."""
    if getattr(func, "__name__", "") != "__get__":
        return True
    return getattr(getattr(func, "__self__", None), "__name__", "") not in _SAME_FOR_ALL


class PassedTokens(Tensor):
    """The selected tokens alone, between blocks; raises where anything but a block uses them.

    A dry run has shown that nothing does. Another path through the model's code, which depends on
    the content of the frame, could.
    """

    held: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if reads_tokens(func):
            raise UnsupportedError(
                f"The model used a block's output between its blocks (in "
                f"`{getattr(func, '__name__', func)}`), as it did not for another frame of this "
                "size. Blocks passed the selected tokens alone. Use Config.exact() or "
                "gating='block', with which every block returns all tokens."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def pass_on(tokens: Tensor) -> PassedTokens:
    """Tokens for the next block alone."""
    made = tokens.as_subclass(PassedTokens)
    vars(made)["held"] = tokens
    return made


def taken(tokens: Tensor) -> Tensor:
    """Tokens as a block gets them, ready to be used."""
    return tokens.held if isinstance(tokens, PassedTokens) else tokens
