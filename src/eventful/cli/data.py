"""`eventful data check`: prints what a dataset has and what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eventful.paper.data.catalog import FORMATS
from eventful.paper.data.check import Report, SplitReport, Watcher, check

SHOWN = 5  # problems of each type to print; --json has them all
COLOURS = {"complete": "green", "partial": "yellow", "unusable": "red"}


def run(path: Path, split: str | None, probe: int, as_json: bool) -> None:
    """Print the report; exit with 1 if the data is unusable."""
    with _progress() as watch:
        report = check(path, split, probe, watch)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _show(report)
    if report.verdict == "unusable":
        raise SystemExit(1)


@contextmanager
def _progress() -> Iterator[Watcher]:
    """A bar for each split, on stderr: stdout belongs to the report."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def watch(split: str, done: int, videos: int) -> None:
            if split not in tasks:
                tasks[split] = bars.add_task(split, total=videos)
            bars.update(tasks[split], completed=done)

        yield watch


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    if report.format is None:
        console.print(f"{report.path}: no known format. The known ones are:", markup=False)
        for known in FORMATS.values():
            console.print(f"  {known.name}: {known.form}", markup=False)
        return
    console.print(f"{report.path}: {report.format} ({report.task})", markup=False)
    for name, there in report.parts.items():
        console.print(f"  {'there ' if there else 'absent'}  {name}", markup=False)
    table = Table("split", "videos", "frames", "annotations", "labels", "decoded", "verdict")
    for split in report.splits:
        table.add_row(
            split.split,
            f"{split.videos:,}",
            "not counted" if split.frames is None else f"{split.frames:,}",
            f"{split.annotations:,}",
            f"{split.labels} of {split.classes}",
            str(split.probed),
            f"[{COLOURS[split.verdict]}]{split.verdict}[/]",
        )
    console.print(table)
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
