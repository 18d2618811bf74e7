"""Several processes over the videos of a set; each video is one process's from start to end."""

from __future__ import annotations

import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.multiprocessing as multiprocessing

from eventful.errors import DataError, EventfulError, WorkerError
from eventful.paper.data.records import Video
from eventful.paper.evaluate.runs import RunStore, VideoResult

Tick = Callable[[int], None]
_PATIENCE = 1.0  # seconds between looks at whether the processes are alive
_FAREWELL = 10.0  # seconds for a process to end when it is told to


class Job(Protocol):
    """What is to be done with a video; goes to other processes, so it holds values alone."""

    def length(self, video: Video) -> int:
        """Frames of it to do, for a progress bar; 0 where it cannot be read."""
        ...

    def run(self, video: Video, device: str, tick: Tick) -> VideoResult:
        """Do it; `tick` is told how many frames were done since it was last called."""
        ...


@dataclass(frozen=True)
class Item:
    """One video to do, and where its result goes."""

    job: Job
    store: RunStore
    variant: str
    index: int
    video: Video

    def run(self, device: str, tick: Tick) -> str | None:
        """Do the video and write its result; returns what is wrong with its data, if something is.

        Raises:
            WorkerError: something went wrong that nobody foresaw; it says with which video.
        """
        try:
            result = self.job.run(self.video, device, tick)
            self.store.save(self.variant, self.index, self.video.name, result)
        except DataError as error:
            return str(error)
        except EventfulError as error:
            raise type(error)(f"Video {self.video.name}: {error}") from error
        except Exception as error:
            raise WorkerError(
                f"Video {self.video.name} failed. What is done is kept.\n{traceback.format_exc()}"
            ) from error
        return None


class Workers:
    """Processes that wait for videos; with one, the calling process does the work itself.

    Args:
        count: how many.
        device: where the models run; plain `cuda` gives the processes one GPU after another.
        threads: of each process; None for an equal part of what torch uses.
    """

    def __init__(self, count: int = 1, device: str = "cpu", threads: int | None = None) -> None:
        self.count, self.device, self._threads = count, device, threads
        self._processes: list[Any] = []
        self._inbox: Any = None
        self._outbox: Any = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._processes:
            return
        if error is None:
            for _ in self._processes:
                self._inbox.put(None)
        for process in self._processes:
            process.join(timeout=0 if error is not None else _FAREWELL)
            process.terminate()
            process.join(timeout=_FAREWELL)
            process.kill()
        # Nobody reads any more what may still wait to be sent; do not wait for them to.
        for line in (self._inbox, self._outbox):
            line.cancel_join_thread()
            line.close()
        self._processes = []

    def run(self, items: Sequence[Item], tick: Tick = lambda frames: None) -> dict[int, str]:
        """Do the videos; returns what is wrong with those that cannot be used, by index."""
        if self.count == 1 or len(items) < 2:
            return self._here(items, tick)
        self._start()
        for item in items:
            self._inbox.put(item)
        names = {item.index: item.video.name for item in items}
        doing: dict[int, str] = {}  # by process
        problems: dict[int, str] = {}
        left = len(items)
        while left:
            kind, index, value = self._receive(doing)
            if kind == "begin":
                doing[value] = names[index]
            elif kind == "tick":
                tick(value)
            elif kind == "error":
                raise value
            else:
                left -= 1
                doing = {pid: name for pid, name in doing.items() if name != names[index]}
                if value is not None:
                    problems[index] = value
        return problems

    def _here(self, items: Sequence[Item], tick: Tick) -> dict[int, str]:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        told = {item.index: item.run(self.device, tick) for item in items}
        return {index: problem for index, problem in told.items() if problem is not None}

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("spawn")  # forked processes cannot use CUDA
        self._inbox, self._outbox = context.Queue(), context.Queue()
        threads = self._threads or max(1, torch.get_num_threads() // self.count)
        for rank in range(self.count):
            device = self.device
            if device == "cuda":
                device = f"cuda:{rank % max(1, torch.cuda.device_count())}"
            process = context.Process(
                target=work, args=(self._inbox, self._outbox, device, threads), daemon=True
            )
            with _uninterrupted():
                process.start()
            self._processes.append(process)

    def _receive(self, doing: dict[int, str]) -> tuple[str, int, Any]:
        while True:
            try:
                message: tuple[str, int, Any] = self._outbox.get(timeout=_PATIENCE)
                return message
            except queue.Empty:
                dead = [process for process in self._processes if not process.is_alive()]
                if dead:
                    video = doing.get(dead[0].pid, "a video it had just begun")
                    raise WorkerError(
                        f"A worker ended with exit code {dead[0].exitcode} at {video}; the system "
                        "may have run out of memory. The videos that are done are kept: run again "
                        "with fewer --workers to go on."
                    ) from None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is for the calling process alone, which ends the others: they inherit deaf ears."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_with_parent() -> None:
    """See to it that this process does not outlive the one that asks, however that one ends."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)  # the main thread may be waiting for the rest of a message

    threading.Thread(target=wait, daemon=True).start()


def work(inbox: Any, outbox: Any, device: str, threads: int) -> None:
    """The life of one process: items in, what became of them out, until None comes in."""
    torch.set_num_threads(threads)
    _end_with_parent()
    for item in iter(inbox.get, None):
        outbox.put(("begin", item.index, os.getpid()))
        try:
            problem = item.run(device, lambda frames: outbox.put(("tick", 0, frames)))
            outbox.put(("done", item.index, problem))
        except EventfulError as error:
            outbox.put(("error", item.index, error))
