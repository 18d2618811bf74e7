"""Does `eventful run`: settings from options, progress, and a summary at the end."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from eventful.budget import BudgetWarning
from eventful.cli.run import Rule, What, Work, Written
from eventful.cli.run_progress import progress
from eventful.errors import EventfulError, RunError
from eventful.modelspec.size import parse_size
from eventful.pipeline.loop import RunResult
from eventful.pipeline.loop import run as run_model
from eventful.pipeline.outputs import FAILED, INTERRUPTED
from eventful.pipeline.settings import RunSettings
from eventful.pipeline.stopping import Stop

EXITS = {INTERRUPTED: 130, FAILED: 1}


def run(what: What, rule: Rule, work: Work, written: Written, as_json: bool) -> None:
    """Run, show how far it is, and end with the exit code of what happened."""
    settings = _settings(what, rule, work, written)
    stop = Stop()
    with warnings.catch_warnings(), stop.on_signals(), progress(quiet=as_json) as observer:
        warnings.simplefilter("once", BudgetWarning)
        warnings.showwarning = _warn  # type: ignore[assignment]
        with writing_to(written.out):
            result = run_model(what.model, what.sources, settings, observer=observer, stop=stop)
    if as_json:
        print(json.dumps(result.summary, indent=2))
    else:
        _show(result)
    for source, message in result.failed.items():
        typer.secho(f"{source} failed: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(EXITS.get(result.status, 0))


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Say which folder cannot be written to, as on a full disk."""
    try:
        yield
    except OSError as error:
        if isinstance(error, EventfulError):
            raise
        raise RunError(f"{folder} cannot be written to: {error}.") from None


def _warn(message: Warning | str, *where: Any) -> None:
    """The text of a warning alone: where in the code it arose is of no use here."""
    print(message, file=sys.stderr)


def _settings(what: What, rule: Rule, work: Work, written: Written) -> RunSettings:
    given: dict[str, Any] = {**vars(what), **vars(rule), **vars(work), **vars(written)}
    for name in ("model", "sources", "tracker"):
        del given[name]
    given["size"] = parse_size(what.size)
    given["dtype"], given["format"] = what.dtype.value, written.format.value
    given["track"] = work.tracker.value if work.track else None
    return RunSettings(**given)


def _show(result: RunResult) -> None:
    """The summary in a few lines."""
    summary = result.summary
    fps = summary["fps"]
    print(
        f"{summary['frames']} frames, {summary['status']}"
        + (f", {fps:.1f} a second" if fps else "")
    )
    if summary["updated"] is not None:
        line = f"{summary['updated']:.1%} of the tokens updated"
        if summary["operations"] is not None:
            line += f", {summary['operations']:.1%} of the dense operations"
        print(line)
    if summary["ms"] is not None:
        line = f"{summary['ms']:.1f} ms a step"
        if summary["speedup"] is not None:
            line += (
                f", the model alone {summary['dense_ms']:.1f} ms: {summary['speedup']:.2f}x as fast"
            )
            if summary["speedup"] < 1:
                line += ". The model alone is faster here: docs/limits.md says when"
        print(line)
    if summary["error"] is not None:
        print(f"mean error of the features {summary['error']:.3f}")
    for name, sides in summary["accuracy"].items():
        shown = ", ".join(f"{side} {value:.1%}" for side, value in sides.items())
        print(f"{name} on {summary['scored_frames']} frames: {shown}")
    for reason, count in summary["lost"].items():
        print(f"{count} frames {reason}")
    if summary["losses"]:
        print(f"losses of live sources: {summary['losses']}")
    for path in _files(result):
        print(path)


def _files(result: RunResult) -> list[Path]:
    """What a person wants to look at."""
    summary = result.summary
    videos = [name for about in summary["sources"].values() for name in about.get("videos", ())]
    names = [*videos, summary["results"], "frames.csv", "run.json", summary.get("report")]
    return [path for name in names if name and (path := result.folder / name).exists()]
