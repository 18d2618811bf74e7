"""Folders that are written whole or not at all, and replace an earlier export but nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eventful.errors import ArtefactError, EventfulError


@contextmanager
def replacing_folder(folder: Path, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Give an empty folder; it replaces `folder` when the block ends, unless an error does so.

    Args:
        ours: whether a folder holds what an earlier export wrote, and nothing besides.

    Raises:
        ArtefactError: `folder` holds something else, or cannot be written.
    """
    try:
        place = folder.resolve()  # what a link points to is replaced, and the link stays
        _check_free(place, folder, ours)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=place.parent, prefix=".eventful-", ignore_cleanup_errors=True
        ) as work:
            made = Path(work, place.name)
            made.mkdir()
            yield made
            _check_free(place, folder, ours)  # somebody may have used it in the meantime
            _exchange(made, place, Path(work, "before"))
    except EventfulError:
        raise
    except OSError as error:
        raise ArtefactError(
            f"{folder} cannot be written: {error.strerror or error}. Name another folder."
        ) from error


def _check_free(place: Path, name: Path, ours: Callable[[Path], bool]) -> None:
    """Raise unless the folder is not there, empty, or of an earlier export."""
    if not place.exists():
        return
    if not place.is_dir():
        raise ArtefactError(f"{name} is a file. Name another folder.")
    if any(place.iterdir()) and not ours(place):
        raise ArtefactError(
            f"{name} holds files that `eventful export` did not write, and they would be lost. "
            "Name another folder."
        )


def _exchange(made: Path, place: Path, before: Path) -> None:
    """Move a new folder to its place; where that fails, the old one is there again."""
    aside = place.exists()
    if aside:
        place.rename(before)
    try:
        made.rename(place)
    except OSError:
        if aside:
            before.rename(place)
        raise
