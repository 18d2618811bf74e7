"""What the user can type: every command, its options and their help.

A command's work is imported inside its body, so `eventful --help` answers without loading torch.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

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
    frames: Annotated[int, typer.Option(min=2, help="Number of frames to run.")] = 30,
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


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine has: versions, devices, backends, and how to get what is missing."""
    from eventful.cli import doctor

    doctor.run(as_json)
