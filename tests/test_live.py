"""`eventful live` without a browser: sources that come, go and die, budgets, presets, viewers."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("timm")
pytest.importorskip("av")

import websockets.sync.client as client
from starlette.testclient import TestClient
from websockets.exceptions import ConnectionClosed

import videos
from commands import here  # noqa: F401
from eventful.live import feed as feeds
from eventful.live import memory
from eventful.live import viewers as viewing
from eventful.live import worker as workers
from eventful.live.admission import Allowed
from eventful.live.app import Page, make_app
from eventful.live.feed import Feed
from eventful.live.groups import CHOICES, Group
from eventful.live.guard import Access
from eventful.live.pictures import View, jpeg
from eventful.live.worker import Wanted, Worker
from eventful.pipeline.subject import open_subject
from live_pages import (
    Turns,
    header_of,
    made,
    opened,
    serving,
    stepped,
    tiny,
    wait_for,
    working,
)  # fmt: skip


def share(channel) -> float:
    return channel.last.updated / channel.last.tokens


# Sources


def test_a_source_is_stepped_and_counted():
    with working("part=0.25") as worker:
        stepped(worker, 6)
        [channel] = worker.channels
        state = channel.state()
        assert worker.nbytes > 0
    assert state["status"] == "running"
    assert state["tokens"] == 12 + 1  # 48 x 64 pixels in patches of 16, and the class token
    assert 0 < state["updated"] <= state["tokens"]
    assert 0 < state["operations"] <= state["dense_operations"]
    assert state["frames"] >= state["steps"] + state["dropped"]
    assert [point[0] for point in state["points"]] == list(range(1, state["steps"] + 1))
    assert state["points"][0][2] == 1.0  # the first frame is computed as a whole


def test_frames_that_nobody_took_are_dropped_and_counted(monkeypatch):
    with working("rate=100&frames=30") as worker, Turns(monkeypatch) as turns:
        [channel] = worker.channels
        feed = channel.feed
        wait_for(lambda: feed.status == "ended" and turns.waiting)  # nothing moves
        at_work = feed.arrived - feed.dropped - feed.waiting
        assert (feed.arrived, at_work, channel.steps) == (30, 1, 0)
        turns.let(2)
        wait_for(lambda: channel.steps + feed.dropped == 30)
        # The last frame came next, not one of a queue; its latency counts from its arrival.
        assert channel.steps == 1 + (feed.dropped == 28)
        assert 0 < channel.latency <= time.monotonic() - feed.last


def test_a_second_source_comes_and_goes():
    with working("") as worker:
        stepped(worker)
        second = worker.add(made("part=1"))
        stepped(worker, 3)
        assert [group.streams for group in worker._groups.values()] == [("s1", "s2")]
        worker.remove(second.id)
        stepped(worker, 3)
        assert [channel.id for channel in worker.channels] == ["s1"]
        assert [group.streams for group in worker._groups.values()] == [("s1",)]
        wait_for(lambda: not second.feed._thread.is_alive())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("then=refuse", "made-up camera does not answer."),
        ("frames=3&then=die", "made-up camera was unplugged."),
    ],
)
def test_a_dead_source_is_dead_and_the_others_go_on(text, message):
    with working("", text) as worker:
        good, bad = worker.channels
        wait_for(lambda: bad.feed.status == "dead")
        assert (bad.state()["latency"] is None) == (bad.steps == 0)
        assert bad.feed.message == message
        stepped(worker, 3)
        assert good.feed.status == "running"
        assert bad.state()["staleness"] >= 0


def test_a_stalled_source_says_so_and_comes_back(monkeypatch):
    monkeypatch.setattr(feeds, "STALLED", 0.15)
    with working("", "rate=3.5") as worker:
        steady, slow = worker.channels
        wait_for(lambda: slow.feed.status == "stalled")
        wait_for(lambda: slow.feed.status == "running")
        before = steady.steps
        wait_for(lambda: steady.steps > before)


def test_a_source_that_ends_keeps_its_last_picture():
    with working("frames=4") as worker:
        [channel] = worker.channels
        wait_for(lambda: channel.feed.status == "ended")
        wait_for(lambda: channel.steps + channel.feed.dropped == 4)
        assert channel.shown.number == channel.steps
        assert channel.shown.picture.shape == (3, 48, 64)


def test_a_file_plays_in_its_own_time_and_again(tmp_path):
    path = videos.pan(tmp_path / "pan.mp4", 6, step=(2, 2), rate=25)
    arrived = []
    feed = Feed(next(iter(_files(path))), loop=True, notify=lambda: arrived.append(feed.take()))
    began = time.monotonic()
    feed.start()
    wait_for(lambda: len(arrived) >= 15)
    took = time.monotonic() - began
    feed.close()
    feed.join(5)
    assert not feed._thread.is_alive()
    assert took > 0.35  # two whole repetitions of 0.2 s, with a frame less each
    # The first frame of a repetition does not follow on the one before it.
    assert [frame.resumed for frame in arrived[:13]] == [False] * 6 + [True] + [False] * 5 + [True]


def _files(path):
    from eventful.pipeline.sources import find_sources

    return find_sources([str(path)])


def test_sources_of_other_sizes_and_one_that_changes_its_size():
    with working("", "size=64x48", "change=5&frames=12&then=stall") as worker:
        stepped(worker, 8)
        sizes = {channel.size for channel in worker.channels}
        assert sizes == {(48, 64), (64, 48), (96, 64)}
        # The model sees the third one in the same size as the second: they share a batch.
        streams = sorted(group.streams for group in worker._groups.values())
        assert streams == [("s1",), ("s2", "s3")]
        assert [channel.feed.status for channel in worker.channels][:2] == ["running"] * 2


def test_removing_the_last_source_frees_everything():
    with working("") as worker:
        stepped(worker)
        worker.remove("s1")
        wait_for(lambda: not worker._groups)
        assert worker.channels == []
        assert worker.nbytes == 0
        worker.add(made())
        stepped(worker)
        with pytest.raises(KeyError):
            worker.remove("s1")


def test_a_picture_that_the_model_refuses_costs_its_source_alone(monkeypatch):
    good = Group.step

    breaks, tried = [], []

    def step(group, prepared):
        time.sleep(0.1)  # so that both have a frame at each turn, and are tried in one batch
        tried.append(set(prepared))
        if breaks and "s2" in prepared:
            raise ValueError("a picture that breaks the model")
        return good(group, prepared)

    monkeypatch.setattr(Group, "step", step)
    with working("", "") as worker:
        bad = worker.channels[1]
        wait_for(lambda: {"s1", "s2"} in tried)
        breaks.append(True)
        wait_for(lambda: bad.feed.status == "dead")
        assert worker.channels[0].feed.status == "running"
        assert bad.feed.message == "ValueError: a picture that breaks the model"
        stepped(worker, 3)
        assert worker.alive
        assert [group.streams for group in worker._groups.values()] == [("s1",)]


def test_a_model_of_clips_takes_two_frames_a_step():
    worker = Worker(open_subject("actions"), open_footage=opened, dense_every=None).start()
    try:
        worker.add(made("size=64x64"))
        [channel] = worker.channels
        wait_for(lambda: channel.steps >= 2)
        assert channel.feed.arrived >= 4
        assert channel.shown.prediction.probabilities is not None
    finally:
        worker.close()


def test_free_memory_is_given_back(monkeypatch):
    calls = []
    monkeypatch.setattr(workers, "give_back", lambda: calls.append(1))
    monkeypatch.setattr(workers, "GIVE_BACK_EVERY", 0.05)
    with working(""):
        wait_for(lambda: len(calls) >= 2)
    memory.give_back()
    assert memory.resident_bytes() > 10**6


# Budget, preset, pause, reset


def test_the_budget_acts_at_once():
    with working("part=1") as worker:
        [channel] = worker.channels
        for wanted in (0.1, 0.9, 0.25):
            worker.change(share=wanted)
            stepped(worker, 2)  # one may have been under way
            counts = [round(12 * wanted), 12]
            # The class token comes on top; so does the one that is refreshed in turn.
            assert counts[0] <= channel.last.updated <= counts[0] + 3, wanted
    assert worker.wanted.share == 0.25


def test_a_slider_that_is_dragged_fast_is_applied_once_a_step(monkeypatch):
    applied = []
    keep = Group.set_share
    monkeypatch.setattr(
        Group, "set_share", lambda group, value: (applied.append(value), keep(group, value))[1]
    )
    with working("part=0.1") as worker, Turns(monkeypatch) as turns:
        [channel] = worker.channels
        turns.let()
        wait_for(lambda: channel.steps == 1 and turns.waiting)
        for percent in range(1, 101):
            worker.change(share=percent / 100)
        assert applied == []  # the step that is under way goes on as it began
        turns.let(3)
        wait_for(lambda: channel.steps == 4)
        assert applied == [1.0]
        assert share(channel) == 1.0


def test_every_preset_can_be_switched_to_while_it_runs():
    with working("", "part=0.1") as worker:
        stepped(worker)
        for preset in (*CHOICES, "fast"):
            worker.change(preset=preset)
            stepped(worker, 3)
            assert worker.wanted.preset == preset
            assert {group.preset for group in worker._groups.values()} == {preset}
            if preset == "dense":
                assert [share(channel) for channel in worker.channels] == [1.0, 1.0]
        assert worker.notice == (0, "")
        assert [channel.feed.status for channel in worker.channels] == ["running"] * 2


def test_a_preset_that_the_model_refuses_is_undone(monkeypatch):
    good = workers.Group

    def group(ready, preset, share):
        if preset == "exact":
            raise ValueError("not with this model")
        return good(ready, preset, share)

    monkeypatch.setattr(workers, "Group", group)
    with working("") as worker:
        stepped(worker)
        worker.change(preset="exact")
        wait_for(lambda: worker.notice[0])
        assert worker.notice[1].startswith("exact cannot be used with ")
        assert "not with this model" in worker.notice[1]
        stepped(worker, 2)
        assert worker.wanted == Wanted("fast")
        assert worker.channels[0].feed.status == "running"


def test_pause_holds_a_file_and_goes_on(tmp_path):
    path = videos.pan(tmp_path / "pan.mp4", 200, step=(0, 1), rate=25)
    with working("") as worker:
        camera = worker.channels[0]
        film = worker.add(_files(path)[0])
        stepped(worker, 2)
        worker.change(paused=True)
        wait_for(lambda: worker._applied.paused)  # the step that was under way is done
        steps, read, dropped = film.steps, film.feed.arrived, camera.feed.dropped
        seen = camera.feed.arrived
        wait_for(lambda: camera.feed.arrived >= seen + 25)  # half a second of the camera's, or more
        assert film.steps == steps
        assert film.feed.arrived <= read + 1
        assert camera.feed.dropped == dropped  # nobody wanted these frames
        assert camera.feed.status == "running"
        read, began = film.feed.arrived, time.monotonic()
        worker.change(paused=False)
        wait_for(lambda: film.feed.arrived >= read + 6)
        # 25 a second: those of the pause, a dozen, do not come at once. One may have been read.
        assert time.monotonic() - began > 3.9 / 25
        stepped(worker, 3)
        assert film.feed.status == "running"


def test_reset_computes_everything_anew():
    with working("part=0", "part=0") as worker:
        stepped(worker, 6)
        first, second = worker.channels
        assert not first.last.flushed
        steps = first.steps
        worker.reset(first.id)
        wait_for(lambda: first.state()["first"] > steps)
        wait_for(lambda: first.points)
        assert first.points[0][2] == 1.0  # a whole frame
        assert second.points[0][0] == 1  # the other's plots are as they were
        worker.reset()
        wait_for(lambda: second.state()["first"] > 1)
        with pytest.raises(KeyError):
            worker.reset("s9")


@pytest.mark.real_clock
def test_the_dense_model_is_measured_beside():
    with working("", dense_every=0.1) as worker:
        [channel] = worker.channels
        wait_for(lambda: channel.dense_ms)
        first = channel.dense_ms
        wait_for(lambda: channel.dense_ms != first)


# Viewers


def connected(page):
    return client.connect(f"ws://127.0.0.1:{page.port}/ws", close_timeout=2)


def pictures(socket, count: int) -> list[dict]:
    """Headers of the next pictures; none is confirmed."""
    found: list[dict] = []
    while len(found) < count:
        message = socket.recv(timeout=60)
        found += [header_of(message)] if isinstance(message, bytes) else []
    return found


def test_without_a_viewer_nothing_is_drawn(monkeypatch):
    calls = []
    monkeypatch.setattr(viewing, "jpeg", lambda *args: calls.append(args))
    monkeypatch.setattr(viewing, "description", lambda *args: calls.append(args))
    with serving("", "") as page:
        stepped(page.worker, 10)
        assert page.page.hub.encoded == 0
        assert calls == []


def test_a_slow_viewer_gets_the_latest_and_no_queue(monkeypatch):
    monkeypatch.setattr(viewing, "EVERY", 0.05)  # several states would be due, too
    with serving("rate=50") as page, connected(page) as socket:
        early = [socket.recv(timeout=60) for _ in range(2)]
        assert sorted(type(message).__name__ for message in early) == ["bytes", "str"]
        stepped(page.worker, 20)
        at = page.worker.channels[0].shown.number
        socket.send(json.dumps({"type": "seen", "source": "s1"}))
        late = socket.recv(timeout=60)  # nothing was confirmed: no picture or state before this one
        assert header_of(late)["number"] >= at
        wait_for(lambda: page.page.hub.delivered == 2)
        assert page.page.hub.encoded == 2


def test_a_slow_viewer_of_many_sources_gets_few_pictures_in_fair_turns():
    with serving(*["rate=30"] * 5) as page, connected(page) as socket:
        channels = page.worker.channels
        wait_for(lambda: all(channel.shown for channel in channels))
        served, last, at = [], dict.fromkeys((c.id for c in channels), 0), {}
        for _ in range(10):
            found = pictures(socket, viewing.WINDOW)
            served += [header["source"] for header in found]
            last |= {header["source"]: header["number"] for header in found}
            # Each was drawn after the pictures before it were confirmed.
            assert all(header["number"] >= at.get(header["source"], 0) for header in found)
            [viewer] = page.page.hub.viewers
            assert len(viewer.open) == viewing.WINDOW
            wait_for(lambda: all(c.shown.number > last[c.id] + 2 for c in channels))  # noqa: B023
            at = {channel.id: channel.shown.number for channel in channels}
            for header in found:
                socket.send(json.dumps({"type": "seen", "source": header["source"]}))
        counts = [served.count(f"s{i}") for i in range(1, 6)]
        assert counts == [4] * 5, served


def watched(socket, count: int, source: str = "s1") -> list[int]:
    """Confirm everything, until so many pictures of a source were seen."""
    numbers: list[int] = []
    while len(numbers) < count:
        message = socket.recv(timeout=60)
        if isinstance(message, bytes):
            header = header_of(message)
            socket.send(json.dumps({"type": "seen", "source": header["source"]}))
            numbers += [header["number"]] if header["source"] == source else []
        else:
            socket.send(json.dumps({"type": "seen", "state": True}))
    return numbers


def test_a_viewer_sees_pictures_in_order_and_the_state():
    with serving("", "") as page, connected(page) as socket:
        numbers = watched(socket, 10)
        assert numbers == sorted(set(numbers))


def test_two_viewers_share_what_is_drawn(monkeypatch):
    with (
        serving("") as page,
        Turns(monkeypatch) as turns,
        connected(page) as one,
        connected(page) as other,
    ):
        hub = page.page.hub
        for step in range(1, 6):  # the next one when both have seen it
            turns.let()
            assert watched(one, 1) == watched(other, 1) == [step]
            wait_for(lambda: hub.delivered == 2 * step)  # noqa: B023
            assert hub.encoded == step
        assert len(hub.viewers) == 2


def test_an_overlay_is_one_viewer_s_own():
    with serving("frames=5&part=0.3") as page, connected(page) as one, connected(page) as other:
        channel = page.worker.channels[0]
        wait_for(lambda: channel.feed.status == "ended")
        wait_for(lambda: channel.steps + channel.feed.dropped == 5)
        wait_for(lambda: channel.shown.number == channel.steps)
        for socket, overlay in ((one, "mask"), (other, "none")):
            socket.send(json.dumps({"type": "view", "overlay": overlay}))
            numbers = []
            while numbers[-1:] != [channel.steps]:
                numbers += watched(socket, 1)
        again = {name: jpeg(channel.shown, View(name), ()) for name in ("none", "mask", "error")}
        assert len(set(again.values())) == 3
        assert page.page.hub._made.keys() >= {("s1", View("mask")), ("s1", View("none"))}


def test_a_hidden_page_gets_no_pictures():
    with serving("") as page, connected(page) as socket:
        watched(socket, 2)
        [viewer] = page.page.hub.viewers
        socket.send(json.dumps({"type": "view", "hidden": True}))
        wait_for(lambda: viewer.view is None)
        sent = viewer.sent["s1"]  # this one may still be on its way
        socket.send(json.dumps({"type": "seen", "source": "s1"}))
        wait_for(lambda: not viewer.open)  # the next picture could go
        stepped(page.worker, 10)
        assert viewer.sent["s1"] == sent
        socket.send(json.dumps({"type": "view"}))
        while (number := watched(socket, 1)[0]) <= sent:
            pass
        assert number > sent + 5  # those of the time between did not come


def test_a_viewer_that_goes_in_the_middle_is_forgotten():
    with serving("", "") as page:
        with connected(page) as socket:
            watched(socket, 1)
            socket.socket.close()  # without a word
            wait_for(lambda: not page.page.hub.viewers)
        calls = []
        page.page.hub._wake = lambda: calls.append(1)
        stepped(page.worker, 3)
        assert calls == []  # without a viewer nobody is called
        del page.page.hub._wake
        with connected(page) as again:  # as after a reload
            state = json.loads(again.recv(timeout=60))
            assert len(state["sources"][0]["points"]) > 3  # the plots go on from before
            watched(again, 2)


@pytest.mark.parametrize(
    "message",
    ["no JSON", "[]", "{}", '{"type": "open"}', '{"type": "view", "overlay": "x"}',
     '{"type": "view", "width": 99999}', '{"type": "view", "predictions": 1}', "[" * 400,
     json.dumps({"type": "seen", "source": "s" * 600})],
)  # fmt: skip
def test_a_message_that_no_page_sends_ends_the_connection(message):
    with serving("") as page:
        with connected(page) as socket:
            socket.send(message)
            with pytest.raises(ConnectionClosed, match="1008"):
                watched(socket, 10**9)
        wait_for(lambda: not page.page.hub.viewers)
        assert page.worker.alive


# Monitoring


def test_metrics_and_health():
    with serving("name", "then=refuse") as page:
        stepped(page.worker, 3)
        wait_for(lambda: page.worker.channels[1].feed.status == "dead")
        with urlopen(f"{page.url}metrics") as answer:
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            text = answer.read().decode()
        with urlopen(f"{page.url}healthz") as answer:
            assert answer.read() == b"ok\n"
    line = re.compile(r'[a-z_]+(\{[a-z]+="[^"\n]*"(,[a-z]+="[^"\n]*")*\})? -?[0-9.e+]+(\+Inf)?')
    for row in text.splitlines():
        assert row.startswith("# ") or line.fullmatch(row), row
    names = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(names) == len(set(names))
    labels = '{source="s1",name="made:name"}'
    assert float(re.search(rf"eventful_live_steps_total{re.escape(labels)} (\S+)", text)[1]) >= 3
    done, whole = (
        float(re.search(rf"eventful_live_{name}{re.escape(labels)} (\S+)", text)[1])
        for name in ("tokens_updated_total", "tokens_total")
    )
    assert 13 <= done <= whole  # the first frame is computed as a whole
    assert 'eventful_live_up{source="s1",name="made:name"} 1' in text
    assert 'eventful_live_up{source="s2",name="made:then=refuse"} 0' in text
    count = int(re.search(r'latency_seconds_count\{source="s1".*\} (\d+)', text)[1])
    most = int(re.search(r'latency_seconds_bucket\{source="s1",.*le="\+Inf"\} (\d+)', text)[1])
    assert count == most >= 3


def test_health_is_bad_when_the_model_s_thread_is_gone():
    worker = Worker(tiny(), open_footage=opened)
    page = Page(worker, Allowed())
    with TestClient(make_app(page, Access()), base_url="http://127.0.0.1") as browser:
        assert browser.get("/healthz").status_code == 503
        worker.start()
        assert browser.get("/healthz").status_code == 200


# The command


@pytest.mark.slow
def test_the_command_serves_the_detector_and_ends_by_a_signal(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "eventful.cli", "live", "--port", "0", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "EVENTFUL_TOKEN": ""},
    )  # fmt: skip
    try:
        about = json.loads(process.stdout.readline())
        assert about["model"] == "detector"

        def state():
            with urlopen(f"{about['url']}api/state") as answer:
                return json.load(answer)["sources"][0]

        wait_for(lambda: state()["steps"] >= 1, 300)
        assert state()["name"] == "a clip of the generated world"
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "lets other machines in, so a token is needed"),
        (["--host", "example.org"], "so a token is needed"),
        (["--token", "short"], "at least 16 characters"),
        (["--allow-url", "http://user:hunter2@host/"], "without a user name"),
        (["--allow-url", "ftp://host/"], "give scheme, host and a path"),
        (["--preset", "slow"], "no preset 'slow'"),
        (["no-such-video.mp4"], "no-such-video.mp4"),
        (["no/such.safetensors"], None),
    ],
)
def test_wrong_usage_is_said_before_anything_runs(words, message, here):
    if message is None:
        done = here("live", "--model", *words)
        assert done.returncode == 2
        return
    done = here("live", "--port", "0", *words)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "hunter2" not in done.stderr
    assert done.stdout == ""
