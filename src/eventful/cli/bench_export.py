"""`eventful bench export`: exported steps beside the dense model in the same runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eventful import files
from eventful.bench import tables
from eventful.cli.progress import shown
from eventful.cli.tables import Column, Grid, show
from eventful.errors import ConfigError, MissingFileError
from eventful.export.frames import open_for_export
from eventful.export.measuring import WAYS, Way, measure
from eventful.modelspec.size import parse_size

PAGE = Path("docs/export.md")


def run(
    model: str, size: str | None, weights: str | None, r: int, ways: tuple[str, ...], frames: int,
    threads: int, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure, print, and write `out`."""
    chosen = [_way(text) for text in ways] or list(WAYS)
    given = parse_size(size)
    opened, example = open_for_export(model, weights, given)
    with shown(f"bench {model}", "runtimes") as report:
        made = measure(
            opened, model, example, r, chosen, frames=frames, threads=threads, tick=report
        )
    if out is not None:
        files.write_json(out, made)
    if as_json:
        print(json.dumps(made, indent=2))
        return
    columns = ("runtime", "weights", "dense", "step", "speed-up")
    grid = Grid([Column(name, names=name == "runtime") for name in columns], title=model)
    for row in made["rows"]:
        grid.add([
            row["runtime"], row["precision"], f"{row['dense_ms']:,.1f} ms",
            f"{row['step_ms']:,.1f} ms", f"{row['speed_up']:.2f}x",
        ])  # fmt: skip
    from rich.console import Console

    show(Console(), grid)


def _way(text: str) -> Way:
    """A way by its words, `openvino bf16` or `openvino-bf16`."""
    to, _, precision = text.replace(" ", "-").partition("-")
    found = Way(to, precision or "f32")
    if found not in WAYS:
        known = ", ".join(f"{way.to}-{way.precision}" for way in WAYS)
        raise ConfigError(f"There is no runtime {text!r}; there are {known}.")
    return found


def plot(results: Path, page: Path = PAGE) -> None:
    """Put the table of the stored files into the page."""
    paths = sorted(results.glob("*.json"))
    if not paths:
        raise MissingFileError(f"There are no results in {results}: eventful bench export --out.")
    parts = [table(json.loads(path.read_text()), path) for path in paths]
    tables.put(page, "\n\n".join(parts), "export")


def table(made: dict[str, Any], path: Path) -> str:
    """The rows of one file in Markdown, with their origin."""
    rows, where = made["rows"], made["origin"]
    lines = [
        "| runtime | weights | dense | step | speed-up |",
        "|---|---|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['runtime']} {row['version'].partition('+')[0]} | {row['precision']} "
            f"| {row['dense_ms']:,.0f} ms | {row['step_ms']:,.0f} ms "
            f"| **{row['speed_up']:.2f}x** |"
        )
    first = rows[0]
    lines.append("")
    lines.append(
        f"*{first['model']} at {first['size']} px, {first['updated']} of {first['tokens']} tokens, "
        f"{first['frames']} frames, medians. {where['device_name']}, {where['threads']} threads, "
        f"torch {where['torch']}, commit {where['commit']}: [{path}](../{path}).*"
    )
    return "\n".join(lines)
