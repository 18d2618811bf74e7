"""One call of a model on a frame: its arguments, and the same call on another tensor."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Call:
    """`model.method(*args, **kwargs)`, where one of the arguments is the frame."""

    model: nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frame: Tensor

    def run(self) -> Any:
        """Call the model."""
        target = self.model if self.method == "forward" else getattr(self.model, self.method)
        return target(*self.args, **self.kwargs)

    def on(self, frame: Tensor) -> Call:
        """The same call with another tensor in the frame's place."""
        args = tuple(frame if value is self.frame else value for value in self.args)
        named = {k: frame if v is self.frame else v for k, v in self.kwargs.items()}
        return Call(self.model, self.method, args, named, frame)

    def key(self) -> Hashable | None:
        """What two calls must share to be the same work; None if that cannot be told."""
        rest: list[Any] = [self.method]
        for name, value in (*enumerate(self.args), *sorted(self.kwargs.items())):
            if value is self.frame:
                rest.append((name, "frame"))
            elif _plain(value):
                rest.append((name, type(value).__name__, repr(value)))
            else:
                return None
        return tuple(rest)


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)
