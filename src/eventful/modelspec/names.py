"""Names that were meant: the known ones nearest to what a user wrote."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 5


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence with the known names nearest to `name`; empty if none is near."""
    by_lower = {other.lower(): other for other in sorted(known)}
    wanted = name.lower()
    found = difflib.get_close_matches(wanted, by_lower, n=_SHOWN, cutoff=0.6)
    parts = [other for other in by_lower if wanted and (wanted in other or other in wanted)]
    parts.sort(key=lambda other: abs(len(other) - len(wanted)))
    near = [by_lower[other] for other in dict.fromkeys([*found, *parts])][:_SHOWN]
    return f" Names near it: {', '.join(near)}." if near else ""


def first_line(error: BaseException) -> str:
    """The first line of a library's message, which may be a page long."""
    text = str(error).strip()
    line = text.splitlines()[0].strip() if text else type(error).__name__
    return line if len(line) <= 240 else line[:237] + "..."
