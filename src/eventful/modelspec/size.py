"""Sizes of frames as users write them: 518, 480x640 (height, then width), or longest:518.

A size means the same everywhere: height and width of the frames that the model gets, one number for
a square. Pictures keep their shape; the rest of a frame is padding.
"""

from __future__ import annotations

from dataclasses import dataclass

from eventful.errors import ConfigError
from eventful.video.fitting import Fit
from eventful.video.limits import VARIABLE, most_pixels

LONGEST = "longest:"
_DIFFERENCE = 1 / 8  # of shapes: frames of few whole patches cannot come closer to a picture's


@dataclass(frozen=True)
class Longest:
    """The longer side of frames that have the shape of the picture, so that nothing is padding."""

    side: int


Size = int | tuple[int, int] | Longest


def parse_size(text: str | None) -> Size | None:
    """A size from the command line; None for none.

    Raises:
        ConfigError: the text is no size, or the frames would be huge.
    """
    given = (text or "").lower()
    sides = _sides(given)
    if not sides:
        return None
    if given.startswith(LONGEST):
        return Longest(sides[0])
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _sides(text: str) -> list[int]:
    """The numbers of a size: none, the one side, or height and width."""
    parts = text.removeprefix(LONGEST).split("x") if text else []
    most_parts = 1 if text.startswith(LONGEST) else 2
    if len(parts) > most_parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--size is HxW in pixels, e.g. 480x640, one side of a square, e.g. 518, or "
            f"{LONGEST}518 for frames with the shape of the picture; got {text!r}."
        )
    sides = [int(part) for part in parts]
    most = most_pixels()
    if sides and sides[0] * sides[-1] > most:
        raise ConfigError(
            f"--size {text} is more than {most:,} pixels, the limit for pictures. Give a smaller "
            f"one, or set another limit with {VARIABLE}."
        )
    return sides


def both_sides(size: Size) -> tuple[int, int]:
    """Height and width; one number is the side of a square.

    Raises:
        ConfigError: The size depends on the picture.
    """
    if isinstance(size, Longest):
        raise ConfigError(
            f"--size {in_words(size)} takes the shape of the picture. That is not known here, or "
            "the model takes frames of one shape only: give HxW, or one side of a square."
        )
    return (size, size) if isinstance(size, int) else size


def in_words(size: Size | None) -> str:
    """A size as users write it."""
    if isinstance(size, Longest):
        return f"{LONGEST}{size.side}"
    if size is None or isinstance(size, int):
        return str(size or "")
    return f"{size[0]}x{size[1]}"


def whole_patches(size: Size, picture: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the frames of a model that takes any number of whole patches.

    Raises:
        ConfigError: The size was given, and is no whole number of patches.
    """
    exact: tuple[float, float]
    if isinstance(size, Longest):
        scale = size.side / max(picture)
        exact = picture[0] * scale, picture[1] * scale
    else:
        exact = both_sides(size)
    height, width = (
        max(1, round(side / own)) * own for side, own in zip(exact, patch, strict=True)
    )
    if not isinstance(size, Longest) and (height, width) != exact:
        raise ConfigError(
            f"--size {in_words(size)} is no whole number of patches of {patch[0]}x{patch[1]} "
            f"pixels; the nearest is {height}x{width}."
        )
    return height, width


def fit_of(frame: tuple[int, int], picture: tuple[int, int]) -> Fit:
    """How pictures become frames of a size: padded, or stretched where that is hardly seen."""
    scale = min(side / own for side, own in zip(frame, picture, strict=True))
    parts = (own * scale / side for side, own in zip(frame, picture, strict=True))
    return "stretch" if min(parts) >= 1 - _DIFFERENCE else "pad"
