"""Faults of one part of a cluster, in threads of this process: the rest goes on."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_threads import ThreadEngine
from eventful.cluster.accounts import Account, Lease
from eventful.cluster.batches import Batches, Stepped
from eventful.cluster.driver import Driver
from eventful.cluster.endings import Endings
from eventful.cluster.links import LinkLate
from eventful.cluster.reader import Order, Reader
from eventful.cluster.registry import LEDGER
from eventful.cluster.snapshots import Snapshots
from eventful.cluster.sources import ClusterSpec, Plan, StreamSpec, add_stream, remove_stream
from eventful.cluster.store import Store
from eventful.cluster.worker import Worker
from eventful.live.groups import Group
from eventful.pipeline.sources import find_sources
from eventful.pipeline.stopping import Stop
from test_cluster_driver import films, plan, results, started, stream, threads  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:timm.test_vit has random weights"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]
Status = dict[str, Any]


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr("eventful.cluster.run._SAVE", 0.1)
    monkeypatch.setattr("eventful.cluster.registry._RETRY", 0.2)


def by_name(status: Status) -> dict[str, Status]:
    return {each["name"]: each for each in status["streams"]}


def once(stop: Stop, condition: Any) -> None:
    if condition and not stop.requested:
        stop.request()


def named(rows: list[dict[str, Any]], stream: str, reason: str | None = None) -> list[int]:
    """Frames of a stream that are named as missed, and with no reason given, those counted too."""
    found = []
    for row in (row for row in rows if row["source"] == stream):
        for each in row["missed"]:
            if reason in (None, each["reason"]):
                found += range(each["first"], each["last"] + 1)
        found += [row["frame"]] if reason is None and "labels" in row else []
    return found


TAKEN: list[int] = []
AWAY = threading.Event()


def take(rows: list[dict[str, Any]]) -> None:
    if AWAY.is_set():
        raise ValueError("the database is away")
    TAKEN.extend(row["frame"] for row in rows)


def test_a_run_is_complete_when_its_results_have_arrived(tmp_path, films):
    path = plan(tmp_path, stream("a", films(12)), results="test_cluster_faults:take", workers=1)
    TAKEN.clear()
    AWAY.set()
    ended: list[Status] = []

    def look(engine: ThreadEngine, status: Status) -> None:
        if by_name(status).get("a", {}).get("state") == "ended":
            ended.append(status)
        if len(ended) == 5:  # it has waited for half a second
            assert not TAKEN
            AWAY.clear()

    found, _ = started(path, tmp_path / "out", look)
    assert (found.status, found.waiting) == ("complete", "")
    assert list(range(12)) == TAKEN
    assert "database is away" in ended[4]["registry"]["problem"]


def test_an_interrupted_run_says_what_still_waits(tmp_path, films):
    path = plan(tmp_path, stream("a", films(12)), results="test_cluster_faults:take", workers=1)
    TAKEN.clear()
    AWAY.set()
    stop = Stop()

    def look(engine: ThreadEngine, status: Status) -> None:
        once(stop, by_name(status).get("a", {}).get("state") == "ended")

    found, _ = started(path, tmp_path / "out", look, stop=stop)
    assert found.status == "interrupted"
    assert "12 results" in found.waiting
    assert "database is away" in found.waiting
    AWAY.clear()
    again, _ = started(path, tmp_path / "out", resume=True)
    assert (again.status, again.waiting) == ("complete", "")
    assert list(range(12)) == TAKEN


def test_the_summary_has_what_was_missed_at_the_end(tmp_path, films, monkeypatch):
    monkeypatch.setattr(Batches, "step", lambda self, pictures: Stepped())
    path = plan(tmp_path, stream("a", films(20), 'mode = "latest"\nrate = 50.0'), workers=1)
    found, _ = started(path, tmp_path / "out")
    assert named(results(tmp_path / "out"), "a", "lost") == list(range(20))
    assert found.summary["frames"] == {"counted": 0, "dropped": 0, "lost": 20, "disk full": 0}


def test_a_stream_that_cannot_be_used_does_not_keep_a_run_going(tmp_path, films, monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    streams = stream("a", films(12)) + '\n[[stream]]\nname = "b"\nsource = "env:NOWHERE"\n'
    found, _ = started(plan(tmp_path, streams, workers=1), tmp_path / "out")
    assert found.status == "complete"
    assert "NOWHERE" in found.failed["b"]


@pytest.fixture
def mortal(monkeypatch) -> tuple[ThreadEngine, list[str]]:
    """An engine whose workers end when they say so, and their names."""
    engine, dead = ThreadEngine(), []
    fault = Worker._fault

    def dying(self: Worker, names: list[str], message: str) -> None:
        dead.append(self.name)
        try:
            fault(self, names, message)
        finally:
            threading.Thread(target=engine.kill, args=(self.name,)).start()

    monkeypatch.setattr(Worker, "_fault", dying)
    return engine, dead


def test_a_fault_of_a_worker_ends_no_stream(tmp_path, films, monkeypatch, mortal):
    engine, dead = mortal
    step, left = Group.step, [3]

    def broken(self: Group, prepared: Any) -> Any:
        if left[0] and (len(prepared) == 2 or left[0] < 3):  # both together, then each alone
            left[0] -= 1
            raise RuntimeError("CUDA error: unspecified launch failure")
        return step(self, prepared)

    monkeypatch.setattr(Group, "step", broken)
    path = plan(tmp_path, stream("a", films(40)) + stream("b", films(40)), workers=1)
    found, _ = started(path, tmp_path / "out", engine=engine)
    assert dead == ["w0"]
    assert (found.status, found.failed) == ("complete", {})
    assert found.summary["frames"]["counted"] == 80


def test_a_stream_that_ends_two_workers_in_turn_is_ended(tmp_path, films, monkeypatch, mortal):
    engine, dead = mortal
    step = Group.step

    def broken(self: Group, prepared: Any) -> Any:
        if "bad" in prepared:
            raise RuntimeError("CUDA error: an illegal memory access")
        return step(self, prepared)

    monkeypatch.setattr(Group, "step", broken)
    path = plan(tmp_path, stream("bad", films(40)) + stream("good", films(40)), workers=2)
    found, _ = started(path, tmp_path / "out", engine=engine)
    assert len(dead) >= 2  # a third one may have had it at the same time
    assert list(found.failed) == ["bad"]
    assert "illegal memory access" in found.failed["bad"]
    assert by_name(found.summary)["good"]["counted"] == 40


def test_a_stream_that_a_worker_gave_up_is_read_no_more(tmp_path, films, monkeypatch):
    step = Batches.step

    def refused(self: Batches, pictures: Any) -> Stepped:
        if "bad" in pictures:
            return Stepped(failed=dict.fromkeys(pictures, "it cannot be used"))
        return step(self, pictures)

    monkeypatch.setattr(Batches, "step", refused)
    endless = 'mode = "latest"\nloop = true\nrate = 20.0'
    path = plan(tmp_path, stream("bad", films(40), endless) + stream("good", films(40), endless))
    stop, read = Stop(), []

    def look(engine: ThreadEngine, status: Status) -> None:
        if by_name(status).get("bad", {}).get("state") == "failed":
            read.append("bad" in engine.find("r0").made.result()._outlets)
        once(stop, read and not read[-1])

    found, _ = started(path, tmp_path / "out", look, stop=stop)
    assert found.failed == {"bad": "it cannot be used"}
    assert not read[-1]


def test_snapshots_of_streams_that_are_over_are_deleted(tmp_path, films, monkeypatch):
    wrote, written = Snapshots.write, []

    def write(self: Snapshots, stream: str, frame: int, content: bytes) -> None:
        written.append(stream)
        wrote(self, stream, frame, content)

    monkeypatch.setattr(Snapshots, "write", write)
    path = plan(tmp_path, stream("a", films(40)), workers=1, snapshot_every=0.01)
    started(path, tmp_path / "out")
    assert written
    assert not list((tmp_path / "out/state/snapshots").iterdir())


def test_what_a_dead_reader_had_read_of_a_camera_is_named(tmp_path, films, monkeypatch):
    """Numbers are not used again, so that the gap is seen."""
    step, gate = Batches.step, threading.Event()
    known: list[int] = []
    stop = Stop()

    def waiting(self: Batches, pictures: Any) -> Stepped:
        gate.wait(30)
        return step(self, pictures)

    def look(engine: ThreadEngine, status: Status) -> None:
        mine = by_name(status).get("a", {})
        if not known and mine.get("arrived", 0) > 25:
            known.append(mine["arrived"] - 1)
            engine.kill("r0")
            gate.set()
        once(stop, known and mine.get("counted", 0) > 3)

    monkeypatch.setattr(Batches, "step", waiting)
    endless = 'mode = "latest"\nloop = true\nrate = 50.0'
    path = plan(tmp_path, stream("a", films(40), endless), workers=1, deadline=60)
    started(path, tmp_path / "out", look, stop=stop)
    rows = results(tmp_path / "out")
    seen = named(rows, "a")
    assert sorted(seen) == list(range(max(seen) + 1))
    assert len(named(rows, "a", "lost")) > known[0] / 2
    assert max(seen) > known[0]


def test_a_reader_says_how_far_it_read_and_hears_no_late_call(films):
    (source,) = find_sources([str(films(40))])
    reader = Reader("r0")

    def lease(epoch: int) -> Lease:
        return Lease("a", epoch, "w0", "r0", -1, False)

    reader.open(lease(5), Order(source, rate=100.0))
    end = time.monotonic() + 20
    while reader.describe()["streams"]["a"]["last"] < 3 and time.monotonic() < end:
        time.sleep(0.01)
    reader.open(lease(4), Order(source))  # was under way for long
    assert reader._outlets["a"].epoch == 5
    assert reader.close("a") >= 3
    assert reader.close("a") == -1


def test_a_rolling_restart_goes_on_where_a_call_fails(tmp_path, films, monkeypatch):
    call, state, stop = Driver.call, {"failed": 0, "asked": False, "began": False}, Stop()

    def fails_once(self: Driver, name: str, method: str, *args: Any) -> Any:
        if self.restarts.going and method == "lease" and not state["failed"]:
            state["failed"] += 1
            raise LinkLate("the registry was killed just now")
        return call(self, name, method, *args)

    def restart() -> bool:
        asked, state["asked"] = state["asked"], False
        return bool(asked)

    def look(engine: ThreadEngine, status: Status) -> None:
        if not state["began"] and by_name(status).get("a", {}).get("counted", 0) > 2:
            state["began"] = state["asked"] = True
        again = [worker["again"] for worker in status["workers"]]
        once(stop, min(again) > 0 and not status["restarting"])

    monkeypatch.setattr(Driver, "call", fails_once)
    endless = 'mode = "latest"\nloop = true\nrate = 20.0'
    path = plan(tmp_path, stream("a", films(40), endless))
    found, _ = started(path, tmp_path / "out", look, stop=stop, restart=restart)
    assert state["failed"]
    assert not found.summary["restarting"]


def test_a_stream_that_has_ended_comes_back_under_its_name(tmp_path, films):
    endless = 'mode = "latest"\nloop = true\nrate = 20.0'
    path = plan(tmp_path, stream("a", films(12)) + stream("keep", films(40), endless))
    stop, state = Stop(), {"step": 0}

    def look(engine: ThreadEngine, status: Status) -> None:
        mine = by_name(status).get("a", {})
        if state["step"] == 0 and mine.get("state") == "ended":
            remove_stream(path, "a")
            state["step"] = 1
        elif state["step"] == 1 and mine.get("state") == "removed":
            add_stream(path, StreamSpec("a", str(films(40))))
            state["step"] = 2
        once(stop, state["step"] == 2 and mine.get("counted") == 40)

    started(path, tmp_path / "out", look, stop=stop)
    assert named(results(tmp_path / "out"), "a") == list(range(40))


def test_a_stream_that_a_worker_paused_in_vain_goes_on(tmp_path, films):
    """It was to move, and then the registry did not answer."""
    path = plan(tmp_path, stream("a", films(200)), workers=1)
    paused: list[bool] = []

    def look(engine: ThreadEngine, status: Status) -> None:
        if not paused and by_name(status).get("a", {}).get("counted", 0) > 2:
            worker = engine.find("w0").made.result()
            worker._order(lambda: worker._pause("a"))
            paused.append(True)

    found, _ = started(path, tmp_path / "out", look)
    assert paused
    assert found.summary["frames"]["counted"] == 200


def test_a_registry_that_does_not_answer_at_the_end_is_told_of(tmp_path, films, monkeypatch):
    monkeypatch.setattr("eventful.cluster.driver._END", 0.2)

    def late(self: Any) -> None:
        raise LinkLate("late")

    monkeypatch.setattr("eventful.cluster.registry.Registry.close", late)
    path: Path = plan(tmp_path, stream("a", films(12)), workers=1)
    found, _ = started(path, tmp_path / "out")
    assert "did not answer at the end" in found.waiting
    assert found.status == "incomplete"
    summary = json.loads((tmp_path / "out" / "cluster.json").read_text())
    assert summary["frames"]["counted"] == 12


def test_what_a_crash_left_in_doubt_is_shown(tmp_path, films):
    path = plan(tmp_path, stream("a", films(12)), results="test_cluster_faults:take", workers=1)
    AWAY.clear()
    out = tmp_path / "out"
    started(path, out)
    store = Store(out / "state" / LEDGER)
    store.write(facts={"uncertain": {"a": [[3, 4]]}})
    store.close()
    found, _ = started(path, out, resume=True)
    assert found.summary["registry"]["uncertain"] == {"a": [(3, 4)]}
    told = [event for event in found.summary["events"] if event["event"] == "uncertain"]
    assert [(event["stream"], event["first"], event["last"]) for event in told] == [("a", 3, 4)]


def test_a_stream_that_comes_back_is_not_over():
    account = Account("a", state="removed")
    driver: Any = SimpleNamespace(
        accounts={"a": account},
        problems={},
        plan=Plan(ClusterSpec(), (StreamSpec("a", "x.mp4"),)),
        registry=SimpleNamespace(answer={"waiting": 0, "problem": ""}, asked=5.0),
    )
    endings = Endings(driver)
    endings.turn(1.0)
    assert not endings.complete
    account.state = "ended"
    endings.turn(5.0)
    assert not endings.complete  # what the registry said is of an earlier moment
    driver.registry.asked = 6.0
    assert endings.complete
