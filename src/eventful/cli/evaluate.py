"""`eventful evaluate`: what can be typed. The work is imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

evaluate = typer.Typer(
    help="Accuracy against operations, on data and weights you have.", no_args_is_help=True
)

Data = Annotated[Path, typer.Option(help="Folder of the dataset, or a COCO-style JSON file.")]
Weights = Annotated[
    list[str],
    typer.Option(
        metavar="[NAME=]FILE",
        help="Weights from `eventful weights convert`.",
    ),
]
Split = Annotated[str | None, typer.Option(help="Split; default: the one to evaluate on.")]
Preset = Annotated[
    list[str] | None,
    typer.Option(help="dense, fast, exact, paper, tokenwise, stgt or skip; several may be given."),
]
Budget = Annotated[
    list[str] | None,
    typer.Option("--r", metavar="R", help="Tokens to update, 768 or 12%; several may be given."),
]
Threshold = Annotated[
    list[float] | None, typer.Option("--h", help="Threshold on the error in place of r.")
]
Size = Annotated[int | None, typer.Option(min=1, help="Side of the frames in pixels.")]
Count = Annotated[int, typer.Option(min=1, help="Processes, each with its own videos.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of each process.")]
Device = Annotated[str, typer.Option(help="cpu, or cuda: one GPU after another for the workers.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Videos = Annotated[int | None, typer.Option(min=1, help="Only the first videos, so many.")]
Frames = Annotated[int | None, typer.Option(min=1, help="Only so many frames of each video.")]
Views = Annotated[str, typer.Option(help="Temporal x spatial views of each video.")]
Out = Annotated[
    Path | None, typer.Option(file_okay=False, help="Folder for results; needed to resume.")
]
Resume = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Go on with what is in the folder, or not.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@evaluate.command()
def vitdet(
    data: Data,
    weights: Weights,
    preset: Preset = None,
    r: Budget = None,
    h: Threshold = None,
    size: Size = None,
    split: Split = None,
    videos: Videos = None,
    frames: Frames = None,
    workers: Count = 1,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    resume: Resume = True,
    as_json: Json = False,
) -> None:
    """Detection: mAP50 as COCO has it and as FGFA has it, and operations per frame.

    Every preset is run at every r. `skip` runs the dense model on as many frames as cost the same.
    """
    from eventful.cli import evaluate_run as run

    settings = run.settings(
        data, weights, split, size, device, dtype, videos, frames, None, workers, threads, out,
        resume,
    )  # fmt: skip
    run.run(run.asked("vitdet", preset, r, h, size), settings, as_json)


@evaluate.command()
def vivit(
    data: Data,
    weights: Weights,
    preset: Preset = None,
    r: Budget = None,
    h: Threshold = None,
    size: Size = None,
    split: Split = None,
    videos: Videos = None,
    views: Views = "4x3",
    workers: Count = 1,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    resume: Resume = True,
    as_json: Json = False,
) -> None:
    """Action recognition: top-1 and top-5 over the views of each video, and operations per video.

    Every preset is run at every r. `skip` runs the dense model on as many steps as cost the same.
    """
    from eventful.cli import evaluate_run as run

    settings = run.settings(
        data, weights, split, size, device, dtype, videos, None, views, workers, threads, out,
        resume,
    )  # fmt: skip
    run.run(run.asked("vivit", preset, r, h, size), settings, as_json)


@evaluate.command("list")
def list_experiments(as_json: Json = False) -> None:
    """The experiments of the paper, and what each needs."""
    from eventful.cli import evaluate_run as run

    run.show_experiments(as_json)


@evaluate.command("run")
def run_experiment(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="One of `evaluate list`, or a .toml of your own.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="Folder of the dataset, or a COCO-style JSON file.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]FILE", help="Weights; `evaluate list` says which names."),
    ] = None,
    split: Split = None,
    videos: Videos = None,
    frames: Frames = None,
    views: Views = "4x3",
    skip: Annotated[
        bool, typer.Option("--skip", help="Add frame skipping at the cost of each variant.")
    ] = False,
    workers: Count = 1,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Out = None,
    resume: Resume = True,
    as_json: Json = False,
) -> None:
    """Run an experiment of the paper; the published numbers stand beside the measured ones."""
    from eventful.cli import evaluate_run as run

    made = run.named(name, skip)
    if made.kind == "runtime":
        plan = run.runtime_plan(weights or [], device, dtype, frames, views)
        run.run_runtime(made, plan, out, as_json)
        return
    settings = run.settings(
        run.needed(data, made), weights or [], split, None, device, dtype, videos, frames, views,
        workers, threads, out, resume,
    )  # fmt: skip
    run.run(made, settings, as_json)
