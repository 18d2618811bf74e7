"""Options of `eventful cluster`. The work is in `cluster_work`, imported when it runs."""

from __future__ import annotations

import typer

from eventful.cli.cluster_simulate import simulate

cluster = typer.Typer(help="Run many cameras on many machines, by Ray.", no_args_is_help=True)


@cluster.callback()
def group() -> None:
    """Run many cameras on many machines, by Ray."""


cluster.command()(simulate)
