"""`eventful data`: prints what a dataset has and what is missing, and writes it as another."""

from __future__ import annotations

import json
from pathlib import Path

from eventful.cli.progress import shown
from eventful.cli.tables import Column, Grid, show
from eventful.paper.data.catalog import FORMATS, open_dataset
from eventful.paper.data.check import Report, SplitReport, check
from eventful.paper.data.export import Picture, export

SHOWN = 5  # problems of each type to print; --json has them all
COLOURS = {"complete": "green", "partial": "yellow", "unusable": "red"}


def run(path: Path, split: str | None, probe: int, as_json: bool) -> None:
    """Print the report; exit with 1 if the data is unusable."""
    with shown(unit="videos") as watch:
        report = check(path, split, probe, watch)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _show(report)
    if report.verdict == "unusable":
        raise SystemExit(1)


def run_export(
    source: Path, folder: Path, format: str, splits: tuple[str | None, str | None],
    picture: Picture, as_json: bool,
) -> None:  # fmt: skip
    """Write one split of a dataset to a folder.

    Args:
        splits: The one to read and the name to write it under.
    """
    videos = open_dataset(source, splits[0])
    with shown(unit="frames") as watch:
        written = export(
            videos, folder, format, splits[1], picture=picture,
            watch=lambda done, total: watch(videos.split, done, total),
        )  # fmt: skip
    if as_json:
        print(json.dumps(written.to_dict(), indent=2))
        return
    print(
        f"wrote {written.videos:,} videos, {written.frames:,} frames and {written.annotations:,} "
        f"annotations to {folder} ({written.format}, split {written.split})"
    )


def _show(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if report.format is None:
        console.print(f"{report.path}: no known format. The known ones are:", markup=False)
        for known in FORMATS.values():
            console.print(f"  {known.name}: {known.form}", markup=False)
        return
    console.print(f"{report.path}: {report.format} ({report.task})", markup=False)
    for name, there in report.parts.items():
        console.print(f"  {'there ' if there else 'absent'}  {name}", markup=False)
    headings = ("videos", "frames", "annotations", "labels", "decoded", "verdict")
    grid = Grid([Column("split", names=True), *map(Column, headings)])
    for split in report.splits:
        counts = [f"{split.videos:,}", "-" if split.frames is None else f"{split.frames:,}"]
        counts += [f"{split.annotations:,}", f"{split.labels} of {split.classes}"]
        verdict = f"[{COLOURS[split.verdict]}]{split.verdict}[/]"
        grid.add([split.split, *counts, str(split.probed), verdict])
    show(Console(highlight=False), grid)
    if any(split.frames is None for split in report.splits):
        console.print("Frames of video files are not counted.")
    for split in report.splits:
        for line in _problems(split):
            console.print(line, markup=False)


def _problems(split: SplitReport) -> list[str]:
    lines = []
    for problem in ("missing", "malformed", "damaged"):
        found: tuple[str, ...] = getattr(split, problem)
        if found:
            lines.append(f"{split.split}: {len(found)} {problem}")
            lines += [f"  {message}" for message in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"  and {len(found) - SHOWN} more (--json lists them all)")
    return lines
