"""Sizes of frames as users write them: 518, or 480x640 (height, then width)."""

from __future__ import annotations

from eventful.errors import ConfigError
from eventful.video.limits import VARIABLE, most_pixels

Size = int | tuple[int, int]


def parse_size(text: str | None) -> Size | None:
    """A size from the command line; None for none.

    Raises:
        ConfigError: the text is neither one number nor two, or the frames would be huge.
    """
    numbers = parse_sides(text or "")
    if not numbers:
        return None
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def parse_sides(text: str) -> list[int]:
    """The numbers of a size: none, the one side, or height and width."""
    parts = text.lower().split("x") if text else []
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--size is HxW in pixels, e.g. 480x640, or one side, e.g. 518; got {text!r}."
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
    """Height and width; one number is the side of a square."""
    return (size, size) if isinstance(size, int) else size


def in_words(size: Size | None) -> str:
    """A size as users write it."""
    if size is None or isinstance(size, int):
        return str(size or "")
    return f"{size[0]}x{size[1]}"
