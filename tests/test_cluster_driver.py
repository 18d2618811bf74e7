"""A whole cluster in threads of this process: workers, registry and readers that are killed."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import videos
from cluster_threads import ThreadEngine
from commands import here  # noqa: F401
from eventful.cluster.batches import Batches
from eventful.cluster.folder import read_status
from eventful.cluster.reader import Reader
from eventful.cluster.run import RunOptions, run
from eventful.cluster.sources import (
    ModelSpec,
    StreamSpec,
    add_stream,
    read_plan,
    remove_stream,
)
from eventful.cluster.status import metrics
from eventful.errors import ConfigError, MissingFileError, RunError
from eventful.live.feed import Feed
from eventful.pipeline.results import LINES
from eventful.pipeline.stopping import Stop

pytestmark = pytest.mark.filterwarnings("ignore:timm.test_vit has random weights")
SECRET = "s3cret-word"


@pytest.fixture(autouse=True)
def threads():
    """A worker sets the threads of its process, which is this one here."""
    pytest.importorskip("timm")  # before two threads import it at the same time
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def plan(folder: Path, streams: str, **cluster: Any) -> Path:
    path = folder / "sources.toml"
    head = {"model": "timm:test_vit", "size": "64x96", "workers": 2, **cluster}
    lines = [f"{name} = {json.dumps(value)}" for name, value in head.items()]
    path.write_text("[cluster]\n" + "\n".join(lines) + "\n" + streams)
    return path


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Small videos of a given length."""
    folder = tmp_path_factory.mktemp("films")
    made: dict[int, Path] = {}

    def film(frames: int) -> Path:
        if frames not in made:
            made[frames] = videos.pan(folder / f"{frames}.mp4", frames, size=(64, 96), step=(0, 1))
        return made[frames]

    return film


def stream(name: str, path: Path, more: str = "") -> str:
    return f'\n[[stream]]\nname = "{name}"\nsource = "{path}"\n{more}\n'


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / LINES).read_text().splitlines()]


LIMIT = 120.0  # seconds; a run that does not end by itself is ended, and its test fails


def limited(stop: Stop, observe: Any, seconds: float = LIMIT) -> Callable[[Any], None]:
    """An observer that ends the run after a while: without it, a hang would stop all tests."""
    end = time.monotonic() + seconds

    def look(status: dict[str, Any]) -> None:
        observe(status)
        if time.monotonic() > end and not stop.requested:
            stop.request()

    return look


def started(
    path: Path,
    out: Path,
    observe: Any = lambda engine, status: None,
    *,
    stop: Stop | None = None,
    restart: Any = lambda: False,
    engine: ThreadEngine | None = None,
    **options: Any,
) -> tuple[Any, ThreadEngine]:
    engine, stop = engine or ThreadEngine(), stop or Stop()
    found = run(
        path,
        RunOptions(out, **options),
        stop=stop,
        observe=limited(stop, lambda status: observe(engine, status)),
        restart=restart,
        open_engine=lambda plan, space: engine,
    )
    return found, engine


def test_every_frame_is_counted_once_whoever_is_killed(tmp_path, films, monkeypatch):
    path = plan(tmp_path, "".join(stream(name, films(200)) for name in "abc"))
    victims = ["w0", "registry", "r0", "w1"]
    take = Reader.take

    def slow_take(reader: Reader, *args: Any) -> Any:
        time.sleep(0.05 if victims else 0)  # no machine is done before the last kill
        return take(reader, *args)

    monkeypatch.setattr(Reader, "take", slow_take)
    monkeypatch.setattr("eventful.cluster.run._SAVE", 0.1)

    def kill(engine: ThreadEngine, status: dict[str, Any]) -> None:
        if victims and sum(s["counted"] for s in status["streams"]) > 5 * (4 - len(victims)):
            engine.kill(victims.pop(0))

    found, _ = started(path, tmp_path / "out", kill)
    assert not victims
    assert found.status == "complete"
    rows = results(tmp_path / "out")
    for name in "abc":
        own = [row for row in rows if row["source"] == name]
        assert [row["frame"] for row in own] == list(range(200))
        assert not any(row["missed"] for row in own)
    epochs = {row["epoch"] for row in rows}
    assert len(epochs) > 3
    assert found.summary["frames"] == {"counted": 600, "dropped": 0, "lost": 0, "disk full": 0}


