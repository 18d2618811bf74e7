"""Destinations that fail in the middle: nothing arrives twice, and nothing is forgotten."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eventful.cluster.registry as registries
from eventful.cluster.accounts import Entry, Part
from eventful.cluster.delivery import CallDelivery, Delivery, FileDelivery, find_function
from eventful.cluster.ledger import Ledger
from eventful.cluster.links import LinkFault
from eventful.cluster.registry import Registry
from eventful.cluster.store import Store
from eventful.errors import ConfigError
from eventful.pipeline.results import LINES


def entry(epoch: int, number: int) -> Entry:
    return Entry("a", epoch, (Part(number, number),), {"seconds": None, "labels": []})


def opened(folder: Path, to: Delivery | None = None) -> Ledger:
    return Ledger(Store(folder / "ledger.sqlite"), to or FileDelivery(folder, "jsonl"))


def counted(ledger: Ledger, *numbers: int) -> None:
    """Frames of a stream, counted under a new lease."""
    ledger.add("a", "a", every=False)
    epoch = ledger.lease("a", worker="w0").epoch
    assert ledger.accept([entry(epoch, n) for n in numbers]) == ["counted"] * len(numbers)


def frames(path: Path) -> list[int]:
    return [json.loads(line)["frame"] for line in path.read_text().splitlines()]


def test_parts_of_a_batch_that_failed_are_taken_back(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("eventful.pipeline.results._ROWS", 4)
    one = opened(tmp_path, FileDelivery(tmp_path, "parquet"))
    counted(one, *range(10))
    wrote, calls = parquet.write_table, []

    def full_at_the_second(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        wrote(*args, **options)

    monkeypatch.setattr(parquet, "write_table", full_at_the_second)
    one.save(all_of_them=True)
    assert "No space" in one.problem
    one.save(all_of_them=True)
    assert not one.problem
    rows = parquet.read_table(tmp_path / "results").to_pylist()
    assert [row["frame"] for row in rows] == list(range(10))


def test_every_part_of_a_batch_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("eventful.pipeline.results._ROWS", 4)
    synced: list[str] = []
    sync = __import__("eventful.cluster.delivery", fromlist=["_sync"])._sync
    monkeypatch.setattr(
        "eventful.cluster.delivery._sync",
        lambda paths: (synced.extend(path.name for path in paths), sync(paths))[1],
    )
    one = opened(tmp_path, FileDelivery(tmp_path, "parquet"))
    counted(one, *range(10))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "part-00009.parquet.1-1.partial").write_text("")  # of a killed process
    one.save(all_of_them=True)
    assert sorted(synced) == ["part-00001.parquet", "part-00002.parquet", "part-00003.parquet",
                              "results"]  # fmt: skip


TAKEN: list[list[int]] = []
RAISED: list[BaseException] = []


def take(rows: list[dict[str, Any]]) -> None:
    if RAISED:
        raise RAISED.pop()
    TAKEN.append([row["frame"] for row in rows])


@pytest.fixture
def called(tmp_path) -> Callable[[], Ledger]:
    TAKEN.clear()
    RAISED.clear()
    return lambda: opened(tmp_path, CallDelivery("test_cluster_delivery:take", tmp_path))


def test_a_function_is_not_called_again_where_its_return_cannot_be_noted(called, monkeypatch):
    one = called()
    counted(one, 0)
    wrote = CallDelivery._write_note

    def full(self: CallDelivery, *args: Any, returned: bool) -> None:
        if returned:
            raise OSError(28, "No space left on device")
        wrote(self, *args, returned=returned)

    monkeypatch.setattr(CallDelivery, "_write_note", full)
    one.save()
    one.save()
    assert TAKEN == [[0]]
    assert not one.waiting


def test_what_a_crash_left_in_doubt_is_known_for_good(called):
    one = called()
    counted(one, 0, 1)
    RAISED.append(KeyboardInterrupt())  # the process dies in the middle of the call
    with pytest.raises(KeyboardInterrupt):
        one.save()
    two = called()
    assert two.uncertain == {"a": [(0, 1)]}
    counted(two, 2)
    two.close()
    assert TAKEN == [[2]]
    for _ in range(2):
        three = called()
        assert three.uncertain == {"a": [(0, 1)]}
        three.close()


def test_a_password_in_an_error_of_the_function_is_not_shown(called):
    one = called()
    counted(one, 0)
    RAISED.append(ValueError("no way to postgres://ann:s3cret@db:5432/frames"))
    one.save()
    assert "s3cret" not in one.problem
    assert "postgres://db:5432/frames" in one.problem


def test_a_file_that_was_emptied_between_two_runs(tmp_path):
    one = opened(tmp_path)
    counted(one, 0, 1)
    one.close()
    (tmp_path / LINES).write_text("")
    two = opened(tmp_path)
    counted(two, 2)
    two.close()
    assert frames(tmp_path / LINES) == [2]


def test_a_file_that_is_moved_away_or_emptied_while_it_is_written(tmp_path):
    one = opened(tmp_path)
    counted(one, 0, 1)
    one.save()
    (tmp_path / LINES).rename(tmp_path / "old.jsonl")
    counted(one, 2)
    one.save()
    assert not one.problem
    assert frames(tmp_path / "old.jsonl") == [0, 1]
    assert frames(tmp_path / LINES) == [2]
    (tmp_path / LINES).write_text("")
    counted(one, 3)
    one.save()
    assert frames(tmp_path / LINES) == [3]


def test_a_row_that_the_destination_cannot_take_is_a_problem_and_no_end(tmp_path, monkeypatch):
    one = opened(tmp_path)
    counted(one, 0)
    monkeypatch.setattr(FileDelivery, "_take_back", lambda self: 1 / 0)
    one.save()
    assert "ZeroDivisionError" in one.problem
    monkeypatch.undo()
    one.save()
    assert not one.problem
    assert frames(tmp_path / LINES) == [0]


def test_a_module_that_cannot_be_imported_by_its_name_is_refused():
    with pytest.raises(ConfigError, match=r"module\.path:function"):
        find_function(".x:c")


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry with a short patience; a fault of its threads does not end this process."""
    monkeypatch.setattr(registries, "_die", lambda: None)
    monkeypatch.setattr(registries, "_RETRY", 0.1)
    made: list[Registry] = []

    def make(to: str = "jsonl") -> Registry:
        made.append(Registry(str(tmp_path), str(tmp_path), to, 100))
        return made[-1]

    yield make
    for each in made:
        each.close(0.1)


