"""Starts Ray on this machine, or joins a cluster. Every use of Ray in this package begins here.

A Ray port that others can reach lets them run code as this user. A Ray that is started here
therefore listens on the loopback interface alone, takes a token, sends no usage statistics and
has no dashboard. Binding to loopback needs a setting in the environment that Ray reads when it is
imported: with `_node_ip_address="127.0.0.1"` alone, every port of Ray 2.60 is open to the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from eventful import extras
from eventful.errors import ClusterError
from eventful.remote.ports import children, listening

_OWN = ("127.", "::1")
LOCAL = ""  # the address that starts Ray on this machine
_STORE = 256 * 2**20  # bytes of the object store; results and settings are small
_ALWAYS = {"RAY_USAGE_STATS_ENABLED": "0"}
_LOOPBACK = {
    # Ray's own switch for desktops: off, every service binds to loopback, also on Linux.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Workers are not last in line for the processor. Ray keeps no record of each call, which is
    # for a dashboard that is not there: 25 MB a minute.
    "RAY_worker_niceness": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
}


@dataclass(frozen=True)
class Local:
    """A Ray that is started on this machine.

    Attributes:
        cpus, gpus: that it shares out; None for as many as there are.
        store: bytes of its object store.
    """

    cpus: int | None = None
    gpus: int | None = None
    store: int = _STORE


@contextmanager
def ray_session(address: str = LOCAL, cpus: int | None = None) -> Iterator[Any]:
    """Give the module `ray`, connected; afterwards leave, or stop what was started here.

    A program that is connected to Ray already stays connected, as it is.

    Args:
        address: `HOST:PORT` of a running cluster, `auto` for the one of this machine, or `LOCAL`.
        cpus: of a Ray started here; None for as many as there are.

    Raises:
        MissingDependencyError: Ray is not installed.
        ClusterError: the cluster cannot be reached, or refuses the token.
    """
    ray = imported(address)
    if ray.is_initialized():
        yield ray
        return
    connect(address, Local(cpus), configure_logging=False)
    try:
        yield ray
    finally:
        ray.shutdown()


def imported(address: str = LOCAL) -> Any:
    """Ray, with its settings in the environment before its first import.

    Raises:
        MissingDependencyError: Ray is not installed.
        ClusterError: the address is one of Ray's client.
    """
    if "://" in address:
        raise ClusterError(
            f"{address}: Ray's client protocol is not supported. Run the command on a machine of "
            "the cluster, with its HOST:PORT or auto."
        )
    for name, value in {**_ALWAYS, **({} if address else _LOOPBACK)}.items():
        os.environ.setdefault(name, value)
    return extras.require("ray")


def connect(address: str = LOCAL, local: Local = Local(), **more: Any) -> Any:  # noqa: B008
    """Start Ray here, or join a cluster; gives the module `ray`.

    Args:
        more: further options of `ray.init`.

    Raises:
        MissingDependencyError, ClusterError: see `ray_session`.
    """
    ray = imported(address)
    options: dict[str, Any] = {"log_to_driver": False, **more}
    if address:
        options |= {"address": address}
    else:
        _check_loopback()
        options |= {"address": "local", "num_cpus": local.cpus, "num_gpus": local.gpus}
        options |= {"include_dashboard": False, "object_store_memory": local.store}
    others = children(os.getpid())  # what this program started itself is its own affair
    try:
        ray.init(**options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        what = f"No Ray cluster at {address}" if address else "Ray does not start here"
        raise ClusterError(
            f"{what} ({type(error).__name__}: {str(error).strip() or 'no reason given'}). "
            + _advice(address)
        ) from error
    if not address:
        _check_ports(ray, others)
    return ray


def _check_loopback() -> None:
    opened = os.environ.get("EVENTFUL_RAY_PORTS") == "open"
    if extras.require("ray._private.ray_constants").ENABLE_RAY_CLUSTER and not opened:
        raise ClusterError(
            "Ray was imported before eventful could bind it to loopback, and reads its settings "
            "once. Start it yourself with ray.init(), or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 "
            "and RAY_AUTH_MODE=token before importing it."
        )


def _check_ports(ray: Any, others: set[int]) -> None:
    """Stop what was started here if it can be reached from other machines.

    Args:
        others: processes below this one that are not Ray's.
    """
    mine = children(os.getpid()) - others
    reached = [
        f"{each.host}:{each.port}"
        for each in listening()
        if each.pid in mine and not each.host.startswith(_OWN)
    ]
    if reached and os.environ.get("EVENTFUL_RAY_PORTS") != "open":
        ray.shutdown()
        raise ClusterError(
            f"Ray listens on {', '.join(reached)}, which other machines can reach, and whoever "
            "reaches it can run code here (docs/cluster.md, security). Use a newer Ray, or set "
            "EVENTFUL_RAY_PORTS=open on a network that you trust."
        )


def _advice(address: str) -> str:
    if not address:
        return "Its log is in /tmp/ray/session_latest/logs."
    return (
        "Give HOST:PORT of the head node (`ray start --head` prints it) or auto; this machine "
        "needs the cluster's token in RAY_AUTH_TOKEN_PATH. Leave the address out to start Ray here."
    )
