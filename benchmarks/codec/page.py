"""The stored measurements as tables of the decision page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.codec.gain import CONTENDERS, PRODUCT
from eventful.bench.tables import put

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "codec"
PAGE = ROOT / "docs" / "decisions" / "0012-unchanged-blocks.md"
_SHOWN = (
    *("decoding", "scaling", "normalising", "embedding", "error", "gate, without the error"),
    *("motion", "context", "blocks", "output and estimate", "the rest of a step"),
)


def stored() -> list[dict[str, Any]]:
    """The stored runs, by name of their file."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def write() -> None:
    """Put the tables into the page."""
    for name, text in tables(stored()).items():
        put(PAGE, text, name)


def tables(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The tables by the name of their place in the page."""
    parts = next(run for run in runs if _of_processor(run))
    origins = [f"*{_origin(run)}*" for run in runs]
    return {
        "equal": "\n".join(_equal(max((run["rows"] for run in runs), key=len))),
        "parts": "\n".join(_parts(parts["rows"])),
        "gain": "\n".join([*_gain(runs), "", *"\n\n".join(origins).split("\n")]),
    }


def _of_processor(run: dict[str, Any]) -> bool:
    """Whether times are those of the processor, on one thread."""
    return bool(run.get("clock") == "process_time")


def _equal(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Shares that equal the last frame."""
    yield (
        "| clip | encoding | kbit/s | blocks equal | tokens equal, by the decoded pixels "
        "| tokens equal, as the model sees them | blocks without motion | of these, equal |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    last = ""
    for row in rows:
        equal, clip = row["equal"], row["clip"]
        cells = [
            "" if clip == last else clip,
            row["encoding"],
            f"{equal['kbit_s']:,.0f}",
            *(
                _share(equal[key])
                for key in (
                    *("blocks", "tokens_source", "tokens"),
                    *("still_vectors", "still_and_equal"),
                )
            ),
        ]
        last = clip
        yield f"| {' | '.join(cells)} |"


def _parts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Milliseconds of a frame and shares of it, on the clips as they are."""
    found = [row for row in rows if "parts" in row and _is_plain(row)]
    yield f"| part | {' | '.join(row['clip'] for row in found)} |"
    yield f"|---|{'--:|' * len(found)}"
    for part in _SHOWN:
        cells = []
        for row in found:
            ms = row["parts"].get(part, 0.0)
            cells.append(f"{ms:.2f} ms, {ms / row['parts']['total']:.1%}")
        yield f"| {part} | {' | '.join(cells)} |"
    yield f"| all | {' | '.join(format(row['parts']['total'], '.1f') + ' ms' for row in found)} |"


def _gain(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Times of the contenders as shares of the product's: of sums, or medians over frames."""
    names = [name for name in CONTENDERS if name != PRODUCT]
    heads = " | ".join(f"`{name}`" for name in names)
    yield f"| time | clip | tokens equal | {heads} |"
    yield f"|---|---|--:|{'--:|' * len(names)}"
    for run in runs:
        shown, value = ("wall, median", "middle")
        if _of_processor(run):
            shown, value = ("processor, sum", "ratio")
        timed = [row for row in run["rows"] if "gain" in row]
        shown += f", {timed[0]['size'][0]} x {timed[0]['size'][1]}"
        for row in timed:
            gain = row["gain"]
            cells = [
                shown,
                row["clip"] if _is_plain(row) else f"{row['clip']}, {row['encoding']}",
                _share(gain["unchanged"]),
                *(f"{gain['contenders'][name][value]:.3f}" for name in names),
            ]
            shown = ""
            yield f"| {' | '.join(cells)} |"


def _is_plain(row: dict[str, Any]) -> bool:
    return bool(row["encoding"] == "as it is")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _origin(run: dict[str, Any]) -> str:
    first = next(row for row in run["rows"] if "gain" in row)
    time = "processor time" if _of_processor(run) else "wall"
    return (
        f"{time}: {run['device_name']}, threads: {run['threads']}, torch {run['torch']}, PyAV "
        f"{run['av']}, {run['model']}, {first['size'][0]} x {first['size'][1]} pixels, fp32, "
        f"commit {run['commit']}"
    )
