"""Frames that a model takes in another shape than (B, C, height, width).

Qwen-VL takes patches (B * h * w, C), one frame after another, SigLIP 2 takes (B, h * w, C), both
with the grid of each frame in another argument. The engine sees them as frames (B, h, w, C), so
that frames of another grid are frames of another shape. LLaVA-NeXT takes tiles of a picture,
(B, tiles, C, height, width). The engine sees each tile as a frame of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any
from weakref import ref

from torch import Tensor, nn

from eventful.errors import FrameError
from eventful.surgery.session import Session


class GridReader:
    """Finds frames that come as patches among the arguments of calls of one model."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        self._model = model
        self._names: dict[str, str] = {}
        for _, adapter in session.trunks.values():
            self._names.update(adapter.grids)
        self._read: tuple[ref[Tensor], int, list[list[int]]] | None = None

    def find(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor] | None:
        """The argument that holds patches, and the frames in it (B, h, w, C).

        None for a model that takes pictures.
        """
        if not self._names:
            return None
        given = _by_name(self._model, method, args, kwargs)
        found = [name for name in self._names if isinstance(given.get(name), Tensor)]
        if len(found) != 1:
            raise FrameError(self._advice(found))
        (name,) = found
        source = given.get(self._names[name])
        if not isinstance(source, Tensor) or source.dim() not in (2, 3):
            raise FrameError(
                f"{name} was passed without the patches of the frame: pass a tensor "
                f"{self._names[name]} of 2 or 3 dimensions, as the model's processor makes it."
            )
        return source, _frames(source, self._grid(name, given[name]), name, len(given[name]))

    def _advice(self, found: list[str]) -> str:
        listed = ", ".join(self._names)
        if found:
            return (
                f"{' and '.join(found)} were passed together. A stream is one video: pass one of "
                f"{listed}, with its patches."
            )
        return (
            f"{type(self._model).__name__} takes a frame as patches, with its grid in one of "
            f"{listed}. Pass what the model's processor returns, as keyword arguments."
        )

    def _grid(self, name: str, grids: Tensor) -> tuple[int, int]:
        """The grid (h, w) that all frames of a call share."""
        rows = self._values(grids)
        if grids.dim() != 2 or grids.shape[1] not in (2, 3) or not rows:
            raise FrameError(f"{name} has one row of 2 or 3 numbers per frame, got {rows!r}.")
        if any(len(row) == 3 and row[0] != 1 for row in rows):
            raise FrameError(
                f"{name} is {rows}: a clip of {max(row[0] for row in rows)} times. Step the times "
                "of a clip in turn, each with a first number of 1."
            )
        if any(row != rows[0] for row in rows):
            raise FrameError(
                f"{name} is {rows}: the frames of a call need one grid. Resize them to one size."
            )
        height, width = rows[0][-2:]
        return height, width

    def _values(self, grids: Tensor) -> list[list[int]]:
        """The numbers in a tensor; of one that was read before they are known without waiting."""
        version = -1 if grids.is_inference() else grids._version
        if self._read is not None and version >= 0:
            known, seen, values = self._read
            if known() is grids and seen == version:
                return values
        values = grids.tolist()
        self._read = (ref(grids), version, values)
        return values


def tiles_of(model: nn.Module, frame: Tensor) -> Tensor | None:
    """The tiles (B * tiles, C, height, width) that a vision-language model takes of pictures.

    None for a frame of another shape, or for a model that takes a picture as a whole.
    """
    if frame.dim() != 5 or not callable(getattr(type(model), "get_image_features", None)):
        return None
    return frame.flatten(0, 1)


def _frames(source: Tensor, grid: tuple[int, int], name: str, count: int) -> Tensor:
    """Patches as frames (B, h, w, C), without a copy."""
    height, width = grid
    size = height * width
    rows = source.shape[0] if source.dim() == 2 else source.shape[1]
    expected = count * size if source.dim() == 2 else size
    if source.dim() == 3 and rows > size:
        raise FrameError(
            f"Of {rows} patches {rows - size} are padding: {name} says {height} x {width}. A "
            "stream takes frames without padding: cut the patches and their mask to "
            f"[:, :{size}]."
        )
    if rows != expected or (source.dim() == 3 and len(source) != count):
        raise FrameError(
            f"{count} frames of {height} x {width} patches, as {name} says, do not fit a tensor "
            f"{tuple(source.shape)}."
        )
    return source.reshape(count, height, width, source.shape[-1])


def _by_name(
    model: nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name; those that have none are left out."""
    function = getattr(type(model), method, None)
    if not args or function is None:
        return dict(kwargs)
    names = list(inspect.signature(function).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}
