"""A worker: a process with a model and the streams that are leased to it."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eventful.cluster.accounts import Entry, Lease, Part, Verdict
from eventful.cluster.batches import Batches
from eventful.cluster.links import LinkError, LinkLate, Links, Reply
from eventful.cluster.messages import in_words
from eventful.cluster.outbox import MOST, Outbox
from eventful.cluster.reader import Picked, Want
from eventful.cluster.snapshots import Snapshots
from eventful.cluster.sources import ClusterSpec
from eventful.live.groups import Result
from eventful.live.memory import resident_bytes

_log = logging.getLogger("eventful.cluster")
REGISTRY = "registry"
_WAIT = 0.1  # seconds that a reader waits for a frame
_AHEAD = 32  # results of a stream of which every frame is wanted that may wait
_LATE = 5.0  # seconds after which a reader is asked again
_FAILURES = 5  # turns in turn that fail; then the process ends
_FAREWELL = 3.0  # seconds to hand in results, and then to say why it ends
_PATIENCE = 30.0  # seconds to wait for the registry at the start, again and again
_SMOOTH = 0.1  # weight of a new step in the mean cost


@dataclass
class Held:
    """A stream that is leased to this worker.

    Attributes:
        after: last frame that was taken.
        pending: frames of a step that is not whole yet.
        paused: it takes no more frames, since it is about to be given back.
        cost: milliseconds of a frame, the mean of late.
    """

    lease: Lease
    after: int
    pending: list[Picked] = field(default_factory=list)
    paused: bool = False
    cost: float | None = None
    steps: int = 0
    updated: float = 0.0
    tokens: float = 0.0
    latency: float = 0.0
    kept: float = field(default_factory=time.monotonic)


class Worker:
    """Takes frames of its streams, steps them together, and hands in the results.

    Args:
        links: finds the registry and the readers.
        state: folder for snapshots.
    """

    def __init__(self, name: str, spec: ClusterSpec, links: Links, state: str) -> None:
        self.name, self._spec, self._links = name, spec, links
        self._started, self._steps, self._frames = time.time(), 0, 0
        self._phase, self._alive = "starting", time.monotonic()
        self._held: dict[str, Held] = {}
        self._asked: dict[str, tuple[Reply, dict[str, Want], float]] = {}
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
        self._orders = queue.SimpleQueue()
        self._outbox = Outbox(lambda: links.find(REGISTRY), self._judged)
        self._snapshots = Snapshots(Path(state) / "snapshots")
        self._stepping: set[str] = set()
        self._stopped = False
        torch.set_num_threads(max(1, int(spec.cpus)))
        self._batches = Batches(spec.model)
        for lease in self._renewed():
            self._hold(lease, None)
        self._thread = threading.Thread(target=self._run, name="eventful.worker", daemon=True)
        self._thread.start()

    def health(self) -> dict[str, Any]:
        """What the driver watches; answered while a step is under way."""
        streams = {
            name: {
                "epoch": held.lease.epoch,
                "cost": held.cost,
                "steps": held.steps,
                "tokens": held.tokens,
                "updated": held.updated,
                "latency": held.latency,
                "paused": held.paused,
                "busy": name in self._stepping or self._outbox.holds(name) > 0,
            }
            for name, held in list(self._held.items())
        }
        return {
            "pid": os.getpid(),
            "started": self._started,
            "phase": self._phase,
            "quiet": time.monotonic() - self._alive,
            "streams": streams,
            "steps": self._steps,
            "frames": self._frames,
            "unsent": len(self._outbox),
            "flushed": self._batches.flushed,
            "resumed": self._batches.resumed,
            "state_bytes": self._batches.nbytes,
            "resident_bytes": resident_bytes(),
        }

    def lease(self, lease: Lease, snapshot: bytes | None) -> None:
        """Take a stream, or its new lease, from now on."""
        self._order(lambda: self._hold(lease, snapshot))

    def release(self, stream: str, seconds: float) -> bytes | None:
        """Give a stream back, after its results were handed in; a snapshot if it is small."""
        try:
            return self._released(stream, seconds)
        except TimeoutError:
            raise LinkLate(f"{self.name} is in the middle of a step") from None

    def _released(self, stream: str, seconds: float) -> bytes | None:
        end = time.monotonic() + seconds
        self._order(lambda: self._pause(stream)).result(seconds)
        while (self._asks(stream) or self._outbox.holds(stream)) and time.monotonic() < end:
            time.sleep(0.005)
        left = max(0.1, end - time.monotonic())
        return self._order(lambda: self._give(stream)).result(left)

    def drop(self, stream: str, epoch: int) -> None:
        """Forget a stream whose lease is of that epoch or an earlier one."""
        self._order(lambda: self._drop(stream, epoch))

    def stop(self) -> None:
        """End, after the results were handed in."""
        end = time.monotonic() + 5.0
        for name in list(self._held):
            self._order(lambda name=name: self._pause(name))  # type: ignore[misc]
        while len(self._outbox) and time.monotonic() < end:
            time.sleep(0.01)
        self._stopped = True
        self._thread.join(5.0)

    def hang(self, seconds: float) -> None:
        """Do nothing for a while: for tests of the deadline."""
        self._order(lambda: time.sleep(seconds))

    def _order(self, work: Callable[[], Any]) -> Future[Any]:
        """Have something done between two steps."""
        done: Future[Any] = Future()
        self._orders.put((work, done))
        return done

    def _renewed(self) -> list[Lease]:
        """The leases that this worker had before it was started again."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                leases: list[Lease] = self._links.find(REGISTRY).send("renew", self.name).get(10.0)
                return leases
            except LinkError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    # What follows runs in the worker's thread.

    def _run(self) -> None:
        failures = 0
        while not self._stopped:
            self._alive = time.monotonic()
            try:
                self._turn()
                failures = 0
            except Exception as error:  # a fault of ours: go on with the next frames
                _log.exception("a turn of %s failed", self.name)
                failures += 1
                if failures >= _FAILURES:
                    self._fault([], in_words(error))
                time.sleep(0.5)

    def _turn(self) -> None:
        while not self._orders.empty():
            work, done = self._orders.get()
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
        self._outbox.turn()
        self._ask()
        picked = self._answers()
        self._ask()  # the next frames come while these are computed
        due = {name for name, frame in picked.items() if self._collect(name, frame)}
        if due:
            self._step(sorted(due))
        self._keep()
        self._outbox.turn()

    def _ask(self) -> None:
        """Ask every reader for frames that was not asked yet."""
        if len(self._outbox) >= MOST:
            return
        wants: dict[str, dict[str, Want]] = {}
        for name, held in self._held.items():
            # A source that waits is not read further than its results can be handed in.
            ahead = held.lease.every and self._outbox.holds(name) >= _AHEAD
            if held.lease.reader and not held.paused and not ahead:
                want = Want(held.lease.epoch, held.after)
                wants.setdefault(held.lease.reader, {})[name] = want
        for reader, own in wants.items():
            if reader not in self._asked:
                try:
                    reply = self._links.find(reader).send("take", own, _WAIT)
                except LinkError:
                    continue
                self._asked[reader] = reply, own, time.monotonic()
        if not self._asked:
            self._phase = "idle"
            time.sleep(0.02)

    def _answers(self) -> dict[str, Picked]:
        """Frames that came, of leases in force; waits a moment if there are none."""
        end = time.monotonic() + 2 * _WAIT
        while not any(reply.there for reply, _, _ in self._asked.values()):
            if time.monotonic() > end or not self._asked or not self._orders.empty():
                break
            if len(self._asked) == 1:
                with suppress(LinkError):
                    next(iter(self._asked.values()))[0].wait(0.02)
            else:
                time.sleep(0.001)
            self._outbox.turn()
        found: dict[str, Picked] = {}
        for reader, (reply, wants, moment) in list(self._asked.items()):
            if not reply.there and time.monotonic() - moment < _LATE:
                continue
            del self._asked[reader]
            try:
                answer: dict[str, Picked] = reply.get(0.01)
            except LinkError:
                time.sleep(0.02)
                continue
            for name, frame in answer.items():
                held = self._held.get(name)
                if held is not None and held.lease.epoch == wants[name].epoch:
                    held.after = frame.number
                    found[name] = frame
        return found

    def _collect(self, name: str, frame: Picked) -> bool:
        """Add a frame to its stream's step; whether that is whole."""
        held = self._held[name]
        if frame.resumed:
            held.pending.clear()
            self._batches.flush(name)
        held.pending.append(frame)
        return len(held.pending) >= self._batches.step_frames

    def _step(self, due: list[str]) -> None:
        fresh = any(not self._held[name].steps for name in due)
        self._phase = "first step" if fresh else "running"
        began = time.monotonic()
        frames = {name: self._held[name].pending for name in due}
        self._stepping = set(due)
        for name in due:
            self._held[name].pending = []
        found = self._batches.step(
            {name: [frame.picture for frame in own] for name, own in frames.items()}
        )
        results = found.results
        took = time.monotonic() - began
        operations = sum(result.numbers.operations for result in results.values())
        for name, result in results.items():
            held, own = self._held[name], frames[name]
            share = result.numbers.operations / operations if operations else 1 / len(results)
            self._count(held, result, took * share)
            held.latency = own[-1].age + took
            parts = tuple(Part(frame.behind, frame.number, frame.earlier) for frame in own)
            row = {"seconds": own[-1].seconds, **self._batches.row(result)}
            self._outbox.add(Entry(name, held.lease.epoch, parts, row))
        for name, message in found.failed.items():
            self._fail(name, message)
        if found.faults:
            self._fault(list(found.faults), next(iter(found.faults.values())))
        self._stepping = set()
        self._steps += 1
        self._frames += len(results)
        self._phase = "running"

    def _count(self, held: Held, result: Result, seconds: float) -> None:
        ms = 1e3 * seconds
        held.steps += 1
        if held.steps > 2:  # the first ones compute everything
            held.cost = ms if held.cost is None else held.cost + _SMOOTH * (ms - held.cost)
        held.tokens += result.numbers.tokens
        held.updated += result.numbers.updated

    def _fail(self, name: str, message: str) -> None:
        """A stream whose frames cannot be used ends."""
        held = self._held.pop(name)
        self._batches.leave(name)
        with suppress(LinkError):
            end = "end", name, held.after, "failed", message, held.lease.epoch
            self._links.find(REGISTRY).send(*end)

    def _fault(self, names: list[str], message: str) -> None:
        """End this process: other workers, or the next one of this name, take its streams.

        Args:
            names: streams that may be the cause.
        """
        end = time.monotonic() + _FAREWELL
        while len(self._outbox) and time.monotonic() < end:
            self._outbox.turn()
            time.sleep(0.01)
        _log.error("%s ends: %s", self.name, message)
        with suppress(LinkError):
            self._links.find(REGISTRY).send("fault", names, message).get(_FAREWELL)
        _die()

    def _judged(self, entry: Entry, verdict: Verdict, position: int) -> None:
        held = self._held.get(entry.stream)
        if held is None or held.lease.epoch != entry.epoch:
            return
        if verdict == "fenced":
            self._drop(entry.stream, entry.epoch)
        elif verdict == "again":
            held.after = position
            self._outbox.drop(entry.stream)

    def _hold(self, lease: Lease, snapshot: bytes | None) -> None:
        held = self._held.get(lease.stream)
        if held is not None and held.lease.epoch >= lease.epoch:
            return
        self._outbox.drop(lease.stream)
        if held is not None:
            # The reader was started again: what the model remembers is still good.
            self._held[lease.stream] = Held(lease, lease.after, cost=held.cost, steps=held.steps)
            return
        snapshot = snapshot or self._snapshots.read(lease.stream, lease.after)
        self._held[lease.stream] = Held(lease, lease.after)
        self._batches.join(lease.stream, snapshot)

    def _pause(self, stream: str) -> None:
        """Take no more frames of a stream; what was taken is handed in."""
        held = self._held.get(stream)
        if held is not None:
            held.paused = True

    def _give(self, stream: str) -> bytes | None:
        made = self._batches.snapshot(stream, self._spec.snapshot_bytes)
        held = self._held.get(stream)
        if held is not None:
            self._drop(stream, held.lease.epoch)
        return made

    def _drop(self, stream: str, epoch: int) -> None:
        held = self._held.get(stream)
        if held is not None and held.lease.epoch <= epoch:
            del self._held[stream]
            self._outbox.drop(stream)
            self._batches.leave(stream)

    def _keep(self) -> None:
        """Write a snapshot of the stream that has waited longest for one, if it is due."""
        every = self._spec.snapshot_every
        if not self._held or not every:
            return
        name, held = min(self._held.items(), key=lambda item: item[1].kept)
        if time.monotonic() - held.kept < every or not held.steps:
            return
        held.kept = time.monotonic()
        made = self._batches.snapshot(name, self._spec.snapshot_bytes)
        if made is not None and not held.pending:
            self._snapshots.write(name, held.after, made)

    def _asks(self, name: str) -> bool:
        """Whether a frame of a stream may be on its way here."""
        return any(name in wants for _, wants, _ in list(self._asked.values()))


def _die() -> None:
    """End this process: Ray starts it again."""
    os._exit(1)
