"""Evaluation on miniature data: the same numbers however a run came about, and clear refusals."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch

import miniatures
import tiny_models
from eventful import Config
from eventful.cli.evaluate_run import asked
from eventful.cli.evaluate_run import settings as cli_settings
from eventful.conversion import block_shapes
from eventful.counting import BlockWork, count_backbone
from eventful.counting_models import count_clip
from eventful.data import open_dataset
from eventful.errors import (
    CheckpointError,
    ConfigError,
    DamagedMediaError,
    MissingFileError,
    RunError,
    WorkerError,
)
from eventful.evaluate import experiment as experiments
from eventful.evaluate.detection import DetectionJob
from eventful.evaluate.evaluation import Settings, Silent, evaluate
from eventful.evaluate.models import Weights
from eventful.evaluate.padding import (
    mean_padding,
    padding_of,
    skipped_if_none_is_padding,
)
from eventful.evaluate.runs import RunStore, VideoResult
from eventful.evaluate.variants import Variant, schedule
from eventful.evaluate.workers import Item, Workers, work
from eventful.models.shapes import temporal_blocks
from eventful.models.vitdet import ViTDet
from eventful.models.vitdet.model import detector_config
from tolerances import apart, assert_near, limit

FRAMES = 5
PRESETS = ["dense", "paper", "skip"]


@pytest.fixture(scope="module")
def vid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return miniatures.imagenet(tmp_path_factory.mktemp("vid"), frames=FRAMES)


@pytest.fixture(scope="module")
def weights(vid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector that has seen the data, so that its accuracy is not zero."""
    model = tiny_models.trained(tiny_models.detector(), vid, "val", steps=40)
    return tiny_models.write(model, tmp_path_factory.mktemp("weights") / "vitdet.safetensors")


@pytest.fixture(scope="module")
def epic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return miniatures.epic(tmp_path_factory.mktemp("epic"))


@pytest.fixture(scope="module")
def vivit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "vivit.safetensors"
    return tiny_models.write(tiny_models.recogniser(), path)


@pytest.fixture(scope="module")
def whole(vid: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory):
    """One run without interruption: its settings and its report."""
    settings = Settings(vid, {"base": weights}, out=tmp_path_factory.mktemp("whole"))
    return settings, evaluate(asked("vitdet", PRESETS, ["4", "50%"], None, None), settings)


class StopAfter(Silent):
    """Somebody presses Ctrl-C after so many frames."""

    def __init__(self, frames: int) -> None:
        self.left = frames

    def advance(self, frames: int) -> None:
        self.left -= frames
        if self.left < 0:
            raise KeyboardInterrupt


def test_every_variant_is_measured(whole) -> None:
    _, report = whole
    keys = [row.key for row in report.rows]
    assert keys == [
        "base-model",
        "paper-r4",
        "paper-f.5",
        "frame-skipping-cost-of-paper-r4",
        "frame-skipping-cost-of-paper-f.5",
    ]
    for row in report.rows:
        assert (row.videos, row.frames, row.skipped_videos) == (2, 2 * FRAMES, 0)
        assert 0 <= row.coco_map50 <= 100
        assert 0 <= row.fgfa_map50 <= 100
    assert report.rows[0].coco_map50 > 5  # the detector has learned something
    assert {row.coco_map50 for row in report.rows} != {report.rows[0].coco_map50}


def test_operations_are_those_of_the_closed_forms(whole, weights: Path) -> None:
    _, report = whole
    model = ViTDet(Weights(weights).vitdet_config())
    shapes = block_shapes(model, 64, Config.paper())
    dense = count_backbone(shapes).total
    by_key = {row.key: row for row in report.rows}
    assert by_key["base-model"].operations == pytest.approx(dense / 1e9)
    work = BlockWork.uniform(4)
    clip = count_clip(shapes, Config.paper(), work, frames=FRAMES).total / FRAMES
    assert by_key["paper-r4"].operations == pytest.approx(clip / 1e9)
    assert by_key["paper-r4"].saving == pytest.approx(dense / clip)


def test_skipping_costs_at_least_what_it_stands_beside(whole) -> None:
    """Whole frames only: at most one frame per video more."""
    _, report = whole
    by_key = {row.key: row for row in report.rows}
    pattern, skip = by_key["paper-r4"], by_key["frame-skipping-cost-of-paper-r4"]
    assert skip.share == pytest.approx(pattern.operations / pattern.dense_operations)
    assert pattern.operations <= skip.operations
    assert skip.operations <= pattern.operations + skip.dense_operations / FRAMES


