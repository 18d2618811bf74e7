"""One call of a model on a frame: its arguments, and the same call on another tensor."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor, nn

from eventful.errors import FrameError, UnsupportedError

_METHODS = ("forward", "get_image_features", "get_video_features")


@dataclass(frozen=True, eq=False)
class Call:
    """`model.method(*args, **kwargs)`, where one of the arguments is the frame.

    Attributes:
        motion: (B, 2, y, x) that came with the frame, see `eventful.Frame`; None without.
        source: the argument that holds the frame in another shape, see `engine.grids`; None where
            the frame itself is an argument.
    """

    model: nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frame: Tensor
    motion: Tensor | None = None
    source: Tensor | None = None

    @classmethod
    def of(
        cls, model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any],
        frame: Tensor, source: Tensor | None = None,
    ) -> Call:  # fmt: skip
        """A user's call; motion comes as an attribute of the frame."""
        motion = getattr(frame, "motion", None)
        if motion is not None:
            fits = isinstance(motion, Tensor) and motion.dim() == 4
            if not fits or motion.shape[:2] != (len(frame), 2):
                shape = tuple(motion.shape) if isinstance(motion, Tensor) else motion
                raise FrameError(
                    f"The motion of {len(frame)} frames is a tensor ({len(frame)}, 2, h, w) of "
                    f"fractions of the frame, down and across; got {shape!r}."
                )
            motion = motion.to(frame.device)
        return cls(model, method, args, kwargs, frame, motion, source)

    def __post_init__(self) -> None:
        if not callable(getattr(self.model, self.method, None)):
            names = sorted({name for name in dir(self.model) if name.startswith(_METHODS)})
            raise UnsupportedError(
                f"{type(self.model).__name__} has no method {self.method!r}. Methods that take a "
                f"frame: {', '.join(names)}."
            )

    def run(self) -> Any:
        """Call the model."""
        target = self.model if self.method == "forward" else getattr(self.model, self.method)
        return target(*self.args, **self.kwargs)

    def on(self, frame: Tensor) -> Call:
        """The same call with another tensor in the frame's place."""
        held, source = self._held, None
        if self.source is not None:
            source = frame.reshape(-1, *self.source.shape[1:])
        given = frame if source is None else source
        args = tuple(given if value is held else value for value in self.args)
        named = {k: given if v is held else v for k, v in self.kwargs.items()}
        return Call(self.model, self.method, args, named, frame, self.motion, source)

    @property
    def _held(self) -> Tensor:
        """The argument that is, or holds, the frame."""
        return self.frame if self.source is None else self.source

    @property
    def grid(self) -> tuple[int, int] | None:
        """(h, w) of a frame that came as patches; None for a picture."""
        if self.source is None or self.source.dim() > 3:
            return None
        return self.frame.shape[1], self.frame.shape[2]

    def part(self, rows: list[int]) -> Call:
        """The same call for some of the streams."""
        motion = None if self.motion is None else self.motion[rows]
        return replace(self.on(self.frame[rows]), motion=motion)

    @property
    def repeatable(self) -> bool:
        """Whether a recorded call repeats it: all arguments but the frame are simple values."""
        if not self.kwargs and len(self.args) == 1 and self.args[0] is self.frame:
            return True  # as most calls are
        values = (*self.args, *self.kwargs.values())
        return all(value is self._held or _is_simple(value) for value in values)

    @property
    def divisible(self) -> bool:
        """Whether the call can be made for some of its streams: no argument has a row for each."""
        values = (*self.args, *self.kwargs.values())
        return self.repeatable and not any(_has_records(value) for value in values)

    def key(self) -> Hashable:
        """What calls share that do the same work on their frames; of repeatable calls, all."""
        if not self.kwargs and len(self.args) == 1 and self.args[0] is self.frame:
            return self.method
        rest: list[Any] = [self.method]
        for name, value in (*enumerate(self.args), *sorted(self.kwargs.items())):
            what = "frame" if value is self._held else type(value).__name__
            rest.append((name, what, _text(value) if _is_simple(value) else None))
        return tuple(rest)


def _is_simple(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_simple(entry) for entry in value)
    if _is_record(value):
        return all(_is_simple(getattr(value, each.name)) for each in fields(value))
    return value is None or isinstance(value, bool | int | float | str)


def _is_record(value: Any) -> bool:
    """Whether a value is a frozen dataclass that holds its fields alone, as a placement does."""
    kind = type(value)
    params = vars(kind).get("__dataclass_params__")  # a subclass may hold more than its fields
    if params is None or not params.frozen:
        return False
    held = getattr(value, "__dict__", None)
    return held is None or held.keys() == {each.name for each in fields(kind)}


def _text(value: Any) -> Any:
    """A simple value for a key; of a record its fields, since its text may be anything."""
    if isinstance(value, list | tuple):
        return tuple(_text(entry) for entry in value)
    if _is_record(value):
        kind = type(value)
        each = tuple((one.name, _text(getattr(value, one.name))) for one in fields(kind))
        return (kind.__module__, kind.__qualname__, each)
    return repr(value)


def _has_records(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_records(entry) for entry in value)
    return _is_record(value)
