"""What the user can type: every command, its options and their help.

A command's work is imported inside its body, so `eventful --help` answers without loading torch.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eventful.cli.train import train

app = typer.Typer(
    name="eventful",
    help="Run vision transformers on video and pay only for what changed.",
    no_args_is_help=True,
    add_completion=False,
    # A traceback with every local printed would bury the error under tensors.
    pretty_exceptions_enable=False,
)
reproduce = typer.Typer(help="Recompute figures of the paper from shapes.", no_args_is_help=True)
app.add_typer(reproduce, name="reproduce")
data = typer.Typer(help="Look at datasets on disk.", no_args_is_help=True)
app.add_typer(data, name="data")
weights = typer.Typer(help="Published weights for this package's models.", no_args_is_help=True)
app.add_typer(weights, name="weights")
app.add_typer(train, name="train")


class Dtype(StrEnum):
    """Types a model's weights may have."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command("inspect")
def inspect_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="timm:NAME, or hf:NAME where NAME is a model name or the path of a config.",
        ),
    ],
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Side of the frame in pixels; default: the model's own."),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Type of the weights, hence of most of the state.")
    ] = Dtype.float32,
    as_json: Json = False,
) -> None:
    """Dry run of a conversion.

    Shows which blocks match, which do not and why, and the bytes one stream would remember.
    Changes nothing.
    """
    from eventful.cli import inspect

    inspect.run(model, size, dtype.value, as_json)


@app.command()
def demo(
    frames: Annotated[int, typer.Option(min=5, help="Number of frames to run.")] = 30,
    as_json: Json = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Also write a picture of which tokens were updated (needs the plot extra).",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="timm:NAME or hf:NAME, as for inspect.")
    ] = "timm:vit_small_patch16_224",
    size: Annotated[int, typer.Option(min=1, help="Side of the frame in pixels.")] = 384,
) -> None:
    """Follow a video with a converted model, beside the same model run whole on every frame."""
    from eventful.cli import demo

    demo.run(frames, as_json, picture, model, size)


@app.command()
def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Names of benchmark models; --list shows them."),
    ] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="Preset to measure; may be given several times.")
    ] = None,
    r: Annotated[
        list[int] | None, typer.Option(min=0, help="Tokens to update; may be given several times.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Streams stepped together.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.float32,
    frames: Annotated[int, typer.Option(min=4, help="Frames per run.")] = 12,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Also measure torch.compile of dense.")
    ] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model, under two minutes on two cores.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Append the rows to this CSV file.", dir_okay=False)
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the benchmark models.")] = False,
    as_json: Json = False,
) -> None:
    """Time every preset beside the fastest dense path, in turn on each frame of one run."""
    from eventful.cli import bench

    if show:
        bench.show_models()
        return
    plan = bench.Plan(
        models=tuple(models or ()),
        presets=tuple(preset or ()),
        r=tuple(r or ()),
        batches=tuple(batch or (1,)),
        device=device,
        dtype=dtype.value,
        frames=frames,
        compiled=compiled,
        quick=quick,
    )
    bench.run(plan, out, as_json)


@reproduce.command()
def counts(as_json: Json = False) -> None:
    """Operation counts of the paper's tables, beside the published ones."""
    from eventful.cli import reproduce

    reproduce.counts(as_json)


@reproduce.command()
def memory(as_json: Json = False) -> None:
    """Memory of the paper's models per stream, beside the published figures."""
    from eventful.cli import reproduce

    reproduce.memory(as_json)


@data.command("check")
def check_data(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Folder of a dataset, or a COCO-style JSON file.")
    ],
    split: Annotated[
        str | None, typer.Option(help="Look at this split alone; default: every one there.")
    ] = None,
    probe: Annotated[
        int, typer.Option(min=-1, help="Videos per split to decode two frames of; -1 for all.")
    ] = 32,
    as_json: Json = False,
) -> None:
    """Say what a dataset has and what it lacks.

    Finds the layout by itself, reads every annotation, looks for every file and decodes a sample.
    Exits with 1 where the data cannot be used as it is.
    """
    from eventful.cli import data

    data.run(path, split, probe, as_json)


@weights.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A .pkl, .pth or .safetensors file.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="The .safetensors file to write.", dir_okay=False)
    ],
    layout: Annotated[
        str,
        typer.Option(
            help="detectron2 (COCO cascade), vid (the paper's), transformers, vivit, or auto."
        ),
    ] = "auto",
    partial: Annotated[
        bool, typer.Option("--partial", help="Write what fits although something does not.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Rename the tensors of a published checkpoint, and report every key that fits nothing."""
    from eventful.cli import weights

    weights.convert(source, target, layout, partial, as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine has: versions, devices, backends, and how to get what is missing."""
    from eventful.cli import doctor

    doctor.run(as_json)