def test_a_run_stopped_half_way_goes_on_to_the_same_numbers(whole, tmp_path: Path) -> None:
    settings, report = whole
    again = replace(settings, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        evaluate(report.experiment, again, StopAfter(2 * FRAMES + 2))
    done = sorted(path.name for path in tmp_path.rglob("*.safetensors"))
    assert 0 < len(done) < 2 * len(report.rows)
    assert not list(tmp_path.rglob("*.part"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    resumed = evaluate(report.experiment, again)
    assert resumed.rows == report.rows
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())


def test_two_workers_give_what_one_does(whole, tmp_path: Path) -> None:
    settings, report = whole
    shared = evaluate(report.experiment, replace(settings, out=tmp_path, workers=2))
    assert shared.rows == report.rows
    for path in (settings.out / "videos").rglob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / path.relative_to(settings.out)).read_bytes()


def test_results_and_the_figure_are_written(whole) -> None:
    settings, report = whole
    stored = json.loads((settings.out / "results.json").read_text())
    assert [row["key"] for row in stored["rows"]] == [row.key for row in report.rows]
    assert stored["unit"] == "GFlops per frame"
    assert stored["detail"]["base-model"]["coco_map50"]["per_class"]["airplane"] is not None
    lines = (settings.out / "results.csv").read_text().splitlines()
    assert len(lines) == 1 + len(report.rows)
    assert lines[0].startswith("key,label,preset")
    assert (settings.out / "figure.png").stat().st_size > 10_000
    assert (settings.out / "figure.pdf").is_file()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"frames": 2}, "frames: null there, 2 now"),
        ({"videos": 1}, "data.videos: 2 there, 1 now"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"split": "train"}, "data.split"),
    ],
)
def test_another_configuration_is_refused(whole, change: dict, named: str) -> None:
    settings, report = whole
    with pytest.raises(RunError, match=r"--out.*--no-resume") as caught:
        evaluate(report.experiment, replace(settings, **change))
    assert named in str(caught.value)


def test_other_variants_and_other_weights_are_refused(whole, tmp_path: Path) -> None:
    settings, report = whole
    with pytest.raises(RunError, match=r'variants: "paper-r5" only now'):
        evaluate(asked("vitdet", ["paper"], ["5"], None, None), settings)
    other = tiny_models.write(tiny_models.detector(seed=1), tmp_path / "other.safetensors")
    with pytest.raises(RunError, match=r"weights.base"):
        evaluate(report.experiment, replace(settings, weights={"base": other}))


def test_starting_over_deletes_the_run_and_nothing_else(whole, tmp_path: Path) -> None:
    settings, _ = whole
    made = asked("vitdet", ["dense"], None, None, None)
    (tmp_path / "notes.txt").write_text("mine")
    evaluate(made, replace(settings, out=tmp_path))
    again = replace(settings, out=tmp_path, frames=2, resume=False)
    assert evaluate(made, again).rows[0].frames == 4
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_damaged_result_is_computed_again(whole, tmp_path: Path) -> None:
    settings, _ = whole
    made = asked("vitdet", ["dense"], None, None, None)
    first = evaluate(made, replace(settings, out=tmp_path))
    path = next(tmp_path.rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:20])
    assert evaluate(made, replace(settings, out=tmp_path)).rows == first.rows


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    data = miniatures.imagenet(tmp_path / "vid", frames=2)
    picture = next(data.rglob("Data/VID/val/ILSVRC2015_val_00001000/000001.JPEG"))
    picture.write_bytes(b"no picture")
    return data


def test_a_damaged_video_is_left_out_and_counted(damaged: Path, weights: Path) -> None:
    settings = Settings(damaged, {"base": weights})
    report = evaluate(asked("vitdet", ["dense"], None, None, None), settings)
    assert (report.rows[0].videos, report.rows[0].skipped_videos) == (1, 1)
    assert "000001.JPEG" in report.problems["ILSVRC2015_val_00001000"]


