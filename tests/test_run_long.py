"""`eventful run` for long: lost cameras, changes of size, cuts, clocks, failures, memory."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import csv
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny_models
import videos
from commands import here  # noqa: F401
from eventful import Config
from eventful.errors import SourceError
from eventful.pipeline import loop, rows, source_run
from eventful.pipeline.history import FrameRow, RunFacts
from eventful.pipeline.loop import run
from eventful.pipeline.outputs import Observer
from eventful.pipeline.report import write_report
from eventful.pipeline.settings import RunSettings
from eventful.pipeline.sources import Footage, Taken
from eventful.surgery.libraries import load
from eventful.video import ahead, lasting, read
from eventful.video.decoders import Picture
from eventful.video.fitting import resized
from eventful.video.world import ACTIONS, CLASSES

pytest.importorskip("av")
pytest.importorskip("timm")
pytest.importorskip("supervision")

PLAIN = RunSettings(video=False, report=False, score=0.0)
LOST = SourceError("camera:0 sent nothing for 10 s.")


@pytest.fixture(scope="module")
def detector():
    return tiny_models.detector(len(CLASSES)).eval()


@pytest.fixture(scope="module")
def vit():
    """Two blocks; it takes pictures of any shape."""
    made = load("timm").models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=4
    )
    return made.eval()


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "frames.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def flushes(folder: Path) -> list[int]:
    """Numbers of the frames that were computed as a whole."""
    return [int(row["index"]) for row in table(folder) if row["flushed"] == "1"]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


class Camera:
    """A decoder of pictures of one size, which then fails or ends; it may wait for a gate first."""

    rate, length, live, damaged = 25.0, None, True, 0

    def __init__(
        self,
        count: int,
        error: Exception | None = None,
        *,
        size: tuple[int, int] = (40, 60),
        times: list[float] | None = None,
        gate: threading.Event | None = None,
    ) -> None:
        self.count, self.error, self.times, self.gate = count, error, times, gate
        self.opened = False
        self.pixels = videos.texture(*size, seed=1)

    def pictures(self) -> Iterator[Picture]:
        height, width = self.pixels.shape[:2]
        if self.gate is not None:
            self.opened = self.gate.wait(60.0)
        for place in range(self.count):
            stamp = None if self.times is None else self.times[place]
            yield Picture(height, width, stamp, True, lambda h, w: resized(self.pixels, h, w))
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        pass


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    """What opening a source gives, one after the other; an exception is raised."""
    made: dict[str, list] = {}

    def open_decoder(source, **_):
        found = made[source.shown].pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    put = ahead.Ahead.put

    def put_later(self, frame) -> None:
        """Once the frame before was taken: the tests do not depend on how fast the machine is."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or not self._frames)
        put(self, frame)

    monkeypatch.setattr(ahead.Ahead, "put", put_later)
    monkeypatch.setattr(read, "open_decoder", open_decoder)
    monkeypatch.setattr(lasting, "FIRST_WAIT", 0.01)
    return made


class Reel(Footage):
    """A source made of pictures, with times of its own."""

    rate = 25.0

    def __init__(self, pictures: list[Tensor], times: list[float] | None = None) -> None:
        self.pictures, self.times, self.length = pictures, times, len(pictures)

    def frames(self, after: int = -1) -> Iterator[Taken]:
        for index in range(after + 1, len(self.pictures)):
            seconds = index / 25 if self.times is None else self.times[index]
            yield Taken(index, seconds, self.pictures[index])


@pytest.fixture
def reel(monkeypatch: pytest.MonkeyPatch):
    """Makes a source that gives some footage."""

    def show(footage: Footage) -> str:
        monkeypatch.setattr(source_run, "open_source", lambda *_: footage)
        monkeypatch.setattr(loop, "missing_file", lambda _: None)
        return "reel.mp4"

    return show


