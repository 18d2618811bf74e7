"""Linear layers of steps on a CPU, with weights that are rearranged once.

Ahead of every product, the matrix library copies the weights into the order in which it reads
them. A dense step spreads that over all tokens of a frame. With 50 tokens it takes a fifth of the
product's time. oneDNN can keep the rearranged weights. The sums are the same, in another order.

oneDNN also makes code for every number of rows, half of which it never frees: about 0.6 MB for each
number and layer, and as much time as a product of a small model takes. The tokens that changed are
another number in every frame, so rows of zeros are added up to one of few numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
                rows = args[0].numel() // module.in_features
                served = rows if _is_whole(step, args[0]) else served_rows(rows)
                return _product(args[0], packed.weight, module.bias, served - rows)
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


def served_rows(rows: int) -> int:
    """The next number of rows that code is made for: eight from each power of two to the next."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def _is_whole(step: Step, tokens: Tensor) -> bool:
    """Whether these are all tokens, whose number changes with that of the streams alone."""
    whole = {layout.tokens for layout in step.layouts.values()}
    return step.flush_all or (tokens.dim() > 1 and tokens.shape[-2] in whole)


def _product(tokens: Tensor, weight: Tensor, bias: Tensor | None, more: int) -> Tensor:
    """A layer's output, computed with `more` rows of zeros behind the tokens."""
    given = tokens
    if more:
        given = F.pad(tokens.reshape(-1, tokens.shape[-1]), (0, 0, 0, more))
    result: Tensor = _ops._linear_pointwise(given, weight, bias, "none", [], "")
    return result[:-more].view(*tokens.shape[:-1], -1) if more else result


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