def test_a_video_with_malformed_boxes_is_left_out_and_counted(
    tmp_path: Path, weights: Path
) -> None:
    data = miniatures.imagenet(tmp_path, frames=2)
    next(data.rglob("Annotations/VID/val/ILSVRC2015_val_00001000/000001.xml")).write_text("")
    report = evaluate(
        asked("vitdet", ["dense"], None, None, None), Settings(data, {"base": weights})
    )
    assert (report.rows[0].videos, report.rows[0].skipped_videos) == (1, 1)
    assert "well-formed XML" in report.problems["ILSVRC2015_val_00001000"]


def test_nothing_that_can_be_used_is_an_error(damaged: Path, weights: Path, tmp_path: Path) -> None:
    for picture in damaged.rglob("Data/VID/val/*/*.JPEG"):
        picture.write_bytes(b"no picture")
    settings = Settings(damaged, {"base": weights}, out=tmp_path / "out")
    with pytest.raises(DamagedMediaError, match=r"None of the 2 videos .*does not decode"):
        evaluate(asked("vitdet", ["dense"], None, None, None), settings)


def strict(text: str) -> dict:
    """JSON as others read it, who know no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


def test_data_without_boxes_has_a_cost_and_no_accuracy(tmp_path: Path, weights: Path) -> None:
    data = miniatures.imagenet(tmp_path / "vid", frames=2)
    for path in data.rglob("Annotations/VID/val/*/*.xml"):
        path.write_text("<annotation/>")
    made = asked("vitdet", ["dense", "paper"], ["4"], None, None)
    report = evaluate(made, Settings(data, {"base": weights}, out=tmp_path / "out"))
    stored = strict((tmp_path / "out/results.json").read_text())
    for row, kept in zip(report.rows, stored["rows"], strict=True):
        assert row.coco_map50 is row.fgfa_map50 is kept["coco_map50"] is None
        assert kept["operations"] == row.operations > 0
    assert (tmp_path / "out/figure.png").is_file()


def test_a_detector_that_finds_nothing_scores_zero(vid: Path, tmp_path: Path) -> None:
    model = tiny_models.detector()
    heads = replace(model.config.heads, score_threshold=1.1)
    blind = ViTDet(replace(model.config, heads=heads))
    blind.load_state_dict(model.state_dict())
    path = tiny_models.write(blind, tmp_path / "blind.safetensors")
    (row,) = evaluate(
        asked("vitdet", ["dense"], None, None, None), Settings(vid, {"base": path}, frames=2)
    ).rows
    assert row.coco_map50 == row.fgfa_map50 == 0


def test_a_worker_tells_what_became_of_each_video(
    damaged: Path, weights: Path, vivit: Path, tmp_path: Path
) -> None:
    videos = open_dataset(damaged, "val").videos
    store = RunStore.open(tmp_path / "run", {}, resume=True)
    variant = Variant("Base model", "dense")
    jobs = [DetectionJob(Weights(path), variant) for path in (weights, vivit)]
    inbox, outbox = queue.Queue(), queue.Queue()
    for index, (job, video) in enumerate([(jobs[0], videos[0]), (jobs[0], videos[1])]):
        inbox.put(Item(job, store, "v", index, video))
    inbox.put(Item(jobs[1], store, "v", 2, videos[0]))  # weights of another model
    inbox.put(Item(Stumbling(), store, "v", 3, videos[0]))
    inbox.put(None)
    work(inbox, outbox, "cpu", torch.get_num_threads())
    assert [m for m in outbox.queue if m[0] == "begin"] == [
        ("begin", i, os.getpid()) for i in range(4)
    ]
    told = [message for message in outbox.queue if message[0] not in ("begin", "tick")]
    assert [(kind, index) for kind, index, _ in told] == [
        *(("done", 0), ("done", 1), ("error", 2), ("error", 3)),
    ]
    assert told[0][2] is None
    assert "000001.JPEG" in told[1][2]
    assert isinstance(told[2][2], CheckpointError)
    assert isinstance(told[3][2], WorkerError)
    assert "stumbled" in str(told[3][2])
    assert sum(frames for kind, _, frames in outbox.queue if kind == "tick") == 2


class Stumbling:
    """A job with a mistake in it."""

    def run(self, video: object, device: str, tick: object) -> VideoResult:
        raise ZeroDivisionError("stumbled")


class Dying(Stumbling):
    """A job that takes its process with it, as one that runs out of memory does."""

    def run(self, video: object, device: str, tick: object) -> VideoResult:
        time.sleep(0.5)  # what it has told is on its way
        os._exit(9)


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run(vid: Path, tmp_path: Path) -> None:
    store = RunStore.open(tmp_path, {}, resume=True)
    videos = open_dataset(vid, "val").videos
    items = [Item(Dying(), store, "v", i, video) for i, video in enumerate(videos)]
    with (
        pytest.raises(WorkerError, match="exit code 9 at ILSVRC2015_val"),
        Workers(2, threads=1) as workers,
    ):
        workers.run(items)


STOPPED = """
import os, signal, sys, time
from pathlib import Path
from eventful.data.records import Video
from eventful.evaluate.runs import RunStore
from eventful.evaluate.workers import Item, Workers
from eventful.video.source import ImageFiles

