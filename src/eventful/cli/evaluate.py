"""Options of `eventful evaluate`. The work is in `evaluate_run`, imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eventful.cli.options import Evaluated, Evaluation, FramesPerVideo, Json, Views, grouped

evaluate = typer.Typer(
    help="Accuracy against operations, on data and weights you have.", no_args_is_help=True
)


@evaluate.command()
@grouped
def vitdet(*, what: Evaluated, frames: FramesPerVideo = None, how: Evaluation) -> None:
    """Detection: mAP50 as COCO has it and as FGFA has it, and operations per frame.

    Every preset is run at every r. `skip` runs the dense model on as many frames as cost the same.
    """
    from eventful.cli import evaluate_run as run

    run.run_options("vitdet", what, how, frames=frames)


@evaluate.command()
@grouped
def vivit(*, what: Evaluated, views: Views = "4x3", how: Evaluation) -> None:
    """Action recognition: top-1 and top-5 over the views of each video, and operations per video.

    Every preset is run at every r. `skip` runs the dense model on as many steps as cost the same.
    """
    from eventful.cli import evaluate_run as run

    run.run_options("vivit", what, how, views=views)


@evaluate.command("list")
def list_experiments(as_json: Json = False) -> None:
    """The experiments of the paper, and what each needs."""
    from eventful.cli import evaluate_run as run

    run.show_experiments(as_json)


@evaluate.command("run")
@grouped
def run_experiment(
    *,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="One of `evaluate list`, or a .toml of your own.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the dataset, a COCO-style JSON file, or world:street?..."),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]FILE", help="Weights; `evaluate list` says which names."),
    ] = None,
    frames: FramesPerVideo = None,
    views: Views = "4x3",
    skip: Annotated[
        bool, typer.Option("--skip", help="Add frame skipping at the cost of each variant.")
    ] = False,
    how: Evaluation,
) -> None:
    """Run an experiment of the paper; the published numbers stand beside the measured ones."""
    from eventful.cli import evaluate_run as run

    run.run_named(
        run.load_experiment(name, skip), data, weights or [], how, frames=frames, views=views
    )