def test_latest_frames_are_counted_or_named(tmp_path, films, monkeypatch):
    more = 'mode = "latest"\nrate = 50.0'
    path = plan(tmp_path, stream("a", films(120), more) + stream("b", films(120), more))
    victims = ["w0", "w1"]
    release = threading.Event()
    due = Feed._due

    def held_due(feed: Feed, *args: Any) -> bool:
        # Frame 60 comes after the kills, however fast this machine is.
        if feed.index == 59:
            release.wait(LIMIT)
        return due(feed, *args)

    step = Batches.step

    def slow_step(self: Batches, pictures: Any) -> Any:
        time.sleep(0.05)  # longer than a frame takes to come: some are dropped
        return step(self, pictures)

    monkeypatch.setattr(Feed, "_due", held_due)
    monkeypatch.setattr(Batches, "step", slow_step)
    monkeypatch.setattr("eventful.cluster.run._SAVE", 0.1)

    def kill(engine: ThreadEngine, status: dict[str, Any]) -> None:
        counted = [s["counted"] for s in status["streams"]]
        if victims and len(counted) == 2 and min(counted) > 0:
            engine.kill(victims.pop(0))
        if not victims:
            release.set()

    try:
        found, _ = started(path, tmp_path / "out", kill)
    finally:
        release.set()
    assert not victims
    assert found.status == "complete"
    for name in "ab":
        seen: list[int] = []
        for row in results(tmp_path / "out"):
            if row["source"] == name:
                for missed in row["missed"]:
                    seen += range(missed["first"], missed["last"] + 1)
                seen += [row["frame"]] if "labels" in row else []
        assert sorted(seen) == list(range(120))
    frames = found.summary["frames"]
    assert sum(frames.values()) == 240
    assert frames["dropped"]


def test_streams_come_and_go_while_it_runs_and_it_is_resumed(tmp_path, films, here, monkeypatch):
    path = plan(tmp_path, stream("a", films(300)))
    stop, out = Stop(), tmp_path / "out"
    seen: list[dict[str, Any]] = []
    take = Reader.take

    def slow_take(reader: Reader, *args: Any) -> Any:
        time.sleep(0 if stop.requested else 0.05)  # `a` is there until it is removed
        return take(reader, *args)

    monkeypatch.setattr(Reader, "take", slow_take)
    monkeypatch.setattr("eventful.cluster.run._SAVE", 0.1)

    def change(engine: ThreadEngine, status: dict[str, Any]) -> None:
        seen.append(status)
        by_name = {s["name"]: s for s in status["streams"]}
        if len(seen) == 1:
            done = here("cluster", "add", path, "late", films(8))
            assert done.returncode == 0, done.stderr
        gone = all(s.name != "a" for s in read_plan(path).streams)
        if by_name.get("late", {}).get("state") == "ended" and not gone:
            remove_stream(path, "a")
        if by_name.get("a", {}).get("state") == "removed" and not stop.requested:
            stop.request()

    found, _ = started(path, out, change, stop=stop, stay=True)
    assert found.status == "interrupted"
    states = {s["name"]: (s["state"], s["counted"]) for s in found.summary["streams"]}
    assert states["late"] == ("ended", 8)
    assert 0 < states["a"][1] < 300
    shown = here("cluster", "status", "--out", out)
    assert shown.returncode == 1  # it does not run any more
    assert "late" in shown.stdout
    with pytest.raises(ConfigError, match="--resume"):
        started(path, out)
    path.write_text(path.read_text() + stream("a", films(300)))
    kept = len(results(out))
    again, _ = started(path, out, resume=True)
    rows = [row for row in results(out) if row["source"] == "a"]
    assert len(results(out)) > kept
    seen = [
        m for row in rows for each in row["missed"] for m in range(each["first"], each["last"] + 1)
    ]
    seen += [row["frame"] for row in rows if "labels" in row]
    assert sorted(seen) == list(range(300))
    assert again.status == "complete"


