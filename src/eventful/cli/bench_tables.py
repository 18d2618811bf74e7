"""Prints measured rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from eventful.bench.rows import Row
from eventful.cli import tables
from eventful.cli.tables import Column, Grid

LEGEND = (
    "Medians over steady frames, every contender in turn on each frame. Speed-up: against the "
    "fastest dense path; pipelined: with several frames in flight. Ops: operations. "
    "Error: of the output against dense; skip: the same of the dense model on every k-th frame, "
    "at equal operations."
)


def show(rows: Sequence[Row], out: Path | str | None) -> None:
    """A table for each run, with what every dense path took."""
    console = Console()
    for run in _by_run(rows):
        tables.show(console, _grid(run), spare=["skip", "flush"])
        for note in run[0].notes:
            console.print(f"[dim]{note}[/]")
    console.print(LEGEND)
    if out:
        console.print(f"Rows appended to {out}")


def _by_run(rows: Sequence[Row]) -> list[list[Row]]:
    runs: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = (row.model, row.tokens, row.depth, row.batch, row.device, row.dtype)
        runs.setdefault(key, []).append(row)
    return list(runs.values())


def _grid(run: Sequence[Row]) -> Grid:
    first = run[0]
    paths = ", ".join(f"{name} {_ms(ms)} ms" for name, ms in first.dense_ms.items())
    columns = _columns(first.device)
    grid = Grid(
        [Column(title, names=title == "preset") for title in columns],
        title=f"{first.model}, {first.tokens} tokens, {first.depth} blocks, batch {first.batch}, "
        f"{first.dtype} on {first.device}",
        caption=f"dense: {paths}; best: {first.dense_best}",
    )
    for row in run:
        grid.add([cell(row) for cell in columns.values()])
    return grid


def _columns(device: str) -> dict[str, Callable[[Row], str]]:
    """The columns that fit a screen; CSV and JSON have all."""
    columns: dict[str, Callable[[Row], str]] = {
        "preset": lambda row: row.preset,
        "r": lambda row: str(row.r),
        "ms": lambda row: _ms(row.ms),
        "speed-up": lambda row: f"{row.speedup:.2f}x",
    }
    if device != "cpu":  # without frames in flight it equals the column before
        columns["pipelined"] = lambda row: f"{row.speedup_pipelined:.2f}x"
    return {
        **columns,
        "fewer ops": lambda row: f"{1 / row.macs_ratio:.1f}x",
        "flush": lambda row: _ms(row.flush_ms),
        "error": lambda row: f"{row.feature_error:.3f}",
        "skip": lambda row: f"{row.skip_error:.3f}",
        "state": lambda row: f"{row.state_bytes / 1e6:,.0f} MB",
    }


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