class Slow:
    def run(self, video, device, tick):
        tick(1)
        time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # deaf if started in the background
    store = RunStore.open(sys.argv[1], {}, resume=True)
    frames = ImageFiles(Path(), ("x" * 100_000,))  # more than a pipe holds
    items = [Item(Slow(), store, "v", i, Video("v", frames)) for i in range(8)]

    def stop(frames):
        Path(sys.argv[2]).touch()
        os.killpg(0, signal.SIGINT)

    with Workers(2, threads=1) as workers:
        workers.run(items, stop)
"""


def test_ctrl_c_ends_every_process_at_once(tmp_path: Path) -> None:
    """As a terminal sends it, to all of them; videos still wait to be handed out."""
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), str(tmp_path / "pressed")],
        capture_output=True,
        text=True,
        timeout=300,  # three processes that load torch, on a machine that may be busy
        start_new_session=True,
    )
    took = time.time() - (tmp_path / "pressed").stat().st_mtime
    assert took < 30  # a worker's job would go on for ten minutes
    assert done.returncode == -signal.SIGINT
    assert done.stderr.count("Traceback") == 1  # of the calling process alone
    assert not list(tmp_path.rglob("*.part"))


def test_a_mistake_names_the_video(vid: Path, tmp_path: Path) -> None:
    store = RunStore.open(tmp_path, {}, resume=True)
    video = open_dataset(vid, "val").videos[1]
    with pytest.raises(WorkerError, match=rf"Video {video.name} failed(.|\n)*stumbled"):
        Workers(1).run([Item(Stumbling(), store, "v", 0, video)])


def test_a_store_refuses_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    with pytest.raises(RunError, match="no run of ours"):
        RunStore.open(tmp_path, {}, resume=True)
    with pytest.raises(RunError, match=r"cannot be written to.*--out"):
        RunStore.open(Path(__file__) / "run", {}, resume=True)
    (tmp_path / "run.json").write_text("not json")
    with pytest.raises(RunError, match="start over"):
        RunStore.open(tmp_path, {}, resume=True)


def test_a_store_keeps_numbers_exactly(tmp_path: Path) -> None:
    store = RunStore.open(tmp_path / "run", {"a": (1, 2)}, resume=True)
    kept = torch.rand(3, 4, dtype=torch.float64)
    store.save("v", 7, "P01/a b", VideoResult({"x": kept, "none": torch.zeros(0, 4)}, {"n": 1}))
    found = RunStore.open(tmp_path / "run", {"a": [1, 2]}, resume=True).load("v", 7, "P01/a b")
    assert found.tensors["x"].equal(kept)
    assert found.tensors["none"].shape == (0, 4)
    assert found.facts == {"n": 1}


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 1 / 3, 0.01])
def test_skipping_spreads_its_frames(share: float) -> None:
    due = list(islice(schedule(share), 300))
    assert due[0]
    for length in (1, 7, 100, 300):
        assert sum(due[:length]) == math.ceil(length * share - 1e-6)
    computed = [t for t, run in enumerate(due) if run]
    gaps = {b - a for a, b in pairwise(computed)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_tiny_epic_dense_and_eventful(epic: Path, vivit: Path, tmp_path: Path) -> None:
    made = asked("vivit", ["dense", "paper", "skip"], ["5", "17"], None, None)
    settings = Settings(epic, {"base": vivit}, views=(2, 2), out=tmp_path / "a")
    report = evaluate(made, settings)
    rows = {row.key: row for row in report.rows}
    model = tiny_models.recogniser()
    spatial = block_shapes(model.spatial, 32, Config.paper())
    temporal = count_backbone(temporal_blocks(model)).total
    dense = 4 * (4 * count_backbone(spatial).total + temporal)
    assert rows["base-model"].operations == pytest.approx(dense / 1e12)
    five = count_clip(spatial, Config.paper(), BlockWork.uniform(5), frames=4).total + temporal
    assert rows["paper-r5"].operations == pytest.approx(4 * five / 1e12)
    for row in report.rows:
        assert row.videos == 2
        assert 0 <= row.top1 <= row.top5 <= 100
    # With every token selected the eventful model says what the dense one does.
    stored = {
        key: [
            RunStore(tmp_path / "a").load(key, i, video.name).tensors["logits"]
            for i, video in enumerate(open_dataset(epic))
        ]
        for key in ("base-model", "paper-r17", "paper-r5")
    }
    for dense_logits, all_tokens, few in zip(*stored.values(), strict=True):
        assert_near(all_tokens, dense_logits)
        assert apart(few, dense_logits) > 10 * limit("model")
    with pytest.raises(KeyboardInterrupt):
        evaluate(made, replace(settings, out=tmp_path / "b"), StopAfter(100))
    assert list((tmp_path / "b").rglob("*.safetensors"))
    assert evaluate(made, replace(settings, out=tmp_path / "b")).rows == report.rows


def test_what_does_not_fit_is_told(
    vid: Path, epic: Path, weights: Path, vivit: Path, tmp_path: Path
) -> None:
    dense = asked("vitdet", ["dense"], None, None, None)
    with pytest.raises(CheckpointError, match="whole ViTDet"):
        evaluate(dense, Settings(vid, {"base": vivit}))
    with pytest.raises(CheckpointError, match="weights convert"):
        evaluate(dense, Settings(vid, {"base": tmp_path / "absent.safetensors"}))
    with pytest.raises(ConfigError, match="detection"):
        evaluate(dense, Settings(epic, {"base": weights}))
    with pytest.raises(ConfigError, match=r"--weights base=FILE"):
        evaluate(dense, Settings(vid, {}))
    with pytest.raises(ConfigError, match="no use for weights named 'r9'"):
        evaluate(dense, Settings(vid, {"base": weights, "r9": weights}))
    with pytest.raises(MissingFileError):
        evaluate(dense, Settings(tmp_path / "nowhere", {"base": weights}))
    mot = miniatures.mot(tmp_path / "mot")
    with pytest.raises(ConfigError, match="30 classes apart, the data has 1"):
        evaluate(dense, Settings(mot, {"base": weights}))
    clips = miniatures.kinetics(tmp_path / "kinetics")  # three classes of those 97
    with pytest.raises(ConfigError, match="97 classes apart, the data has 3"):
        evaluate(asked("vivit", ["dense"], None, None, None), Settings(clips, {"base": vivit}))
    with pytest.raises(ConfigError, match="patches of 16 px: choose 64"):
        evaluate(dense, Settings(vid, {"base": weights}, size=70))
    with pytest.raises(ConfigError, match="patches of 8 px: choose 8"):
        evaluate(asked("vivit", ["dense"], None, None, 5), Settings(epic, {"base": vivit}, size=5))
    with pytest.raises(ConfigError, match="needs to know how many"):
        asked("vitdet", ["paper"], None, None, None)
    with pytest.raises(ConfigError, match="at which cost"):
        asked("vitdet", ["skip"], None, None, None)
    with pytest.raises(ConfigError, match="percentage"):
        asked("vitdet", ["paper"], ["a few"], None, None)
    with pytest.raises(ConfigError, match="are for eventful models"):
        asked("vitdet", None, ["4"], None, None)
    with pytest.raises(ConfigError, match="--device is cpu, cuda"):
        cli_settings(vid, [], None, None, "abacus", "float32", *[None] * 7)


def test_the_same_budget_twice_is_one_variant() -> None:
    made = asked("vitdet", ["paper"], ["4", "4", "12%", "12.0%"], [0.5, 0.5], None)
    assert [variant.budget for variant in made.variants] == ["r4", "f.12", "h0.5"]


def test_skipping_alone_costs_what_the_papers_rule_would(vid: Path, weights: Path) -> None:
    settings = Settings(vid, {"base": weights})
    (row,) = evaluate(asked("vitdet", ["skip"], ["4"], None, None), settings).rows
    shapes = block_shapes(ViTDet(Weights(weights).vitdet_config()), 64, Config.paper())
    step = count_backbone(shapes, Config.paper(), [BlockWork.uniform(4)] * 2).total
    assert row.share == pytest.approx(step / count_backbone(shapes).total)


def test_an_experiment_of_ones_own_runs_beside_published_numbers(
    vid: Path, weights: Path, tmp_path: Path
) -> None:
    text = """
    title = "Mine"
    [[variants]]
    label = "Spatial"
    preset = "dense"
    options = { pool = 2 }
    published = { accuracy = 50.0, operations = 0.001 }
    [[variants]]
    label = "Mine"
    preset = "paper"
    r = [4, 8]
    options = { pool = 2 }
    [[variants]]
    label = "Skip"
    preset = "skip"
    like = "Mine"
    [[variants]]
    label = "Tuned"
    preset = "exact"
    h = 0.5
    weights = "other"
    """
    (tmp_path / "mine.toml").write_text(text)
    made = experiments.load(tmp_path / "mine.toml")
    report = evaluate(made, Settings(vid, {"base": weights}, frames=2))
    assert [row.label for row in report.rows] == [
        *("Spatial", "Mine", "Mine", "Skip, cost of Mine", "Skip, cost of Mine"),
    ]
    assert report.left_out == {"tuned-h0.5": "needs --weights other=FILE"}
    spatial = report.rows[0]
    model = ViTDet(Weights(weights).vitdet_config())
    pooled = count_backbone(block_shapes(model, 64, Config.paper(pool=2))).total
    assert spatial.operations == pytest.approx(pooled / 1e9)
    assert spatial.operations < spatial.dense_operations
    assert spatial.published_accuracy == 50.0


# Padding


def test_padding_of_a_wide_frame_is_that_of_its_shape() -> None:
    config = detector_config(30, 1024, False, "bicubic")
    found = padding_of((720, 1280), config)  # becomes 576 x 1024: 36 of 64 rows
    assert found.pixels == pytest.approx(1 - 576 / 1024)
    assert found.tokens == pytest.approx(1 - 36 / 64)
    assert padding_of((500, 500), config).tokens == pytest.approx(1 - (40 / 64) ** 2)


def test_two_thirds_of_the_rest_are_skipped_at_the_papers_padding() -> None:
    assert skipped_if_none_is_padding(0.446, 4096, 768) == pytest.approx(0.66, abs=0.005)


def test_padding_is_measured_from_sizes_and_selections(
    vid: Path, weights: Path, tmp_path: Path
) -> None:
    videos = open_dataset(vid, "val").videos
    config = Weights(weights).vitdet_config()
    sizes = mean_padding(videos, config)  # 48 x 64 pixels: 3 of 4 rows
    assert sizes["padded_tokens"] == pytest.approx(0.25)
    assert sizes["frames"] == 2 * FRAMES
    paper = experiments.load("padding")
    alone = evaluate(paper, Settings(vid, {}))
    assert alone.rows == ()
    assert alone.statistics["padded_tokens"] == pytest.approx(
        1 - 40 * 54 / 64**2  # 640 x 853 pixels
    )
    small = replace(paper, variants=(Variant("Ours", "paper", size=64, r=3),))
    report = evaluate(small, Settings(vid, {"base": weights}))
    found = report.statistics
    inside = 3 * (1 - found["selected_padding"]) / 12
    assert found["unpadded_skipped"] == pytest.approx(1 - inside)
    assert found["unpadded_skipped"] >= found["unpadded_skipped_at_least"] - 1e-9


def test_padding_leaves_out_what_cannot_be_read(damaged: Path, weights: Path) -> None:
    first = next(damaged.rglob("Data/VID/val/ILSVRC2015_val_00001000/000000.JPEG"))
    first.unlink()
    made = replace(experiments.load("padding"), variants=(Variant("Ours", "paper", size=64, r=3),))
    for given in ({}, {"base": weights}):
        report = evaluate(made, Settings(damaged, given))
        assert report.statistics["videos"] == 1
        assert any("000000.JPEG is not there" in why for why in report.problems.values())
        strict(json.dumps(report.plain()))
