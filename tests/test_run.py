"""`eventful run`: what it writes is what the model says, frame by frame, whatever interrupts it."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import csv
import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_models
import videos
from commands import here  # noqa: F401
from eventful import Config, Stream, TopR, convert
from eventful.errors import ConfigError, RunError, UnsupportedError
from eventful.models.saving import save_model
from eventful.models.vitdet import Detections
from eventful.modelspec.size import Longest
from eventful.paper.data.records import Box
from eventful.paper.data.world import names_seed, open_seed, open_world, seed_name
from eventful.paper.evaluate.metrics import fgfa_map50
from eventful.pipeline import loop, results, rows, stills
from eventful.pipeline.annotate import as_supervision, draw
from eventful.pipeline.folder import RunFolder
from eventful.pipeline.history import FrameRow, Still
from eventful.pipeline.labels import labelled
from eventful.pipeline.loop import run
from eventful.pipeline.models import open_model
from eventful.pipeline.outputs import Observer
from eventful.pipeline.predictions import Prediction, read_output
from eventful.pipeline.scoring import Scores
from eventful.pipeline.settings import RunSettings
from eventful.pipeline.sources import Footage, SourceName, Taken, find_sources, open_source
from eventful.pipeline.stopping import Stop, StopRequested
from eventful.pipeline.subject import open_subject
from eventful.surgery.libraries import load
from eventful.video.frame import Frame, Region
from eventful.video.scene import PALETTE
from eventful.video.world import ACTIONS, CLASSES, World
from runs import PLAIN, WORLD, detector  # noqa: F401

pytest.importorskip("av")
pytest.importorskip("timm")
pytest.importorskip("supervision")

TIMM = "timm:vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return videos.pan(tmp_path_factory.mktemp("clip") / "clip.mp4", 8, size=(64, 96), step=(1, 2))


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "frames.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(folder: Path) -> list[int]:
    assert [int(row["index"]) for row in table(folder)] == [row["frame"] for row in lines(folder)]
    return [row["frame"] for row in lines(folder)]


def frames_of(path: Path) -> int:
    with load("av").open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


class StopAfter(Observer):
    """Requests the end after so many steps, as ctrl-C does."""

    def __init__(self, steps: int) -> None:
        self.stop, self.left = Stop(), steps

    def stepped(self, row: FrameRow, frames: int) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def interrupted(model: str, source: str, settings: RunSettings, steps: int) -> loop.RunResult:
    after = StopAfter(steps)
    with after.stop.on_signals():
        return run(model, [source], settings, observer=after, stop=after.stop)


# --- what is written


def test_every_frame_has_the_results_of_a_stream_and_its_row(detector: str, tmp_path: Path) -> None:
    settings = replace(PLAIN, out=tmp_path / "run", r="6", frames=6)
    result = run(detector, [WORLD], settings)
    assert (result.status, result.failed, numbers(tmp_path / "run")) == (
        "complete",
        {},
        [*range(6)],
    )
    model = open_model(detector).model
    stream = Stream(convert(model, Config.fast(TopR(6))))
    world = open_seed(WORLD)
    shown = zip(world.read(range(6)), lines(tmp_path / "run"), table(tmp_path / "run"), strict=True)
    for picture, line, row in shown:
        pixels, place = model.prepare(picture)
        (found,) = stream(pixels, [place])
        boxes = torch.tensor([entry["box"] for entry in line["detections"]]).reshape(-1, 4)
        assert torch.allclose(boxes, found.boxes, atol=0.01)
        assert [entry["class"] for entry in line["detections"]] == found.labels.tolist()
        assert all(entry["label"] == CLASSES[entry["class"]] for entry in line["detections"])
        assert float(row["operations"]) == stream.last.macs
        assert float(row["updated"]) == pytest.approx(stream.last.fraction * int(row["tokens"]))
        assert (row["flushed"], int(row["found"])) == (str(int(stream.last.flushed[0])), len(found))
    assert len({row["operations"] for row in table(tmp_path / "run")}) == 2  # one flush, then r


def test_the_comparison_is_what_is_computed_by_hand(detector: str, tmp_path: Path) -> None:
    settings = replace(PLAIN, out=tmp_path / "run", r="4", frames=4, compare=True)
    result = run(detector, [WORLD], settings)
    model = open_model(detector).model
    stream = Stream(convert(model.backbone, Config.fast(TopR(4))))
    truth, dense, world = [], [], open_seed(WORLD)
    pictures = [taken.picture for taken in open_source(find_sources([WORLD])[0]).frames()]
    for index, row in enumerate(table(tmp_path / "run")):
        pixels, place = model.prepare(pictures[index])
        with torch.no_grad():
            whole = model.backbone(pixels)
            dense.append(model(pixels, [place])[0])
        error = (stream(pixels) - whole).norm() / whole.norm()
        assert float(row["error"]) == pytest.approx(float(error), rel=1e-3, abs=1e-6)
        assert row["dense_ms"] != ""
        found = world.truth(index)
        truth.append(
            [
                Box(*box, int(label), None, bool(skip))
                for box, label, skip in zip(
                    found.boxes.tolist(), found.labels, found.ignore, strict=True
                )
            ]
        )
    assert float(table(tmp_path / "run")[3]["error"]) > 0.001
    expected = fgfa_map50(dense, truth, CLASSES).value
    accuracy = result.summary["accuracy"]["mAP50"]
    assert accuracy["dense"] == pytest.approx(expected)
    assert set(accuracy) == {"eventful", "dense"}
    assert result.summary["scored_frames"] == 4
    assert "detections" in lines(tmp_path / "run")[0]["dense"]


def test_a_score_leaves_out_results_but_not_the_accuracy(detector: str, tmp_path: Path) -> None:
    all_ = run(detector, [WORLD], replace(PLAIN, out=tmp_path / "a", frames=2))
    none = run(detector, [WORLD], replace(PLAIN, out=tmp_path / "b", frames=2, score=0.99))
    assert all(line["detections"] == [] for line in lines(tmp_path / "b"))
    assert any(line["detections"] for line in lines(tmp_path / "a"))
    assert none.summary["accuracy"] == all_.summary["accuracy"] != {}


def test_dense_runs_the_whole_model(detector: str, tmp_path: Path) -> None:
    settings = replace(PLAIN, out=tmp_path / "run", frames=3, dense=True)
    result = run(detector, [WORLD], settings)
    row = table(tmp_path / "run")[2]
    assert row["updated"] == row["tokens"] == "16"
    assert row["operations"] == row["dense_operations"] != "0"
    assert result.summary["memory"] == 0
    assert list(result.summary["accuracy"]["mAP50"]) == ["dense"]


def test_features_go_to_arrays_and_the_video_shows_updates(clip: Path, tmp_path: Path) -> None:
    vit = load("timm").create_model("vit_tiny_patch16_224", num_classes=0, depth=2).eval()
    settings = RunSettings(
        out=tmp_path / "run", size=Longest(64), r="2", format="npz", frames=5, every=2
    )
    result = run(vit, [str(clip)], settings)
    assert result.summary["kind"] == "features"
    (part,) = (tmp_path / "run" / "arrays").iterdir()
    with np.load(part) as arrays:
        assert arrays["frame"].tolist() == [0, 2, 4, 6]
        assert arrays["features"].shape == (4, 1 + 4 * 3, 192)  # 96 x 64 becomes 64 x 48
        assert np.ptp(arrays["features"], axis=0).max() > 0
    assert settings.fixed()["size"] == settings.shown()["size"] == "longest:64"
    assert frames_of(tmp_path / "run" / "clip.mp4") == 4


def test_a_classifier_gives_labels_and_parquet_holds_them(clip: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    settings = RunSettings(out=tmp_path / "run", size=64, format="parquet", frames=3, report=False)
    result = run(TIMM, [str(clip)], settings)
    rows_ = load("pyarrow.parquet").read_table(tmp_path / "run" / "results").to_pylist()
    assert [row["frame"] for row in rows_] == [0, 1, 2]
    assert len(rows_[0]["labels"]) == 5
    assert rows_[0]["labels"][0]["score"] >= rows_[0]["labels"][1]["score"] > 0
    assert result.summary["random_weights"]


def test_a_model_of_clips_waits_for_a_whole_clip_then_slides(tmp_path: Path) -> None:
    model = tiny_models.recogniser(len(ACTIONS))
    save_model(model, tmp_path / "clips.safetensors", classes=ACTIONS)
    source = "world:3?action=jump&size=48x64&exposures=1&frames=13"
    name = str(tmp_path / "clips.safetensors")
    result = run(name, [source], replace(PLAIN, out=tmp_path / "run", compare=True, preset="exact"))
    # Steps of two frames, of which a clip has four; the thirteenth frame fills no step.
    assert numbers(tmp_path / "run") == [1, 3, 5, 7, 9, 11]
    assert [len(line["labels"]) for line in lines(tmp_path / "run")] == [0, 0, 0, 5, 5, 5]
    assert result.summary["frames"] == 12
    top1 = result.summary["accuracy"]["top1"]
    right = [line["dense"]["labels"][0]["label"] == "jump" for line in lines(tmp_path / "run")[3:]]
    assert top1["dense"] == pytest.approx(sum(right) / 3)
    ready = open_subject(name).at(48, 64)
    pictures = list(open_seed(source).read(range(8)))
    with torch.no_grad():
        vectors = [model.spatial(*ready.prepare(pictures[i : i + 2]).args) for i in range(0, 8, 2)]
        expected = model.classify(torch.stack(vectors, dim=1))[0].softmax(0)
    best = lines(tmp_path / "run")[3]["dense"]["labels"][0]
    assert best["score"] == pytest.approx(float(expected.max()), abs=1e-5)
    # What a resumed run remembers of the clip makes its rows the same.
    short = replace(PLAIN, out=tmp_path / "two", compare=True, preset="exact", frames=6)
    run(name, [source], short)
    run(name, [source], replace(short, frames=None, resume=True))
    assert lines(tmp_path / "two") == lines(tmp_path / "run")


def test_tracks_have_numbers_that_stay(tmp_path: Path) -> None:
    pytest.importorskip("trackers")
    from eventful.pipeline.tracking import Tracks

    def found(shift: float, *scores: float) -> Prediction:
        boxes = torch.tensor([[10.0, 10, 50, 50], [60, 10, 90, 60]])[: len(scores)] + shift
        labels = torch.zeros(len(scores), dtype=torch.int64)
        return Prediction("detections", Detections(boxes, torch.tensor(scores), labels))

    for kind in ("bytetrack", "sort"):
        tracks = Tracks(kind, 25.0, 0.3, first=5)
        seen = [tracks.follow(found(shift, 0.9, 0.4)).tracks for shift in range(6)]
        assert seen[-1] == seen[-2]
        assert len(set(seen[-1])) == 2
        assert min(seen[-1]) >= 5
        assert tracks.count == max(seen[-1]) + 1
        assert tracks.follow(found(6, 0.9, 0.05)).above(0.5).tracks == seen[-1][:1]
        assert tracks.follow(found(7)).tracks == ()


# --- resume, interruption, failures


def test_a_resumed_run_equals_one_without_a_break(
    detector: str, clip: Path, tmp_path: Path
) -> None:
    source = str(clip)
    whole = replace(PLAIN, out=tmp_path / "whole", r="5", frames=8)
    run(detector, [source], whole)
    parts = replace(whole, out=tmp_path / "parts", video=True)
    first = interrupted(detector, source, parts, 3)
    assert first.status == "interrupted"
    assert numbers(tmp_path / "parts") == [0, 1, 2]
    slug = find_sources([source])[0].slug
    assert frames_of(tmp_path / "parts" / f"{slug}.mp4") == 3
    second = run(detector, [source], replace(parts, resume=True))
    assert second.status == "complete"
    assert second.summary["sources"][source]["resumed"]
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    same = [{**row, "ms": 0} for row in table(tmp_path / "parts")]
    assert same == [{**row, "ms": 0} for row in table(tmp_path / "whole")]
    assert frames_of(tmp_path / "parts" / f"{slug}-2.mp4") == 5
    third = run(detector, [source], replace(parts, resume=True))
    assert numbers(tmp_path / "parts") == [*range(8)]
    assert third.summary["frames"] == 8


def test_accuracy_is_of_all_frames_when_a_run_is_resumed(tmp_path: Path) -> None:
    def prediction(*boxes: Box) -> Prediction:
        corners = torch.tensor([[b.x1, b.y1, b.x2, b.y2] for b in boxes]).reshape(-1, 4)
        found = Detections(
            corners, torch.ones(len(boxes)), torch.tensor([b.label for b in boxes]).long()
        )
        return Prediction("detections", found)

    footage = Footage()
    footage.classes = ("cat", "dog")
    cat, dog = Box(10, 10, 60, 60, 0), Box(100, 10, 180, 60, 1)
    both, none = prediction(cat, dog), prediction()
    whole, first, second = (Scores(footage.classes, ("eventful", "dense")) for _ in range(3))
    steps = [(both, both), (none, both), (both, none), (none, none)]
    for index, sides in enumerate(steps):
        taken = Taken(index, None, torch.zeros(3, 1, 1), (cat, dog))
        whole.add("a", footage, taken, sides)
        (first if index < 2 else second).add("a", footage, taken, sides)
        if index == 1:
            first.save("a", tmp_path / "scores")
            second.restore("a", tmp_path / "scores")
    assert whole.accuracy() == {"mAP50": {"eventful": 0.5, "dense": 0.5}}
    assert second.accuracy() == whole.accuracy()
    assert first.accuracy() == {"mAP50": {"eventful": 0.5, "dense": 1.0}}
    assert (first.frames, second.frames) == (2, 4)
    footage.classes = ("cat", "cow")
    assert not whole.fits(footage)


def test_a_killed_run_goes_on_behind_its_last_complete_result(
    detector: str, clip: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = replace(PLAIN, out=out, frames=4)
    run(detector, [str(clip)], settings)
    text = (out / "results.jsonl").read_text()
    (out / "results.jsonl").write_text(text[:-20])  # half a line
    with (out / "frames.csv").open("a") as file:
        file.write(f"{clip},4,")  # and half a row
    result = run(detector, [str(clip)], replace(settings, frames=6, resume=True))
    assert numbers(out) == [*range(6)]
    assert result.summary["frames"] == 6
    assert "resumed" not in result.summary["sources"][str(clip)]  # the snapshot is of a later frame


def test_other_settings_are_named_when_a_run_is_resumed(
    detector: str, clip: Path, tmp_path: Path
) -> None:
    settings = replace(PLAIN, out=tmp_path / "run", r="4", frames=1)
    run(detector, [str(clip)], settings)
    with pytest.raises(RunError, match=r"update rule was .*TopR\(r=4.* and is .*TopR\(r=5"):
        run(detector, [str(clip)], replace(settings, r="5", resume=True))
    with pytest.raises(RunError, match=r"--score was 0.0 and is 0.7; .* was a source and is not"):
        run(detector, ["world:8"], replace(settings, score=0.7, resume=True))
    with pytest.raises(RunError, match=f"the model was .* and is {TIMM}"):
        run(TIMM, [str(clip)], replace(settings, size=64, resume=True))
    with pytest.raises(ConfigError, match="holds a run"):
        run(detector, [str(clip)], settings)
    assert numbers(tmp_path / "run") == [0]
    run(detector, [str(clip)], replace(settings, r="5", overwrite=True))
    assert numbers(tmp_path / "run") == [0]


def test_overwriting_deletes_what_a_run_wrote_and_nothing_else(
    detector: str, clip: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = replace(PLAIN, out=out, frames=1, video=True)
    run(detector, [str(clip)], settings)
    (out / "notes.txt").write_text("mine")
    run(detector, ["world:8?size=48x64&exposures=1"], replace(settings, overwrite=True))
    assert (out / "notes.txt").read_text() == "mine"
    assert [path.name for path in out.glob("*.mp4")] == ["world-8-size-48x64-exposures-1.mp4"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").touch()
    with pytest.raises(ConfigError, match="holds no run"):
        run(detector, [str(clip)], replace(settings, out=tmp_path / "other", overwrite=True))


def test_a_damaged_frame_is_counted_and_skipped(detector: str, tmp_path: Path) -> None:
    folder = videos.images(tmp_path / "pictures", 4)
    (folder / "2.png").write_bytes(b"not a picture")
    result = run(detector, [str(folder)], replace(PLAIN, out=tmp_path / "run"))
    assert result.status == "complete"
    assert result.summary["lost"] == {"damaged": 1}
    assert numbers(tmp_path / "run") == [0, 1, 2]


def test_one_failing_source_of_two_fails_alone(
    detector: str, clip: Path, tmp_path: Path, here
) -> None:
    out = tmp_path / "run"
    missing = "rtsp://me:secret@127.0.0.1:9/x"
    done = here(
        *("run", detector, missing, tmp_path / "no.mp4", clip, "--frames", "2", "--out", out),
        *("--no-video", "--no-report"),
    )
    assert done.returncode == 1
    assert "no.mp4 failed" in done.stderr
    assert "rtsp://127.0.0.1:9/x failed" in done.stderr
    assert numbers(out) == [0, 1]
    written = done.stdout + done.stderr + "".join(p.read_text() for p in out.glob("*.*"))
    assert "secret" not in written
    assert "Traceback" not in done.stderr


def test_nothing_is_written_where_no_source_is_there(
    detector: str, clip: Path, tmp_path: Path, here
) -> None:
    """The command with the right name then finds no run in its way."""
    out = tmp_path / "run"
    options = ("--frames", "1", "--out", out, "--no-video", "--no-report")
    done = here("run", detector, tmp_path / "no.mp4", *options)
    assert done.returncode != 0
    assert "no.mp4" in done.stderr
    assert not out.exists()
    assert here("run", detector, clip, *options).returncode == 0


def test_a_source_in_the_folder_to_be_replaced_is_not_deleted(
    detector: str, clip: Path, tmp_path: Path, here
) -> None:
    out = tmp_path / "run"
    options = ("--frames", "1", "--out", out, "--no-report")
    assert here("run", detector, clip, *options).returncode == 0
    (video,) = out.glob("*.mp4")
    content = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    done = here("run", detector, video, *options, "--overwrite")
    assert done.returncode == 2
    assert "which --overwrite replaces" in " ".join(done.stderr.split())
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == content


def test_an_interrupted_command_ends_all_files(
    detector: str, clip: Path, tmp_path: Path, here, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eventful.cli import run_progress

    after = StopAfter(3)
    monkeypatch.setattr(run_progress.LineProgress, "stepped", after.stepped.__func__)
    monkeypatch.setattr(run_progress.LineProgress, "left", 3, raising=False)
    out, handler = tmp_path / "run", signal.getsignal(signal.SIGINT)
    done = here("run", detector, clip, "--out", out, "--no-report")
    assert done.returncode == 130, done.stderr
    assert numbers(out) == [0, 1, 2]
    (video,) = out.glob("*.mp4")
    assert frames_of(video) == 3
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_wait_for_a_frame_is_cut_short() -> None:
    stop = Stop()
    with pytest.raises(StopRequested), stop.on_signals(), stop.waiting():
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(StopRequested), stop.waiting():
        pass


# --- the command


def test_the_command_prints_one_json_summary(
    detector: str, clip: Path, tmp_path: Path, here
) -> None:
    out = tmp_path / "run"
    done = here(
        *("run", detector, clip, "--frames", "3", "--out", out, "--no-video", "--no-report"),
        *("--operations", "0.7", "--json"),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "run.json").read_text())
    assert (summary["frames"], summary["status"]) == (3, "complete")
    assert "OperationsBudget" in summary["settings"]["budget"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-model", WORLD], "A model is detector"),
        (["timm:vit_of_dreams", WORLD], "no model"),
        ([TIMM, "world:7?camera=boat"], "camera is one of"),
        ([TIMM, WORLD, "--r", "4", "--error", "0.1"], "exclude each other"),
        ([TIMM, WORLD, "--error", "0.1", "--rate", "5"], "exclude each other"),
        ([TIMM, WORLD, "--dense", "--r", "4"], "has no effect"),
        ([TIMM, WORLD, "--preset", "paper"], "needs --r"),
        ([TIMM, WORLD, "--track"], "follows detections"),
        ([TIMM, WORLD, "--format", "npz"], "npz is for"),
        ([TIMM, WORLD, WORLD], "given twice"),
        ([TIMM, WORLD, "--device", "toaster"], "toaster"),
        (["timm:resnet18", WORLD], "--dense runs it whole"),
        ([TIMM, WORLD, "--score", "2"], "--score"),
    ],
)
def test_wrong_usage_ends_with_2(words: list[str], message: str, tmp_path: Path, here) -> None:
    done = here("run", *words, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


# --- parts


def test_names_of_the_world_are_parsed_once_for_sets_and_seeds() -> None:
    assert names_seed("world:7?camera=pan")
    assert not names_seed("world:street")
    assert open_seed("world:7", 300).frames == 300
    assert open_seed("world:7?frames=9", 300).frames == 9
    assert open_seed("world:8?action=jump").mode == "pan"  # as in world:actions, no walk and no cut
    with pytest.raises(ConfigError, match="no option; those are frames, camera"):
        open_seed("world:7?videos=3")
    made = find_sources(["world:street?videos=2&frames=5"])
    films = [video.frames for video in open_world(Path("world:street?videos=2&frames=5"))]
    assert [source.name for source in made] == [seed_name(film) for film in films]
    again = open_seed(made[1].name)
    assert again == World(films[1].seed, 5, films[1].mode, films[1].size)


def test_frames_of_the_world_do_not_depend_on_where_one_begins() -> None:
    (source,) = find_sources([WORLD])
    taken = list(open_source(source).frames())
    later = list(open_source(source).frames(5))
    assert [each.index for each in later] == [6, 7, 8, 9]
    assert all(a.picture.equal(b.picture) for a, b in zip(taken[6:], later, strict=True))
    assert taken[0].truth
    assert taken[3].seconds == pytest.approx(3 / 25)


def test_slugs_are_short_and_differ(tmp_path: Path) -> None:
    found = find_sources(["a/street.mp4", "b/street.mp4", "rtsp://u:p@host/cam?x=1", "camera:0"])
    slugs = [source.slug for source in found]
    assert slugs[2:] == ["cam", "camera-0"]
    assert all(slug.startswith("street-") for slug in slugs[:2])
    assert slugs[0] != slugs[1]
    turned = find_sources(["b/street.mp4", "a/street.mp4"])
    assert [source.slug for source in turned] == slugs[1::-1]  # files of a run keep their source
    assert [source.live for source in found] == [False, False, True, True]
    assert not any("u:p" in repr(source) for source in found)


def test_outputs_are_read_by_their_form() -> None:
    # A picture of 100 x 200 in the middle of a square frame of 80 pixels.
    frame = Frame(
        torch.zeros(1, 3, 80, 80), original_size=(100, 200), region=Region(20.0, 0.0, 40.0, 80.0)
    )
    queries = {
        "logits": torch.tensor([[[0.0, 9.0, 0.0], [0.0, 0.0, 9.0]]]),
        "pred_boxes": torch.tensor([[[0.5, 0.5, 0.5, 0.25], [0.1, 0.1, 0.1, 0.1]]]),
    }
    found = read_output(queries, frame, labels=False).detections
    assert torch.allclose(found.boxes[0], torch.tensor([50.0, 25.0, 150.0, 75.0]))
    assert found.labels[0] == 1
    assert found.scores[0] > 0.99 > 0.01 > found.scores[1]
    boxes = {"boxes": torch.tensor([[0.0, 20, 40, 60]]), "scores": torch.ones(1)}
    found = read_output([{**boxes, "labels": torch.ones(1).long()}], frame, labels=False).detections
    assert found.boxes.tolist() == [[0.0, 0.0, 100.0, 100.0]]
    heat = torch.zeros(1, 1, 80, 80)
    heat[..., 20:40, :] = 1
    saliency = read_output(heat, frame, labels=False).saliency
    assert saliency.shape == (100, 200)
    assert saliency[10].min() == 1
    assert saliency[90].max() == 0
    assert read_output(torch.zeros(1, 5), frame, labels=True).kind == "labels"
    assert read_output(torch.zeros(1, 5), frame, labels=False).kind == "features"
    assert read_output(torch.zeros(1, 7, 5), frame, labels=True).features.shape == (7, 5)
    with pytest.raises(UnsupportedError, match="a tensor"):
        read_output(torch.zeros(2, 5), frame, labels=True)


def test_boxes_are_drawn_where_they_are_and_for_supervision() -> None:
    found = Detections(
        torch.tensor([[100.0, 100, 300, 300]]), torch.tensor([0.9]), torch.tensor([1])
    )
    made = as_supervision(found, ("a", "b"), (3,))
    assert made.data["class_name"].tolist() == ["b"]
    assert made.tracker_id.tolist() == [3]
    picture = torch.zeros(3, 400, 400, dtype=torch.uint8)
    picture[0] = 200
    drawn = draw(picture, Prediction("detections", found), ("a", "b"))
    assert drawn[:, 200, 100].tolist() == list(bytes.fromhex(PALETTE[1][1:]))  # RGB, not BGR
    assert drawn[:, 200, 200].tolist() == [200, 0, 0]
    assert (
        draw(torch.zeros(3, 90, 90, dtype=torch.uint8), Prediction("detections", found), ()).shape[
            1
        ]
        >= 360
    )


def test_the_history_of_a_long_run_is_bounded_and_its_sums_are_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "KEPT", 10)
    history = rows.History()
    for index in range(1000):
        history.add(FrameRow("a", index, None, 1.0, 10, 5.0, 3.0, 6.0, found=index % 2))
    assert len(history.rows) <= 10
    steps = {b.index - a.index for a, b in zip(history.rows, history.rows[1:], strict=False)}
    assert len(steps) == 1
    summary = history.summary()
    assert (summary["frames"], summary["updated"], summary["found"]) == (1000, 0.5, 500)
    assert summary["operations"] == 0.5


def test_stills_are_spread_over_the_run_and_bounded() -> None:
    held, made = stills.Stills(), []
    for index in range(500):

        def still(index: int = index) -> Still:
            made.append(index)
            return Still("a", index, torch.zeros(3, 10, 2000, dtype=torch.uint8))

        held.offer("a", still)
    chosen = [still.index for still in held.chosen()]
    assert len(chosen) == stills.SHOWN
    assert chosen == sorted(chosen)
    assert chosen[0] > 0
    assert chosen[-1] > 350
    assert len(made) < 100
    assert held.chosen()[0].eventful.shape[2] == 960


def test_labels_of_a_dataset_become_the_truth_of_a_source(tmp_path: Path) -> None:
    import miniatures

    folder = miniatures.mot(tmp_path / "mot", frames=4)
    sequence = folder / "val" / "C-seq"
    source = SourceName(str(sequence / "img1"), "img1", str(sequence / "img1"))
    footage = labelled(open_source(source), source, sequence, ("person",))
    taken = list(footage.frames())
    assert len(taken) == 4
    assert any(frame.truth for frame in taken)
    with pytest.raises(ConfigError, match="the classes person, the model has dog"):
        labelled(Footage(), source, sequence, ("dog",))


def test_a_function_of_ones_own_gives_a_model(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my_models.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Identity()\ndef bad():\n    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(open_model("my_models:make").model, torch.nn.Identity)
    for name in ("my_models:bad", "my_models:none", "no_such_module:make"):
        with pytest.raises(UnsupportedError):
            open_model(name)


def test_results_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"source": "a", "frame": 0}\nnonsense\n')
    with pytest.raises(RunError, match="line 2"):
        results.last_frames(tmp_path, "jsonl")
    folder = RunFolder(tmp_path / "new")
    assert folder.video("a").name == "a.mp4"


def test_live_sources_take_turns_and_one_that_fails_leaves_the_others() -> None:
    done: list[str] = []

    class Fake:
        waits = False

        def __init__(self, name: str, steps: int, error: Exception | None = None) -> None:
            self.name, self.left, self.error, self.ended = name, steps, error, ""

        def step(self) -> bool:
            self.left -= 1
            if self.left < 0 and self.error is not None:
                raise self.error
            done.append(self.name)
            return self.left > 0

        def end(self, status: str, message: str = "") -> None:
            self.ended = f"{status} {message}".strip()

    runs = [Fake("a", 2), Fake("b", 1, ValueError("odd")), Fake("c", 3)]
    runs[1].left = 0
    loop._drive(runs, Stop())
    assert done == ["a", "c", "a", "c", "c"]
    assert [each.ended for each in runs] == ["complete", "failed ValueError: odd", "complete"]
    runs = [Fake("a", 9), Fake("b", 0, StopRequested())]
    with pytest.raises(StopRequested):
        loop._drive(runs, Stop())
    assert [each.ended for each in runs] == ["interrupted", "interrupted"]