def picture(seed: int, size: tuple[int, int] = (40, 60), shift: int = 0) -> Tensor:
    ground = videos.texture(size[0], size[1] + 16, seed)[:, shift : shift + size[1]]
    return torch.from_numpy(np.ascontiguousarray(ground)).permute(2, 0, 1)


# --- lost cameras


def test_a_lost_camera_is_tried_again_and_the_stream_is_flushed(detector, script, tmp_path) -> None:
    script["camera:0"] = [Camera(3, LOST), LOST, Camera(3), Camera(99)]
    settings = replace(PLAIN, out=tmp_path / "run", frames=8, r="4")
    result = run(detector, ["camera:0"], settings)
    assert result.status == "complete"
    assert [int(row["index"]) for row in table(settings.out)] == [*range(8)]
    assert flushes(settings.out) == [0, 3, 6]
    written = json.loads((settings.out / "run.json").read_text())
    assert written["losses"] == written["sources"]["camera:0"]["losses"] == 2
    # A resumed run counts on.
    script["camera:0"] = [Camera(2, LOST), Camera(99)]
    result = run(detector, ["camera:0"], replace(settings, frames=12, resume=True))
    assert result.summary["losses"] == 3
    assert flushes(settings.out) == [0, 3, 6, 10]


def test_the_flush_comes_even_if_the_first_frame_after_a_loss_is_left_out(
    detector, script, tmp_path
) -> None:
    script["camera:0"] = [Camera(3, LOST), Camera(99)]
    settings = replace(PLAIN, out=tmp_path / "run", frames=4, r="4", every=2)
    run(detector, ["camera:0"], settings)
    assert flushes(settings.out) == [0, 4]


def test_a_clip_does_not_mix_frames_from_before_and_after_a_loss(script, tmp_path) -> None:
    model = tiny_models.recogniser(len(ACTIONS))
    script["camera:0"] = [Camera(9, LOST), Camera(99)]
    settings = replace(PLAIN, out=tmp_path / "run", frames=18)
    run(model, ["camera:0"], settings)
    # Steps of two frames, four of them to a clip. Frame 8 has no partner.
    assert [row["frame"] for row in lines(settings.out)] == [1, 3, 5, 7, *range(10, 20, 2)]
    known = [bool(row["labels"]) for row in lines(settings.out)]
    assert known == [False, False, False, True] + [False] * 3 + [True] * 2
    assert flushes(settings.out)[:2] == [1, 10]


def test_a_camera_that_is_gone_does_not_hold_up_the_others(detector, script, tmp_path) -> None:
    gate = threading.Event()
    silent = Camera(9, gate=gate)
    script["camera:0"] = [Camera(2), silent]
    script["camera:1"] = [Camera(99)]

    class Watch(Observer):
        def ended(self, source: str, status: str, message: str) -> None:
            if source == "camera:1":
                gate.set()

    settings = replace(PLAIN, out=tmp_path / "run", frames=6)
    result = run(detector, ["camera:0", "camera:1"], settings, observer=Watch())
    assert result.status == "complete"
    assert silent.opened  # by the end of the other one, and not by its own patience
    assert [row["source"] for row in table(settings.out)][-4:] == ["camera:0"] * 4


def test_one_live_source_fails_by_name_and_the_others_go_on(
    detector, script, tmp_path, monkeypatch, here
) -> None:
    monkeypatch.setattr("eventful.pipeline.sources.LASTING", 0.1)
    script["camera:0"] = [Camera(2, LOST), *[LOST] * 50]
    script["camera:1"] = [SourceError("camera:1 cannot be opened.")]
    script["camera:2"] = [Camera(99)]
    path = tiny_models.write(detector, tmp_path / "tiny.safetensors")
    out = tmp_path / "run"
    words = ("--frames", "12", "--no-video", "--no-report", "--out", out)
    done = here("run", path, "camera:0", "camera:1", "camera:2", *words)
    assert done.returncode == 1
    assert "camera:0 failed: camera:0 sent nothing" in done.stderr
    assert "camera:1 failed: camera:1 cannot be opened" in done.stderr
    assert "camera:2 failed" not in done.stderr
    assert "losses of live sources: 1" in done.stdout
    sources = json.loads((out / "run.json").read_text())["sources"]
    assert [sources[f"camera:{n}"]["status"] for n in range(3)] == ["failed", "failed", "complete"]
    assert [sources[f"camera:{n}"].get("frames") for n in range(3)] == [2, 0, 12]


