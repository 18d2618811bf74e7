"""Charts of a report as SVG. Long runs are thinned to the lowest and highest value of a column.

The lines are stretched to the width of the page, and all texts are HTML beside them, so that they
keep their size on a phone. A script reads values back from the lines, so nothing is stored twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eventful.pipeline.report_elements import Element, el
from eventful.pipeline.report_numbers import counted, known, median, plain

WIDE, HIGH = 4000, 1000  # units of the drawing
FEW = 60  # up to so many values are drawn as dots, too

Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """One line of a chart; `kind` is its class in the style sheet."""

    name: str
    kind: str
    values: Values


@dataclass(frozen=True)
class Marks:
    """Frames that are marked: `flush` by a line from top to bottom, `stale` by a coloured area.

    `kind` is the name in the key, too; `nouns` are one marked frame and several, in words.
    """

    kind: str
    nouns: tuple[str, str]
    where: Sequence[bool]


@dataclass(frozen=True)
class Chart:
    """What one chart shows.

    Attributes:
        top: upper end of the axis; values above it are drawn there, and a note says so.
        places: frame of each value, increasing.
        about: one sentence on what is shown.
        columns: of the drawing, at most; more frames are thinned.
    """

    title: str
    unit: str
    about: str
    lines: Sequence[Line]
    marks: Sequence[Marks]
    top: float
    places: Sequence[int]
    columns: int


def chart_of(chart: Chart) -> Element:
    """The chart as a figure, with a key, axes and a summary in words."""
    lines = [line for line in chart.lines if known(line.values)]
    marks = [mark for mark in chart.marks if any(mark.where)]
    summary = _summary(chart, lines, marks)
    return el(
        "figure",
        el("figcaption", el("strong", chart.title), el("span", chart.about, class_="about")),
        _key(chart, lines, marks),
        _plot(chart, lines, marks, summary),
        el("p", summary, class_="note"),
        class_="chart",
    )


def _plot(chart: Chart, lines: Sequence[Line], marks: Sequence[Marks], summary: str) -> Element:
    ticks = ticks_of(chart.top)
    first, last = chart.places[0], chart.places[-1]
    grid = "".join(f"M0 {_y(tick, chart.top)}H{WIDE}" for tick in ticks)
    drawing = el(
        "svg",
        el("path", d=grid, class_="grid"),
        *(_marked(mark, chart) for mark in marks),
        # The line of the stream comes last, so that it is above the others.
        *(part for line in reversed(lines) for part in _line(line, chart)),
        viewBox=f"0 0 {WIDE} {HIGH}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    down = [
        el("span", plain(tick), style=f"bottom:{100 * tick / chart.top:.2f}%") for tick in ticks
    ]
    across = [
        el("span", f"{place:,}", style=f"left:{100 * _part(place, first, last):.2f}%")
        for place in _frames_of_axis(first, last)
    ]
    return el(
        "div",
        el("div", *down, class_="down", aria_hidden="true"),
        el("div", drawing, el("div", class_="cursor", hidden=True), class_="field"),
        el("div", *across, class_="across", aria_hidden="true"),
        class_="plot",
        role="img",
        aria_label=f"{chart.title}. {summary}",
        data_first=str(first),
        data_last=str(last),
        data_top=f"{chart.top:.6g}",
    )


def _key(chart: Chart, lines: Sequence[Line], marks: Sequence[Marks]) -> Element:
    """Names of the lines with their medians; the script puts the values of a frame there."""
    entries = [
        el(
            "li",
            el("i", class_=f"sample {line.kind}", aria_hidden="true"),
            line.name,
            " ",
            el("b", plain(median(line.values), chart.unit), data_unit=chart.unit),
        )
        for line in lines
    ]
    entries += [
        el("li", el("i", class_=f"sample {mark.kind}", aria_hidden="true"), mark.kind)
        for mark in marks
    ]
    where = el("li", "median", class_="where")
    return el("ul", where if lines else None, *entries, class_="key")


def _line(line: Line, chart: Chart) -> Iterator[Element]:
    points = thinned(line.values, chart.places, chart.columns)
    first, last = chart.places[0], chart.places[-1]
    drawn = [(_x(place, first, last), _y(value, chart.top)) for place, value in points]
    text = "M" + "L".join(f"{x} {y}" for x, y in drawn)
    yield el("path", d=text, class_=f"line {line.kind}", data_line=True)
    if len(drawn) <= FEW:
        dots = "".join(f"M{x} {y}h0" for x, y in drawn)
        yield el("path", d=dots, class_=f"dots {line.kind}")


def _marked(marks: Marks, chart: Chart) -> Element:
    first, last = chart.places[0], chart.places[-1]
    where = [
        _part(place, first, last)
        for place, marked in zip(chart.places, marks.where, strict=True)
        if marked
    ]
    if marks.kind == "stale":
        text = _areas(where, max(0.5 / max(last - first, 1), 0.5 / chart.columns))
    else:
        # One line in a column is all that can be seen.
        columns = {int(part * chart.columns): round(WIDE * part) for part in where}
        text = "".join(f"M{x} 0V{HIGH}" for x in columns.values())
    return el("path", d=text, class_=f"mark {marks.kind}")


def _areas(where: Sequence[float], half: float) -> str:
    """Areas around marked frames; those that touch are one."""
    runs: list[list[float]] = []
    for middle in where:
        start, end = max(0.0, middle - half), min(1.0, middle + half)
        if runs and start <= runs[-1][1] + half / 4:
            runs[-1][1] = end
        else:
            runs.append([start, end])
    parts = [(round(WIDE * start), max(1, round(WIDE * (end - start)))) for start, end in runs]
    return "".join(f"M{x} 0h{wide}V{HIGH}h-{wide}z" for x, wide in parts)


def thinned(values: Values, places: Sequence[int], columns: int) -> list[tuple[int, float]]:
    """(place, value) of the known values, at most the lowest and highest of each column.

    The two of a column stay in their order, so peaks that last one frame are kept.
    """
    there = [
        (place, value)
        for place, value in zip(places, values, strict=True)
        if value is not None and math.isfinite(value)
    ]
    if len(there) <= 2 * columns:
        return there
    first, last = there[0][0], there[-1][0]
    by_column: dict[int, list[tuple[int, float]]] = {}
    for point in there:
        column = min(columns - 1, int(columns * _part(point[0], first, last)))
        by_column.setdefault(column, []).append(point)
    kept = []
    for points in by_column.values():
        low, high = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def axis_top(*lines: Values) -> float:
    """Upper end of an axis that starts at 0 and shows all values but single, far outliers."""
    needed = max((_needed(known(line)) for line in lines), default=0.0)
    if needed <= 0:
        return 1.0
    step = _step(needed)
    return step * math.ceil(needed / step - 1e-9)


def _needed(values: list[float]) -> float:
    """The highest value, or somewhat more than usual ones if it is far above them."""
    ranked = sorted(values)
    if len(ranked) < 8:
        return ranked[-1] if ranked else 0.0
    usual = ranked[-1 - max(1, len(ranked) // 50)]
    return ranked[-1] if ranked[-1] <= 3 * usual or usual <= 0 else 1.3 * usual


def ticks_of(top: float) -> list[float]:
    """Round numbers from 0 to the top, three to six of them."""
    step = _step(top)
    return [step * place for place in range(int(top / step + 1e-6) + 1)]


def _step(top: float) -> float:
    power = 10.0 ** math.floor(math.log10(top))
    share = top / power
    return power * (0.2 if share <= 1 else 0.5 if share <= 2 else 1 if share <= 5 else 2)


def _frames_of_axis(first: int, last: int) -> list[int]:
    """Round frame numbers to write under a chart, with room between them."""
    if first == last:
        return [first]
    step = max(1, round(_step(last - first)))
    start = -(-first // step) * step
    return list(range(start, last + 1, step))


def _part(place: float, first: float, last: float) -> float:
    """Where a frame lies between the first and the last; one frame is in the middle."""
    return (place - first) / (last - first) if last > first else 0.5


def _x(place: int, first: int, last: int) -> int:
    return round(WIDE * _part(place, first, last))


def _y(value: float, top: float) -> int:
    return round(HIGH * (1 - min(max(value / top, 0.0), 1.0)))


def _summary(chart: Chart, lines: Sequence[Line], marks: Sequence[Marks]) -> str:
    said = []
    for line in lines:
        points = list(
            zip(known(line.values), _known_places(line.values, chart.places), strict=True)
        )
        high, place = max(points, key=lambda point: point[0])
        middle = plain(median(line.values), chart.unit)
        text = f"{line.name}: median {middle}, highest {plain(high, chart.unit)} (frame {place:,})"
        above = sum(value > chart.top for value, _ in points)
        if above:
            text += f", {counted(above, 'value')} above the axis"
        said.append(text + ".")
    for mark in marks:
        count = sum(mark.where)
        said.append(f"{count:,} {mark.nouns[count > 1]}.")
    return " ".join(said)


def _known_places(values: Values, places: Sequence[int]) -> list[int]:
    pairs = zip(values, places, strict=True)
    return [place for value, place in pairs if value is not None and math.isfinite(value)]
