"""Runs a simulation: cameras send, workers compute, machines die, leases move."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from eventful.cluster.placement import Limits, Move, Placement
from eventful.cluster.simulate import events as kinds
from eventful.cluster.simulate.costs import Costs
from eventful.cluster.simulate.events import Calendar, Event
from eventful.cluster.simulate.fleet import Fleet
from eventful.cluster.simulate.outcome import CAUSES, Outcome
from eventful.cluster.simulate.ticks import Seats, Worked, work
from eventful.errors import ConfigError

Array = np.ndarray
Tick = Callable[[int, int], None]
_SEGMENT = 2.0  # seconds that are computed at once; shares are drawn anew for each
_WORKER, _MACHINE, _REGISTRY, _ROOM, _STEP = range(len(CAUSES))
NOWHERE = -1  # the worker of a stream that has none
_TRIAL_HOURS = 0.1  # to find the number of GPUs


def simulate(
    fleet: Fleet,
    costs: Costs,
    seed: int = 0,
    *,
    placement: Placement | None = None,
    tick: Tick = lambda done, count: None,
) -> Outcome:
    """Simulate a cluster.

    Args:
        seed: equal seeds give equal outcomes.
        placement: which worker runs which stream; by default as a real cluster decides it, with
            the limits of the fleet.
        tick: called with the intervals done, and all of them.
    """
    return _Cluster(fleet, costs, seed, placement).run(tick)


def gpus_needed(fleet: Fleet, costs: Costs, most_missing: float, seed: int = 0) -> int | None:
    """The fewest GPUs with which at most this share of the frames is dropped or lost.

    Found by bisection over short simulations of the same fleet without failures, since a failure
    in a short time would decide alone. None if one GPU for each camera is not enough.
    """
    trial = replace(
        fleet, hours=min(fleet.hours, _TRIAL_HOURS), worker_days=0, node_days=0, registry_days=0
    )

    def enough(gpus: int) -> bool:
        return simulate(replace(trial, gpus=gpus), costs, seed).missing_share <= most_missing

    low, high = 0, fleet.cameras
    if not enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


class _Cluster:
    """The state of a simulated cluster."""

    def __init__(self, fleet: Fleet, costs: Costs, seed: int, placement: Placement | None) -> None:
        self.fleet, self.costs = fleet, costs
        self.placement = placement or Placement(_limits(fleet, costs))
        self.most = fleet.most or costs.most
        if self.most > costs.most:
            raise ConfigError(
                f"Steps of {self.most} frames were not measured, only up to {costs.most}."
            )
        self.random = np.random.default_rng(seed)
        cameras, gpus = fleet.cameras, fleet.gpus
        self.share = self.random.choice(np.asarray(fleet.shares, dtype=float), cameras)
        self.phase = self.random.uniform(0, fleet.tick_ms, cameras)
        self.is_busy = self.random.random(cameras) < fleet.busy_cameras
        self.worker = np.full(cameras, NOWHERE)
        self.alive = np.ones(gpus, dtype=bool)
        self.life = np.zeros(gpus, np.int64)
        self.left = np.zeros(gpus)
        self.names = [str(camera) for camera in range(cameras)]
        self.sending = np.ones(cameras, dtype=bool)
        self.fresh = np.ones(cameras, dtype=bool)
        self.why = np.full(cameras, _ROOM)
        self.since = np.full(cameras, -1)  # interval in which the worker was lost
        self.registry_back = 0  # interval from which on the registry answers
        self.now = 0
        self.calendar = Calendar(fleet, self.random)
        self.made = Outcome.empty(fleet, costs, seed)
        self.last_state: tuple[bytes, ...] = ()
        self.changed = 0.0  # second in which it was another
        self.waiting: set[int] = set()  # dead workers whose streams found no room elsewhere
        self._place(range(cameras))

    def run(self, tick: Tick) -> Outcome:
        """Simulate to the end."""
        turn, longest = 0, self.fleet.in_ticks(_SEGMENT)
        while self.now < self.fleet.ticks:
            for event in self.calendar.take(self.now):
                _ACTIONS[event.kind](self, event)
            end = min(self.now + longest, self.calendar.next, self.fleet.ticks)
            self._segment(end, turn)
            turn, self.now = turn + 1, end
            tick(end, self.fleet.ticks)
        return self.made

    # Work

    def _segment(self, end: int, turn: int) -> None:
        """All intervals up to the next event."""
        intervals = end - self.now
        served = self.sending & (self.worker != NOWHERE)
        served[served] = self.alive[self.worker[served]]
        idle = np.flatnonzero(self.sending & ~served)
        np.add.at(self.made.lost, (self.why[idle], idle), intervals)
        seats = Seats.of(self.worker, np.flatnonzero(served), self.most, turn)
        tokens, flushed = self._tokens(seats.stream, intervals)
        dying = self._dying(end)
        worked = work(seats, tokens, self.costs, self.left, self.fleet.tick_ms, dying)
        self.left = worked.left
        stream = seats.stream
        self.made.done[stream] += worked.done.sum(axis=0)
        self.made.lost[_STEP, stream] += worked.broken.sum(axis=0)
        self.made.dropped[stream] += (~worked.done & ~worked.broken).sum(axis=0)
        self.made.flushes += int((flushed & worked.done).sum())
        self.made.sent += intervals * int(self.sending.sum())
        self.fresh[stream] = (flushed & ~worked.done).any(axis=0)  # still due
        waits = self.fleet.read + self.phase[stream]
        self.made.add_latencies((worked.finish + waits)[worked.done])
        self._note(worked, intervals, len(idle))

    def _tokens(self, stream: Array, intervals: int) -> tuple[Array, Array]:
        """Tokens of each frame, and which frames are computed as a whole."""
        all_tokens = self.costs.tokens
        level = np.exp(self.random.normal(0, self.fleet.spread, len(stream)))
        share = np.minimum(self.expected_share()[stream] * level, 1.0)
        tokens = np.broadcast_to(share * all_tokens, (intervals, len(stream))).copy()
        flushed = np.zeros(tokens.shape, dtype=bool)
        if len(stream):
            flushed[0] = self.fresh[stream]
            rate = self.fleet.cuts / 3600 / self.fleet.fps
            cuts = self.random.binomial(flushed.size, min(rate, 1.0))
            flushed.reshape(-1)[self.random.integers(0, flushed.size, cuts)] = True
        tokens[flushed] = all_tokens
        return tokens, flushed

    def expected_share(self) -> Array:
        """Share of the tokens of each camera at this time of day, without its own ups and downs."""
        third = self.fleet.ticks / 3
        if not third <= self.now < 2 * third:
            return self.share
        return np.asarray(np.minimum(np.where(self.is_busy, self.fleet.busy, 1.0) * self.share, 1))

    def _dying(self, end: int) -> Array:
        """Workers that die when the segment ends; their running step is lost."""
        dying = np.zeros(self.fleet.gpus, dtype=bool)
        if end == self.calendar.next:
            for event in self.calendar.peek(end):
                if event.kind == kinds.DIES:
                    dying[event.subject] = True
                elif event.kind == kinds.NODE_DIES:
                    dying[self._of_node(event.subject)] = True
        return dying & self.alive

    def _note(self, worked: Worked, intervals: int, idle: int) -> None:
        self.made.busy += worked.busy.sum(axis=0)
        self.made.alive[self.alive] += intervals
        minute = self.now // self.fleet.in_ticks(60)
        done = int(worked.done.sum())
        broken = int(worked.broken.sum())
        added = (done, worked.done.size - done - broken, idle * intervals + broken)
        self.made.minutes[:3, minute] += added
        self.made.minutes[3, minute] += float(worked.busy.sum())

    # Leases

    def _measure(self) -> None:
        """Tell the placement what streams cost: milliseconds a frame times frames a second."""
        tokens = self.expected_share() * self.costs.tokens
        ms = self.costs.per_stream + self.costs.per_token * tokens + self.costs.fixed / self.most
        loads = (ms / self.fleet.tick_ms).tolist()
        self.placement.loads.update(zip(self.names, loads, strict=True))

    def _running(self) -> dict[str, list[str]]:
        """Streams by worker, of those that are alive."""
        running: dict[str, list[str]] = {
            str(worker): [] for worker in np.flatnonzero(self.alive).tolist()
        }
        for name, worker in zip(self.names, self.worker.tolist(), strict=True):
            if worker != NOWHERE and self.alive[worker]:
                running[str(worker)].append(name)
        return running

    def _place(self, streams: Iterable[int]) -> None:
        """Give streams without a worker to workers, with new leases."""
        self._measure()
        running = self._running()
        for stream in streams:
            name = self.names[stream]
            worker = self.placement.place(name, running)
            if worker is None:
                self.why[stream] = _ROOM
                continue
            running[worker].append(name)
            self._move(Move(name, worker))

    def _move(self, move: Move) -> None:
        stream = int(move.stream)
        self.worker[stream] = int(move.worker)
        self._resume(np.asarray([stream]))

    def _resume(self, streams: Array) -> None:
        """Streams have a live worker again, which has nothing of them."""
        self.fresh[streams] = True
        waited = streams[self.since[streams] >= 0]
        self.made.recoveries += ((self.now - self.since[waited]) / self.fleet.fps).tolist()
        self.since[waited] = -1

    def _of_node(self, node: int) -> Array:
        first = node * self.fleet.node
        return np.arange(first, min(first + self.fleet.node, self.fleet.gpus))

    @property
    def _registry_down(self) -> bool:
        return self.now < self.registry_back

    # Events

    def _kill(self, worker: int, cause: int, back: float) -> None:
        """A worker dies; its replacement and the notice of its death are planned."""
        self.alive[worker] = False
        self.life[worker] += 1
        self.left[worker] = 0
        streams = self.worker == worker
        self.why[streams] = cause
        self.since[streams & (self.since < 0)] = self.now
        life = int(self.life[worker])
        notice = self.now + self.fleet.in_ticks(self.fleet.notice)
        self.calendar.add(notice, kinds.NOTICED, worker, life)
        self.calendar.add(self.now + self.fleet.in_ticks(back), kinds.BACK, worker, life)

    def _count(self, what: str) -> None:
        self.made.events[what] = self.made.events.get(what, 0) + 1

    def gone(self, event: Event) -> None:
        """A camera stops."""
        self._count("cameras gone")
        self.sending[event.subject] = False
        self.calendar.later(
            kinds.RETURNS, max(self.fleet.camera_gone, 1e-9), event.subject, self.now
        )

    def returns(self, event: Event) -> None:
        """A camera sends again; its first frame is computed as a whole."""
        self.sending[event.subject] = self.fresh[event.subject] = True
        self.calendar.later(kinds.GONE, self.fleet.camera_days * kinds.DAY, event.subject, self.now)

    def dies(self, event: Event) -> None:
        """A worker process dies."""
        if self.alive[event.subject]:
            self._count("workers")
            self._kill(event.subject, _WORKER, self.fleet.worker_back)
        self.calendar.later(kinds.DIES, self.fleet.worker_days * kinds.DAY, event.subject, self.now)

    def node_dies(self, event: Event) -> None:
        """A machine dies, with all of its workers."""
        self._count("machines")
        for worker in self._of_node(event.subject).tolist():
            self._kill(worker, _MACHINE, self.fleet.node_back)
        self.calendar.later(
            kinds.NODE_DIES, self.fleet.node_days * kinds.DAY, event.subject, self.now
        )

    def registry_dies(self, event: Event) -> None:
        """No leases are given out for a while."""
        self._count("registry")
        self.registry_back = self.now + self.fleet.in_ticks(self.fleet.registry_back)
        self.calendar.later(
            kinds.REGISTRY_DIES,
            self.fleet.registry_days * kinds.DAY,
            now=self.registry_back,
        )

    def noticed(self, event: Event) -> None:
        """The streams of a dead worker go to others."""
        worker = event.subject
        if self.alive[worker] or self.life[worker] != event.life:
            return
        if self._registry_down:
            self.why[self.worker == worker] = _REGISTRY
            self.calendar.add(self.registry_back, kinds.NOTICED, worker, event.life)
        else:
            self.waiting.add(worker)
            self._hand_over(worker)

    def _hand_over(self, worker: int) -> None:
        """Streams of a dead worker go to others that have the time; the rest wait for it."""
        streams = np.flatnonzero(self.worker == worker)
        self._measure()
        own = [self.names[stream] for stream in streams.tolist()]
        for move in self.placement.rooms(own, self._running()):
            self._move(move)

    def back(self, event: Event) -> None:
        """A worker can take streams again, first of all those that are still its own."""
        worker = event.subject
        if self.life[worker] != event.life:
            return
        if self._registry_down:
            self.calendar.add(self.registry_back, kinds.BACK, worker, event.life)
            return
        self.alive[worker] = True
        self.waiting.discard(worker)
        self._resume(np.flatnonzero(self.worker == worker))
        self._place(np.flatnonzero(self.worker == NOWHERE).tolist())

    def look(self, event: Event) -> None:
        """A worker that is full hands a stream on; streams that wait are tried again."""
        self.calendar.add(self.now + self.fleet.in_ticks(self.fleet.look), kinds.LOOK)
        if self._registry_down:
            return
        for worker in sorted(self.waiting):
            self._hand_over(worker)
        self._measure()
        now = self.now / self.fleet.fps
        if self._settled(now) or not self._can_move():
            return  # what follows would say the same, at a thousand times the cost
        while move := self.placement.next_move(self._running(), now):
            self._move(move)
            self.made.moves += 1

    def _settled(self, now: float) -> bool:
        """Whether nothing that placement looks at has changed for longer than it waits."""
        state = (self.worker.tobytes(), self.alive.tobytes(), self.expected_share().tobytes())
        if state != self.last_state:
            self.last_state, self.changed = state, now
        limits = self.placement.limits
        return now - self.changed > limits.patience + limits.cooldown + self.fleet.look

    def _can_move(self) -> bool:
        """Whether a move can be due: somebody is full, and somebody else could take a stream."""
        loads = np.asarray([self.placement.loads[name] for name in self.names])
        at = np.flatnonzero((self.worker != NOWHERE) & self.alive[self.worker])
        if not len(at):
            return False
        limits, alive = self.placement.limits, np.flatnonzero(self.alive)
        sums = np.bincount(self.worker[at], loads[at], self.fleet.gpus)[alive]
        fullest, emptiest, least = sums.max(), sums.min(), loads[at].min()
        gain = limits.full - limits.target
        takes = emptiest + least <= limits.target or fullest - emptiest > gain + least
        return bool(fullest > limits.full and takes)


def _limits(fleet: Fleet, costs: Costs) -> Limits:
    """When streams move, and how many a worker has memory for."""
    room = int(fleet.memory // costs.state_bytes) if costs.state_bytes else fleet.cameras
    return Limits(full=fleet.full, target=fleet.target, most=max(room, 1))


_ACTIONS: dict[int, Callable[[_Cluster, Event], None]] = {
    kinds.GONE: _Cluster.gone,
    kinds.DIES: _Cluster.dies,
    kinds.NODE_DIES: _Cluster.node_dies,
    kinds.REGISTRY_DIES: _Cluster.registry_dies,
    kinds.NOTICED: _Cluster.noticed,
    kinds.BACK: _Cluster.back,
    kinds.LOOK: _Cluster.look,
    kinds.RETURNS: _Cluster.returns,
}
