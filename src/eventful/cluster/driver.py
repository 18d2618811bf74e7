"""The driver: brings what runs in line with what `sources.toml` says, again and again.

It looks at everything that is there, and does what is missing; it keeps nothing that it could not
find out anew. So it does not matter which message was lost, or who was started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from eventful.cluster.accounts import Account, Lease, State
from eventful.cluster.endings import Endings
from eventful.cluster.events import Events
from eventful.cluster.links import Engine, Link, LinkError
from eventful.cluster.messages import scrubbed
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
_END = 20.0  # seconds for a registry that is started again to come back at the end
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
        self.snapshots = Snapshots(Path(state) / "snapshots")
        self.restarts = Restarts(self, self.snapshots)
        self.endings = Endings(self)
        self.accounts: dict[str, Account] = {}
        self.sources: dict[str, SourceName] = {}
        self.problems: dict[str, str] = {}  # by stream
        self.touched: dict[str, float] = {}  # when something was last done about a stream
        self._retry: dict[str, float] = {}
        self._read: dict[
            str, int
        ] = {}  # last frame of a stream that a reader is known to have read
        self._uncertain: dict[str, Any] = {}
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
        """Whether every stream of the plan is over, and every result has arrived."""
        return self.endings.complete

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
        steps = (self._match_plan, self._readers, self._workers, self.endings.turn, self._balance,
                 self.restarts.turn)  # fmt: skip
        for step in steps:
            # The next turn tries again; a stream may have ended in the meantime.
            with suppress(LinkError, StreamNameError):
                step(now)

    def stop(self) -> None:
        """End everything in order: no frame, then no result is left behind."""
        for name in self.workers:
            with suppress(LinkError):
                self.engine.find(name).send("stop").get(_CALL)
        for name in self.readers:
            with suppress(LinkError):
                self.engine.find(name).send("stop").get(_CALL)
        self.registry.answer = self._closed()
        self.registry.asked = self._clock()
        self.touched.clear()  # what the registry says now is the last word of every account
        self._read_accounts()
        for name, account in self.accounts.items():
            if account.over:  # a worker may have written one more as the stream ended
                self.snapshots.delete(name)

    def _closed(self) -> dict[str, Any]:
        """What the registry says when it has delivered what it can; it may be on its way back."""
        end = time.monotonic() + _END
        while True:
            try:
                answer = self.engine.find(REGISTRY).send("close").get(2 * _CALL)
                return dict(answer)
            except LinkError as error:
                if time.monotonic() > end:
                    problem = f"The registry did not answer at the end ({error})."
                    return {**self.registry.answer, "problem": problem}
                time.sleep(0.3)

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
            raise RunError(f"{watch.name} cannot start: {scrubbed(watch.dead)}")
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
            name = values["name"]
            if self.touched.get(name, float("-inf")) < self.registry.asked:
                account = Account(**values)
                if account.faults > (self.accounts[name].faults if name in self.accounts else 0):
                    self.events.note("a worker died", stream=name, message=account.message)
                self.accounts[name] = account
        for name, ranges in answer.get("uncertain", {}).items():
            for first, last in ranges[len(self._uncertain.get(name, ())) :]:
                self.events.note("uncertain", stream=name, first=first, last=last)
        self._uncertain = answer.get("uncertain", {})

    def _lease(self, stream: str, *, worker: str | None = None, reader: str | None = None) -> Lease:
        lease: Lease = self.call(REGISTRY, "lease", stream, worker, reader)
        account = self.accounts[stream]
        account.epoch, account.position = lease.epoch, lease.after
        account.worker, account.reader = lease.worker, lease.reader
        self.touched[stream] = self._clock()
        return lease

    def end(self, stream: str, last: int, state: State, message: str = "") -> None:
        """Close the account of a stream, and let go of it everywhere."""
        self.call(REGISTRY, "end", stream, last, state, message)
        account = self.accounts[stream]
        self.touched[stream] = self._clock()
        if account.worker in self.workers:
            with suppress(LinkError):
                self.engine.find(account.worker).send("drop", stream, 1 << 62)
        if account.reader in self.readers:
            with suppress(LinkError):
                self.engine.find(account.reader).send("close", stream)
        account.state, account.message, account.worker = state, message, ""
        self.placement.forget(stream)
        self.snapshots.delete(stream)
        self.events.note(state, stream=stream, **({"message": message} if message else {}))

    def _match_plan(self, now: float) -> None:
        """Streams that were added to the plan, or taken out of it."""
        wanted = {spec.name: spec for spec in self.plan.streams}
        self.problems = {name: text for name, text in self.problems.items() if name in wanted}
        for name, account in list(self.accounts.items()):
            if name not in wanted and account.state != "removed":
                self._leave(name, account)
        for name, spec in wanted.items():
            known = self.accounts.get(name)
            if known is None or known.state == "removed" or name not in self.sources:
                self._add(spec)

    def _leave(self, name: str, account: Account) -> None:
        """Let go of a stream: it may come back, also one that has ended or failed."""
        self.sources.pop(name, None)
        if account.over:
            self.call(REGISTRY, "forget", name)
            account.state = "removed"
            self.touched[name] = self._clock()
            return
        if account.reader in self.readers:
            with suppress(LinkError):
                self._note_read(name, self.call(account.reader, "close", name))
        self.end(name, max(self._read.get(name, -1), account.position), "removed")

    def _note_read(self, name: str, last: int) -> None:
        self._read[name] = max(last, self._read.get(name, -1))

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
        self.accounts[spec.name] = Account(**values)
        self.touched[spec.name] = self._clock()
        self.events.note("added", stream=spec.name)

    def _readers(self, now: float) -> None:
        """Every stream is read by a reader that is up."""
        up = [name for name, watch in self.readers.items() if watch.life == "up"]
        for name in up:
            self._let_go(name, self.readers[name])
        for account in list(self.accounts.values()):
            name = account.name
            if account.over or name not in self.sources or not up:
                continue
            watch = self.readers.get(account.reader)
            if watch is None:  # of a plan with more readers, or new
                self._open(name, min(up, key=self._read_by))
            elif watch.life == "up" and watch.asked > self.touched.get(name, 0.0):
                state = watch.answer["streams"].get(name)
                if state is None or self._given_up(name, state, now):
                    self._open(name, account.reader)

    def _let_go(self, reader: str, watch: Watch) -> None:
        """A reader reads nothing that is over, as a stream that a worker gave up."""
        for name, state in watch.answer["streams"].items():
            account = self.accounts.get(name)
            if account is None or watch.asked <= self.touched.get(name, float("-inf")):
                continue
            if account.over or account.reader != reader:
                self.engine.find(reader).send("close", name)
            else:
                self._note_read(name, state["last"])
            if account.over:
                self.snapshots.delete(name)

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
        after = lease.after
        if order.counts_on:  # what a reader read before it died was seen, and is missing
            after = max(after, self._read.get(name, -1))
        self.engine.find(reader).send("open", replace(lease, after=after), order)
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
            if self.touched.get(stream, 0.0) >= min(watch.asked, self.registry.asked):
                continue
            epoch = holds.get(stream, {}).get("epoch", -1)
            if epoch > account.epoch:  # the registry forgot a lease when it died
                lease = self._lease(stream)
            elif epoch < account.epoch:
                lease = account.lease()
                self.touched[stream] = self._clock()
            elif holds[stream]["paused"]:  # it was to move, and the registry did not answer
                lease = self._lease(stream)
            else:
                continue
            self.engine.find(name).send("lease", lease, None)
        for stream in holds:
            found = self.accounts.get(stream)
            if found is not None and found.worker != name:
                self.engine.find(name).send("drop", stream, found.epoch)

    def _balance(self, now: float) -> None:
        if self.restarts.going:
            return
        move: Move | None = self.placement.next_move(self.running(), now)
        if move is not None:
            self.move(move.stream, move.worker, "load")
