"""How the processes of a cluster call each other: a few methods, served by Ray.

Whatever is written above this (readers, workers, the driver) knows links alone, so that tests can
put threads of one process in the place of Ray's actors.
"""

from __future__ import annotations

from typing import Any, Protocol

from eventful.errors import EventfulError


class LinkError(EventfulError):
    """A call that got no answer."""


class LinkDown(LinkError):
    """The process is gone, or not there yet."""


class LinkDead(LinkDown):
    """The process is gone for good: it could not be started again. The message says why."""


class LinkLate(LinkError):
    """The answer did not come in time."""


class LinkFault(LinkError):
    """The call failed, in a way that no caller can do anything about."""


class Reply(Protocol):
    """An answer that will come."""

    def get(self, seconds: float) -> Any:
        """The answer.

        Raises:
            LinkDown: The process is gone.
            LinkLate: It did not come in so many seconds.
        """

    def wait(self, seconds: float) -> None:
        """Wait so long for it, at most."""

    @property
    def there(self) -> bool:
        """Whether `get` would return or raise at once."""


class Link(Protocol):
    """A process that can be called."""

    def send(self, method: str, *args: Any) -> Reply:
        """Call a method, without waiting for it."""


class Links(Protocol):
    """All processes of a run, by name."""

    def find(self, name: str) -> Link:
        """The process of this name.

        Raises:
            LinkDown: There is none.
        """


class Engine(Links, Protocol):
    """Starts and ends them."""

    def start(self, kind: str, name: str, *args: Any, **place: Any) -> Link:
        """Start a registry, reader or worker, which is started again whenever it dies."""

    def kill(self, name: str, pid: int | None = None) -> None:
        """End a process at once, even one that hangs; it is started again.

        Args:
            pid: its number, as it says itself.
        """

    def revive(self, name: str) -> None:
        """Start a process once more that is gone for good."""

    def stop(self) -> None:
        """End all of them."""
