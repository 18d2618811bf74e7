"""All commands, their options and their help.

A command's work is imported inside its body, so `eventful --help` answers without loading torch.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eventful.cli.cluster import cluster
from eventful.cli.evaluate import evaluate
from eventful.cli.export import export
from eventful.cli.groups import RunUnlessNamed
from eventful.cli.live import live
from eventful.cli.options import (
    MODEL_HELP,
    Benchmarked,
    Calibrated,
    Dtype,
    Filmed,
    Filming,
    FrameSize,
    Json,
    Limited,
    ModelWeights,
    Sizes,
    TimedSystems,
    Timing,
    Written,
    grouped,
)
from eventful.cli.ray_options import OnCluster
from eventful.cli.reproduce_claims import reproduce
from eventful.cli.run import run
from eventful.cli.train import train
from eventful.cli.visualize import visualize

if TYPE_CHECKING:
    from eventful.cli.bench import Plan

app = typer.Typer(
    name="eventful",
    help="Run vision transformers on video and pay only for what changed.",
    no_args_is_help=True,
    add_completion=False,
    # A traceback with every local variable would print whole tensors.
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from eventful import __version__

        typer.echo(f"eventful {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version."),
    ] = False,
) -> None:
    """Run vision transformers on video and pay only for what changed."""


app.command()(run)
app.command()(export)
app.command()(live)
app.add_typer(cluster, name="cluster")
app.add_typer(reproduce, name="reproduce")
data = typer.Typer(
    help="Check datasets on disk, and write them in other formats.", no_args_is_help=True
)
app.add_typer(data, name="data")
weights = typer.Typer(help="Published weights for this package's models.", no_args_is_help=True)
app.add_typer(weights, name="weights")
app.add_typer(train, name="train")
app.add_typer(evaluate, name="evaluate")
app.command()(visualize)


bench = typer.Typer(
    cls=RunUnlessNamed,
    help="Time every preset beside the fastest dense path: `eventful bench MODEL...`.",
    epilog="Options of `eventful bench` without a command: see `eventful bench run --help`.",
)
app.add_typer(bench, name="bench")


class Axis(StrEnum):
    """What a sweep varies."""

    r = "r"
    tokens = "tokens"
    batch = "batch"
    depth = "depth"


@app.command("inspect")
def inspect_model(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help=MODEL_HELP),
    ],
    size: FrameSize = None,
    weights: ModelWeights = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Type of the weights, hence of most of the state.")
    ] = Dtype.float32,
    as_json: Json = False,
) -> None:
    """Dry run of a conversion.

    Shows which blocks match, which do not and why, and the bytes one stream would remember. Tries
    the first two steps without the model's arithmetic. Exits with 1 if no block matches, or if a
    stream would refuse its first frames.
    """
    from eventful.cli import inspect

    inspect.run(model, size, weights, dtype.value, as_json)


@app.command()
def demo(
    video: Annotated[
        str | None,
        typer.Argument(
            metavar="[VIDEO]", help="A video, or another source; a clip of the package by default."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for the results; it is replaced.")
    ] = Path("demo"),
    frames: Annotated[
        int | None, typer.Option(min=1, help="At most so many; 60 if not given.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="As for `eventful run`.")
    ] = "detector",
    weights: ModelWeights = None,
    size: FrameSize = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Run a trained detector on a video, dense and eventful, and film them side by side."""
    from eventful.cli import demo
    from eventful.modelspec.size import parse_size

    opened = demo.Opened(model, weights, parse_size(size))
    demo.run(video, out, frames, opened, device, as_json)


