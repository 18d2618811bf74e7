"""Telling one model from another: a fingerprint of its weights, and its blocks' settings."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eventful.engine.probe import plain_parts
from eventful.engine.settings import plain_settings
from eventful.files import digest
from eventful.memory.snapshot import Identity
from eventful.surgery.session import Session


def identity_of(session: Session) -> Identity:
    """What ties a snapshot to this model."""
    trunk = next(iter(session.trunks.values()))[0]
    rule = {k: v for k, v in session.config.to_dict().items() if k != "policy"}
    return Identity(
        fingerprint=fingerprint(session),
        rule={**rule, "blocks": session.blocks},
        settings=block_settings(session),
        device=next(trunk.parameters()).device,
    )


def fingerprint(session: Session) -> str:
    """A digest of names, shapes and values in trunks and heads, the same on every device."""

    def parts() -> Iterator[str | bytes]:
        trunks = ((name, trunk) for name, (trunk, _) in sorted(session.trunks.items()))
        for name, module in (*trunks, *sorted(session.heads.items())):
            for key, tensor in sorted(module.state_dict().items()):
                yield f"{name}/{key}:{tuple(tensor.shape)}:{tensor.dtype}"
                yield from map(_checksum, plain_parts(tensor))

    return digest(parts())


def block_settings(session: Session) -> dict[str, str]:
    """Plain attributes of every converted block, such as the scaling of a LoRA, by full name."""
    found: dict[str, str] = {}
    for name, (trunk, _) in session.trunks.items():
        for path in session.blocks[name]:
            block = trunk.get_submodule(path.removeprefix(f"{name}.") if name else path)
            settings = plain_settings(block, session.volatile)
            found.update({f"{path}.{key}": value for key, value in settings.items()})
    return found


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
