"""Processes the videos of a set in Ray actors: the same items and the same results as `workers`.

Results travel to the driver, which stores them, so the folder of a run is needed there alone; data
and weights must be readable under the same path on every machine. An actor that dies is replaced
and its video begun again; if the driver dies, its actors end, and the same command goes on with
the videos that are not stored.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eventful import __version__, files
from eventful.errors import ClusterError, DataError, EventfulError, WorkerError
from eventful.paper.data.records import Video
from eventful.paper.evaluate.runs import VideoResult
from eventful.paper.evaluate.workers import Item, Tick, no_tick
from eventful.remote.session import LOCAL, ray_session

_POLL = 0.25  # seconds between two reports of progress
_ATTEMPTS = 3  # of one video whose actors die
_PATIENCE = 120.0  # seconds in which one actor at least must start
_PROGRESS, _WORK = "progress", "work"  # concurrency groups: one answers while the other computes


@dataclass(frozen=True)
class Place:
    """What must be equal on all machines for the result to be that of one process.

    Attributes:
        weights: digest by path; None where the file cannot be read.
    """

    host: str
    versions: Mapping[str, str]
    weights: Mapping[str, str | None]

    @classmethod
    def here(cls, paths: Sequence[str]) -> Place:
        """This process."""
        versions = {
            "eventful": __version__,
            "torch": str(torch.__version__),
            "Python": platform.python_version(),
        }
        return cls(platform.node(), versions, {path: _digest(path) for path in paths})

    def refuse(self, other: Place) -> None:
        """Raise unless the other machine fits this one."""
        for name, version in self.versions.items():
            if other.versions[name] != version:
                raise WorkerError(
                    f"{other.host} has {name} {other.versions[name]}, this machine {version}: "
                    "the numbers could differ. Install the same version on all machines."
                )
        for path, digest in self.weights.items():
            if other.weights[path] != digest:
                why = "is another file" if other.weights[path] else "cannot be read"
                raise WorkerError(
                    f"{path} {why} on {other.host}. Put data and weights on a file system that "
                    "all machines mount under the same path."
                )


def _digest(path: str) -> str | None:
    try:
        return files.file_digest(Path(path))
    except OSError:
        return None


@dataclass(frozen=True)
class Outcome:
    """What an actor made of a video: exactly one of the three."""

    result: VideoResult | None = None
    problem: DataError | None = None
    error: EventfulError | None = None


class Actor:
    """Runs in a process of Ray; one video at a time.

    Args:
        threads: torch's, in the thread that computes.
    """

    def __init__(self, device: str, threads: int) -> None:
        self._device, self._threads = device, threads
        self._index, self._frames = -1, 0

    def place(self, paths: Sequence[str]) -> Place:
        """See `Place`; answers when the actor is up."""
        return Place.here(paths)

    def run(self, item: Item) -> Outcome:
        """Process one video."""
        torch.set_num_threads(self._threads)  # holds for the calling thread
        self._frames, self._index = 0, item.index
        try:
            return Outcome(result=item.compute(self._device, self._tick))
        except DataError as problem:
            return Outcome(problem=problem)
        except EventfulError as error:
            return Outcome(error=error)

    def frames(self, index: int) -> int:
        """Frames of a video that are done."""
        return self._frames if index == self._index else 0

    def _tick(self, frames: int) -> None:
        self._frames += frames


@dataclass
class _Task:
    """One video at an actor.

    Attributes:
        asked: a question for its progress that is not answered yet.
        shown: frames that were reported as progress.
    """

    item: Item
    actor: Any
    asked: Any = None
    shown: int = 0


@dataclass
class RayWorkers:
    """Actors for videos, started with the first ones; a context manager.

    Args:
        address: of the cluster; empty for a Ray on this machine.
        count: number of actors; None for as many as the cluster has room for.
        device: where models run; each actor on `cuda` has a GPU of its own.
        threads: of each actor; None for one, or for an equal part of torch's if `count` is given.
        weights: files that must be the same everywhere.
    """

    address: str = LOCAL
    count: int | None = None
    device: str = "cpu"
    threads: int | None = None
    weights: Sequence[Path] = ()
    _pool: _Actors | None = None
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, cause: object, error: BaseException | None, trace: object) -> None:
        self._pool = None
        self._open.close()

    def run(self, items: Sequence[Item], tick: Tick = no_tick) -> dict[int, str]:
        """Process the videos; returns the problems of those that cannot be used, by index."""
        if not items:
            return {}
        if self._pool is None:
            self._pool = self._start()
        return _Run(self._pool, list(reversed(items)), tick).finish()

    def _start(self) -> _Actors:
        """Connect, and start the actors."""
        threads = self.threads or 1
        if self.threads is None and self.count is not None:
            threads = max(1, torch.get_num_threads() // self.count)
        cpus = None if self.count is None else self.count * threads
        ray = self._open.enter_context(ray_session(self.address, cpus))
        paths = tuple(str(path.resolve()) for path in self.weights)
        pool = _Actors(ray, self.device, threads, Place.here(paths))
        room = pool.room()
        if room < (self.count or 1):
            raise ClusterError(
                f"The cluster has room for {room} workers with {threads} threads on "
                f"{self.device}. Lower --workers or --threads, or choose another --device."
            )
        for _ in range(self.count or room):
            pool.start_one()
        self._open.callback(pool.close)
        return pool


@dataclass
class _Actors:
    """The actors of a cluster that are not at work.

    Attributes:
        here: what every actor must have.
        starting: actors that were started and have not answered, by the answer.
    """

    ray: Any
    device: str
    threads: int
    here: Place
    idle: list[Any] = field(default_factory=list)
    starting: dict[Any, Any] = field(default_factory=dict)
    _failed: int = 0

    @property
    def _gpus(self) -> int:
        return int(self.device.partition(":")[0] == "cuda")

    def room(self) -> int:
        """Actors that fit into the cluster."""
        there = self.ray.cluster_resources()
        room = int(there.get("CPU", 0)) // self.threads
        return min(room, int(there.get("GPU", 0))) if self._gpus else room

    def start_one(self) -> None:
        """Start an actor; `answer` takes it up."""
        remote = self.ray.remote(concurrency_groups={_PROGRESS: 1, _WORK: 1})(Actor)
        options = remote.options(num_cpus=self.threads, num_gpus=self._gpus)
        device = "cuda:0" if self._gpus else self.device  # Ray shows each actor its own GPU
        actor = options.remote(device, self.threads)
        self.starting[actor.place.remote(tuple(self.here.weights))] = actor

    def answer(self, reference: Any) -> None:
        """An actor is up, or will never be."""
        actor = self.starting.pop(reference)
        try:
            self.here.refuse(self.ray.get(reference))
        except self.ray.exceptions.RayError as error:
            self._failed += 1
            if self._failed >= _ATTEMPTS:
                raise ClusterError(
                    f"Workers do not start. Is eventful installed on every machine? {error}"
                ) from error
            self.start_one()
            return
        self.idle.append(actor)

    def discard(self, actor: Any) -> None:
        """End an actor, also one that is out of reach and could come back."""
        with suppress(self.ray.exceptions.RayError):
            self.ray.kill(actor)

    def close(self) -> None:
        """End all."""
        for actor in (*self.idle, *self.starting.values()):
            self.discard(actor)


@dataclass
class _Run:
    """Hands videos to actors until all are done."""

    pool: _Actors
    waiting: list[Item]
    tick: Tick
    tasks: dict[Any, _Task] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)  # actors lost, by index of the video

    def finish(self) -> dict[int, str]:
        """Process all; returns the problems, by index."""
        ray, pool = self.pool.ray, self.pool
        moved = time.monotonic()
        try:
            while self.waiting or self.tasks:
                while self.waiting and pool.idle:
                    task = _Task(self.waiting.pop(), pool.idle.pop())
                    call = task.actor.run.options(concurrency_group=_WORK)
                    self.tasks[call.remote(task.item)] = task
                done, _ = ray.wait([*self.tasks, *pool.starting], timeout=_POLL)
                for reference in done:
                    if reference in pool.starting:
                        pool.answer(reference)
                    else:
                        self._finish(reference)
                self._report()
                moved = time.monotonic() if done or self.tasks else moved
                if time.monotonic() - moved > _PATIENCE:
                    raise ClusterError(
                        f"No worker started in {_PATIENCE:.0f} s: the cluster has no free room. "
                        "Wait for other jobs, or add machines."
                    )
        finally:
            for task in self.tasks.values():
                pool.discard(task.actor)
        return self.problems

    def _finish(self, reference: Any) -> None:
        task = self.tasks.pop(reference)
        item, exceptions = task.item, self.pool.ray.exceptions
        try:
            outcome: Outcome = self.pool.ray.get(reference)
        except exceptions.RayTaskError as error:
            self.pool.idle.append(task.actor)
            raise WorkerError(
                f"Video {item.video.name} failed. What is done is kept.\n{error}"
            ) from error
        except exceptions.RayError as error:
            self._begin_again(task, error)
            return
        self.pool.idle.append(task.actor)
        if outcome.error is not None:
            raise type(outcome.error)(f"Video {item.video.name}: {outcome.error}")
        if outcome.problem is not None:
            _confirm(item, outcome.problem)
            self.problems[item.index] = str(outcome.problem)
        elif outcome.result is not None:
            item.keep(outcome.result)
            self._advance(task, item.job.length(item.video))

    def _begin_again(self, task: _Task, error: Exception) -> None:
        """Start another actor for one that died, unless its video has killed several."""
        item = task.item
        self.pool.discard(task.actor)
        self.lost[item.index] = self.lost.get(item.index, 0) + 1
        if self.lost[item.index] >= _ATTEMPTS:
            raise WorkerError(
                f"{_ATTEMPTS} workers ended at {item.video.name}; the system may have run out of "
                "memory. The videos that are done are kept: run again with fewer --workers to go "
                f"on. Ray says: {error}"
            ) from error
        self.pool.start_one()
        self.waiting.append(item)
        self.tick(-task.shown)

    def _report(self) -> None:
        """Progress of the videos that run, without waiting for an actor."""
        ray = self.pool.ray
        for task in self.tasks.values():
            if task.asked is None:
                call = task.actor.frames.options(concurrency_group=_PROGRESS)
                task.asked = call.remote(task.item.index)
                continue
            if ray.wait([task.asked], timeout=0)[0]:
                with suppress(ray.exceptions.RayError):
                    self._advance(task, ray.get(task.asked))
                task.asked = None

    def _advance(self, task: _Task, frames: int) -> None:
        if frames > task.shown:
            self.tick(frames - task.shown)
            task.shown = frames


def _confirm(item: Item, problem: DataError) -> None:
    """Raise if this machine can read a video that a worker could not.

    A machine without the data would otherwise leave out videos, and the number would be another.
    """
    if _readable(item.video):
        raise WorkerError(
            f"A worker cannot read {item.video.name} ({problem}), and this machine can. Put data "
            "and weights on a file system that all machines mount under the same path."
        )


def _readable(video: Video) -> bool:
    try:
        for _ in video.frames if video.boxes is None else video:
            pass
    except DataError:
        return False
    return True
