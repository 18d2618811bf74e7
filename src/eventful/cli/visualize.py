"""Options of `eventful visualize`. The work is in `visualize_run`, imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from eventful.cli.options import MODEL_HELP, FrameSize, Json, ModelWeights, grouped


@dataclass(frozen=True)
class Options:
    """What is shown, and how."""

    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A video, a MOTChallenge sequence, a folder of images, or `synthetic`.",
        ),
    ]
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for what is made.")]
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help=MODEL_HELP,
        ),
    ] = "timm:vit_small_patch16_224"
    weights: ModelWeights = None
    preset: Annotated[str, typer.Option(help="fast, exact, paper, tokenwise or stgt.")] = "fast"
    r: Annotated[
        str | None, typer.Option("--r", metavar="R", help="Tokens to update, 256 or 12%.")
    ] = None
    h: Annotated[float | None, typer.Option(help="Threshold on the error in place of r.")] = None
    budget: Annotated[
        str | None,
        typer.Option(metavar="SCHEDULE", help="A budget that changes: 0:512,40:128,80:25%."),
    ] = None
    gate: Annotated[
        str | None,
        typer.Option(help="Gate to show, such as blocks.2.qkv; default: the paper's choice."),
    ] = None
    size: FrameSize = None
    frames: Annotated[int, typer.Option(min=2, help="At most so many frames.")] = 120
    start: Annotated[int, typer.Option(min=0, help="First frame.")] = 0
    columns: Annotated[int, typer.Option(min=2, help="Frames on the contact sheet.")] = 5
    score: Annotated[float, typer.Option(help="Detections shown have at least this score.")] = 0.5
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"


@grouped
def visualize(*, options: Options, as_json: Json = False) -> None:
    """Show what is updated: predictions, error and mask as a video and as a contact sheet.

    Also draws the operations of each frame, which follow a changing budget.
    """
    from eventful.cli import visualize_run

    visualize_run.run(options, as_json)
