"""The processes of a cluster as actors of Ray."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from contextlib import suppress
from typing import Any

from eventful.cluster.links import LinkDead, LinkDown, LinkFault, LinkLate
from eventful.cluster.ports import children, listening
from eventful.cluster.reader import Reader
from eventful.cluster.registry import Registry
from eventful.cluster.sources import ClusterSpec
from eventful.cluster.worker import Worker
from eventful.errors import EventfulError, RunError
from eventful.surgery.libraries import load

_KINDS = {"registry": Registry, "reader": Reader, "worker": Worker}
_KNOWN = 3.0  # seconds for which a process is found without asking Ray
_LOOPBACK = ("127.", "::1")
# Read by Ray when it is imported: a local cluster on the loopback interface, no reports to its
# makers, workers that are not last in line for the processor.
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0"}
# Ray keeps a record of each call, for a dashboard that is not there: 25 MB a minute.
_LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
}


class RayReply:
    """See `links.Reply`."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def get(self, seconds: float) -> Any:
        """See `links.Reply`."""
        ray = load("ray")
        try:
            return ray.get(self._reference, timeout=seconds)
        except ray.exceptions.GetTimeoutError as error:
            raise LinkLate(f"no answer in {seconds:g} s") from error
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, EventfulError):
                raise cause from None
            raise LinkFault(f"{type(cause).__name__}: {cause}") from None
        except ray.exceptions.ActorDiedError as error:
            raise LinkDead(_last_line(str(error))) from None
        except ray.exceptions.RayError as error:
            raise LinkDown(str(error).partition("\n")[0]) from None

    def wait(self, seconds: float) -> None:
        """See `links.Reply`."""
        load("ray").wait([self._reference], timeout=seconds)

    @property
    def there(self) -> bool:
        """See `links.Reply`."""
        done, _ = load("ray").wait([self._reference], timeout=0)
        return bool(done)


class RayLink:
    """See `links.Link`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def send(self, method: str, *args: Any) -> RayReply:
        """See `links.Link`."""
        return RayReply(getattr(self.handle, method).remote(*args))


class RayLinks:
    """See `links.Links`; it can be sent to other processes."""

    def __init__(self, space: str) -> None:
        self.space = space
        self._known: dict[str, tuple[float, RayLink]] = {}

    def __reduce__(self) -> Any:
        return RayLinks, (self.space,)

    def find(self, name: str) -> RayLink:
        """See `links.Links`."""
        moment, link = self._known.get(name, (0.0, None))
        now = time.monotonic()
        if link is None or now - moment > _KNOWN:
            try:
                handle = load("ray").get_actor(name, namespace=self.space)
            except ValueError as error:
                raise LinkDown(f"{name} is not there") from error
            link = RayLink(handle)
            self._known[name] = now, link  # for a while: one that was revived is another one
        return link


class RayEngine:
    """See `links.Engine`.

    Args:
        address: of a cluster that runs: `auto` or host:port. None starts one on this machine, which
            listens on the loopback interface alone and ends with this process.

    Raises:
        RunError: Something of the local cluster can be reached from other machines.
    """

    def __init__(self, spec: ClusterSpec, space: str, address: str | None = None) -> None:
        self._spec, self.links = spec, RayLinks(space)
        self._own: dict[str, RayLink] = {}
        self._recipes: dict[str, tuple[str, tuple[Any, ...]]] = {}
        for name, value in (_SETTINGS if address else {**_SETTINGS, **_LOCAL}).items():
            os.environ.setdefault(name, value)
        ray = load("ray")
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": space}
        if address is not None:
            ray.init(address=address, **quiet)
        else:
            ray.init(
                num_cpus=math.ceil(spec.workers * spec.cpus) + 1,
                num_gpus=math.ceil(spec.workers * spec.gpus) or None,
                include_dashboard=False,
                object_store_memory=spec.object_store,
                **quiet,
            )
            self._check_ports()
        self._node = ray.get_runtime_context().get_node_id()

    def find(self, name: str) -> RayLink:
        """See `links.Links`."""
        return self._own[name]

    def start(self, kind: str, name: str, *args: Any, **place: Any) -> RayLink:
        """See `links.Engine`; the registry stays on this machine, where its folder is."""
        ray = load("ray")
        spec = self._spec
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": spec.workers + 8}
        if kind == "worker":
            options = {"num_cpus": spec.cpus, "num_gpus": spec.gpus, "max_concurrency": 8}
        elif kind == "registry":
            strategy = load("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = strategy(self._node, soft=False)
        made = ray.remote(_KINDS[kind]).options(
            name=name, namespace=self.links.space, max_restarts=-1, max_task_retries=0, **options
        )
        self._recipes[name] = kind, args
        # The first handle is kept: Ray ends an actor whose handle is gone.
        self._own[name] = RayLink(made.remote(*args))
        return self._own[name]

    def revive(self, name: str) -> None:
        """See `links.Engine`."""
        kind, args = self._recipes[name]
        load("ray").kill(self._own[name].handle)  # gives its name back
        with suppress(ValueError):  # not yet: the next attempt finds it free
            self.start(kind, name, *args)

    def kill(self, name: str, pid: int | None = None) -> None:
        """See `links.Engine`; a process that hangs hears nothing of Ray, so it gets a signal."""
        load("ray").kill(self.find(name).handle, no_restart=False)
        if pid is not None and pid in children(os.getpid()):
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """See `links.Engine`."""
        load("ray").shutdown()

    def _check_ports(self) -> None:
        """Nothing that was started here may be reached from other machines."""
        mine = children(os.getpid())
        open_ones = [
            each
            for each in listening()
            if each.pid in mine | {os.getpid()} and not each.host.startswith(_LOOPBACK)
        ]
        if open_ones and os.environ.get("EVENTFUL_RAY_PORTS") != "open":
            load("ray").shutdown()
            shown = ", ".join(f"{each.host}:{each.port}" for each in open_ones)
            raise RunError(
                f"Ray listens on {shown}, which other machines can reach, and whoever reaches it "
                "can run code here (docs/cluster.md, security). Use a newer Ray, or set "
                "EVENTFUL_RAY_PORTS=open on a network that you trust."
            )


def _last_line(text: str) -> str:
    """Of a traceback, what was raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it died"
