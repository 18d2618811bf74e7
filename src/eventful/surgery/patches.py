"""Patch embedding as a matrix product: the result of the strided convolution, several times faster.

Convolution libraries are tuned for many channels and overlapping windows. A patch embedding has
three channels and no overlap, and costs a GPU as much as four blocks of an eventful step. The sums
are the same, in another order.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn import functional as F

from eventful.rules.motion import see
from eventful.rules.step import Step
from eventful.surgery.session import Session

_FEW_CHANNELS = 4
_ALIGNED = 16


def embeds_patches(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a module is a convolution over patches of an image that do not overlap."""
    return (
        type(module) is nn.Conv2d
        and module.in_channels <= _FEW_CHANNELS
        and module.kernel_size == module.stride
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )


class PatchForward:
    """A patch embedding's forward: a matrix product in a resident step, the original elsewhere.

    A step that follows the motion of the picture looks at what goes in and what comes out.
    """

    def __init__(self, session: Session, trunk: str, module: nn.Conv2d) -> None:
        self.session, self.trunk, self.module = session, trunk, module

    def __call__(self, image: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Embed (B, C, height, width) as (B, D, rows, columns)."""
        step = self.session.step
        module = self.module
        plain = not args and not kwargs and image.dim() == 4
        if step is None or step.state.reversible or not plain:
            result: Tensor = type(module).forward(module, image, *args, **kwargs)
        else:
            result = self._product(step, image)
        if step is not None and plain:
            see(step, self.trunk, image, result)
        return result

    def _product(self, step: Step, image: Tensor) -> Tensor:
        """The convolution as a matrix product."""
        module = self.module
        tall, wide = module.kernel_size
        batch, channels, height, width = image.shape
        rows, columns = height // tall, width // wide
        image = image[..., : rows * tall, : columns * wide]
        cells = image.reshape(batch, channels, rows, tall, columns, wide)
        size = channels * tall * wide
        padded = -(-size // _ALIGNED) * _ALIGNED  # matrix units need rows of aligned length
        patches = image.new_zeros(batch, rows, columns, padded)
        patches[..., :size].unflatten(-1, (channels, tall, wide)).copy_(
            cells.permute(0, 2, 4, 1, 3, 5)
        )
        weight = step.constant(
            (id(module), "rows"), lambda: F.pad(module.weight.flatten(1), (0, padded - size))
        )
        tokens = F.linear(patches, weight, module.bias)
        return tokens.permute(0, 3, 1, 2)
