"""The processes of a cluster as actors of Ray."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from eventful.cluster.links import LinkDead, LinkDown, LinkFault, LinkLate
from eventful.cluster.reader import Reader
from eventful.cluster.registry import Registry
from eventful.cluster.sources import ClusterSpec
from eventful.cluster.worker import Worker
from eventful.errors import EventfulError
from eventful.remote.ports import children
from eventful.remote.session import LOCAL, Local, connect
from eventful.surgery.libraries import load

_KINDS = {"registry": Registry, "reader": Reader, "worker": Worker}
_KNOWN = 3.0  # seconds for which a process is found without asking Ray


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
        ClusterError: Ray does not start, or can be reached from other machines.
    """

    def __init__(self, spec: ClusterSpec, space: str, address: str | None = None) -> None:
        self._spec, self.links = spec, RayLinks(space)
        self._own: dict[str, RayLink] = {}
        self._recipes: dict[str, tuple[str, tuple[Any, ...]]] = {}
        quiet = {"logging_level": logging.ERROR, "namespace": space}
        cpus, gpus = (math.ceil(spec.workers * each) for each in (spec.cpus, spec.gpus))
        ray = connect(address or LOCAL, Local(cpus + 1, gpus or None, spec.object_store), **quiet)
        if address is None:
            _hide_token()
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


def _hide_token() -> None:
    """Ray writes its token for all users to read, and whoever has it runs code as this one."""
    with suppress(OSError):
        (Path.home() / ".ray" / "auth_token").chmod(0o600)


def _last_line(text: str) -> str:
    """Of a traceback, what was raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it died"
