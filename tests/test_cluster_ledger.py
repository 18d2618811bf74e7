"""What counts in a cluster: once each, gaps named, over arbitrary crashes and full disks."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from eventful.cluster.accounts import Account, Entry, Missed, Part
from eventful.cluster.delivery import CallDelivery, FileDelivery, find_function, open_delivery
from eventful.cluster.ledger import Ledger
from eventful.cluster.store import Store, StoreError
from eventful.errors import ConfigError, RunError, StreamNameError
from eventful.pipeline.results import LINES


def entry(stream: str, epoch: int, *numbers: int, behind: int | None = None) -> Entry:
    parts = tuple(Part(n if behind is None else behind, n) for n in numbers)
    return Entry(stream, epoch, parts, {"seconds": None, "labels": []})


def account(**values) -> Account:
    return Account("a", epoch=7, **values)


def test_frames_between_are_named_by_reason():
    one = account(position=9)
    missed = one.count(entry("a", 7, 20, behind=15))
    assert missed == [Missed(10, 14, "lost"), Missed(15, 19, "dropped")]
    assert (one.position, one.counted) == (20, 1)
    assert one.missed == {"lost": 5, "dropped": 5, "disk full": 0}


def test_behind_a_position_that_is_ahead_of_it():
    # A reader that was opened anew had not handed out what another one had.
    assert account(position=9).count(entry("a", 7, 12, behind=3)) == [Missed(10, 11, "dropped")]


def test_what_was_taken_and_what_was_replaced_before_it_are_told_apart():
    one = account(position=9)
    part = Part(31, 40, ((5, 8), (10, 20), (21, 30)))
    missed = one.count(Entry("a", 7, (part,), {"seconds": None}))
    assert missed == [
        Missed(10, 19, "dropped"),
        Missed(20, 20, "lost"),
        Missed(21, 29, "dropped"),
        Missed(30, 30, "lost"),
        Missed(31, 39, "dropped"),
    ]


def test_an_old_epoch_is_refused_and_a_repeated_frame_too():
    one = account(position=9)
    assert one.judge(entry("a", 6, 10), room=True) == "fenced"
    assert one.judge(entry("a", 7, 9), room=True) == "repeated"
    assert one.judge(entry("a", 7, 10), room=True) == "counted"
    assert (one.fenced, one.repeated, one.position) == (1, 1, 9)


def test_every_frame_is_asked_for_again_or_waits():
    one = account(position=9, every=True)
    assert one.judge(entry("a", 7, 11), room=True) == "again"
    assert one.judge(entry("a", 7, 10), room=False) == "wait"


def test_without_room_frames_are_passed_over_and_named_later():
    one = account(position=9)
    assert one.judge(entry("a", 7, 12, behind=11), room=False) == "dropped"
    one.hold(entry("a", 7, 12, behind=11))
    one.hold(entry("a", 7, 15, behind=15))
    missed = one.count(entry("a", 7, 17, behind=16))
    assert missed == [Missed(10, 15, "disk full"), Missed(16, 16, "dropped")]
    assert one.missed == {"dropped": 1, "lost": 0, "disk full": 6}


def test_the_end_names_what_is_left():
    one = account(position=9)
    assert one.end(12, "ended") == [Missed(10, 12, "lost")]
    assert one.over
    assert one.judge(entry("a", 7, 13), room=True) == "fenced"


def test_several_frames_of_one_step():
    one = account(position=-1)
    step = Entry("a", 7, (Part(0, 0), Part(1, 3)), {"seconds": None})
    assert one.count(step) == [Missed(1, 2, "dropped")]
    assert (one.counted, one.position) == (2, 3)


def ledger(folder: Path, **options) -> Ledger:
    return Ledger(Store(folder / "ledger.sqlite"), FileDelivery(folder, "jsonl"), **options)


def lines(folder: Path) -> list[dict]:
    path = folder / LINES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_epochs_are_never_given_out_twice(tmp_path):
    one = ledger(tmp_path)
    one.add("a", "a.mp4", every=False)
    first = one.lease("a", worker="w0").epoch
    two = ledger(tmp_path)  # the first one died before it could save
    assert "a" not in two.accounts
    two.add("a", "a.mp4", every=False)
    assert two.lease("a", worker="w1").epoch > first


def test_a_worker_that_was_started_again_gets_new_epochs(tmp_path):
    one = ledger(tmp_path)
    for name, worker in (("a", "w0"), ("b", "w1"), ("c", "w0")):
        one.add(name, name, every=False)
        one.lease(name, worker=worker, reader="r0")
    before = {name: each.epoch for name, each in one.accounts.items()}
    leases = one.renew("w0")
    assert [lease.stream for lease in leases] == ["a", "c"]
    assert all(lease.epoch > before[lease.stream] for lease in leases)
    assert one.accept([entry("a", before["a"], 0), entry("b", before["b"], 0)]) == [
        "fenced",
        "counted",
    ]


def test_a_stream_that_is_over_is_not_leased(tmp_path):
    one = ledger(tmp_path)
    one.add("a", "a", every=False)
    first = one.lease("a", worker="w0").epoch
    one.end("a", 3, "removed")
    with pytest.raises(StreamNameError, match="'a'"):
        one.lease("a", worker="w0")
    late = one.accounts["a"].epoch
    one.add("a", "a", every=False)  # added again: its numbers go on
    assert one.accept([entry("a", first, 4)]) == ["fenced"]
    assert one.lease("a", worker="w0").epoch > late
    assert one.lease("a", worker="w0").after == 3


def test_what_was_delivered_before_a_crash_is_not_delivered_again(tmp_path, monkeypatch):
    one = ledger(tmp_path)
    one.add("a", "a", every=False)
    epoch = one.lease("a", worker="w0").epoch
    one.accept([entry("a", epoch, n) for n in range(5)])
    wrote = one.store.write
    writes = []

    def once(*args, **values):  # the process dies between the delivery and the note of it
        writes.append(values)
        if len(writes) == 2:
            raise KeyboardInterrupt
        wrote(*args, **values)

    monkeypatch.setattr(one.store, "write", once)
    with pytest.raises(KeyboardInterrupt):
        one.save()
    assert [row["frame"] for row in lines(tmp_path)] == list(range(5))
    assert len(list(one.store.waiting())) == 5
    with (tmp_path / LINES).open("a") as file:
        file.write('{"source": "a", "fra')  # and half of a line
    two = ledger(tmp_path)
    two.accept([entry("a", epoch, 5)])
    two.save()
    assert [row["frame"] for row in lines(tmp_path)] == list(range(6))


def test_parquet_parts_are_not_delivered_twice(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    store, form = Store(tmp_path / "l.sqlite"), "parquet"
    one = Ledger(store, FileDelivery(tmp_path, form))
    one.add("a", "a", every=False)
    epoch = one.lease("a", worker="w0").epoch
    one.accept([entry("a", epoch, 0), entry("a", epoch, 3, behind=2)])
    one.save()
    assert one.waiting == 2  # a file of two rows would be too small
    wrote = store.write

    def dies(*args, **values):
        if not args[1]:
            raise KeyboardInterrupt
        wrote(*args, **values)

    monkeypatch.setattr(store, "write", dies)
    one.accept([entry("a", epoch, 4)])
    with pytest.raises(KeyboardInterrupt):
        one.save(all_of_them=True)
    two = Ledger(Store(tmp_path / "l.sqlite"), FileDelivery(tmp_path, form))
    two.accept([entry("a", epoch, 5)])
    two.close()
    rows = parquet.read_table(tmp_path / "results").to_pylist()
    assert [row["frame"] for row in rows] == [0, 3, 4, 5]
    assert rows[1]["missed"] == [
        {"first": 1, "last": 1, "reason": "lost"},
        {"first": 2, "last": 2, "reason": "dropped"},
    ]


CALLED: list[list[int]] = []


def take(rows):
    if CALLED and CALLED[-1] == [-1]:
        CALLED.pop()
        raise ValueError("the database is away")
    if CALLED and CALLED[-1] == [-2]:
        raise KeyboardInterrupt  # the process dies
    CALLED.append([row["frame"] for row in rows])


def test_a_function_gets_each_row_once(tmp_path):
    def opened() -> Ledger:
        to = CallDelivery("test_cluster_ledger:take", tmp_path)
        return Ledger(Store(tmp_path / "l.sqlite"), to)

    CALLED.clear()
    one = opened()
    one.add("a", "a", every=False)
    epoch = one.lease("a", worker="w0").epoch
    one.accept([entry("a", epoch, 0)])
    one.save()
    CALLED.append([-1])
    one.accept([entry("a", epoch, 1)])
    one.save()
    assert "the database is away" in one.problem
    one.save()
    assert not one.problem
    assert CALLED == [[0], [1]]
    CALLED.append([-2])
    one.accept([entry("a", epoch, 2), entry("a", epoch, 3)])
    with pytest.raises(KeyboardInterrupt):
        one.save()
    CALLED.pop()
    two = opened()
    assert two.delivery.uncertain == {"a": (2, 3)}
    two.accept([entry("a", epoch, 4)])
    two.save()
    assert CALLED == [[0], [1], [4]]


@pytest.mark.parametrize("spec", ["nothing:here", "json:nothing", "json:__name__", ":x"])
def test_a_function_that_is_none_is_refused(spec):
    with pytest.raises(ConfigError, match=r"module\.path:function"):
        find_function(spec)


def test_a_destination_by_name(tmp_path):
    assert isinstance(open_delivery("jsonl", tmp_path, tmp_path), FileDelivery)
    with pytest.raises(ConfigError, match="csv"):
        open_delivery("csv", tmp_path, tmp_path)


def test_a_damaged_state_says_so(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(RunError, match="--overwrite"):
        Store(path)


class Died(BaseException):
    """The process of the registry was killed."""


class Machine(RuleBasedStateMachine):
    """A camera, its reader, workers of which some are dead or hang, a registry and a disk.

    The true story of each frame is kept beside. At the end the results must be a partition of all
    frames into counted ones, each once, and missed ranges.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.full = False
        self.sent = -1  # last frame of the camera
        self.handed = -1  # last one that the reader handed out
        self.hands: list[Entry] = []  # results of workers, dead ones included, in any order
        self.every = False
        self.earlier: deque[tuple[int, int]] = deque(maxlen=2)  # the last ones handed out
        self.left = 0  # writes until the registry dies, counted before and after each

    @initialize(every=st.booleans())
    def begin(self, every: bool) -> None:
        self.every = every
        self.start()
        self.ledger.add("a", "a", every=every)
        self.lease = self.ledger.lease("a", worker="w0", reader="r0")
        self.taken = self.lease.after
        self.ledger.save()

    def start(self) -> None:
        self.ledger = ledger(self.folder, limit=3)
        self.write, self.deliver = self.ledger.store.write, self.ledger.delivery.write
        self.ledger.store.write = self.store_write  # type: ignore[method-assign]
        self.ledger.delivery.write = self.delivery_write  # type: ignore[method-assign]

    def store_write(self, *args, **values) -> None:
        if self.full:
            raise StoreError("disk full")
        self.die_at(lambda: self.write(*args, **values))

    def delivery_write(self, rows) -> None:
        if self.full:
            raise OSError("disk full")
        self.die_at(lambda: self.deliver(rows))

    def die_at(self, write) -> None:
        """The process dies before or after its n-th write."""
        self.left -= 1
        if self.left == 0:
            raise Died
        write()
        self.left -= 1
        if self.left == 0:
            raise Died

    @rule(frames=st.integers(1, 4))
    def arrive(self, frames: int) -> None:
        self.sent += frames

    @rule()
    def step(self) -> None:
        """The worker that holds the lease takes a frame and computes a result."""
        if self.every:
            if self.taken < self.sent:
                self.taken += 1
                self.hands.append(entry("a", self.lease.epoch, self.taken))
        elif self.handed < self.sent:
            part = Part(self.handed + 1, self.sent, tuple(self.earlier))
            self.earlier.append((self.handed + 1, self.sent))
            self.handed = self.sent
            self.hands.append(Entry("a", self.lease.epoch, (part,), {"seconds": None}))

    @precondition(lambda self: self.hands)
    @rule(data=st.data(), keep=st.booleans())
    def commit(self, data, keep: bool) -> None:
        """Some result arrives at the registry; it may be handed in again."""
        self.hand_in(data.draw(st.sampled_from(self.hands)), keep)

    @rule(times=st.integers(1, 6), frames=st.integers(1, 3))
    def work(self, times: int, frames: int) -> None:
        """What usually happens: frames come, are computed and handed in."""
        for _ in range(times):
            self.arrive(frames)
            self.step()
            if self.hands:
                self.hand_in(self.hands[-1], keep=False)

    def hand_in(self, chosen: Entry, keep: bool) -> None:
        verdict = self.ledger.accept([chosen])[0]
        if verdict in ("counted", "dropped"):
            assert chosen.epoch == self.lease.epoch
        if verdict == "wait":
            return
        if verdict == "again" and chosen.epoch == self.lease.epoch:
            self.taken = self.ledger.accounts["a"].position
        if not keep:
            self.hands.remove(chosen)

    @rule()
    def save(self) -> None:
        self.ledger.save()

    @rule()
    def worker_died_or_moved(self) -> None:
        self.lease = self.ledger.lease("a", worker="w1")
        self.taken = self.lease.after

    @rule()
    def reader_died(self) -> None:
        """It goes on behind the position, under a new epoch."""
        self.lease = self.ledger.lease("a", reader="r1")
        self.taken = self.handed = self.lease.after
        self.earlier.clear()

    @precondition(lambda self: not self.full)
    @rule(left=st.integers(1, 7))
    def registry_died(self, left: int) -> None:
        """What it had in memory is gone; the lease of the disk is in force."""
        self.left = left
        with suppress(Died):
            self.ledger.save()
        self.left = 0
        self.ledger.store.close()
        self.start()
        if self.ledger.accounts["a"].epoch != self.lease.epoch:
            self.lease = self.ledger.lease("a")
            self.taken = self.lease.after

    @rule()
    def disk(self) -> None:
        self.full = not self.full

    def teardown(self) -> None:
        try:
            self.full = False
            if not hasattr(self, "lease"):
                return
            self.left = 0
            self.ledger.end("a", self.sent)
            # No result that comes now counts.
            assert set(self.ledger.accept(self.hands)) <= {"fenced"}
            self.ledger.close()
            self.check()
        finally:
            shutil.rmtree(self.folder)

    def check(self) -> None:
        counted, missed = [], []
        rows = lines(self.folder)
        for row in rows:
            ranges = [range(m["first"], m["last"] + 1) for m in row["missed"]]
            assert all(ranges)  # none is empty
            missed += [number for each in ranges for number in each]
            if row["frame"] not in missed:
                counted.append(row["frame"])
        assert sorted(counted + missed) == list(range(self.sent + 1))
        assert counted == sorted(counted)
        account = Store(self.folder / "ledger.sqlite").accounts()[0]
        assert account.counted == len(counted)
        assert sum(account.missed.values()) == len(missed)
        assert [row["epoch"] for row in rows] == sorted(row["epoch"] for row in rows)


Machine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestNothingIsCountedTwice = Machine.TestCase
