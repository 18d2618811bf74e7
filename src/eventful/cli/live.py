"""Options of `eventful live`. The work is in `live_work`, imported when it runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from eventful.cli.options import MODEL_HELP, SIZE, Dtype, Json, ModelWeights, grouped

_MODEL, _SERVER, _PAGE = "Model", "Server", "What the page may add"


@dataclass(frozen=True)
class Seen:
    """What the page shows."""

    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE]...",
            help="Videos, camera:0, rtsp:// and http:// addresses, world:7; as for `eventful run`. "
            "A clip of the generated world by default.",
        ),
    ] = None
    model: Annotated[
        str, typer.Option(metavar="MODEL", help=MODEL_HELP, rich_help_panel=_MODEL)
    ] = "detector"
    weights: ModelWeights = None
    size: Annotated[
        str | None,
        typer.Option(metavar="HxW", help=SIZE, rich_help_panel=_MODEL),
    ] = None
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.", rich_help_panel=_MODEL)] = "cpu"
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.", rich_help_panel=_MODEL)] = (
        Dtype.float32
    )
    preset: Annotated[
        str,
        typer.Option(
            help="fast, exact, paper, tokenwise, stgt or dense, to begin with.",
            rich_help_panel=_MODEL,
        ),
    ] = "fast"
    score: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Detections below it are left out.", rich_help_panel=_MODEL
        ),
    ] = 0.5
    loop: Annotated[bool, typer.Option("--loop", help="Begin again at the end of a file.")] = False


@dataclass(frozen=True)
class Served:
    """Where the page is served, and to whom."""

    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; all but loopback need a token.", rich_help_panel=_SERVER
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="0 for any that is free.", rich_help_panel=_SERVER),
    ] = 8765
    token: Annotated[
        str | None,
        typer.Option(
            envvar="EVENTFUL_TOKEN",
            show_envvar=True,
            help="Needed to open the page, at least 16 characters.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another name of this machine in the address of the page; may be repeated.",
            rich_help_panel=_SERVER,
        ),
    ] = None


@dataclass(frozen=True)
class Addable:
    """What may be added through the page."""

    allow_folder: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Files below this folder; may be repeated.",
            rich_help_panel=_PAGE,
        ),
    ] = None
    allow_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Addresses below this one, e.g. rtsp://camera.local/; may be repeated.",
            rich_help_panel=_PAGE,
        ),
    ] = None
    allow_camera: Annotated[
        bool,
        typer.Option("--allow-camera", help="Cameras of this machine.", rich_help_panel=_PAGE),
    ] = False
    upload_mb: Annotated[
        float,
        typer.Option(min=0, help="Largest upload; 0 for none.", rich_help_panel=_PAGE),
    ] = 64.0
    max_sources: Annotated[
        int, typer.Option(min=1, max=64, help="At one time.", rich_help_panel=_PAGE)
    ] = 16


@grouped
def live(*, seen: Seen, served: Served, addable: Addable, as_json: Json = False) -> None:
    """Show sources through a model on a local page, and change its budget while it runs.

    `--json` prints one line with the address when the page is ready. Ctrl-C ends it.
    """
    # Batches and selections have another size at each step. oneDNN, under torch, keeps code for
    # 1024 shapes unless it is limited; with a limit, memory was seen to grow less.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    from eventful.cli import live_work

    live_work.run(seen, served, addable, as_json)
