"""Linear layers of steps on a CPU, with weights that are rearranged once.

Ahead of every product, the matrix library copies the weights into the order in which it reads
them. A dense step spreads that over all tokens of a frame. With 50 tokens it takes a fifth of the
product's time. oneDNN can keep the rearranged weights. The sums are the same, in another order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from eventful.rules.step import Step
from eventful.surgery.session import Session

VARIABLE = "EVENTFUL_PACK"
_LEAST = 1 << 17  # weights; of smaller layers the product takes next to no time
_ROWS = 64  # for which the weights are arranged; other numbers are served as well
_ops: Any = torch.ops.mkldnn


class PackedWeight:
    """The weights of one layer as oneDNN reads them, shared by all streams of a model.

    Attributes:
        weight: opaque to other operations.
    """

    def __init__(self, weight: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.weight: Tensor = _ops._reorder_linear_weight(weight.detach(), _ROWS)

    def holds(self, weight: Tensor) -> bool:
        """Whether it was made from these values; torch does not count every write to a weight."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.equal(self.weight.to_dense(), weight)


def can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer whose weights are worth rearranging on a CPU."""
    return type(module) is nn.Linear and module.weight.numel() >= _LEAST


def packing_available() -> bool:
    """Whether this torch can keep rearranged weights; EVENTFUL_PACK=0 says not to."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return (
        os.environ.get(VARIABLE, "1") not in ("0", "false", "no")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and all(hasattr(_ops, name) for name in names)
    )


class LinearForward:
    """A linear layer's forward: with rearranged weights in a step on a CPU in fp32."""

    def __init__(self, session: Session, module: nn.Linear) -> None:
        self.session, self.module = session, module

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take what the layer takes, return what it returns."""
        step, module = self.session.step, self.module
        if step is not None and len(args) == 1 and not kwargs and _serves(step, module, args[0]):
            packed = step.constant((id(module), "packed"), self._packed)
            if packed is not None:
                bias, none = module.bias, "none"
                result: Tensor = _ops._linear_pointwise(args[0], packed.weight, bias, none, [], "")
                return result
        forward: Callable[..., Tensor] = type(module).forward
        return forward(module, *args, **kwargs)

    def _packed(self) -> PackedWeight | None:
        """The rearranged weights: another stream's, if the weights are still the same."""
        if not packing_available():
            return None
        weight = self.module.weight
        with self.session.packing:
            known = self.session.packed.get(id(self.module))
            if known is None or not known.holds(weight):
                known = self.session.packed[id(self.module)] = PackedWeight(weight)
        return known


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
