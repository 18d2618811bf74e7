"""The largest picture that is decoded: a small file can claim a size that fills the memory."""

from __future__ import annotations

import os

from eventful.errors import ConfigError, PictureSizeError

VARIABLE = "EVENTFUL_MAX_PIXELS"
MOST_PIXELS = 2**28 // 3  # 256 MiB as RGB; Pillow warns from the same number on


def most_pixels() -> int:
    """Most pixels a picture may have; EVENTFUL_MAX_PIXELS sets another number."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return MOST_PIXELS
    try:
        number = int(float(text))
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise ConfigError(f"{VARIABLE}={text!r}: give a number of pixels, such as 250000000.")
    return number


def check_pixels(shown: object, height: int, width: int) -> None:
    """Refuse a picture above the limit, before it is decoded.

    Args:
        shown: the file or address, as messages name it.
    """
    limit = most_pixels()
    if height * width > limit:
        raise PictureSizeError(
            f"{shown} has {width:,} x {height:,} pixels, as it says, and the limit is {limit:,} "
            "pixels, because a small file can claim a size that fills the memory. Make the picture "
            f"smaller, or, if it really is so large, raise the limit: {VARIABLE}={height * width}."
        )


def too_large(shown: object, height: int, width: int) -> PictureSizeError:
    """The error for a picture within the limit that does not fit into memory."""
    return PictureSizeError(
        f"{shown} has {width:,} x {height:,} pixels, for which the memory does not suffice. Make "
        "the picture smaller."
    )
