"""The driver: brings what runs in line with what `sources.toml` says, again and again.

It looks at everything that is there, and does what is missing; it keeps nothing that it could not
find out anew. So it does not matter which message was lost, or who was started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from eventful.cluster.accounts import Account, Lease, State
from eventful.cluster.events import Events
from eventful.cluster.links import Engine, Link, LinkError
from eventful.cluster.placement import Move, Placement
from eventful.cluster.rates import Rates
from eventful.cluster.reader import Order
from eventful.cluster.restarts import Restarts
from eventful.cluster.snapshots import Snapshots
from eventful.cluster.sources import Plan, StreamSpec
from eventful.cluster.watch import Watch
from eventful.cluster.worker import REGISTRY
from eventful.errors import EventfulError, RunError, StreamNameError
from eventful.pipeline.sources import SourceName

_CALL = 10.0  # seconds for an answer to a call
_RELEASE = 3.0  # seconds for a worker to hand in what it has of a stream that moves
_REVIVE = 3.0  # seconds between two attempts
_RETRY = 30.0  # seconds until a camera that was given up is opened again


class Driver:
    """Runs a plan on an engine. `turn` is called every fraction of a second.

    Args:
        state: folder of the ledger, snapshots and events.
        out: folder of the results.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        out: str,
        state: str,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.engine, self.events, self._clock = plan, engine, events, clock
        spec = plan.cluster
        self.placement = Placement(spec.limits)
        self.rates = Rates()
        self.restarts = Restarts(self, Snapshots(Path(state) / "snapshots"))
        self.accounts: dict[str, Account] = {}
        self.sources: dict[str, SourceName] = {}
        self.problems: dict[str, str] = {}  # by stream
        self._touched: dict[str, float] = {}  # when something was last done about a stream
        self._retry: dict[str, float] = {}
        self._idle: dict[str, float] = {}  # by ended stream: moment since which nothing happens
        limit = (out, state, spec.results, spec.queue)
        engine.start("registry", REGISTRY, *limit)
        self.registry = Watch(REGISTRY, "describe", spec.deadline, spec.start_deadline)
        self.readers = {
            f"r{i}": Watch(f"r{i}", "describe", spec.deadline, spec.start_deadline)
            for i in range(spec.readers)
        }
        self.workers = {
            f"w{i}": Watch(f"w{i}", "health", spec.deadline, spec.start_deadline)
            for i in range(spec.workers)
        }
        for name in self.readers:
            engine.start("reader", name, name)
        for name in self.workers:
            engine.start("worker", name, name, spec, getattr(engine, "links", engine), state)
        self._revived: dict[str, float] = {}  # when a process was last made anew
        self._fates = {w.name: (0, "starting") for w in self.all_watches}

    @property
    def all_watches(self) -> list[Watch]:
        """Of registry, readers and workers."""
        return [self.registry, *self.readers.values(), *self.workers.values()]

    @property
    def complete(self) -> bool:
        """Whether every stream of the plan is over."""
        known = [self.accounts.get(spec.name) for spec in self.plan.streams]
        return bool(known) and all(each is not None and each.over for each in known)

    def turn(self) -> None:
        """Look at everything, and do what is due; a process that does not answer is left for now.

        Raises:
            RunError: A process cannot start: there is no such model, for example.
        """
        now = self._clock()
        for watch in self.all_watches:
            self._look(watch, now)
        if self.registry.life != "up":
            return
        self._read_accounts()
        self.rates.read(self, now)
        steps = (self._match_plan, self._readers, self._workers, self._ends, self._balance)
        for step in steps:
            # The next turn tries again; a stream may have ended in the meantime.
            with suppress(LinkError, StreamNameError):
                step(now)
        with suppress(LinkError):
            self.restarts.turn(now)

    def stop(self) -> None:
        """End everything in order: no frame, then no result is left behind."""
        for name in self.workers:
            with suppress(LinkError):
                self.engine.find(name).send("stop").get(_CALL)
        for name in self.readers:
            with suppress(LinkError):
                self.engine.find(name).send("stop").get(_CALL)
        with suppress(LinkError):
            self.registry.answer = self.call(REGISTRY, "describe")
            self._read_accounts()
            self.engine.find(REGISTRY).send("close").get(2 * _CALL)

    def call(self, name: str, method: str, *args: Any) -> Any:
        """Call a process, and wait for its answer."""
        return self.engine.find(name).send(method, *args).get(_CALL)

    def streams_of(self, worker: str) -> list[str]:
        """Streams that are leased to a worker."""
        return [a.name for a in self.accounts.values() if a.worker == worker and not a.over]

    def running(self) -> dict[str, list[str]]:
        """Streams of every worker that is up and takes streams."""
        return {
            name: self.streams_of(name)
            for name, watch in self.workers.items()
            if watch.life == "up" and not self.restarts.drains(name)
        }

    def reader_state(self, stream: str) -> dict[str, Any]:
        """What the reader says of a stream; empty if it does not know it."""
        account = self.accounts[stream]
        watch = self.readers.get(account.reader)
        found = {} if watch is None else watch.answer.get("streams", {}).get(stream, {})
        return dict(found)

    def move(self, stream: str, worker: str, why: str) -> None:
        """Give a stream to another worker; what it remembers goes along where it is small."""
        account = self.accounts[stream]
        snapshot = None
        old = self.workers.get(account.worker)
        if old is not None and old.life == "up":
            with suppress(LinkError):
                reply = self.engine.find(old.name).send("release", stream, _RELEASE)
                snapshot = reply.get(2 * _RELEASE)
        lease = self._lease(stream, worker=worker)
        self.engine.find(worker).send("lease", lease, snapshot)
        self.events.note("moved", stream=stream, worker=worker, why=why, flushed=snapshot is None)

    def kill(self, watch: Watch, now: float) -> None:
        """End a process; a new one takes its place."""
        self.engine.kill(watch.name, watch.answer.get("pid"))
        watch.killed(now)

    def _look(self, watch: Watch, now: float) -> None:
        """Ask a process how it is, and note what has changed."""
        try:
            link: Link = self.engine.find(watch.name)
        except LinkError:
            return
        life = watch.turn(link, now)
        again, before = self._fates[watch.name]
        if watch.dead and not watch.started:
            raise RunError(f"{watch.name} cannot start: {watch.dead}")
        if watch.dead and now - self._revived.get(watch.name, float("-inf")) > _REVIVE:
            self._revived[watch.name] = now
            self.engine.revive(watch.name)
            self.events.note("revived", process=watch.name, why=watch.dead)
            watch.killed(now)  # the next answer is that of the new one, and until then nobody's
        if life == "hung":
            quiet = round(now - watch.answered, 1)
            self.events.note("hung", process=watch.name, seconds=quiet)
            self.kill(watch, now)
            life = watch.life
        if watch.again != again:
            self.events.note("started again", process=watch.name)
        elif life != before:
            self.events.note(life, process=watch.name)
        self._fates[watch.name] = (watch.again, life)

    def _read_accounts(self) -> None:
        answer = self.registry.answer
        for values in answer.get("accounts", ()):
            if self._touched.get(values["name"], float("-inf")) < self.registry.asked:
                self.accounts[values["name"]] = Account(**{**values, "held": None})

    def _lease(self, stream: str, *, worker: str | None = None, reader: str | None = None) -> Lease:
        lease: Lease = self.call(REGISTRY, "lease", stream, worker, reader)
        account = self.accounts[stream]
        account.epoch, account.position = lease.epoch, lease.after
        account.worker, account.reader = lease.worker, lease.reader
        self._touched[stream] = self._clock()
        return lease

    def _end(self, stream: str, last: int, state: State, message: str = "") -> None:
        self.call(REGISTRY, "end", stream, last, state, message)
        account = self.accounts[stream]
        self._touched[stream] = self._clock()
        if account.worker in self.workers:
            with suppress(LinkError):
                self.engine.find(account.worker).send("drop", stream, 1 << 62)
        if account.reader in self.readers:
            with suppress(LinkError):
                self.engine.find(account.reader).send("close", stream)
        account.state, account.message, account.worker = state, message, ""
        self.placement.forget(stream)
        self.events.note(state, stream=stream, **({"message": message} if message else {}))

    def _match_plan(self, now: float) -> None:
        """Streams that were added to the plan, or taken out of it."""
        wanted = {spec.name: spec for spec in self.plan.streams}
        for name, spec in wanted.items():
            account = self.accounts.get(name)
            if account is None or account.state == "removed" or name not in self.sources:
                self._add(spec)
        for name, account in list(self.accounts.items()):
            if name not in wanted and not account.over:
                last = self.reader_state(name).get("last", account.position)
                self._end(name, max(last, account.position), "removed")
                self.sources.pop(name, None)
                self.problems.pop(name, None)

    def _add(self, spec: StreamSpec) -> None:
        if spec.name not in self.sources:
            try:
                self.sources[spec.name] = spec.found()
            except EventfulError as error:
                if self.problems.get(spec.name) != str(error):
                    self.events.note("cannot be used", stream=spec.name, message=str(error))
                self.problems[spec.name] = str(error)
                return
        source = self.sources[spec.name]
        self.problems.pop(spec.name, None)
        values = self.call(REGISTRY, "add", spec.name, source.name, spec.every(source))
        self.accounts[spec.name] = Account(**{**values, "held": None})
        self._touched[spec.name] = self._clock()
        self.events.note("added", stream=spec.name)

    def _readers(self, now: float) -> None:
        """Every stream is read by a reader that is up."""
        up = [name for name, watch in self.readers.items() if watch.life == "up"]
        for account in list(self.accounts.values()):
            name = account.name
            if account.over or name not in self.sources or not up:
                continue
            watch = self.readers.get(account.reader)
            if watch is None:  # of a plan with more readers, or new
                self._open(name, min(up, key=self._read_by))
            elif watch.life == "up" and watch.asked > self._touched.get(name, 0.0):
                state = watch.answer["streams"].get(name)
                if state is None or self._given_up(name, state, now):
                    self._open(name, account.reader)

    def _read_by(self, reader: str) -> tuple[int, str]:
        return sum(a.reader == reader and not a.over for a in self.accounts.values()), reader

    def _given_up(self, name: str, state: dict[str, Any], now: float) -> bool:
        """Whether a camera that could not be opened is due once more."""
        if state["status"] != "dead" or not self.sources[name].live:
            self._retry.pop(name, None)
            return False
        if name not in self._retry:
            self.events.note("away", stream=name, message=state["message"])
        due = self._retry.setdefault(name, now + _RETRY) <= now
        if due:
            self._retry[name] = now + _RETRY
        return due

    def _open(self, name: str, reader: str) -> None:
        """Read a stream behind its position, under a new lease."""
        spec = next(each for each in self.plan.streams if each.name == name)
        account = self.accounts[name]
        if account.worker not in self.workers:
            account.worker = ""
        lease = self._lease(name, worker=account.worker, reader=reader)
        order = Order(self.sources[name], spec.rate, spec.loop)
        self.engine.find(reader).send("open", lease, order)
        if lease.worker:
            self.engine.find(lease.worker).send("lease", lease, None)

    def _workers(self, now: float) -> None:
        """Every stream is leased to a worker that holds it, or is on its way back."""
        for name, watch in self.workers.items():
            if watch.life == "down" and not self.restarts.drains(name):
                for move in self.placement.rooms(self.streams_of(name), self.running()):
                    self.move(move.stream, move.worker, f"{name} is down")
            elif watch.life == "up":
                self._match_worker(name, watch)
        if any(watch.life == "starting" for watch in self.workers.values()):
            return  # they come up together: who is first does not get all streams
        for account in list(self.accounts.values()):
            if not account.over and account.reader and account.worker not in self.workers:
                worker = self.placement.place(account.name, self.running())
                if worker is not None:
                    lease = self._lease(account.name, worker=worker)
                    self.engine.find(worker).send("lease", lease, None)

    def _match_worker(self, name: str, watch: Watch) -> None:
        """A worker holds what it should, at the epoch in force, and nothing else."""
        holds = watch.answer["streams"]
        for stream in self.streams_of(name):
            account = self.accounts[stream]
            if self._touched.get(stream, 0.0) >= min(watch.asked, self.registry.asked):
                continue
            epoch = holds.get(stream, {}).get("epoch", -1)
            if epoch > account.epoch:  # the registry forgot a lease when it died
                lease = self._lease(stream)
            elif epoch < account.epoch:
                lease = account.lease()
                self._touched[stream] = self._clock()
            else:
                continue
            self.engine.find(name).send("lease", lease, None)
        for stream in holds:
            found = self.accounts.get(stream)
            if found is not None and found.worker != name:
                self.engine.find(name).send("drop", stream, found.epoch)

    def _ends(self, now: float) -> None:
        """Close the accounts of sources that have ended, when their last results are in."""
        for account in list(self.accounts.values()):
            name = account.name
            state = {} if account.over else self.reader_state(name)
            over = state.get("status") in ("ended", "dead")
            if not over or (state["status"] == "dead" and self.sources[name].live):
                self._idle.pop(name, None)
                continue
            if min(self.registry.asked, self.readers[account.reader].asked) <= self._touched[name]:
                continue
            if account.position >= state["last"] or self._is_idle(account, state, now):
                message = state["message"]
                self._end(name, state["last"], "failed" if message else "ended", message)
                self._idle.pop(name, None)

    def _is_idle(self, account: Account, state: dict[str, Any], now: float) -> bool:
        """Whether nothing more will come of a source that has ended."""
        watch = self.workers.get(account.worker)
        if account.every or watch is None or watch.life != "up" or state["handed"] < state["last"]:
            self._idle.pop(account.name, None)
            return False
        if watch.answer["streams"].get(account.name, {}).get("busy", True):
            self._idle.pop(account.name, None)
            return False
        return now - self._idle.setdefault(account.name, now) > 1.0

    def _balance(self, now: float) -> None:
        if self.restarts.going:
            return
        move: Move | None = self.placement.next_move(self.running(), now)
        if move is not None:
            self.move(move.stream, move.worker, "load")
