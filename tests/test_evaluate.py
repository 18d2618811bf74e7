"""Evaluation on miniature data: the same numbers however a run came about, and clear refusals."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest

import miniatures
import tiny_models
from evaluation_data import vivit  # noqa: F401
from eventful import Config
from eventful.bench.contenders import schedule
from eventful.cli.evaluate_run import experiment_from_options
from eventful.cli.evaluate_run import settings as cli_settings
from eventful.cli.options import Evaluation
from eventful.cost.counting import BlockWork, count_backbone
from eventful.cost.models import count_clip
from eventful.errors import (
    CheckpointError,
    ConfigError,
    DamagedMediaError,
    MissingFileError,
    RunError,
)
from eventful.models.shapes import temporal_blocks
from eventful.models.vitdet import ViTDet
from eventful.paper.data import open_dataset
from eventful.paper.evaluate import experiment as experiments
from eventful.paper.evaluate.evaluation import NoProgress, Settings, evaluate
from eventful.paper.evaluate.models import Weights
from eventful.paper.evaluate.runs import RunStore
from eventful.surgery.conversion import block_shapes
from miniatures import damaged  # noqa: F401
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
def whole(vid: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory):
    """One run without interruption: its settings and its report."""
    settings = Settings(vid, {"base": weights}, out=tmp_path_factory.mktemp("whole"))
    return settings, evaluate(
        experiment_from_options("vitdet", PRESETS, ["4", "50%"], None, None), settings
    )


class StopAfter(NoProgress):
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
    assert not list(tmp_path.rglob("*.partial"))
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
        evaluate(experiment_from_options("vitdet", ["paper"], ["5"], None, None), settings)
    other = tiny_models.write(tiny_models.detector(seed=1), tmp_path / "other.safetensors")
    with pytest.raises(RunError, match=r"weights.base"):
        evaluate(report.experiment, replace(settings, weights={"base": other}))


def test_starting_over_deletes_the_run_and_nothing_else(whole, tmp_path: Path) -> None:
    settings, _ = whole
    made = experiment_from_options("vitdet", ["dense"], None, None, None)
    (tmp_path / "notes.txt").write_text("mine")
    evaluate(made, replace(settings, out=tmp_path))
    again = replace(settings, out=tmp_path, frames=2, resume=False)
    assert evaluate(made, again).rows[0].frames == 4
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_damaged_result_is_computed_again(whole, tmp_path: Path) -> None:
    settings, _ = whole
    made = experiment_from_options("vitdet", ["dense"], None, None, None)
    first = evaluate(made, replace(settings, out=tmp_path))
    path = next(tmp_path.rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:20])
    assert evaluate(made, replace(settings, out=tmp_path)).rows == first.rows


def test_a_damaged_video_is_left_out_and_counted(damaged: Path, weights: Path) -> None:
    settings = Settings(damaged, {"base": weights})
    report = evaluate(experiment_from_options("vitdet", ["dense"], None, None, None), settings)
    assert (report.rows[0].videos, report.rows[0].skipped_videos) == (1, 1)
    assert "000001.JPEG" in report.problems["ILSVRC2015_val_00001000"]


def test_a_video_with_malformed_boxes_is_left_out_and_counted(
    tmp_path: Path, weights: Path
) -> None:
    data = miniatures.imagenet(tmp_path, frames=2)
    next(data.rglob("Annotations/VID/val/ILSVRC2015_val_00001000/000001.xml")).write_text("")
    report = evaluate(
        experiment_from_options("vitdet", ["dense"], None, None, None),
        Settings(data, {"base": weights}),
    )
    assert (report.rows[0].videos, report.rows[0].skipped_videos) == (1, 1)
    assert "well-formed XML" in report.problems["ILSVRC2015_val_00001000"]


def test_nothing_that_can_be_used_is_an_error(damaged: Path, weights: Path, tmp_path: Path) -> None:
    for picture in damaged.rglob("Data/VID/val/*/*.JPEG"):
        picture.write_bytes(b"no picture")
    settings = Settings(damaged, {"base": weights}, out=tmp_path / "out")
    with pytest.raises(DamagedMediaError, match=r"None of the 2 videos .*does not decode"):
        evaluate(experiment_from_options("vitdet", ["dense"], None, None, None), settings)


def test_data_without_boxes_has_a_cost_and_no_accuracy(tmp_path: Path, weights: Path) -> None:
    data = miniatures.imagenet(tmp_path / "vid", frames=2)
    for path in data.rglob("Annotations/VID/val/*/*.xml"):
        path.write_text("<annotation/>")
    made = experiment_from_options("vitdet", ["dense", "paper"], ["4"], None, None)
    report = evaluate(made, Settings(data, {"base": weights}, out=tmp_path / "out"))
    stored = miniatures.strict_json((tmp_path / "out/results.json").read_text())
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
        experiment_from_options("vitdet", ["dense"], None, None, None),
        Settings(vid, {"base": path}, frames=2),
    ).rows
    assert row.coco_map50 == row.fgfa_map50 == 0


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
    made = experiment_from_options("vivit", ["dense", "paper", "skip"], ["5", "17"], None, None)
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
    dense = experiment_from_options("vitdet", ["dense"], None, None, None)
    with pytest.raises(CheckpointError, match="whole ViTDet"):
        evaluate(dense, Settings(vid, {"base": vivit}))
    with pytest.raises(CheckpointError, match="weights convert"):
        evaluate(dense, Settings(vid, {"base": tmp_path / "absent.safetensors"}))
    with pytest.raises(ConfigError, match="detection"):
        evaluate(dense, Settings(epic, {"base": weights}))
    with pytest.raises(ConfigError, match=r"--weights base=FILE"):
        evaluate(dense, Settings(vid, {}))
    with pytest.raises(ConfigError, match="does not use weights named 'r9'"):
        evaluate(dense, Settings(vid, {"base": weights, "r9": weights}))
    with pytest.raises(MissingFileError):
        evaluate(dense, Settings(tmp_path / "nowhere", {"base": weights}))
    mot = miniatures.mot(tmp_path / "mot")
    with pytest.raises(ConfigError, match="30 classes, the data has 1"):
        evaluate(dense, Settings(mot, {"base": weights}))
    clips = miniatures.kinetics(tmp_path / "kinetics")
    with pytest.raises(ConfigError, match="97 classes, the data has 400"):
        evaluate(
            experiment_from_options("vivit", ["dense"], None, None, None),
            Settings(clips, {"base": vivit}),
        )
    with pytest.raises(ConfigError, match="patches of 16 px: choose 64"):
        evaluate(dense, Settings(vid, {"base": weights}, size=70))
    with pytest.raises(ConfigError, match="patches of 8 px: choose 8"):
        evaluate(
            experiment_from_options("vivit", ["dense"], None, None, 5),
            Settings(epic, {"base": vivit}, size=5),
        )
    with pytest.raises(ConfigError, match="needs to know how many"):
        experiment_from_options("vitdet", ["paper"], None, None, None)
    with pytest.raises(ConfigError, match="give its cost"):
        experiment_from_options("vitdet", ["skip"], None, None, None)
    with pytest.raises(ConfigError, match="percentage"):
        experiment_from_options("vitdet", ["paper"], ["a few"], None, None)
    with pytest.raises(ConfigError, match="are for eventful models"):
        experiment_from_options("vitdet", None, ["4"], None, None)
    with pytest.raises(ConfigError, match="--device is cpu, cuda"):
        cli_settings(vid, [], Evaluation(device="abacus"))


def test_the_same_budget_twice_is_one_variant() -> None:
    made = experiment_from_options(
        "vitdet", ["paper"], ["4", "4", "12%", "12.0%"], [0.5, 0.5], None
    )
    assert [variant.budget for variant in made.variants] == ["r4", "f.12", "h0.5"]


def test_skipping_alone_costs_what_the_papers_rule_would(vid: Path, weights: Path) -> None:
    settings = Settings(vid, {"base": weights})
    (row,) = evaluate(experiment_from_options("vitdet", ["skip"], ["4"], None, None), settings).rows
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
