"""Results that depend only on the weights and on sizes, computed once per stream.

Libraries resize position embeddings and build rotary tables in every forward call. In a stream
weights and frame size stay the same, so the library's own result is kept in `Step.constant` and
dropped when the weights change. Outside a stream nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from eventful.rules.step import Step
from eventful.surgery.session import Session


@dataclass
class SizedMethod:
    """A method whose result depends only on the weights and on sizes.

    Attributes:
        shaped: of tensors passed to the method, other than parameters, only shape without batch,
            dtype and device matter. If false, the result of a call with such a tensor is not kept.
    """

    module: nn.Module
    method: str
    session: Session
    shaped: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the method takes, return what it returns."""
        original = getattr(type(self.module), self.method)
        step = self.session.step
        if step is None:
            return original(self.module, *args, **kwargs)
        name = (id(self.module), self.method)
        own = [*self.module._parameters.values(), *self.module._buffers.values()]
        key = _key(name, own, args, kwargs, self.shaped)
        return _kept(step, key, lambda: original(self.module, *args, **kwargs))


@dataclass
class ResizingMethod:
    """A method that takes tokens and calls a function of its library to resize positions.

    In a stream the function's result is kept; the rest of the method runs as it is.

    Attributes:
        function: the function's name in the module that defines the method.
    """

    module: nn.Module
    method: str
    function: str
    session: Session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the method takes, return what it returns."""
        original = getattr(type(self.module), self.method)
        step = self.session.step
        if step is not None and calls(original, self.function):
            original = self._keeping(original, step)
        return original(self.module, *args, **kwargs)

    def _keeping(self, original: FunctionType, step: Step) -> FunctionType:
        """The same code, calling a function that resizes once.

        Replacing the name in the library, or the table in the module, would change what other
        threads see that run the same model.
        """
        resize = original.__globals__[self.function]

        def resize_once(*args: Any, **kwargs: Any) -> Any:
            key = _key((id(self.module), self.function), [], args, kwargs, shaped=False)
            return _kept(step, key, lambda: resize(*args, **kwargs))

        twin = FunctionType(
            original.__code__,
            {**original.__globals__, self.function: resize_once},
            original.__name__,
            original.__defaults__,
            original.__closure__,
        )
        twin.__kwdefaults__ = original.__kwdefaults__
        return twin


def is_own(module: nn.Module | None, method: str, library: str) -> bool:
    """Whether a module runs its library's method, not one of a subclass or set on the instance."""
    if module is None or method in vars(module):
        return False
    found = getattr(type(module), method, None)
    return getattr(found, "__module__", "").split(".")[0] == library


def calls(method: object, function: str) -> bool:
    """Whether a method is Python code that calls `function` by a global name of its module."""
    return (
        isinstance(method, FunctionType)
        and function in method.__code__.co_names
        and callable(method.__globals__.get(function))
    )


def _kept(step: Step, key: Hashable | None, make: Callable[[], Any]) -> Any:
    return make() if key is None else step.constant(key, make)


def _key(
    name: Hashable,
    own: list[Tensor | None],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    shaped: bool,
) -> Hashable | None:
    """What the result of a call depends on; None if that is not known.

    Args:
        own: tensors of the module that the call may read.
    """
    tensors = [tensor for tensor in own if tensor is not None]
    parts: list[Hashable] = [name, *(_weight(tensor) for tensor in tensors)]
    for label, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            tensors.append(value)
            if isinstance(value, nn.Parameter):
                parts.append((label, _weight(value)))
            elif shaped:
                parts.append((label, value.shape[1:], value.dtype, value.device))
            else:
                return None
        else:
            part = _key_part(value)
            if part is None:
                return None
            parts.append((label, part))
    if not tensors:
        return None
    device = tensors[0].device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (*parts, cast)


def _weight(tensor: Tensor) -> Hashable:
    version = None if tensor.is_inference() else tensor._version
    return id(tensor), version, tensor.dtype, tensor.device


def _key_part(value: object) -> Hashable | None:
    """A number, a string or a sequence of these as part of a key; None for anything else."""
    if isinstance(value, list | tuple):  # torch.Size, too
        parts = [_key_part(entry) for entry in value]
        return None if None in parts else tuple(parts)
    return (value,) if value is None or type(value) in (bool, int, float, str) else None
