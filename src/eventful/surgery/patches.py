"""Patch embedding as a matrix product: the result of the strided convolution, several times faster.

Convolution libraries are tuned for many channels and overlapping windows. A patch embedding has
three channels and no overlap, and costs a GPU as much as four blocks of an eventful step. The sums
are the same, in another order. Tubelets, patches of a few frames as in ViViT, are embedded alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.rules.motion import see
from eventful.rules.step import Step
from eventful.surgery.session import Session

FEW_CHANNELS = 4  # of a picture
_ALIGNED = 16


def embeds_patches(module: nn.Module) -> TypeGuard[nn.Conv2d | nn.Conv3d]:
    """Whether a module is a convolution over patches or tubelets that do not overlap."""
    if not isinstance(module, nn.Conv2d | nn.Conv3d):
        return False
    return (
        type(module) in (nn.Conv2d, nn.Conv3d)  # a subclass may compute something else
        and module.in_channels <= FEW_CHANNELS
        and module.kernel_size == module.stride
        and (module.padding == "valid" or not any(module.padding))
        and set(module.dilation) == {1}
        and module.groups == 1
    )


class PatchForward:
    """A patch embedding's forward: a matrix product in a resident step, the original elsewhere.

    A step that follows the motion of the picture looks at what goes in and what comes out.
    """

    def __init__(self, session: Session, trunk: str, module: nn.Conv2d | nn.Conv3d) -> None:
        self.session, self.trunk, self.module = session, trunk, module

    def __call__(self, image: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Embed (B, C, height, width) as (B, D, rows, columns), or a clip with a time axis."""
        step = self.session.step
        module = self.module
        plain = not args and not kwargs and image.dim() == 2 + len(module.kernel_size)
        if step is None or step.state.reversible or not step.state.in_place or not plain:
            forward: Callable[..., Tensor] = type(module).forward
            result = forward(module, image, *args, **kwargs)
        else:
            result = self._product(step, image)
        if step is not None and plain and image.dim() == 4:
            see(step, self.trunk, image, result)
        return result

    def _product(self, step: Step, image: Tensor) -> Tensor:
        """The convolution as a matrix product."""
        module = self.module
        kernel, axes = module.kernel_size, range(len(module.kernel_size))
        grid = [image.shape[2 + axis] // kernel[axis] for axis in axes]
        for axis in axes:
            image = image.narrow(2 + axis, 0, grid[axis] * kernel[axis])
        sides = [side for axis in axes for side in (grid[axis], kernel[axis])]
        cells = image.reshape(*image.shape[:2], *sides)
        size = math.prod((image.shape[1], *kernel))
        padded = -(-size // _ALIGNED) * _ALIGNED  # matrix units need rows of aligned length
        places = [2 + 2 * axis for axis in axes]  # of the grid among the axes of the cells
        turned = cells.permute(0, *places, 1, *(place + 1 for place in places))
        make = image.new_empty if padded == size else image.new_zeros
        patches = make(len(image), *grid, padded)
        _copy(patches[..., :size].unflatten(-1, (image.shape[1], *kernel)), turned)
        weight = step.constant(
            (id(module), "rows"), lambda: F.pad(module.weight.flatten(1), (0, padded - size))
        )
        tokens = F.linear(patches, weight, module.bias)
        return tokens.movedim(-1, 1)


def _copy(to: Tensor, source: Tensor) -> None:
    """Copy values as rows of the widest whole numbers that both allow: several times faster."""
    for kind in (torch.int64, torch.int32, torch.int16):
        ratio, rest = divmod(kind.itemsize, source.element_size())
        if not rest and _as_rows(to, ratio) and _as_rows(source, ratio):
            to, source = to.view(kind), source.view(kind)
            break
    to.copy_(source)


def _as_rows(values: Tensor, ratio: int) -> bool:
    """Whether the last axis can be seen as numbers of so many values each."""
    sides = (values.shape[-1], values.storage_offset(), *values.stride()[:-1])
    return values.stride(-1) == 1 and not any(side % ratio for side in sides)
