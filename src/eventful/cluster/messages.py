"""Messages as they may be shown: whatever an error says, no passwords of addresses."""

from __future__ import annotations

import re
from pathlib import Path

from eventful.errors import EventfulError
from eventful.video.address import without_credentials

# user:password@, with the scheme ahead of it if there is one. Whatever looks like it goes.
_LOGIN = re.compile(r"([A-Za-z][\w+.\-]*://)?[^\s/@:'\"]*:\S*@")


def scrubbed(text: str) -> str:
    """A text without logins."""
    return _LOGIN.sub(lambda found: found[1] or "", text)


def shown(source: str) -> str:
    """A source as it may be shown: an existing file as it is, anything else as an address.

    What is no address, but was meant as one (`rtsp//user:password@host`), looks like a path.
    """
    try:
        there = Path(source).exists()
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        there = False
    if there:
        return source
    bare, mark, _ = without_credentials(scrubbed(source)).partition("?")
    return bare + ("?..." if mark else "")


def about(text: str, address: str, name: str) -> str:
    """A message about a source, which is named as it may be shown.

    Args:
        address: as it is opened; messages may also hold it as a path, with one slash for two.
    """
    for form in (address, str(Path(address))):
        if len(form) > 3:  # `.` is everywhere
            text = text.replace(form, name)
    return scrubbed(text)


def in_words(error: BaseException) -> str:
    """An error as a user reads it."""
    kind = type(error).__name__
    plain = isinstance(error, EventfulError | OSError) and str(error)
    return scrubbed(str(error) if plain else f"{kind}: {error}")
