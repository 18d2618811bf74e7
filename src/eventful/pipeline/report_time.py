"""What happened over time: charts and tables of each source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from eventful.pipeline.history import FrameRow, Totals
from eventful.pipeline.report_charts import Chart, Line, Marks, axis_top, chart_of
from eventful.pipeline.report_elements import Element, el
from eventful.pipeline.report_numbers import Numbers, counted, factor, percent, plain

PARTS = 12  # rows of the table of a source
COLUMNS = 480  # of all charts of one kind together, at least LEAST_COLUMNS for each
LEAST_COLUMNS = 60
MOST_SOURCES = 32  # with charts of their own

Named = Sequence[tuple[str, Sequence[FrameRow]]]
ByName = Mapping[str, Totals | None]


def sources_section(named: Named, totals: ByName) -> Element | None:
    """A table that compares the sources; None for one source."""
    if len(named) < 2:
        return None
    return el(
        "section",
        el("h2", "Sources", id="sources"),
        _table(
            "source",
            [(name, Numbers.of(rows).with_totals(totals.get(name))) for name, rows in named],
        ),
        aria_labelledby="sources",
    )


def time_section(named: Named, totals: ByName) -> Element | None:
    """The charts of every source; None where there are no frames."""
    filled = [(name, rows) for name, rows in named if rows]
    if not filled:
        return el("section", el("h2", "Over time"), el("p", "No frame was processed."))
    tops = _Tops.of([row for _, rows in filled for row in rows])
    drawn = filled[:MOST_SOURCES]
    columns = max(LEAST_COLUMNS, COLUMNS // max(1, len(drawn) // 2))
    chooser = None
    if len(drawn) > 1:
        options = [el("option", name, value=str(n)) for n, (name, _) in enumerate(drawn)]
        chooser = el(
            "p",
            el("label", "Source ", el("select", *options, id="source-chooser")),
            class_="chooser",
            hidden=True,
        )
    left_out = len(filled) - len(drawn)
    return el(
        "section",
        el("h2", "Over time", id="time"),
        el(
            "p",
            "The axes are the same for all sources. " if len(drawn) > 1 else None,
            el(
                "span",
                "Point at a chart to read the values of a frame.",
                class_="hint",
                hidden=True,
            ),
        ),
        el("p", f"{counted(left_out, 'more source')} without charts: see the table.")
        if left_out
        else None,
        chooser,
        *(
            _source(
                el("h3", el("bdi", name)) if len(drawn) > 1 else None,
                rows,
                totals.get(name),
                tops,
                columns,
            )
            for name, rows in drawn
        ),
        aria_labelledby="time",
    )


@dataclass(frozen=True)
class _Tops:
    """Upper ends of the axes, the same for all sources, so that charts can be compared."""

    error: float
    share: float
    ms: float
    operations: float

    @classmethod
    def of(cls, rows: Sequence[FrameRow]) -> _Tops:
        return cls(
            error=axis_top([r.error for r in rows], [r.estimate for r in rows]),
            share=min(100.0, axis_top([_share(row) for row in rows])),
            ms=axis_top([r.ms for r in rows], [r.dense_ms for r in rows]),
            operations=axis_top(
                [row.operations / 1e9 for row in rows], [row.dense_operations / 1e9 for row in rows]
            ),
        )


def _share(row: FrameRow) -> float | None:
    return 100 * row.updated / row.tokens if row.tokens else None


def _source(
    heading: Element | None,
    rows: Sequence[FrameRow],
    totals: Totals | None,
    tops: _Tops,
    columns: int,
) -> Element:
    indices = [row.index for row in rows]
    increasing = all(a < b for a, b in pairwise(indices))
    places = indices if increasing else list(range(len(rows)))
    charts = [chart_of(chart) for chart in _charts(rows, tops, places, columns)]
    seconds = [row.seconds for row in rows if row.seconds is not None]
    span = f", {seconds[0]:,.1f} s to {seconds[-1]:,.1f} s" if len(seconds) > 1 else ""
    about = f"Frames {places[0]:,} to {places[-1]:,}{span}." if len(rows) > 1 else "One frame."
    if totals is not None and totals.steps > len(rows):
        about += f" The charts and the table show {len(rows):,} of {totals.steps:,} steps."
    return el(
        "div",
        heading,
        el("p", about, class_="faint"),
        el("div", *charts, class_="charts"),
        el(
            "details",
            el("summary", "The same as a table"),
            _table("part of the run", _parts(rows, places)),
        ),
        class_="source",
    )


def _charts(
    rows: Sequence[FrameRow], tops: _Tops, places: Sequence[int], columns: int
) -> list[Chart]:
    flushes = Marks("flush", ("flush", "flushes"), [row.flushed for row in rows])
    stale = Marks("stale", ("stale frame", "stale frames"), [row.stale for row in rows])

    def chart(
        title: str, unit: str, about: str, top: float, lines: list[Line], marks: list[Marks]
    ) -> Chart:
        return Chart(title, unit, about, lines, marks, top, places, columns)

    error = [
        Line("measured", "eventful", [row.error for row in rows]),
        Line("estimated", "estimate", [row.estimate for row in rows]),
    ]
    made = [
        chart(
            "Error", "", "Of the features against the whole model's: measured where that ran, and "
            "as the stream estimates it.", tops.error, error, [stale],
        ),
        chart(
            "Tokens updated", "%", "Share of the tokens that were computed; in a flush, all.",
            tops.share, [Line("updated", "eventful", [_share(row) for row in rows])], [flushes],
        ),
        chart(
            "Time", "ms", "Of the model's step for a frame.", tops.ms,
            [
                Line("eventful", "eventful", [row.ms for row in rows]),
                Line("dense", "dense", [row.dense_ms for row in rows]),
            ],
            [flushes],
        ),
        chart(
            "Operations", "billion", "Multiply-adds for a frame.", tops.operations,
            [
                Line("eventful", "eventful", [row.operations / 1e9 for row in rows]),
                Line("dense", "dense", [row.dense_operations / 1e9 for row in rows]),
            ],
            [flushes],
        ),
    ]  # fmt: skip
    unknown = all(row.error is None and row.estimate is None for row in rows)
    return made[1:] if unknown else made


def _parts(rows: Sequence[FrameRow], places: Sequence[int]) -> list[tuple[str, Numbers]]:
    """The run in a few parts of equal length, one after the other."""
    count = min(PARTS, len(rows))
    ends = [len(rows) * part // count for part in range(count + 1)]
    made = []
    for start, end in pairwise(ends):
        first, last = places[start], places[end - 1]
        name = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        made.append((name, Numbers.of(rows[start:end])))
    return made


def _table(first: str, lines: Sequence[tuple[str, Numbers]]) -> Element:
    """Numbers below each other; columns in which nothing is known are left out."""
    columns = [
        (first, [name for name, _ in lines]),
        ("frames", [f"{n.frames:,}" for _, n in lines]),
        ("operations saved", [factor(n.saved) for _, n in lines]),
        ("tokens updated", [percent(n.share) for _, n in lines]),
        ("median time", [plain(n.ms, "ms") for _, n in lines]),
        ("median time, dense", [plain(n.dense_ms, "ms") for _, n in lines]),
        ("speed-up", [factor(n.speed_up) for _, n in lines]),
        ("median error", [plain(n.error) for _, n in lines]),
        ("median estimate", [plain(n.estimate) for _, n in lines]),
        ("median objects found", [plain(n.found) for _, n in lines]),
        ("flushes", [f"{n.flushed:,}" for _, n in lines]),
        ("stale frames", [f"{n.stale:,}" for _, n in lines]),
    ]
    kept = [(name, cells) for name, cells in columns if any(cell != "–" for cell in cells)]
    head = [el("th", name, scope="col") for name, _ in kept]
    body = [
        el(
            "tr",
            el("th", el("bdi", kept[0][1][place]), scope="row"),
            *(el("td", cells[place]) for _, cells in kept[1:]),
        )
        for place in range(len(lines))
    ]
    table = el("table", el("thead", el("tr", *head)), el("tbody", *body))
    # A wide table scrolls in its own box; a box that scrolls must take the keyboard's focus.
    return el("div", table, class_="wide", tabindex="0", role="region",
              aria_label=f"Numbers by {first}")  # fmt: skip
