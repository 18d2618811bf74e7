"""Stills of a report: frames with the predictions of both models, and the updated tokens."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from eventful.pipeline.history import Still
from eventful.pipeline.pictures import mark_updated, to_image
from eventful.pipeline.report_elements import Element, el
from eventful.pipeline.report_numbers import counted, percent
from eventful.surgery.libraries import load

if TYPE_CHECKING:
    from PIL.Image import Image

MOST = 16  # stills in one report
WIDEST = 720  # pixels of a picture
BUDGET = 1_700_000  # bytes of all pictures, before base64 makes them a third larger
# How a picture is made smaller until it fits: share of its width, quality.
_TRIES = ((1.0, 82), (1.0, 65), (0.75, 65), (0.6, 55), (0.45, 45), (0.3, 35), (0.2, 25), (0.1, 20))


def stills_section(stills: Sequence[Still], label: Callable[[str], str]) -> Element | None:
    """All stills below each other; the script shows one at a time and adds a slider.

    Args:
        label: the name of a source as it is shown.
    """
    if not stills:
        return None
    chosen = _spread(stills)
    pictures = sum(1 + (s.dense is not None) + (s.updated is not None) for s in chosen)
    room = BUDGET // pictures
    note = f"{len(chosen)} of {counted(len(stills), 'still')}." if len(chosen) < len(stills) else ""
    slider = el(
        "p",
        el("label", "Still ", el("output", f"1 of {len(chosen)}"), for_="still-slider"),
        el(
            "input",
            id="still-slider",
            type="range",
            min="1",
            max=str(len(chosen)),
            value="1",
            step="1",
        ),
        class_="slider",
        hidden=True,
    )
    return el(
        "section",
        el("h2", "Frames", id="frames"),
        el(
            "p",
            "The same frame with the predictions of both models. In the last picture, tokens that "
            "were computed are bright and outlined; the dark ones came from memory. ",
            note,
        ),
        slider,
        *(_still(still, label(still.source), room) for still in chosen),
        class_="stills",
        aria_labelledby="frames",
    )


def _spread(stills: Sequence[Still]) -> Sequence[Still]:
    if len(stills) <= MOST:
        return stills
    last = len(stills) - 1
    return [stills[round(place * last / (MOST - 1))] for place in range(MOST)]


def _still(still: Still, source: str, room: int) -> Element:
    name = f"frame {still.index:,} of {source}"
    eventful = to_image(still.eventful)
    shown = []
    if still.dense is not None:
        shown.append(("dense", to_image(still.dense), f"Predictions of the whole model, {name}"))
    shown.append(("eventful", eventful, f"Predictions of the stream, {name}"))
    if still.updated is not None:
        share = percent(float(still.updated.float().mean()))
        marked = mark_updated(eventful, still.updated)
        shown.append((f"tokens updated: {share}", marked, f"Updated tokens ({share}), {name}"))
    figures = [
        el("figure", _picture(picture, alt, room), el("figcaption", caption))
        for caption, picture, alt in shown
    ]
    return el(
        "article",
        el("h3", f"Frame {still.index:,} ", el("span", el("bdi", source), class_="faint")),
        el("div", *figures, class_="trio"),
        class_="still",
    )


def _picture(picture: Image, alt: str, room: int) -> Element:
    width, height = picture.size
    content = _encoded(picture, room)
    return el(
        "img",
        src=f"data:image/webp;base64,{base64.b64encode(content).decode()}",
        alt=alt,
        width=str(width),
        height=str(height),
        decoding="async",
    )


def _encoded(picture: Image, room: int) -> bytes:
    """The picture as WebP, in the best quality that fits, or in the lowest."""
    widest = min(1.0, WIDEST / picture.width)
    content, per_weight = b"", 0.0
    for share, quality in _TRIES:
        weight = share * share * quality
        if weight * per_weight > 1.5 * room and (share, quality) != _TRIES[-1]:
            continue  # by the last try, this one is far too large
        width = max(1, round(picture.width * widest * share))
        height = max(1, round(picture.height * widest * share))
        small = picture.resize((width, height), load("PIL.Image").Resampling.LANCZOS)
        file = io.BytesIO()
        small.save(file, format="WEBP", quality=quality, method=2)
        content = file.getvalue()
        if len(content) <= room:
            break
        per_weight = len(content) / weight
    return content
