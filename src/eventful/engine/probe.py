"""A few elements of many tensors: shows writes that leave no other trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eventful import ops


class Probe:
    """A few elements of many tensors, read together.

    Shows writes that leave no other trace, such as `p.data.mul_(2)`. The elements are views into
    the tensors' memory: two runs, in the middle and at the end, because runs are several times
    faster to gather than single elements far apart. Read as integers, so that
    NaN equals itself.

    A probe keeps the memory it looks at alive.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        seen: set[int] = set()
        for tensor in (part for held in tensors for part in plain_parts(held)):
            if id(tensor) in seen or not _readable(tensor):
                continue
            seen.add(id(tensor))
            for piece in _pieces(tensor):
                groups.setdefault((piece.device, piece.dtype), []).append(piece)
        self._groups = [tuple(pieces) for pieces in groups.values()]
        self._places = [_places(pieces) for pieces in self._groups]

    def values(self) -> list[Tensor]:
        """The elements as they are now, one tensor per device and width; never waits."""
        return [torch.cat(pieces) for pieces in self._groups]

    def changed(self, before: Sequence[Tensor]) -> bool:
        """Whether they differ from what `values` returned before; waits for their devices."""
        return not all(map(torch.equal, self.values(), before))

    def difference(self, before: Sequence[Tensor]) -> list[Tensor]:
        """For each tensor of `values`, whether it differs, as a bool tensor () on its device."""
        each = zip(self._groups, before, self._places, strict=True)
        return [ops.differs(pieces, seen, places) for pieces, seen, places in each]


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the values of a tensor: itself, or those inside a quantised one."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (Tensor, nn.Parameter, nn.Buffer):
        return [tensor]
    return [part for name in flatten()[0] for part in plain_parts(getattr(tensor, name))]


def _places(pieces: Sequence[Tensor]) -> Tensor:
    """The addresses of all elements, where they are."""
    found = [
        piece.data_ptr() + place * piece.stride(0) * piece.element_size()
        for piece in pieces
        for place in range(len(piece))
    ]
    return torch.tensor(found).to(pieces[0].device)


_RUN = 4  # elements of each piece
_CHANNELS = {4: torch.channels_last, 5: torch.channels_last_3d}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _readable(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory that can be read as integers."""
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and tensor.numel() > 0
        and (tensor.element_size() in _BITS or tensor.is_complex())
    )


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Views of the middle and the end, as integers."""
    held = tensor.detach()
    if held.is_complex():
        held = torch.view_as_real(held.resolve_conj())
    order = _CHANNELS.get(held.dim(), torch.contiguous_format)
    dense = held.is_contiguous() or held.is_contiguous(memory_format=order)
    while not dense and held.dim() > 1:  # one row of what lies scattered
        held = held.select(0, held.shape[0] // 2)
    step, count = 1 if dense or held.dim() == 0 else held.stride(0), held.numel()
    bits, start = held.view(_BITS[held.element_size()]), held.storage_offset()
    if count <= 2 * _RUN:
        return [bits.as_strided((count,), (step,), start)]
    last = count - _RUN
    return [bits.as_strided((_RUN,), (step,), start + step * at) for at in (last // 2, last)]
