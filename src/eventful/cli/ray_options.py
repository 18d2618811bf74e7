"""Options of commands whose work processes of Ray may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from eventful.cli.options import OnRay, RayAddress
from eventful.remote.session import LOCAL


@dataclass(frozen=True)
class OnCluster:
    """Where the work is done."""

    ray: OnRay = False
    ray_address: RayAddress = None
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes of Ray. Default: as many as fit.", show_default=False),
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each process of Ray.", show_default=False)
    ] = None

    @property
    def address(self) -> str | None:
        """Of the cluster, empty for Ray on this machine; None for this process."""
        return self.ray_address or (LOCAL if self.ray else None)


HERE = OnCluster()
