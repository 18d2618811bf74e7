"""Lists and tables in text files, row by row with their line numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from eventful.errors import MalformedDataError
from eventful.paper.data.problems import OnProblem, malformed, missing

T = TypeVar("T")

CLASS_LIST = "classes.txt"


@dataclass(frozen=True)
class Row:
    """One row of a table, with its file and line number."""

    path: Path
    line: int
    values: dict[str, str]

    def text(self, column: str) -> str:
        """A value that must not be empty."""
        return self._parsed(column, _text, "some text")

    def number(self, column: str, low: int, high: int | None = None) -> int:
        """A whole number within bounds."""
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"

        def parse(value: str) -> int:
            number = int(value)
            if number < low or (high is not None and number > high):
                raise ValueError
            return number

        return self._parsed(column, parse, f"a whole number {bounds}")

    def seconds(self, column: str) -> float:
        """A time written HH:MM:SS.ss, or in seconds."""
        return self._parsed(column, _seconds, "a time as HH:MM:SS.ss or in seconds")

    def refuse(self, column: str, expected: str) -> MalformedDataError:
        """The error for this value."""
        what = f"{expected} in column {column!r}"
        return malformed(self.path, self.line, what, self.values[column])

    def _parsed(self, column: str, parse: Callable[[str], T], expected: str) -> T:
        try:
            return parse(self.values[column].strip())
        except ValueError:
            raise self.refuse(column, expected) from None


def rows(path: Path, columns: tuple[str, ...], on_problem: OnProblem) -> Iterator[Row]:
    """Rows of a CSV file with a header, which must have these columns among others.

    A row of another length is handed to `on_problem` and left out.
    """
    text = text_of(path, f"a table with the columns {', '.join(columns)}")
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next(reader, [])
        absent = [column for column in columns if column not in header]
        if absent:
            raise malformed(path, 1, f"a header with the columns {', '.join(absent)}", header)
        for values in reader:
            if not values:
                continue
            if len(values) != len(header):
                expected = f"{len(header)} values, as many as the header names"
                on_problem(malformed(path, reader.line_num, expected, values))
                continue
            yield Row(path, reader.line_num, dict(zip(header, values, strict=True)))
    except csv.Error as error:
        raise malformed(path, reader.line_num, "a row of a CSV file", str(error)) from None


def header_of(path: Path) -> list[str]:
    """The column names of a CSV file; nothing beyond its first line is read."""
    with path.open("rb") as file:
        line = file.readline().decode("utf-8-sig", errors="replace")
    return next(csv.reader([line]), [])


def lines(path: Path, why: str) -> Iterator[tuple[int, str]]:
    """Lines of a text file that are not blank, stripped, with their numbers.

    Args:
        why: What the file is, for the error where it is not there.
    """
    for number, line in enumerate(io.StringIO(text_of(path, why), newline=None), start=1):
        if line.strip():
            yield number, line.strip()


def class_list(*folders: Path) -> Path | None:
    """The first `classes.txt`: names that replace those of a format, in the order of the labels."""
    return next((f / CLASS_LIST for f in folders if (f / CLASS_LIST).is_file()), None)


def class_names(path: Path) -> tuple[str, ...]:
    """The names in a `classes.txt`, one a line."""
    names: dict[str, int] = {}
    for line, name in lines(path, "the names of the labels"):
        before = names.setdefault(name, line)
        if before != line:
            raise malformed(path, line, f"each name once (line {before} has it)", name)
    return tuple(names)


def text_of(path: Path, why: str) -> str:
    """A whole text file in UTF-8, with or without a byte order mark.

    Args:
        why: What the file is, for the error where it is not there.
    """
    if not path.is_file():
        raise missing(path, why)
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        found = content[error.start : error.start + 1]
        raise malformed(path, line, "text in UTF-8", found) from None


def _text(value: str) -> str:
    if not value:
        raise ValueError
    return value


def _seconds(value: str) -> float:
    """'00:01:02.50' is 62.5; so is '62.5'."""
    total = 0.0
    for part in value.split(":"):
        total = total * 60 + float(part)
    if not 0 <= total < float("inf"):
        raise ValueError
    return total
