"""Noticing that a model's weights changed, and telling one model from another."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from eventful.adapters.base import Session
from eventful.errors import WeightsChangedError

_CHANGED = (
    "The model's weights changed since the last frame: the stream's memory no longer fits them. "
    "Call stream.reset() and go on: the next frame recomputes everything."
)


class WeightGuard:
    """Remembers the weights a stream's state was computed with.

    A change shows in a parameter's version counter (in-place writes), its pointer
    (replaced or moved data), the parameter or module object (assignment) or the session's
    count of loaded state dicts.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: list[Any] | None = None

    def forget(self) -> None:
        """Accept any weights at the next step; not those of a state dict loaded since the last."""
        if self._known is not None and self._known[0] != self._session.loads:
            raise WeightsChangedError(_CHANGED)
        self._known = None

    def drop(self) -> None:
        """Accept any weights at the next step."""
        self._known = None

    def check(self) -> list[Any]:
        """Raise if the weights are not the remembered ones; returns their stamp."""
        stamp: list[Any] = [self._session.loads]
        for trunk, _ in self._session.trunks.values():
            for module in trunk.modules():
                stamp.append(id(module))
                for parameter in module._parameters.values():
                    if parameter is not None:
                        version = -1 if parameter.is_inference() else parameter._version
                        stamp.append((id(parameter), parameter.data_ptr(), version))
        if self._known is not None and self._known != stamp:
            raise WeightsChangedError(_CHANGED)
        return stamp

    def remember(self, stamp: list[Any]) -> None:
        """Take these weights as the ones the state was computed with."""
        self._known = stamp


def fingerprint(session: Session) -> str:
    """A digest of the trunks' parameter names, shapes and values, the same on every device."""
    digest = hashlib.sha256()
    for name, (trunk, _) in sorted(session.trunks.items()):
        for key, tensor in sorted(trunk.state_dict().items()):
            digest.update(f"{name}/{key}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
            digest.update(_checksum(tensor))
    return digest.hexdigest()


def _checksum(tensor: Tensor) -> bytes:
    """Two sums over the raw bits, the second weighted by place: exact, so order never matters."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    bits = flat.view(kinds[flat.element_size()]).to(torch.int64)
    place = torch.arange(1, bits.numel() + 1, device=bits.device) % 65521
    sums = torch.stack([bits.sum(), (bits * place).sum()])
    return sums.cpu().numpy().tobytes()


def count_loads(module: nn.Module, session: Session) -> Any:
    """Have the session count state dicts loaded into `module`; returns the hook's handle."""
    return module.register_load_state_dict_post_hook(_LoadCounter(session))


class _LoadCounter:
    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.session.loads += 1