def _plan(
    what: Benchmarked,
    sizes: Sizes | None = None,
    timing: Timing | None = None,
    *,
    quick: bool = False,
) -> Plan:
    """The plan that the options describe; options a command lacks take their defaults."""
    from eventful.cli.bench import Plan
    from eventful.modelspec.size import parse_size

    sizes, timing = sizes or Sizes(), timing or Timing()
    return Plan(
        models=tuple(what.models or ()),
        presets=tuple(what.preset or ()),
        r=tuple(sizes.r or ()),
        batches=tuple(sizes.batch or (1,)),
        devices=tuple(what.device or ("cpu",)),
        dtypes=tuple(dtype.value for dtype in what.dtype or (Dtype.float32,)),
        frames=timing.frames or 0,
        compiled=timing.compiled,
        compile_mode=timing.compile_mode,
        quick=quick,
        weights=what.weights,
        size=parse_size(what.size),
    )


@bench.command("run")
@grouped
def bench_run(
    *,
    what: Benchmarked,
    sizes: Sizes,
    timing: Timing,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model, under two minutes on two cores.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Append the rows to this CSV.", dir_okay=False)
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the benchmark models.")] = False,
    as_json: Json = False,
) -> None:
    """Time every preset beside every dense path, in turn on each frame of one run.

    This is what `eventful bench` does when no other command is named.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings of the memory profiler
    from eventful.cli import bench

    if show:
        bench.show_models()
        return
    bench.run(_plan(what, sizes, timing, quick=quick), out, as_json)


@bench.command("verify")
@grouped
def bench_verify(*, what: Benchmarked, sizes: Sizes, as_json: Json = False) -> None:
    """Only check that every contender computes the right result; exit with 1 if not."""
    from eventful.cli import bench

    bench.verify(_plan(what, sizes), as_json)


@bench.command("sweep")
@grouped
def bench_sweep(
    *,
    what: Benchmarked,
    over: Annotated[
        list[Axis] | None, typer.Option(help="What to vary; may be repeated. Default: all four.")
    ] = None,
    value: Annotated[
        list[int] | None,
        typer.Option(min=0, help="A value on the axis, with one --over; may be repeated."),
    ] = None,
    timing: Timing,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Default: benchmarks/results/sweep-DEVICE.csv, where `plot` finds it.",
            dir_okay=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """How cost grows with r, tokens, batch and depth, beside the dense line."""
    from eventful.cli import bench

    axes = tuple(axis.value for axis in over or tuple(Axis))
    bench.sweep(_plan(what, timing=timing), axes, tuple(value or ()), out, as_json)


@bench.command("runtime")
@grouped
def bench_runtime(
    *,
    experiment: Annotated[
        str, typer.Argument(metavar="[NAME]", help="table-2, or a .toml of your own.")
    ] = "table-2",
    model: Annotated[str | None, typer.Option(help="Only vitdet, or only vivit.")] = None,
    size: Annotated[int | None, typer.Option(help="Only frames of this side in pixels.")] = None,
    timed: TimedSystems,
    out: Annotated[Path | None, typer.Option(help="Folder for JSON and CSV.")] = None,
    as_json: Json = False,
) -> None:
    """Time the paper's two systems: transformer and total, first frame apart."""
    from eventful.cli import evaluate_run as run

    made = run.only_variants(run.load_experiment(experiment, skip=False), model, size)
    plan = run.runtime_plan(
        timed.weights or [], timed.device, timed.dtype.value, timed.frames, timed.views,
        streams=timed.streams, compiled=timed.compiled, compile_mode=timed.compile_mode,
    )  # fmt: skip
    run.run_runtime(made, plan, out, as_json)


