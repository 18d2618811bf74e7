"""`eventful demo`: the detector of the package, dense and eventful side by side on a video."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from eventful.cli.run_progress import progress
from eventful.cli.run_work import EXITS, writing_to
from eventful.cli.tables import Column, Grid, show
from eventful.errors import ConfigError
from eventful.models.shipped import SHIPPED, load
from eventful.modelspec.size import Size
from eventful.pipeline import demo
from eventful.pipeline.folder import RUN
from eventful.pipeline.loop import RunResult
from eventful.pipeline.settings import RunSettings
from eventful.pipeline.stopping import Stop


@dataclass(frozen=True)
class Opened:
    """The model as the options name it."""

    model: str
    weights: str | None = None
    size: Size | None = None


def run(
    video: str | None, out: Path, frames: int | None, what: Opened, device: str, as_json: bool
) -> None:
    """Run, film, and print one table."""
    model = what.model
    settings = RunSettings(
        out=out, frames=frames or demo.FRAMES, compare=True, video=False, device=device,
        overwrite=True, weights=what.weights, size=what.size,
    )  # fmt: skip
    if (out / RUN).is_file() and not (out / demo.VIDEO).is_file():
        raise ConfigError(f"{out} holds a run that is no demo. Choose another folder with --out.")
    names = tuple(getattr(load(model), "classes", ())) if model in SHIPPED else ()
    stop = Stop()
    with stop.on_signals(), progress(quiet=as_json) as observer, writing_to(out):
        result = demo.show(model, video, settings, names, observer=observer, stop=stop)
    if as_json:
        print(json.dumps(result.summary, indent=2))
    elif result.summary["frames"]:
        show(Console(), table(result.summary))
        _where(result)
    for source, message in result.failed.items():
        typer.secho(f"{source} failed: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(EXITS.get(result.status, 0))


def table(summary: dict[str, Any]) -> Grid:
    """Dense beside eventful, from the summary of a run."""
    grid = Grid([Column("", names=True), Column("dense"), Column("eventful")])
    grid.title = f"{summary['model']}, {summary['frames']} frames"
    for name, sides in summary["accuracy"].items():
        grid.add([name, f"{sides['dense']:.1%}", f"{sides['eventful']:.1%}"])
    grid.add(["tokens computed", "100 %", f"{summary['updated']:.1%}"])
    if summary["operations"] is not None:
        grid.add(["operations of the blocks", "100 %", f"{summary['operations']:.1%}"])
    if summary["dense_ms"] is not None:
        grid.add(["ms a frame, median", f"{summary['dense_ms']:.0f}", f"{summary['ms']:.0f}"])
    if summary["speedup"] is not None:
        grid.add(["speed", "1x", f"{summary['speedup']:.2f}x"])
    if summary["error"] is not None:
        grid.add(["error of the features, mean", "0", f"{summary['error']:.3f}"])
    grid.add(["memory of the stream, MB", "0", f"{summary['memory'] / 1e6:.1f}"])
    grid.caption = (
        "Both ran on every frame, in turn: the whole model from a decoded frame to its boxes. "
        "Dense is eager, with fused attention."
    )
    return grid


def _where(result: RunResult) -> None:
    names = (demo.VIDEO, result.summary.get("report"), demo.PICTURE, result.summary["results"])
    words = ("dense and eventful side by side", "the report", "one picture", "all detections")
    for name, text in zip(names, words, strict=True):
        if name and (result.folder / name).exists():
            print(f"{result.folder / name}  {text}")
