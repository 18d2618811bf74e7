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


class Census:
    """The modules and parameters of a model as they are at one moment.

    A change shows in a module or parameter object (assignment), a parameter's pointer
    (replaced or moved data), its version counter (in-place writes) or the session's count of
    loaded state dicts. Taken once and compared often, so it is kept as flat lists.

    Attributes:
        modules: every module, the model first.
        watched: the model and the modules of its trunks.
    """

    def __init__(self, model: nn.Module, session: Session) -> None:
        self.modules = list(model.modules())
        trunks = {id(m) for trunk, _ in session.trunks.values() for m in trunk.modules()}
        self.watched = [model, *(m for m in self.modules[1:] if id(m) in trunks)]
        self._session = session
        self._loads = session.loads
        self._children = [(m._modules, dict(m._modules)) for m in self.modules]
        self._trunk: list[_Held] = []
        self._rest: list[_Held] = []
        for module in self.modules:
            held = self._trunk if id(module) in trunks else self._rest
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    stamp = (parameter.data_ptr(), _version(parameter))
                    held.append((module._parameters, name, parameter, *stamp))

    @property
    def device(self) -> torch.device | None:
        """Where the trunks are; None if they have no weights."""
        return self._trunk[0][2].device if self._trunk else None

    def same_modules(self) -> bool:
        """Whether the model still consists of the same module objects."""
        return all(
            len(now) == len(then) and all(now[name] is then[name] for name in then)
            for now, then in self._children
            if then or now
        )

    def same_state(self) -> bool:
        """Whether memory computed with these weights still fits them."""
        return (
            self._loads == self._session.loads
            and self.same_modules()
            and all(
                held.get(name) is parameter
                and parameter.data_ptr() == pointer
                and _version(parameter) == version
                for held, name, parameter, pointer, version in self._trunk
            )
        )

    def same_places(self) -> bool:
        """Whether every weight, also outside the trunks, still lies where it lay."""
        return all(
            held.get(name) is parameter and parameter.data_ptr() == pointer
            for held, name, parameter, pointer, _ in self._rest
        )

    def agrees(self, other: Census) -> bool:
        """Whether two censuses saw the same modules and weights."""
        if self is other:
            return True

        def seen(census: Census) -> list[Any]:
            modules = [id(module) for module in census.modules]
            return [*modules, *((id(h[2]), *h[3:]) for h in (*census._trunk, *census._rest))]

        return self._loads == other._loads and seen(self) == seen(other)


# The dict that holds a parameter, its name there, the parameter, its pointer and version.
_Held = tuple[dict[str, Any], str, Tensor, int, int]


def _version(parameter: Tensor) -> int:
    return -1 if parameter.is_inference() else parameter._version


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
