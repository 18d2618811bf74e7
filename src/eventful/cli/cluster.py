"""Options of `eventful cluster`. The work is in `cluster_work`, imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eventful.cli.cluster_simulate import simulate
from eventful.cli.options import Json, grouped

cluster = typer.Typer(help="Run many cameras on many machines, by Ray.", no_args_is_help=True)


class Mode(StrEnum):
    """Which frames are wanted."""

    latest = "latest"
    every = "every"


Sources = Annotated[
    Path,
    typer.Argument(metavar="SOURCES.TOML", help="Model, workers and streams: docs/cluster.md."),
]
Folder = Annotated[
    Path,
    typer.Option("--out", file_okay=False, help="Folder of the run: results and state."),
]
OUT = Path("eventful-cluster")


@dataclass(frozen=True)
class Started:
    """How a cluster runs."""

    out: Folder = OUT
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = (
        False
    )
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in the folder.")
    ] = False
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster that runs: auto, or HOST:PORT. Default: one on this machine alone, "
            "which ends with this command.",
        ),
    ] = None
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", help="Numbers for Prometheus; on this machine without HOST."
        ),
    ] = None
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for new streams when all have ended.")
    ] = False


@cluster.command()
@grouped
def run(*, sources: Sources, started: Started, as_json: Json = False) -> None:
    """Run a model on many streams, on many workers.

    Ctrl-C or SIGTERM ends it in order, SIGHUP starts all workers again, one after the other. Exits
    with 0, with 1 if a stream failed or results did not arrive, with 2 for wrong usage, with 130
    if it was interrupted.
    """
    from eventful.cli import cluster_work

    cluster_work.run(sources, started, as_json)


@cluster.command()
def status(out: Folder = OUT, as_json: Json = False) -> None:
    """Show what the run in a folder does: streams, workers, and what happened lately.

    Exits with 1 if it does not run.
    """
    from eventful.cli import cluster_work

    cluster_work.status(out, as_json)


@cluster.command()
def add(
    sources: Sources,
    name: Annotated[str, typer.Argument(help="Of the stream.")],
    source: Annotated[
        str,
        typer.Argument(
            help="As for `eventful run`, or env:NAME: what the variable NAME holds, so that no "
            "password is in the history of the shell."
        ),
    ],
    mode: Annotated[
        Mode | None, typer.Option(help="Default: every for files, latest for cameras.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Frames a second at which a file is read.")
    ] = None,
    loop: Annotated[bool, typer.Option("--loop", help="Begin a file again at its end.")] = False,
) -> None:
    """Write one more stream to SOURCES.TOML; a run that goes on takes it over."""
    from eventful.cli import cluster_work

    cluster_work.add(sources, name, source, None if mode is None else mode.value, rate, loop)


@cluster.command()
def remove(sources: Sources, name: Annotated[str, typer.Argument(help="Of the stream.")]) -> None:
    """Delete a stream from SOURCES.TOML; a run that goes on lets go of it."""
    from eventful.cli import cluster_work

    cluster_work.remove(sources, name)


@cluster.command()
def restart(out: Folder = OUT) -> None:
    """Start all workers of a run again, one after the other, while the others go on."""
    from eventful.cli import cluster_work

    cluster_work.restart(out)


cluster.command()(simulate)
