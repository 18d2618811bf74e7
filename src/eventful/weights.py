"""Noticing that a model's weights changed, and telling one model from another."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from eventful.adapters.base import Session
from eventful.errors import TrainingModeError, WeightsChangedError

_CHANGED = (
    "The model's weights changed since the last frame: the stream's memory no longer fits them. "
    "Call stream.reset() and go on: the next frame recomputes everything."
)


class Census:
    """The modules and parameters of a model as they are at one moment.

    A change shows in a module or parameter object (assignment), a parameter's pointer
    (replaced or moved data), its version counter (in-place writes) or the session's count of
    loaded state dicts. Taken once and compared often, so it is kept as flat lists.

    Attributes:
        modules: every module, the model first.
        watched: the model and the modules of its trunks.
        structure: the same for censuses that saw the same modules and parameters in the trunks.
    """

    def __init__(self, model: nn.Module, session: Session) -> None:
        self.modules = list(model.modules())
        trunks = {id(m) for trunk, _ in session.trunks.values() for m in trunk.modules()}
        self.watched = [model, *(m for m in self.modules[1:] if id(m) in trunks)]
        self._session = session
        self._loads = session.loads
        self._children = [m._modules for m in self.modules if m._modules]
        self._no_children = [m._modules for m in self.modules if not m._modules]
        self._kept_children = [list(held.values()) for held in self._children]
        self._hooks = [
            hooks for m in self.modules for hooks in (m._forward_hooks, m._forward_pre_hooks)
        ]
        self._contents: list[Tensor] | None = None
        self._trunk = _Weights([m for m in self.modules if id(m) in trunks])
        self._rest = _Weights([m for m in self.modules if id(m) not in trunks])
        held = [
            part for m in self.modules if id(m) in trunks for part in (m, *m._parameters.values())
        ]
        self.structure = session.structure_of(held)

    @property
    def device(self) -> torch.device | None:
        """Where the trunks are; None if they have no weights."""
        found = self._trunk.parameters
        return found[0].device if found else None

    def hooked(self) -> bool:
        """Whether some module has hooks, which recorded work would not run."""
        return any(self._hooks)

    def same_state(self) -> bool:
        """Whether memory computed with these weights still fits them."""
        return (
            self._loads == self._session.loads
            and [list(held.values()) for held in self._children] == self._kept_children
            and not any(self._no_children)
            and self._trunk.in_place()
            and self._trunk.unwritten()
        )

    def same_places(self) -> bool:
        """Whether every weight outside the trunks still lies where it lay."""
        return self._rest.in_place()

    def note_contents(self) -> None:
        """Note what the trunks' weights hold, once; a device is not waited for.

        Writes through `.data` show nowhere else. Work shared among streams outlives a stream's
        reset, so that `agrees` has to see them.
        """
        if self._contents is None:
            self._contents = self._trunk.norms()

    def agrees(self, other: Census) -> bool:
        """Whether two censuses saw the same modules and weights."""
        if self is other:
            return True

        def seen(census: Census) -> list[Any]:
            weights = (census._trunk, census._rest)
            return [
                [id(module) for module in census.modules],
                *[[id(p) for p in part.parameters] for part in weights],
                *[(part.pointers, part.versions) for part in weights],
            ]

        same = self._loads == other._loads and seen(self) == seen(other)
        contents = (self._contents or (), other._contents or ())
        return same and all(map(torch.equal, *contents))  # of no more than both have noted


class _Weights:
    """The parameters of some modules: objects, pointers and versions in flat lists."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._dicts = [m._parameters for m in modules if m._parameters]
        self._empty = [m._parameters for m in modules if not m._parameters]
        self._kept = [list(held.values()) for held in self._dicts]
        self.parameters = [p for held in self._kept for p in held if p is not None]
        self.pointers = [p.data_ptr() for p in self.parameters]
        self._tracked = [p for p in self.parameters if not p.is_inference()]
        self.versions = [p._version for p in self._tracked]

    def in_place(self) -> bool:
        """Whether the same parameters hold the same memory."""
        try:  # lists compare identical objects without looking inside; others are tensors
            same = [list(held.values()) for held in self._dicts] == self._kept
        except RuntimeError:
            return False
        if not same or any(self._empty):
            return False
        return [p.data_ptr() for p in self.parameters] == self.pointers

    @torch.no_grad()
    def norms(self) -> list[Tensor]:
        """L1 and L2 norms of the parameters, in a few launches."""
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in self.parameters:
            if parameter.is_floating_point() and type(parameter.data) is Tensor:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        return [
            torch.stack(
                torch._foreach_norm(group, order, dtype=torch.promote_types(kind, torch.float32))
            )
            for (_, kind), group in kinds.items()
            for order in (1, 2)
        ]

    def unwritten(self) -> bool:
        """Whether nobody wrote to them."""
        return [p._version for p in self._tracked] == self.versions


def check_mode(census: Census) -> None:
    """Raise if the model, or a part of its trunks, is in training mode."""
    if any([module.training for module in census.watched]):
        raise TrainingModeError(
            "The model is in training mode: dropout and drop path would be remembered. Call "
            "model.eval() first."
        )


class WeightGuard:
    """Remembers the weights a stream's state was computed with."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        self._model = model
        self._session = session
        self._known: Census | None = None

    @property
    def known(self) -> Census | None:
        """The census remembered, which may no longer hold."""
        return self._known

    def forget(self) -> None:
        """Accept any weights at the next step; not those of a state dict loaded since the last."""
        if self._known is not None and self._known._loads != self._session.loads:
            raise WeightsChangedError(_CHANGED)
        self._known = None

    def drop(self) -> None:
        """Accept any weights at the next step."""
        self._known = None

    def check(self) -> Census:
        """Raise if the trunks' weights are not the remembered ones; returns the census."""
        if self._known is None:
            return Census(self._model, self._session)
        if not self._known.same_state():
            raise WeightsChangedError(_CHANGED)
        if not self._known.same_places():
            return Census(self._model, self._session)
        return self._known

    def remember(self, census: Census) -> None:
        """Take these weights as the ones the state was computed with."""
        self._known = census


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
