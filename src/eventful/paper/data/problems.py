"""Problems with data on disk: stop at the first one, or collect them and continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eventful.errors import DamagedMediaError, DataError, MalformedDataError, MissingFileError

OnProblem = Callable[[DataError], None]


def stop(error: DataError) -> None:
    """The default: raise what was found."""
    raise error


class Problems:
    """Collects problems instead of stopping; the entries concerned are skipped.

    Give it to `open_dataset(..., on_problem=problems)` for rows and files, and read videos inside
    `with problems.skipping():` for those that turn out to be damaged.
    """

    def __init__(self) -> None:
        self.found: list[DataError] = []

    def __call__(self, error: DataError) -> None:
        """Collect one problem."""
        self.found.append(error)

    def __len__(self) -> int:
        return len(self.found)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Leave the block, without an error, where a file is damaged or missing."""
        try:
            yield
        except (DamagedMediaError, MissingFileError) as error:
            self(error)

    @property
    def missing(self) -> list[str]:
        """Messages about files that are not there."""
        return [str(error) for error in self.found if isinstance(error, MissingFileError)]

    @property
    def malformed(self) -> list[str]:
        """Messages about rows and values that do not follow the format."""
        return [str(error) for error in self.found if isinstance(error, MalformedDataError)]

    @property
    def damaged(self) -> list[str]:
        """Messages about images and videos that do not decode."""
        return [str(error) for error in self.found if isinstance(error, DamagedMediaError)]


def malformed(
    path: Path, where: int | str, expected: str, found: object = None
) -> MalformedDataError:
    """The error for something in a file that is not what was expected.

    Args:
        where: Line number, or a description of the part of the file.
        found: The actual content; None if there is none.
    """
    place = f"line {where}" if isinstance(where, int) else where
    instead = "nothing" if found is None else repr(found)
    return MalformedDataError(f"{path}, {place}: expected {expected}, found {instead}")


def missing(path: Path, why: str) -> MissingFileError:
    """The error for a file or folder that is not there.

    Args:
        why: What it is, or which file refers to it.
    """
    return MissingFileError(f"{path} is not there: {why}")
