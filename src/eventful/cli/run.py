"""Options of `eventful run`. The work is in `run_work`, imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eventful.cli.options import MODEL_HELP, SIZE, Dtype, Json, grouped


class Format(StrEnum):
    """Formats of results."""

    jsonl = "jsonl"
    parquet = "parquet"
    npz = "npz"


class TrackerKind(StrEnum):
    """Trackers of detections."""

    bytetrack = "bytetrack"
    sort = "sort"


_MODEL, _RULE, _BUDGET = "Model and frames", "Update rule", "Budgets (one)"
_WORK, _OUT = "What is done", "Output"


@dataclass(frozen=True)
class What:
    """The model and what it runs on."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=MODEL_HELP,
        ),
    ]
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Video files, folders of pictures, camera:0, rtsp:// and http:// addresses, "
            ".streams files, or world:SEED, e.g. 'world:7?camera=pan&frames=100'.",
        ),
    ]
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A .safetensors file, or `pretrained` to fetch the published ones. Random if not "
            "given.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(
            metavar="HxW",
            help=SIZE,
            rich_help_panel=_MODEL,
        ),
    ] = None
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.", rich_help_panel=_MODEL)] = "cpu"
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.", rich_help_panel=_MODEL)] = (
        Dtype.float32
    )
    frames: Annotated[
        int | None,
        typer.Option(min=1, help="At most so many of each source.", rich_help_panel=_MODEL),
    ] = None
    every: Annotated[
        int, typer.Option(min=1, help="Take every so many-th frame.", rich_help_panel=_MODEL)
    ] = 1


@dataclass(frozen=True)
class Rule:
    """Which tokens are updated."""

    preset: Annotated[
        str | None,
        typer.Option(help="fast (default), exact, paper, tokenwise, stgt.", rich_help_panel=_RULE),
    ] = None
    r: Annotated[
        str | None,
        typer.Option("--r", metavar="R", help="Tokens, 256 or 12%.", rich_help_panel=_RULE),
    ] = None
    h: Annotated[
        float | None,
        typer.Option("--h", help="Threshold in place of r.", rich_help_panel=_RULE),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="A TOML file, e.g. of eventful calibrate, in place of these.",
            rich_help_panel=_RULE,
        ),
    ] = None
    error: Annotated[
        float | None,
        typer.Option(help="Mean relative error, e.g. 0.1.", rich_help_panel=_BUDGET),
    ] = None
    latency: Annotated[
        float | None, typer.Option(help="Milliseconds of a step.", rich_help_panel=_BUDGET)
    ] = None
    rate: Annotated[
        float | None, typer.Option(help="Frames a second to keep up with.", rich_help_panel=_BUDGET)
    ] = None
    operations: Annotated[
        float | None,
        typer.Option(help="Share of the dense operations, e.g. 0.2.", rich_help_panel=_BUDGET),
    ] = None
    memory: Annotated[
        float | None,
        typer.Option(help="Megabytes that a stream may keep.", rich_help_panel=_BUDGET),
    ] = None


@dataclass(frozen=True)
class Work:
    """What is done besides."""

    dense: Annotated[
        bool, typer.Option("--dense", help="Run the whole model.", rich_help_panel=_WORK)
    ] = False
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Run both on every frame: times and errors.", rich_help_panel=_WORK
        ),
    ] = False
    track: Annotated[
        bool, typer.Option("--track", help="Track detections.", rich_help_panel=_WORK)
    ] = False
    tracker: Annotated[TrackerKind, typer.Option(help="For --track.", rich_help_panel=_WORK)] = (
        TrackerKind.bytetrack
    )
    score: Annotated[
        float,
        typer.Option(min=0, max=1, help="Detections below it are left out.", rich_help_panel=_WORK),
    ] = 0.5
    labels: Annotated[
        Path | None,
        typer.Option(
            help="Truth of the sources: a MOTChallenge folder or a COCO-style JSON file.",
            rich_help_panel=_WORK,
        ),
    ] = None


@dataclass(frozen=True)
class Written:
    """What is written, and where."""

    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the run.", rich_help_panel=_OUT)
    ] = Path("eventful-run")
    format: Annotated[
        Format,
        typer.Option(help="Of results; npz for features and maps.", rich_help_panel=_OUT),
    ] = Format.jsonl
    video: Annotated[
        bool, typer.Option("--video/--no-video", help="Annotated video.", rich_help_panel=_OUT)
    ] = True
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="HTML report.", rich_help_panel=_OUT)
    ] = True
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in the folder.", rich_help_panel=_OUT),
    ] = False
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace the run in the folder.", rich_help_panel=_OUT),
    ] = False


@grouped
def run(*, what: What, rule: Rule, work: Work, written: Written, as_json: Json = False) -> None:
    """Run a model on video: results, an annotated video and a report in a folder.

    Exits with 0, with 1 if a source failed, with 2 for wrong usage, with 130 if it was interrupted.
    """
    from eventful.cli import run_work

    run_work.run(what, rule, work, written, as_json)