@bench.command("video")
@grouped
def bench_video(
    *,
    what: Filmed,
    how: Filming,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for JSON, CSV and pictures.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The default on your videos: cost, time and error beside dense and beside frame skipping.

    Frames are read and stepped one after the other. Stress clips are generated: still, noise,
    repeat, pan, walk, exposure, lights-off, cut, cursor, flicker, keyframes, enter.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from eventful.cli import bench_video

    bench_video.run(what, how, out, as_json)


@app.command("calibrate")
@grouped
def calibrate_camera(
    *, what: Calibrated, limited: Limited, how: Filming, on: OnCluster, written: Written
) -> None:
    """What each setting would cost and lose on your camera, and which one to take.

    Runs the dense model and every setting side by side on the videos. Writes the cheapest setting
    within the limits as a file that `Config.load` takes. Exits with 1 if there is none.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from eventful.cli import calibrate

    calibrate.run(what, limited, how, written, on)


@bench.command("export")
def bench_export(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help=MODEL_HELP)
    ] = "timm:vit_small_patch14_dinov2",
    size: FrameSize = "518",
    weights: ModelWeights = None,
    r: Annotated[int, typer.Option("--r", min=1, help="Tokens to update.")] = 127,
    runtime: Annotated[
        list[str] | None,
        typer.Option(
            "--runtime",
            help="onnx-f32, onnx-int8, openvino-f32, openvino-bf16, openvino-int8 or aoti-f32; may "
            "be repeated. Default: all.",
        ),
    ] = None,
    frames: Annotated[int, typer.Option(min=3, help="Timed frames.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each runtime.")] = 2,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the rows here.")] = None,
    as_json: Json = False,
) -> None:
    """Exported steps beside the dense model in the same runtime, in turn on each frame."""
    from eventful.cli import bench_export

    bench_export.run(
        model, size, weights, r, tuple(runtime or ()), frames, threads, out, as_json
    )  # fmt: skip


@bench.command("plot")
def bench_plot(
    results: Annotated[Path, typer.Option(help="Folder of the CSV files.")] = Path(
        "benchmarks/results"
    ),
    docs: Annotated[
        Path, typer.Option(help="Folder of benchmarks.md; pictures go to its images/.")
    ] = Path("docs"),
    readme: Annotated[Path, typer.Option(help="Page of the short table.")] = Path("README.md"),
) -> None:
    """Render pictures and tables from the results into the docs and the README."""
    from eventful.cli import bench

    bench.plot(results, docs, readme)


@data.command("check")
def check_data(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Folder of a dataset, or a COCO-style JSON file.")
    ],
    split: Annotated[
        str | None, typer.Option(help="Check this split alone; default: every one there.")
    ] = None,
    probe: Annotated[
        int, typer.Option(min=-1, help="Videos per split to decode two frames of; -1 for all.")
    ] = 32,
    as_json: Json = False,
) -> None:
    """Report what a dataset has and what is missing.

    Finds the format by itself, reads every annotation, looks for every file and decodes a sample.
    Exits with 1 where the data cannot be used as it is.
    """
    from eventful.cli import data

    data.run(path, split, probe, as_json)


@data.command("export")
def export_data(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="world:street, world:actions?videos=8, or a dataset on disk."
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    format: Annotated[
        str, typer.Option(help="imagenet-vid, coco, mot, kinetics or epic-kitchens.")
    ],
    split: Annotated[
        str | None, typer.Option(help="Split to read; default: the one to evaluate on.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", help="Name of the split to write; default: the same.")
    ] = None,
    picture: Annotated[str, typer.Option(help="jpeg or png, for frames with boxes.")] = "jpeg",
    as_json: Json = False,
) -> None:
    """Write one split of a dataset to a folder, in a format that can be read again."""
    from eventful.cli import data

    data.run_export(source, folder, format, (split, name), picture, as_json)  # type: ignore[arg-type]


@weights.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A .pkl, .pth or .safetensors file.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="The .safetensors file to write.", dir_okay=False)
    ],
    key_format: Annotated[
        str,
        typer.Option(
            "--format",
            "--layout",
            help="detectron2 (COCO cascade), vid (the paper's), transformers, vivit, "
            "vivit-authors (tuned by the paper's code), or auto.",
        ),
    ] = "auto",
    partial: Annotated[
        bool, typer.Option("--partial", help="Write what fits although something does not.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Rename the tensors of a published checkpoint, and report every key that fits nothing."""
    from eventful.cli import weights

    weights.convert(source, target, key_format, partial, as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Report versions, devices and backends, and how to install what is missing.

    Exits with 1 if something that is installed does not work, and with 0 if it is merely absent.
    """
    from eventful.cli import doctor

    raise typer.Exit(doctor.run(as_json))