GATE = threading.Event()


def wait_at_gate(rows: list[dict[str, Any]]) -> None:
    GATE.wait(20)


def test_a_slow_function_holds_nobody_up(registry):
    GATE.clear()
    one = registry("test_cluster_delivery:wait_at_gate")
    try:
        one.add("a", "a", False)
        epoch = one.lease("a", "w0", "r0").epoch
        one.commit([entry(epoch, 0)])
        began = time.monotonic()
        assert one.commit([entry(epoch, 1)]) == [("counted", 1)]
        assert one.describe()["waiting"] == 2
        assert one.lease("a", "w1", None).epoch > epoch
        assert time.monotonic() - began < 5  # the function takes 20 s
        left = one.close(0.2)
        assert left["waiting"] == 2
    finally:
        GATE.set()


def test_frames_without_room_are_shown_and_named_at_the_end(tmp_path, monkeypatch):
    one = Ledger(Store(tmp_path / "l.sqlite"), FileDelivery(tmp_path, "jsonl"), limit=2)
    one.add("a", "a", every=False)
    epoch = one.lease("a", worker="w0").epoch
    verdicts = one.accept([entry(epoch, n) for n in range(5)])
    assert verdicts == ["counted"] * 2 + ["dropped"] * 3
    shown = one.accounts["a"].described()
    assert shown["missed"]["disk full"] == 3
    assert one.accounts["a"].missed["disk full"] == 0  # not yet in the results
    one.save()
    one.close()
    last = json.loads((tmp_path / LINES).read_text().splitlines()[-1])
    assert last["missed"] == [{"first": 2, "last": 4, "reason": "disk full"}]
    assert one.accounts["a"].described()["missed"]["disk full"] == 3


def test_the_end_delivers_what_waits_for_more(registry, tmp_path):
    pytest.importorskip("pyarrow.parquet")
    one = registry("parquet")
    one.add("a", "a", False)
    one.commit([entry(one.lease("a", "w0", "r0").epoch, 0)])
    assert one.describe()["waiting"] == 1
    one.flush()
    end = time.monotonic() + 20
    while one.describe()["waiting"] and time.monotonic() < end:
        time.sleep(0.01)
    assert not one.describe()["waiting"]
    for _ in range(2):  # the first answer may be lost on its way
        left = one.close()
        assert (left["waiting"], left["problem"]) == (0, "")


def test_a_registry_that_writes_nothing_any_more_does_not_say_that_it_is_well(
    registry, monkeypatch
):
    one = registry()
    monkeypatch.setattr(Ledger, "due", lambda self, all_of_them=False: 1 / 0)
    one.add("a", "a", False)
    one._threads[1].join(10)
    with pytest.raises(LinkFault, match="dead"):
        one.describe()


def test_only_the_worker_that_has_the_lease_ends_a_stream(tmp_path):
    one = opened(tmp_path)
    one.add("a", "a", every=False)
    old = one.lease("a", worker="w0").epoch
    new = one.lease("a", worker="w1").epoch
    one.end("a", 5, "failed", "of a worker that was thought dead", old)
    assert one.accounts["a"].state == "running"
    one.end("a", 5, "failed", "of the one that has it", new)
    assert one.accounts["a"].state == "failed"


def test_a_stream_of_which_two_workers_die_in_turn_is_ended(tmp_path):
    one = opened(tmp_path)
    counted(one, 0)
    account = one.accounts["a"]
    one.fault(["a", "unknown"], "CUDA error")
    assert account.message == "CUDA error"
    counted(one, 1)  # a result in between: the worker was at fault
    assert not account.message
    one.fault(["a"], "CUDA error")
    assert account.state == "running"
    one.fault(["a"], "CUDA error")
    assert account.state == "failed"
    assert "CUDA error" in account.message


def test_a_stream_that_left_the_plan_may_come_back(tmp_path):
    one = opened(tmp_path)
    counted(one, 0)
    one.end("a", 0)
    one.add("a", "a", every=False)
    assert one.accounts["a"].state == "ended"  # a run that is resumed
    one.forget("a")
    one.add("a", "a", every=False)
    assert one.accounts["a"].state == "running"
