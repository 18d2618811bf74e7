"""The report of a run: one HTML file that needs nothing else, and no network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from eventful import files
from eventful.errors import ConfigError
from eventful.pipeline.history import FrameRow, RunFacts, Still
from eventful.pipeline.report_elements import Child, Element, code, el, page_text, shown_source
from eventful.pipeline.report_numbers import Numbers, counted, factor, percent, plain, size
from eventful.pipeline.report_stills import stills_section
from eventful.pipeline.report_time import sources_section, time_section

NOT_KNOWN = "not measured"


def write_report(
    path: Path, facts: RunFacts, rows: Sequence[FrameRow], stills: Sequence[Still]
) -> None:
    """Write the report of a run as one HTML file.

    The file holds its pictures, charts, styles and script. It stays below 3 MB, however long the
    run was. Texts are escaped, and credentials in addresses are left out.

    Args:
        rows: all frames of all sources, those of one source in order; may be empty.
        stills: at most 16 are shown, spread evenly; may be empty. They need Pillow.

    Raises:
        ConfigError: The file cannot be written, or a still is not a picture in bytes.
        MissingDependencyError: There are stills, and Pillow is not installed.
    """
    label = _labels([*facts.sources, *(r.source for r in rows), *(s.source for s in stills)])
    by_source: dict[str, list[FrameRow]] = {source: [] for source in facts.sources}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    named = [(label(source), its_rows) for source, its_rows in by_source.items()]
    totals = {label(source): facts.totals.get(source) for source in by_source}
    numbers = Numbers.of(rows).with_totals(facts.totals.get(""))
    body = el(
        "body",
        _header(facts, [name for name, _ in named]),
        el(
            "main",
            _key_numbers(facts, numbers, len(named)),
            stills_section(stills, label),
            sources_section(named, totals),
            time_section(named, totals),
            _tables(facts),
        ),
        el("footer", el("p", "Operations are multiply-adds of the transformer's blocks; the "
                             "embedding and the heads are not counted.")),
    )  # fmt: skip
    content = page_text(_page(facts, [name for name, _ in named], body))
    try:
        files.write_bytes(path, content)
    except OSError as error:
        raise ConfigError(
            f"The report cannot be written to {path}: {error.strerror or error}. Name another file."
        ) from None


def _page(facts: RunFacts, sources: Sequence[str], body: Element) -> Element:
    style, script = _asset("report.css"), _asset("report.js")
    body.append(code("script", script))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing can be fetched, and no script but ours runs, whatever a name contains.
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    return el(
        "html",
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", http_equiv="Content-Security-Policy", content=policy),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", name="color-scheme", content="light dark"),
            el("title", f"{facts.model} on {_sources_text(sources)}: report of eventful"),
            code("style", style),
        ),
        body,
        lang="en",
    )


def _asset(name: str) -> str:
    return (resources.files("eventful.pipeline") / name).read_text(encoding="utf-8")


def _labels(sources: Sequence[str]) -> Callable[[str], str]:
    """Names of sources without credentials; those that become equal get a number."""
    labels: dict[str, str] = {}
    for source in dict.fromkeys(sources):
        text, taken = shown_source(source) or "(no name)", set(labels.values())
        numbered = (text if n == 1 else f"{text} ({n})" for n in range(1, len(taken) + 2))
        labels[source] = next(name for name in numbered if name not in taken)
    return labels.__getitem__


def _sources_text(sources: Sequence[str]) -> str:
    if not sources:
        return "no source"
    rest = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return sources[0] + rest


def _header(facts: RunFacts, sources: Sequence[str]) -> Element:
    what = "Source" if len(sources) == 1 else "Sources"
    known: list[tuple[str, Child]] = [(what, el("bdi", _sources_text(sources)))]
    if device := _device(facts):
        known.append(("Device", device))
    return el(
        "header",
        el("p", "eventful: report of a run", class_="faint"),
        el("h1", el("bdi", facts.model)),
        el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in known)),
        el("p", "A stream computes the tokens of a frame that changed, and takes the others from "
                "memory. Dense is the whole model on the same frames.", class_="faint"),
    )  # fmt: skip


def _device(facts: RunFacts) -> str:
    """The device in the settings, and its name among the versions."""
    known = (
        str(value)
        for values in (facts.settings, facts.versions)
        for name, value in values.items()
        if name.lower().replace("_", " ") in ("device", "device name") and value
    )
    return ", ".join(dict.fromkeys(known))


def _key_numbers(facts: RunFacts, numbers: Numbers, sources: int) -> Element:
    cards = [
        *_cost_cards(numbers),
        *_accuracy_cards(facts, numbers),
        *_run_cards(facts, numbers, sources),
    ]
    shown = [
        el(
            "div",
            el("dt", name),
            el(
                "dd",
                value,
                *(el("small", f" {text}") for text in beside),
                class_="number" if value != NOT_KNOWN else "number faint",
            ),
            el("dd", meaning, class_="meaning"),
        )
        for name, value, meaning, *beside in cards
    ]
    return el(
        "section",
        el("h2", "Key numbers", id="numbers"),
        el("dl", *shown, class_="cards"),
        aria_labelledby="numbers",
    )


# Name, value, meaning in one sentence, and maybe what the whole model has instead.
Card = tuple[str, str, str] | tuple[str, str, str, str]


def _cost_cards(numbers: Numbers) -> list[Card]:
    made: list[Card] = []
    if numbers.saved is None:
        made.append(("Operations saved", NOT_KNOWN, "No operations were counted."))
    else:
        meaning = (
            "The whole model needs this many times the operations of the stream, over all frames."
        )
        made.append(("Operations saved", factor(numbers.saved), meaning))
    if numbers.speed_up is None:
        meaning = (
            "The whole model did not run beside the stream, so there is no time to compare with."
        )
        made.append(("Speed-up, measured", NOT_KNOWN, meaning))
    else:
        slower = " Below 1 the stream is slower." if numbers.speed_up < 1 else ""
        meaning = (
            f"Median time of the whole model ({plain(numbers.dense_ms, 'ms')}) divided by that "
            f"of the stream, on the {counted(numbers.compared, 'frame')} where both ran.{slower}"
        )
        made.append(("Speed-up, measured", factor(numbers.speed_up), meaning))
    meaning = "Median time of the model's step for a frame, without decoding and drawing."
    time = NOT_KNOWN if numbers.ms is None else plain(numbers.ms, "ms")
    made.append(("Time of a step", time, meaning, *_dense(numbers.dense_ms, "ms")))
    meaning = "Share of all tokens that were computed; the others came from memory."
    share = percent(numbers.share) if numbers.share is not None else NOT_KNOWN
    made.append(("Tokens updated", share, meaning))
    return made


def _accuracy_cards(facts: RunFacts, numbers: Numbers) -> list[Card]:
    if numbers.error is None:
        meaning = "The whole model's features were not compared with the stream's."
        made: list[Card] = [("Median error", NOT_KNOWN, meaning)]
    else:
        meaning = (
            "Distance of the stream's features from the whole model's, divided by the length of "
            f"those; in 95 % of the frames it is at most {plain(numbers.error_high)}."
        )
        made = [("Median error", plain(numbers.error), meaning)]
    for name, scores in facts.accuracy.items():
        eventful = scores.get("eventful")
        value = NOT_KNOWN if eventful is None else plain(eventful)
        meaning = "Accuracy of the stream against the labels, beside that of the whole model."
        made.append((name, value, meaning, *_dense(scores.get("dense"))))
    return made


def _dense(value: float | None, unit: str = "") -> tuple[str] | tuple[()]:
    return () if value is None else (f"dense {plain(value, unit)}",)


def _run_cards(facts: RunFacts, numbers: Numbers, sources: int) -> list[Card]:
    lost = sum(facts.lost.values())
    reasons = ", ".join(f"{name} {count:,}" for name, count in facts.lost.items() if count)
    meaning = (
        f"Processed from {counted(sources, 'source')}; {numbers.flushed:,} of them were computed "
        f"as a whole (flushes), and {numbers.stale:,} are stale: not to be relied on."
    )
    return [
        ("Frames", f"{numbers.frames:,}", meaning),
        (
            "Lost frames",
            f"{lost:,}",
            f"Damaged, dropped or skipped{f': {reasons}' if reasons else ''}.",
        ),
        ("Memory of the streams", size(facts.memory), "What the streams keep from frame to frame."),
    ]


def _tables(facts: RunFacts) -> Element | None:
    parts = [("Settings", facts.settings), ("Versions", facts.versions)]
    if facts.accuracy:
        scores = {
            name: ", ".join(f"{who} {plain(value)}" for who, value in values.items())
            for name, values in facts.accuracy.items()
        }
        parts.insert(0, ("Accuracy", scores))
    if not any(values for _, values in parts):
        return None
    return el(
        "section",
        el("h2", "Settings and versions", id="settings"),
        el("div", *(_table(name, values) for name, values in parts if values), class_="pairs"),
        aria_labelledby="settings",
    )


def _table(name: str, values: Mapping[str, Any]) -> Element:
    rows = [
        el("tr", el("th", str(key), scope="row"), el("td", str(value)))
        for key, value in values.items()
    ]
    return el("table", el("caption", name), el("tbody", *rows))
