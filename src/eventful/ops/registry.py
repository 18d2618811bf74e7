"""Backends of the tensor operations: which there are, which serves a call, how to force one.

Every backend offers functions of the same names and signatures as `ops.reference`. Left
alone, a call goes to the first backend in the order for its device that can serve it and does
not yield to a faster one for its shapes. A forced backend serves every call it offers or
raises with the reason it cannot.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import ParamSpec, TypeVar

from torch import Tensor

from eventful.errors import BackendError

P = ParamSpec("P")
R = TypeVar("R")

_MODULES = {
    "reference": "eventful.ops.reference",
    "eager": "eventful.ops.eager",
    "triton": "eventful.ops.triton",
    "portable": "eventful.ops.portable",
}
BACKENDS = tuple(_MODULES)
_ORDER = {"cuda": ("triton", "eager")}  # any other device: eager alone
VARIABLE = "EVENTFUL_BACKEND"


@dataclass
class _Choice:
    """The forced backend, None for none, and what was loaded so far."""

    forced: str | None = None
    loaded: dict[str, ModuleType] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


_choice = _Choice()


class use_backend:
    """Force a backend from now on, or inside a `with` block; None goes back to choosing.

    The environment variable EVENTFUL_BACKEND does the same for a whole process.
    """

    def __init__(self, name: str | None) -> None:
        self._before = _choice.forced
        _choice.forced = None if name is None else _known(name)

    def __enter__(self) -> None:
        """The backend is in force already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _choice.forced = self._before


def forced_backend() -> str | None:
    """The backend in force, None if each call chooses."""
    if _choice.forced is not None:
        return _choice.forced
    named = os.environ.get(VARIABLE, "").strip()
    return _known(named, f"{VARIABLE}={named}: ") if named and named != "auto" else None


def fixed_shapes() -> bool:
    """Whether no shape may depend on a value, since a step is exported (`eventful.export`)."""
    return forced_backend() == "portable"


def _known(name: str, where: str = "") -> str:
    if name not in _MODULES:
        raise BackendError(f"{where}there is no backend {name!r}; there are {', '.join(BACKENDS)}.")
    return name


def why_not(backend: str, operation: str, *args: object, **kwargs: object) -> str | None:
    """Why a backend cannot serve a call; None if it can."""
    module = _load(backend)
    if module is None:
        return _choice.missing[backend]
    if not hasattr(module, operation):
        return f"it has no {operation}"
    refuse = getattr(module, "refuse", None)
    reason: str | None = None if refuse is None else refuse(operation, args, kwargs)
    return reason


def _load(backend: str) -> ModuleType | None:
    if backend not in _choice.loaded and backend not in _choice.missing:
        try:
            _choice.loaded[backend] = importlib.import_module(_MODULES[backend])
        except ImportError as error:
            _choice.missing[backend] = f"it does not import ({error})"
    return _choice.loaded.get(backend)


def choose(operation: str, device: str, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    """The name of the backend that serves a call."""
    forced = forced_backend()
    if forced is not None:
        reason = why_not(forced, operation, *args, **kwargs)
        if reason is not None:
            raise BackendError(
                f"Backend {forced!r} cannot serve {operation} here: {reason}. Force another, or "
                "call eventful.use_backend(None) to let each call choose."
            )
        return forced
    for name in _ORDER.get(device, ()):
        if why_not(name, operation, *args, **kwargs) is None:
            yields = getattr(_load(name), "yields", None)
            if yields is None or not yields(operation, args, kwargs):
                return name
    return "eager"


def operation(reference: Callable[P, R]) -> Callable[P, R]:
    """The public face of an operation: its signature and text, served by whichever backend."""
    name = reference.__name__

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        device = _device_of(args)
        if device not in _ORDER and forced_backend() is None:
            module = _choice.loaded.get("eager") or _load("eager")
        else:
            module = _load(choose(name, device, args, kwargs))
        return getattr(module, name)(*args, **kwargs)  # type: ignore[no-any-return]

    return call


def _device_of(args: tuple[object, ...]) -> str:
    for value in args:
        while isinstance(value, tuple) and value:
            value = value[0]
        for held in (value, getattr(value, "query", None)):
            if isinstance(held, Tensor):
                return held.device.type
    return "cpu"
