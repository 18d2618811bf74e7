"""Linear layers of steps on a CPU, with weights that are rearranged once (`ops.packed`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from eventful.ops.packed import LEAST, PackedWeight, pack, packed_product, served_rows
from eventful.rules.step import Step
from eventful.surgery.session import Session


def can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer whose weights are worth rearranging on a CPU."""
    return type(module) is nn.Linear and module.weight.numel() >= LEAST


def pack_linears(session: Session, module: nn.Module) -> None:
    """Give the large linear layers inside a module their forward in a step."""
    for part in module.modules():
        if can_pack(part) and "forward" not in vars(part):
            session.place(part, "forward", LinearForward(session, part))


class LinearForward:
    """A linear layer's forward: with rearranged weights in a step on a CPU in fp32."""

    same_result = True  # of the layer's own forward, see `rules.local.plain_parts`

    def __init__(self, session: Session, module: nn.Linear) -> None:
        self.session, self.module = session, module

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take what the layer takes, return what it returns."""
        step, module = self.session.step, self.module
        if step is not None and len(args) == 1 and not kwargs and _serves(step, module, args[0]):
            packed: PackedWeight | None = step.constant(
                (id(module), "packed"), lambda: pack(module.weight)
            )
            if packed is not None:
                rows = args[0].numel() // module.in_features
                served = rows if _is_whole(step, args[0]) else served_rows(rows)
                return packed_product(args[0], packed, module.bias, served)
        forward: Callable[..., Tensor] = type(module).forward
        return forward(module, *args, **kwargs)


def _is_whole(step: Step, tokens: Tensor) -> bool:
    """Whether these are all tokens, whose number changes with that of the streams alone."""
    whole = {layout.tokens for layout in step.layouts.values()}
    return step.flush_all or (tokens.dim() > 1 and tokens.shape[-2] in whole)


def _serves(step: Step, module: nn.Linear, tokens: Any) -> bool:
    """Whether rearranged weights serve a call."""
    weight, bias = module.weight, module.bias
    return (
        step.state.reversible
        and type(tokens) is Tensor
        and tokens.dtype == weight.dtype == torch.float32
        and tokens.device.type == weight.device.type == "cpu"
        and type(weight) is nn.Parameter
        and (bias is None or bias.dtype == torch.float32)
        and tokens.numel() > 0
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )
