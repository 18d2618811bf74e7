"""Tables that fit the screen: numbers and headings stay whole, long names are folded.

Where even that is too wide, columns that the caller can spare are left out, and a line names them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NARROWEST = 12  # of a column of names


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: may be broken at its spaces.
        names: holds text, which may be broken; else numbers, or short words, which may not.
    """

    heading: str
    names: bool = False


@dataclass
class Grid:
    """A table to be printed.

    Attributes:
        rows: texts by column.
        styles: of rows by their number, such as bold.
        title, caption: above and below it; "" for none.
    """

    columns: Sequence[Column]
    rows: list[list[str]] = field(default_factory=list)
    styles: dict[int, str] = field(default_factory=dict)
    title: str = ""
    caption: str = ""

    def add(self, cells: Sequence[str], style: str = "") -> None:
        """Add a row."""
        if style:
            self.styles[len(self.rows)] = style
        self.rows.append(list(cells))

    def without(self, heading: str) -> Grid:
        """The same without the columns of this heading."""
        kept = [i for i, column in enumerate(self.columns) if column.heading != heading]
        rows = [[row[i] for i in kept] for row in self.rows]
        columns = [self.columns[i] for i in kept]
        return Grid(columns, rows, self.styles, self.title, self.caption)


def show(console: Console, grid: Grid, spare: Sequence[str] = ()) -> None:
    """Print a table within the width of the screen.

    Args:
        spare: headings of columns to leave out where it is too wide, the first one first.
    """
    left_out: list[str] = []
    widths = _widths(grid, console.width)
    for heading in spare:
        if widths is not None:
            break
        if any(column.heading == heading for column in grid.columns):
            grid = grid.without(heading)
            left_out.append(heading)
            widths = _widths(grid, console.width)
    widths = widths or _least(grid)
    screen, needed = console.width, sum(widths) + len(widths) - 1
    if grid.title:
        console.print(grid.title, style="italic", highlight=False, markup=False)
    # Where nothing helps, a line that is too long is better than broken numbers.
    console.width = max(screen, needed)
    console.print(_table(grid, widths, screen))
    console.width = screen
    if grid.caption:
        console.print(grid.caption, style="dim", highlight=False, markup=False)
    if left_out:
        words = ", ".join(left_out)
        console.print(f"[dim]Too narrow for: {words}. --json has them.[/]", highlight=False)


def _widths(grid: Grid, screen: int) -> list[int] | None:
    """Of every column; None if they do not fit."""
    for gap in (2, 1):
        room = screen - gap * (len(grid.columns) - 1)
        widths = _natural(grid)
        # Headings are broken first, names only where that is not enough.
        for least in (_broken_headings(grid), _least(grid)):
            while sum(widths) > room:
                wide = [i for i, width in enumerate(widths) if width > least[i]]
                if not wide:
                    break
                widths[max(wide, key=lambda i: widths[i] - least[i])] -= 1
        if sum(widths) <= room:
            return widths
    return None


def _natural(grid: Grid) -> list[int]:
    """Widths at which nothing is broken."""
    return [
        max([len(column.heading), *(_width(row[i]) for row in grid.rows)])
        for i, column in enumerate(grid.columns)
    ]


def _broken_headings(grid: Grid) -> list[int]:
    """Widths at which headings alone are broken, at their spaces."""
    return [
        max([_longest_word(column.heading), *(_width(row[i]) for row in grid.rows)])
        for i, column in enumerate(grid.columns)
    ]


def _least(grid: Grid) -> list[int]:
    """Widths at which names are broken as much as may be."""
    return [
        min(width, max(_NARROWEST, _longest_word(column.heading))) if column.names else width
        for width, column in zip(_broken_headings(grid), grid.columns, strict=True)
    ]


def _table(grid: Grid, widths: Sequence[int], screen: int) -> Table:
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= screen else 1
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
    )
    for column, width in zip(grid.columns, widths, strict=True):
        heading = "\n".join(textwrap.wrap(column.heading, width)) or column.heading
        table.add_column(
            heading, justify="left" if column.names else "right", width=width, vertical="top"
        )
    for number, row in enumerate(grid.rows):
        cells = [
            Text("\n".join(folded(cell, width))) if column.names else Text.from_markup(cell)
            for cell, column, width in zip(row, grid.columns, widths, strict=True)
        ]
        table.add_row(*cells, style=grid.styles.get(number))
    return table


def folded(text: str, width: int) -> list[str]:
    """Lines of at most this width, broken behind spaces and signs where there are some."""
    lines, rest = [], text
    while len(rest) > width:
        breaks = [m.end() for m in re.finditer(r"[ ,;:/(_\-]", rest[:width])]
        # A break close to the start would make many short lines.
        place = breaks[-1] if breaks and breaks[-1] > width // 3 else width
        lines.append(rest[:place].rstrip())
        rest = rest[place:].lstrip()
    return [*lines, rest] if rest or not lines else lines


def _width(cell: str) -> int:
    return Text.from_markup(cell).cell_len


def _longest_word(heading: str) -> int:
    return max((len(word) for word in heading.split()), default=0)
