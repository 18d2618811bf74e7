"""Options of `eventful reproduce`. The work is in other modules, imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eventful.cli.groups import RunUnlessNamed
from eventful.cli.options import Evaluation, FramesPerVideo, Json, grouped

reproduce = typer.Typer(
    cls=RunUnlessNamed,
    help="The paper's claims on generated videos: `eventful reproduce NAME`.",
    epilog="Options of `eventful reproduce NAME`: see `eventful reproduce run --help`.",
)


@reproduce.command("run")
@grouped
def run_claim(
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="One of `eventful reproduce list`, `all`, or a .toml."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Other data: world:street?..., or a dataset on disk.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]FILE", help="Other weights than those of the package."),
    ] = None,
    frames: FramesPerVideo = None,
    how: Evaluation,
) -> None:
    """Measure a claim of the paper; needs neither data nor weights.

    This is what `eventful reproduce` does when no other command is named. Results go to
    results/NAME, or to --out; with `all`, each to a folder of its name there.
    """
    from eventful.cli import reproduce_run as run

    if name is None:
        run.show_names(how.as_json)
    elif name == "all":
        run.run_all(data, weights or [], how, frames)
    else:
        run.run_one(name, data, weights or [], how, frames)


@reproduce.command("list")
def list_claims(as_json: Json = False) -> None:
    """The names, and what each shows."""
    from eventful.cli import reproduce_run as run

    run.show_names(as_json)


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
