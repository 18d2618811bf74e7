"""Processes the videos of a set in worker processes; each video is handled by one of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from eventful.errors import DataError, EventfulError, WorkerError
from eventful.paper.data.records import Video
from eventful.paper.evaluate.runs import RunStore, VideoResult

Tick = Callable[[int], None]
_POLL = 0.1  # seconds between two reports of progress


def no_tick(frames: int) -> None:
    """Report no progress."""


class Job(Protocol):
    """What to compute for a video. It is pickled and sent to worker processes."""

    def length(self, video: Video) -> int:
        """Frames to process, for a progress bar; 0 if the video cannot be read."""
        ...

    def run(self, video: Video, device: str, tick: Tick) -> VideoResult:
        """Process the video; call `tick` with the number of frames done since the last call."""
        ...


@dataclass(frozen=True)
class Item:
    """One video to process, and where its result is stored."""

    job: Job
    store: RunStore
    variant: str
    index: int
    video: Video

    def run(self, device: str, tick: Tick) -> str | None:
        """Process the video and store its result.

        Returns:
            The problem with the video's data, or None if it could be used.

        Raises:
            WorkerError: any unexpected error; the message names the video.
        """
        try:
            self.keep(self.compute(device, tick))
        except DataError as error:
            return str(error)
        except EventfulError as error:
            raise type(error)(f"Video {self.video.name}: {error}") from error
        except Exception as error:
            raise WorkerError(
                f"Video {self.video.name} failed. What is done is kept.\n{traceback.format_exc()}"
            ) from error
        return None

    def compute(self, device: str, tick: Tick) -> VideoResult:
        """Process the video; nothing is stored."""
        return self.job.run(self.video, device, tick)

    def keep(self, result: VideoResult) -> None:
        """Store a result of `compute`."""
        self.store.save(self.variant, self.index, self.video.name, result)


class Workers:
    """A pool of processes for videos; with `count=1` the calling process does the work.

    Args:
        count: number of processes.
        device: where the models run; `cuda` without a number gives each process its own GPU.
        threads: per process; None for an equal part of torch's threads.
    """

    def __init__(self, count: int = 1, device: str = "cpu", threads: int | None = None) -> None:
        self.count, self.device, self._threads = count, device, threads
        self._pool: _Pool | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, cause: object, error: BaseException | None, trace: object) -> None:
        if self._pool is not None:
            self._pool.close(now=error is not None)
            self._pool = None

    def run(self, items: Sequence[Item], tick: Tick = no_tick) -> dict[int, str]:
        """Process the videos; returns the problems of those that cannot be used, by index."""
        if self.count == 1 or len(items) < 2:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            results = {item.index: item.run(self.device, tick) for item in items}
        else:
            if self._pool is None:
                threads = self._threads or max(1, torch.get_num_threads() // self.count)
                self._pool = _Pool(_devices(self.device, self.count), threads)
            results = self._pool.run(items, tick)
        return {index: problem for index, problem in results.items() if problem is not None}


class _Pool:
    """A process pool whose workers report progress and stop when the parent does.

    Args:
        devices: one per worker.
    """

    def __init__(self, devices: Sequence[str], threads: int) -> None:
        context = multiprocessing.get_context("spawn")  # forked processes cannot use CUDA
        self._messages = context.SimpleQueue()
        # Workers exit when this pipe is closed, which a dying parent does too.
        self._reader, self._writer = context.Pipe(duplex=False)
        queue = context.SimpleQueue()
        for device in devices:
            queue.put(device)
        self._executor = ProcessPoolExecutor(
            len(devices), context, _start_worker, (queue, self._messages, self._reader, threads)
        )
        self._processes: dict[int | None, Any] = {}
        self._current: dict[int | None, str] = {}  # the video each worker began last, by process id

    def run(self, items: Sequence[Item], tick: Tick) -> dict[int, str | None]:
        """Process the items; returns what `Item.run` returns, by index."""
        try:
            with _ignoring_ctrl_c():  # worker processes start here and inherit it
                indices = {self._executor.submit(_run_item, item): item.index for item in items}
            self._processes = {p.pid: p for p in multiprocessing.active_children()}
            return {indices[future]: future.result() for future in self._completed(indices, tick)}
        except BrokenProcessPool:
            raise self._crash() from None

    def close(self, *, now: bool) -> None:
        """Stop the workers.

        Args:
            now: leave the videos they are at unfinished.
        """
        if now:
            self._writer.close()
        self._executor.shutdown(wait=True, cancel_futures=now)
        self._writer.close()
        self._reader.close()

    def _completed(
        self, futures: dict[Future[str | None], int], tick: Tick
    ) -> Iterator[Future[str | None]]:
        """The futures as they complete; reports progress meanwhile."""
        pending = set(futures)
        while pending:
            done, pending = wait(pending, _POLL, FIRST_COMPLETED)
            self._read_messages(tick)
            yield from done

    def _read_messages(self, tick: Tick) -> None:
        while not self._messages.empty():
            message: _Message = self._messages.get()
            if message.began is not None:
                self._current[message.worker] = message.began
            if message.frames:
                tick(message.frames)

    def _crash(self) -> WorkerError:
        """The error for a worker that ended by itself."""
        self._executor.shutdown(wait=True)  # afterwards the exit codes of all workers are known
        self._read_messages(no_tick)
        codes = {pid: process.exitcode for pid, process in self._processes.items()}
        expected = (None, 0, -signal.SIGTERM)  # the executor terminates the other workers
        worker = next((pid for pid, code in codes.items() if code not in expected), None)
        video = self._current.get(worker, "a video it had just begun")
        return WorkerError(
            f"A worker ended with exit code {codes.get(worker)} at {video}; the system may have "
            "run out of memory. The videos that are done are kept: run again with fewer --workers "
            "to go on."
        )


def _devices(device: str, count: int) -> list[str]:
    if device != "cuda":
        return [device] * count
    return [f"cuda:{rank % max(1, torch.cuda.device_count())}" for rank in range(count)]


@contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Child processes started here ignore SIGINT; the parent stops them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class _Message:
    """Progress of one worker.

    Attributes:
        worker: its process id.
        frames: done since its last message.
        began: name of the video it begins.
    """

    worker: int
    frames: int = 0
    began: str | None = None


@dataclass(frozen=True)
class _Worker:
    """What a worker process was started with."""

    device: str
    messages: Any


_worker: _Worker | None = None  # set in worker processes only


def _start_worker(devices: Any, messages: Any, parent: Connection, threads: int) -> None:
    """Runs once in each worker process, ahead of its first video."""
    global _worker
    _worker = _Worker(devices.get(), messages)
    torch.set_num_threads(threads)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: Connection) -> None:
    with suppress(EOFError, OSError):
        parent.recv()  # returns when the other end is closed
    os._exit(1)  # the main thread may be in the middle of a video


def _run_item(item: Item) -> str | None:
    """Runs in a worker process; see `Item.run`."""
    assert _worker is not None
    messages, worker = _worker.messages, os.getpid()
    messages.put(_Message(worker, began=item.video.name))
    return item.run(_worker.device, lambda frames: messages.put(_Message(worker, frames)))
