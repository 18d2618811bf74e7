"""Threads of this process in the place of Ray's actors: the same readers, workers and registry."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any

from eventful.cluster import registry as registries
from eventful.cluster import worker as workers
from eventful.cluster.links import LinkDown, LinkLate
from eventful.cluster.reader import Reader
from eventful.cluster.registry import Registry
from eventful.cluster.worker import Worker

# In a process of its own a fault ends the process. Here it ends the thread alone, also that of a
# worker that outlives its test.
registries._die = workers._die = sys.exit


class ThreadReply:
    def __init__(self, future: Future[Any], alive: Callable[[], bool]) -> None:
        self._future, self._alive = future, alive

    def get(self, seconds: float) -> Any:
        if not self._alive():
            raise LinkDown("it was killed")
        try:
            return self._future.result(seconds)
        except TimeoutError as error:
            raise LinkLate("late") from error

    def wait(self, seconds: float) -> None:
        wait_for([self._future], seconds)

    @property
    def there(self) -> bool:
        return self._future.done() or not self._alive()


class ThreadLink:
    """One process: it may be killed, and made anew."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self.generation, self._closed = make, 0, False
        self._begin()

    def _begin(self) -> None:
        self.pool = ThreadPoolExecutor(24)
        self.made = self.pool.submit(self._start)

    def _start(self) -> Any:
        mine, made = self.generation, self._make()
        if self._closed or mine != self.generation:
            made._stopped = True
        return made

    def send(self, method: str, *args: Any) -> ThreadReply:
        mine, made = self.generation, self.made

        def call() -> Any:
            return getattr(made.result(), method)(*args)

        try:
            future = self.pool.submit(call)
        except RuntimeError as error:  # killed at this moment
            raise LinkDown("it was killed") from error
        return ThreadReply(future, lambda: self.generation == mine)

    def kill(self) -> None:
        """What it did so far counts; what it does from now on is heard by nobody."""
        self.generation += 1
        self._end(30)
        if not self._closed:
            self._begin()

    def _end(self, seconds: float) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        with suppress(Exception):
            process = self.made.result(seconds)
            process._stopped = True  # a worker's thread ends, without handing in what it has
            if isinstance(process, Registry):
                with process._changed:
                    process._closed = True
                    process._changed.notify_all()
                for thread in process._threads:
                    thread.join(5)
                process._ledger.store.close()
            elif isinstance(process, Reader):
                process.stop()
            elif process._thread is not threading.current_thread():
                process._thread.join(5)

    def close(self) -> None:
        self._closed = True
        self._end(5)


class ThreadEngine:
    def __init__(self) -> None:
        self.all: dict[str, ThreadLink] = {}
        self.kills: list[str] = []
        self._lock = threading.Lock()

    @property
    def links(self) -> ThreadEngine:
        return self

    def find(self, name: str) -> ThreadLink:
        try:
            return self.all[name]
        except KeyError:
            raise LinkDown(name) from None

    def start(self, kind: str, name: str, *args: Any, **place: Any) -> ThreadLink:
        made = {"registry": Registry, "reader": Reader, "worker": Worker}[kind]
        self.all[name] = ThreadLink(lambda: made(*args))
        return self.all[name]

    def kill(self, name: str, pid: int | None = None) -> None:
        self.kills.append(name)
        self.all[name].kill()

    def revive(self, name: str) -> None:
        self.all[name].kill()

    def stop(self) -> None:
        for link in self.all.values():
            link.close()