# --- what changes on the way


def sizes(folder: Path) -> Path:
    """Pictures of 40 x 60, then of 60 x 40, then of 40 x 60 again."""
    images = load("PIL.Image")
    folder.mkdir()
    for index in range(9):
        size = (60, 40) if 3 <= index < 6 else (40, 60)
        pixels = picture(index // 3, size, shift=index % 3).permute(1, 2, 0).numpy()
        images.fromarray(pixels).save(folder / f"{index}.png")
    return folder


@pytest.mark.parametrize("kind", ["vit", "detector"])
def test_pictures_may_change_their_size(kind, tmp_path, request) -> None:
    model = request.getfixturevalue(kind)
    settings = replace(PLAIN, out=tmp_path / "run", video=True, compare=True)
    result = run(model, [str(sizes(tmp_path / "pictures"))], settings)
    assert (result.status, result.failed) == ("complete", {})
    assert [row["frame"] for row in lines(settings.out)] == [*range(9)]
    assert flushes(settings.out) == [0, 3, 6]
    with load("av").open(str(settings.out / "pictures.mp4")) as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(shown) == 9
    assert {frame.shape for frame in shown} == {(360, 540, 3)}
    assert shown[4][:, :140].max() < 40  # bars: the picture is upright
    assert shown[4][:, 200:340].mean() > 60
    # What is flushed is what the whole model says of this picture, in its own pixels.
    row = lines(settings.out)[3]
    if kind == "detector":
        assert len(row["detections"]) == len(row["dense"]["detections"]) > 0
        for ours, dense in zip(row["detections"], row["dense"]["detections"], strict=True):
            assert ours["box"] == pytest.approx(dense["box"], abs=0.05)
        boxes = np.array(
            [e["box"] for n in (3, 4, 5) for e in lines(settings.out)[n]["detections"]]
        )
        assert boxes[:, 2].max() <= 40
        assert 40 < boxes[:, 3].max() <= 60
    assert float(table(settings.out)[3]["error"]) < 1e-4


def test_a_camera_may_change_its_size(detector, script, tmp_path) -> None:
    script["camera:0"] = [Camera(2, LOST, size=(40, 60)), Camera(99, size=(64, 48))]
    settings = RunSettings(out=tmp_path / "run", frames=4, score=0.0)
    result = run(detector, ["camera:0"], settings)
    assert (result.status, flushes(settings.out)) == ("complete", [0, 2])


@pytest.mark.parametrize("cuts", [True, False])
def test_a_cut_is_a_flush(vit, reel, tmp_path, cuts) -> None:
    moving = [taken.picture for taken in Endless(12).frames()]
    shots = [*moving, *[picture(9, (32, 32))] * 4]
    settings = replace(PLAIN, out=tmp_path / "run")
    if not cuts:  # so that it is known what the flush comes from
        rule = replace(Config.fast(), scene_cut=None, fallback=False)
        (tmp_path / "rule.toml").write_text(rule.to_toml())
        settings = replace(settings, config=tmp_path / "rule.toml")
    run(vit, [reel(Reel(shots))], settings)
    assert (12 in flushes(settings.out)) == cuts
    assert not {*range(1, 12)} & {*flushes(settings.out)}


@pytest.mark.parametrize(
    "settings", [PLAIN, replace(PLAIN, rate=20.0), replace(PLAIN, report=True)]
)
def test_clocks_may_jump(vit, reel, tmp_path, settings, monkeypatch) -> None:
    times = [0.0, 0.04, 7200.0, 7200.04, -3.0, -2.96, 0.08, 0.12, float("1e9"), 0.2]
    wall = iter([1e9, 0.0] * 1000)
    monkeypatch.setattr(time, "time", lambda: next(wall))  # the clock of the system, as NTP sets it
    settings = replace(settings, out=tmp_path / "run")
    result = run(vit, [reel(Reel([picture(1)] * 10, times))], settings)
    assert (result.status, result.failed) == ("complete", {})
    assert [int(row["index"]) for row in table(settings.out)] == [*range(10)]
    assert [row["seconds"] for row in lines(settings.out)] == times
    assert flushes(settings.out) == [0]
    assert 0 < result.summary["seconds"] < 60


def test_a_camera_s_clock_may_jump(vit, script, tmp_path) -> None:
    script["camera:0"] = [Camera(2, LOST, times=[9.0, 1.0]), Camera(4, times=[0.0, 7e5, 3.0, 4.0])]
    settings = replace(PLAIN, out=tmp_path / "run", frames=6)
    result = run(vit, ["camera:0"], settings)
    assert result.status == "complete"
    assert [int(row["index"]) for row in table(settings.out)] == [*range(6)]


# --- a process that starts again


def test_a_restarted_run_begins_without_a_flush(vit, reel, tmp_path) -> None:
    source = reel(Reel([picture(1, shift=n) for n in range(8)]))
    settings = replace(PLAIN, out=tmp_path / "run", frames=4)
    run(vit, [source], settings)
    result = run(vit, [source], replace(settings, frames=8, resume=True))
    assert flushes(settings.out) == [0]
    assert len(table(settings.out)) == 8
    assert result.summary["sources"][source]["resumed"]


@pytest.mark.parametrize("kind", ["changed", "missing"])
def test_a_damaged_snapshot_is_a_flush_and_a_message(kind, detector, tmp_path, here) -> None:
    path = tiny_models.write(detector, tmp_path / "tiny.safetensors")
    clip = videos.pan(tmp_path / "clip.mp4", 6, size=(40, 60), step=(0, 1))
    words = ("run", path, clip, "--no-video", "--no-report", "--out", tmp_path / "run")
    assert here(*words, "--frames", "3").returncode == 0
    (state,) = (tmp_path / "run" / "state").glob("*.stream")
    content = bytearray(state.read_bytes())
    content[len(content) - 5] ^= 255
    state.unlink() if kind == "missing" else state.write_bytes(content)
    done = here(*words, "--resume")
    assert done.returncode == 0, done.stderr
    assert "goes on with a frame that is computed as a whole" in done.stderr
    assert "Traceback" not in done.stderr
    assert flushes(tmp_path / "run") == [0, 3]
    about = json.loads((tmp_path / "run" / "run.json").read_text())["sources"][str(clip)]
    assert about["resumed"] is False
    assert len(about["notes"]) == 1


@pytest.mark.parametrize("ending", ["memory", "scores"])
def test_other_damaged_files_of_a_run_are_noted_too(ending, tmp_path) -> None:
    model = tiny_models.recogniser(len(ACTIONS))
    tiny_models.write(model, tmp_path / "clips.safetensors")
    from eventful.models.saving import save_model

    save_model(model, tmp_path / "clips.safetensors", classes=ACTIONS)
    source = "world:3?action=jump&size=48x64&exposures=1&frames=16"
    settings = replace(PLAIN, out=tmp_path / "run", frames=10)
    run(str(tmp_path / "clips.safetensors"), [source], settings)
    (state,) = (settings.out / "state").glob(f"*.{ending}")
    state.write_bytes(state.read_bytes()[:-9])
    again = replace(settings, frames=16, resume=True)
    result = run(str(tmp_path / "clips.safetensors"), [source], again)
    assert result.status == "complete"
    (note,) = result.summary["sources"][source]["notes"]
    assert ("scored from frame 10 on" in note) == (ending == "scores")
    assert (flushes(settings.out) == [1, 11]) == (ending == "memory")


def test_a_snapshot_of_pictures_of_another_size_is_not_used(detector, reel, tmp_path) -> None:
    settings = replace(PLAIN, out=tmp_path / "run", frames=2)
    pictures = [picture(1), picture(1), picture(1, (60, 40)), picture(1, (60, 40))]
    source = reel(Reel(pictures))
    run(detector, [source], settings)
    result = run(detector, [source], replace(settings, frames=4, resume=True))
    assert flushes(settings.out) == [0, 2]
    assert "another size" in result.summary["sources"][source]["notes"][0]


# --- what is kept


def row(source: str, index: int) -> FrameRow:
    return FrameRow(source, index, index / 25, 1.0, 10, 1.0 + 8 * (index % 2), 3.0, 6.0,
                    flushed=index % 4 == 1)  # fmt: skip


def test_rows_of_sources_that_take_turns_are_all_kept(monkeypatch) -> None:
    monkeypatch.setattr(rows, "KEPT", 20)
    history = rows.History()
    for index in range(200):
        history.add(row("a", index))
        history.add(row("b", index))
        if index < 10:
            history.add(row("short", index))
    assert len(history.rows) <= 20
    for name in ("a", "b"):
        kept = [each.index for each in history.rows if each.source == name]
        assert len(kept) >= 7
        assert len({b - a for a, b in pairwise(kept)}) == 1
    assert any(each.source == "short" for each in history.rows)


def test_the_report_of_a_thinned_history_tells_of_all_frames(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(rows, "KEPT", 20)
    history = rows.History()
    for index in range(2000):
        history.add(row("a", index))
    for index in range(400):
        history.add(row("b", index))
    facts = RunFacts("vit", ("a", "b"), totals=history.totals(2))
    write_report(tmp_path / "report.html", facts, history.rows, [])
    text = (tmp_path / "report.html").read_text()
    assert ">4,800<" in text  # of both, two in each step
    assert "600 of them were computed as a whole" in text
    assert "<td>4,000</td>" in text
    assert "<td>500</td>" in text
    assert ">50 %<" in text  # the rows that are kept have 10 %
    (shown,) = {f"show {len([r for r in history.rows if r.source == 'a'])} of 2,000 steps"}
    assert shown in text


class Endless(Footage):
    """A square that moves over noise, for so many frames."""

    rate = 25.0

    def __init__(self, length: int) -> None:
        self.length = length
        self.ground = picture(3, (32, 32))

    def frames(self, after: int = -1) -> Iterator[Taken]:
        for index in range(after + 1, self.length):
            shown = self.ground.clone()
            place = index // 2 % 24
            shown[:, place : place + 8, place : place + 8] = 250
            yield Taken(index, index / self.rate, shown)


def resident() -> float:
    """MB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.slow
@pytest.mark.real_clock
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_the_length_of_a_run(vit, reel, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "KEPT", 1000)  # full before the first look
    looks: dict[int, float] = {}

    class Watch(Observer):
        def stepped(self, row: FrameRow, frames: int) -> None:
            if (row.index + 1) % 2000 == 0:
                looks[row.index + 1] = resident()

    settings = RunSettings(out=tmp_path / "run", size=32, video=False)
    began = time.monotonic()
    result = run(vit, [reel(Endless(20_000))], settings, observer=Watch())
    print(f"{time.monotonic() - began:.0f} s, MB: {looks}")
    assert result.summary["frames"] == len(table(settings.out)) == 20_000
    assert ">20,000<" in (settings.out / "report.html").read_text()
    assert looks[20_000] - looks[2000] < 6