def test_status_and_metrics_hold_no_credentials(tmp_path, films, monkeypatch, capfd):
    monkeypatch.setenv("GATE", f"rtsp://admin:{SECRET}@127.0.0.1:9/stream?token={SECRET}")
    streams = '\n[[stream]]\nname = "gate"\nsource = "env:GATE"\n' + stream("a", films(12))
    streams += f'\n[[stream]]\nname = "http"\nsource = "http://u:{SECRET}@127.0.0.1:9/x.m3u8"\n'
    for name, odd in {
        "space": f" rtsp://admin:{SECRET}@127.0.0.1:9/x",
        "typo": f"rtsp//admin:{SECRET}@127.0.0.1:9/x?key={SECRET}",
        "slash": f"rtsp:/admin:{SECRET}@127.0.0.1:9/x",
        "list": f"rtsp://admin:{SECRET}@127.0.0.1:9/x.streams",
        "bracket": f"http://admin:{SECRET}@[::1/x",
    }.items():
        streams += f'\n[[stream]]\nname = "{name}"\nsource = "{odd}"\n'
    path = plan(tmp_path, streams)
    out, stop = tmp_path / "out", Stop()
    texts: list[str] = []

    def look(engine: ThreadEngine, status: dict[str, Any]) -> None:
        texts.append(json.dumps(status) + metrics(status))
        by_name = {s["name"]: s for s in status["streams"]}
        there = len(by_name) == 6 and by_name["a"]["state"] == "ended"
        if there and by_name["gate"]["message"] and status["problems"] and not stop.requested:
            stop.request()

    started(path, out, look, stop=stop)
    written = b"".join(p.read_bytes() for p in out.rglob("*") if p.is_file())
    assert SECRET.encode() not in written
    assert SECRET not in "".join(texts)
    assert SECRET not in "".join(capfd.readouterr())
    assert "127.0.0.1:9" in texts[-1]  # the camera is named, without its password
    assert 'frames_counted_total{stream="a"} 12' in texts[-1]
    assert (out / "state").stat().st_mode & 0o077 == 0
    assert SECRET not in repr(read_plan(path))


def test_a_plan_says_what_is_wrong_with_it(tmp_path):
    path = tmp_path / "s.toml"
    one = '[[stream]]\nname = "a"\nsource = "x"\n'
    with pytest.raises(MissingFileError, match=r"docs/cluster\.md"):
        read_plan(path)
    for text, words in {
        "[cluster\n": "s.toml",
        "[clusters]\n": "'clusters' is unknown",
        '[cluster]\nworkers = "two"\n': "workers is int",
        "[cluster]\nworkers = 0\n": "workers is at least 1",
        "[cluster]\nfull = 0.5\n": "target is between",
        "[cluster]\nwheel = 1\n": "'wheel' is unknown",
        '[cluster]\npreset = "quick"\n': "no preset",
        '[[stream]]\nname = "a"\n': "source is missing",
        '[[stream]]\nname = "a/b"\nsource = "x"\n': "no name of a stream",
        one + 'mode = "some"\n': "latest or every",
        one + "rate = 0\n": "rate is above 0",
        one + 'mode = "every"\nloop = true\n': "no rate and no loop",
        one + one: "two streams",
    }.items():  # fmt: skip
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_plan(path)


def test_a_source_says_what_is_wrong_with_it(monkeypatch, tmp_path):
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(ConfigError, match="NOWHERE is not set"):
        StreamSpec("a", "env:NOWHERE").found()
    with pytest.raises(ConfigError, match="one of several"):
        StreamSpec("a", "world:street?videos=3").found()
    with pytest.raises(ConfigError, match="mode latest"):
        StreamSpec("a", "rtsp://x/y", "every").found()
    with pytest.raises(ConfigError, match="share"):
        ModelSpec(share=2.0)


def test_adding_and_removing_keeps_the_rest_of_the_file(tmp_path, here):
    path = tmp_path / "s.toml"
    text = '# ours\n[cluster]\nworkers = 1  # one\n\n[[stream]]\nname = "a"\nsource = "x.mp4"\n'
    path.write_text(text)
    path.chmod(0o600)
    add_stream(path, StreamSpec("b", 'rtsp://u:p"w\\@h/x', rate=None))
    assert [s.name for s in read_plan(path).streams] == ["a", "b"]
    assert read_plan(path).streams[1].source == 'rtsp://u:p"w\\@h/x'
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="Remove it first"):
        add_stream(path, StreamSpec("b", "y.mp4"))
    remove_stream(path, "b")
    assert path.read_text().rstrip() == text.rstrip()
    with pytest.raises(ConfigError, match=r"there: a"):
        remove_stream(path, "b")
    done = here("cluster", "add", path, "gate", "env:GATE", "--mode", "latest")
    assert done.returncode == 0, done.stderr
    assert 'source = "env:GATE"' in path.read_text()
    assert here("cluster", "remove", path, "gate").returncode == 0
    path.write_text('stream = [{name = "a", source = "x"}, {name = "b", source = "y"}]\n')
    with pytest.raises(ConfigError, match="by hand"):
        remove_stream(path, "a")


def test_commands_say_that_nothing_runs(tmp_path, here):
    for words in (["status"], ["restart"]):
        done = here("cluster", *words, "--out", tmp_path)
        assert done.returncode == 2
        assert "holds no run" in done.stderr
    with pytest.raises(RunError):
        read_status(tmp_path)
