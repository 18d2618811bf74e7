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
    return {
        "equal": "\n".join(_equal(runs[0]["rows"])),
        "parts": "\n".join(_parts(runs)),
        "gain": "\n".join([*_gain(runs), "", _origin(runs)]),
    }


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


def _parts(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Milliseconds of a frame and shares of it, on the clips as they are."""
    found = [row for run in runs for row in run["rows"] if "parts" in row and _is_plain(row)]
    names = [f"{row['clip']}, {row['size'][0]} x {row['size'][1]}" for row in found]
    yield f"| part | {' | '.join(names)} |"
    yield f"|---|{'--:|' * len(names)}"
    for part in _SHOWN:
        cells = []
        for row in found:
            ms = row["parts"].get(part, 0.0)
            cells.append(f"{ms:.2f} ms, {ms / row['parts']['total']:.1%}")
        yield f"| {part} | {' | '.join(cells)} |"
    yield f"| all | {' | '.join(format(row['parts']['total'], '.1f') + ' ms' for row in found)} |"
    shares = [f"{row['parts']['updated']:.1%}" for row in found]
    yield f"| tokens updated | {' | '.join(shares)} |"


def _gain(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Times of the contenders as shares of the product's."""
    names = [name for name in CONTENDERS if name != PRODUCT]
    heads = " | ".join(f"`{name}`" for name in names)
    yield f"| clip | size | tokens equal | a frame | {heads} |"
    yield f"|---|---|--:|--:|{'--:|' * len(names)}"
    for row in (row for run in runs for row in run["rows"] if "gain" in row):
        gain = row["gain"]
        cells = [
            row["clip"] if _is_plain(row) else f"{row['clip']}, {row['encoding']}",
            f"{row['size'][0]} x {row['size'][1]}",
            _share(gain["unchanged"]),
            f"{gain['ms']:.1f} ms",
            *(f"{gain['contenders'][name]['middle']:.3f}" for name in names),
        ]
        yield f"| {' | '.join(cells)} |"


def _is_plain(row: dict[str, Any]) -> bool:
    return bool(row["encoding"] == "as it is")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _origin(runs: Sequence[dict[str, Any]]) -> str:
    first = runs[0]
    return (
        f"*{first['device_name']}, {first['threads']} threads, torch {first['torch']}, PyAV "
        f"{first['av']}, {first['model']}, fp32, commit "
        f"{', '.join(sorted({run['commit'] for run in runs}))}*"
    )
