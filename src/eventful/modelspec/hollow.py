"""Running a model for the shapes of its outputs, and for its refusals, without its arithmetic.

Products of matrices and convolutions, which take nearly all the time, give zeros of the right
shape, and weights take no memory: a large model takes a few seconds.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from eventful.modelspec.size import Size, both_sides

_HEAVY = frozenset(
    {
        *("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "addmv", "mv"),
        *("convolution", "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose2d"),
        *("scaled_dot_product_attention", "_scaled_dot_product_attention_math"),
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)
# Of large tensors of real numbers, these give zeros, too.
_LONG = frozenset(
    {
        *("add", "sub", "mul", "div", "gelu", "silu", "relu", "tanh", "sigmoid", "exp", "rsub"),
        *("_softmax", "softmax", "native_layer_norm", "layer_norm", "native_group_norm"),
        *("upsample_bilinear2d", "upsample_bicubic2d", "native_batch_norm", "hardswish"),
    }
)
_LARGE = 1 << 16  # elements


class NoArithmetic(TorchDispatchMode):
    """Operations that cost much return zeros of the right shape."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, or give zeros for it."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name not in _HEAVY and not (name in _LONG and _is_large(args)):
            return func(*args, **kwargs)
        try:
            shapes = tree_map_only(Tensor, _shape_of, (args, kwargs))
            made = func(*shapes[0], **shapes[1])
        except (NotImplementedError, RuntimeError):  # no rule for its shape
            return func(*args, **kwargs)
        return tree_map_only(Tensor, _zeros, made)


def _is_large(args: tuple[Any, ...]) -> bool:
    first = args[0] if args else None
    return isinstance(first, Tensor) and first.is_floating_point() and first.numel() >= _LARGE


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _zeros(tensor: Tensor) -> Tensor:
    """Zeros like a tensor; pages of memory that nothing reads or writes are never made.

    torch.zeros writes them all, which takes minutes for the maps of a head at 1536 px.
    """
    held = np.zeros(tensor.numel() * tensor.element_size(), dtype=np.uint8)
    return torch.from_numpy(held).view(tensor.dtype).view(tensor.shape)


def without_weights(model: nn.Module) -> nn.Module:
    """A copy on the CPU; tensors that were on the meta device hold one zero for all elements."""
    made = copy.deepcopy(model)
    for module in made.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                module._parameters[name] = nn.Parameter(_one_zero(weight), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _one_zero(buffer)
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.is_meta:
                setattr(module, name, _one_zero(value))
    return made


def _one_zero(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


@contextmanager
def no_arithmetic() -> Iterator[None]:
    """Within it, operations that cost much return zeros of the right shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a switch that has nothing to do with this one
        # oneDNN would rearrange weights in memory that these have not.
        with NoArithmetic(), torch.backends.mkldnn.flags(enabled=False):
            yield


def picture_method(model: nn.Module) -> str:
    """The method that takes pictures alone: `forward`, if it does not begin with text."""
    first = next(iter(inspect.signature(model.forward).parameters), "")
    text = first == "input_ids" and hasattr(model, "get_image_features")
    return "get_image_features" if text else "forward"


def takes(model: nn.Module, size: Size) -> bool:
    """Whether a model takes frames of this size, as it is."""
    hollow = without_weights(model).eval()
    like = next(hollow.parameters(), None)
    dtype = torch.float32 if like is None else like.dtype
    try:
        frame = torch.zeros(1, 3, *both_sides(size), dtype=dtype)
        with no_arithmetic(), torch.no_grad():
            getattr(hollow, picture_method(hollow))(frame)
    except Exception:  # models refuse frames in any way, and memory may not suffice
        return False
    return True
