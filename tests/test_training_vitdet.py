"""Fine-tuning a detector on a miniature VID and DET: learn, stop, go on, evaluate, convert."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import eventful
import miniatures
from eventful.data import open_dataset
from eventful.errors import CheckpointError, ConfigError, NonFiniteError
from eventful.models.loading import load_model
from eventful.models.vitdet import ViTDet
from eventful.models.vitdet.model import detector_config
from eventful.train import checkpoints
from eventful.train.detector import (
    DetectorPlan,
    freeze,
    parameter_groups,
    score_dense,
    start_from,
    train_detector,
    training_frames,
)
from eventful.train.engine import Habits
from eventful.train.export import save_model
from eventful.train.frames import Augment, FrameExamples, at_most_per_class, flipped
from eventful.train.journal import read
from eventful.train.processes import Processes
from eventful.train.recipes import VID, Recipe

ALONE = Processes(0, 1, torch.device("cpu"))
QUICK = Recipe(epochs=2, batch=2, lr=1e-3, weight_decay=0.1, warmup=2, decay_epochs=(1,), clip=1.0)


def tiny(classes: int = 5, cascade: bool = False) -> ViTDet:
    torch.manual_seed(0)
    config = detector_config(
        classes, 64, cascade, "linear",
        trained_size=64, dim=16, depth=2, heads=2, window=2, global_blocks=(1,), pretrained_grid=4,
    )  # fmt: skip
    heads = replace(config.heads, hidden=64, convs=1, samples=32, score_threshold=0.01)
    return ViTDet(replace(config, channels=16, heads=heads, proposals=(50, 20), short_edge=64))


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = miniatures.imagenet(tmp_path_factory.mktemp("vid"))
    save_model(tiny(), root / "start.safetensors")
    return root


def plan(root: Path, **changes: object) -> DetectorPlan:
    made = DetectorPlan(root, also=("det_train",), val_split="val", val_frames=1)
    return replace(made, **changes)


def train(root: Path, out: Path, habits: Habits | None = None, **changes: object) -> ViTDet:
    recipe = replace(QUICK, **changes)
    return train_detector(
        plan(root), root / "start.safetensors", out, ALONE, recipe=recipe, habits=habits
    )


def test_the_published_settings() -> None:
    assert (VID.epochs, VID.batch, VID.lr, VID.weight_decay) == (5, 8, 1e-4, 0.1)
    assert [VID.rate(5000, epoch) for epoch in range(5)] == [1, 1, 0.1, 0.1, 0.1]
    assert VID.rate(499, 0) == 0.5
    assert VID.layer_decay == 1.0  # none is published


def test_training_stops_resumes_and_ends_with_the_same_weights(
    imagenet: Path, tmp_path: Path
) -> None:
    train(imagenet, tmp_path / "whole")
    # Four frames of VID and two images of DET: three steps an epoch.
    halves = tmp_path / "halves"
    train(imagenet, halves, Habits(save_every=2, keep=1, log_every=1, stop_after=2))
    train(imagenet, halves, Habits(save_every=2, keep=1, log_every=1, stop_after=5))
    assert [p.name for p in checkpoints.found(halves / "checkpoints")] == [
        "step_00000003.pt",  # the end of an epoch stays
        "step_00000004.pt",
    ]
    train(imagenet, halves, Habits(log_every=1))
    whole, again = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "halves")
    )
    start = load_file(imagenet / "start.safetensors")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    assert not torch.equal(whole["backbone.blocks.0.attn.qkv.weight"],
                           start["backbone.blocks.0.attn.qkv.weight"])  # fmt: skip
    rows = read(halves / "scalars.csv")
    assert [r["step"] for r in rows if r["name"] == "train/loss"] == list("123456")
    assert [r["step"] for r in rows if r["name"] == "val/coco_map50"] == ["3", "6"]
    rates = [float(r["value"]) for r in rows if r["name"] == "train/lr"]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-4, 1e-4, 1e-4])


def test_scores_lost_with_a_stopped_run_are_made_up_for(imagenet: Path, tmp_path: Path) -> None:
    train(imagenet, tmp_path, epochs=1)
    table = tmp_path / "scalars.csv"
    table.write_text("".join(x for x in table.open() if "val/" not in x))
    train(imagenet, tmp_path, epochs=1)
    assert any(row["name"] == "val/coco_map50" for row in read(table))


def test_a_detector_learns_and_is_the_same_dense_and_eventful(tmp_path: Path) -> None:
    """On MOTChallenge data: what is trained is found, and every token updated equals dense."""
    root = miniatures.mot(tmp_path / "mot", frames=3)
    save_model(tiny(), tmp_path / "start.safetensors")
    recipe = Recipe(epochs=20, batch=3, lr=2e-3, weight_decay=0.0, warmup=5, clip=5.0)
    made, run = DetectorPlan(root, augment=Augment(flip=0.0)), tmp_path / "run"
    train_detector(
        made, tmp_path / "start.safetensors", run, ALONE, recipe=recipe, habits=Habits(log_every=1)
    )
    losses = [float(r["value"]) for r in read(run / "scalars.csv") if r["name"] == "train/loss"]
    assert losses[-1] < 0.5 * losses[0]
    model, videos = load_model(run / "model.safetensors"), open_dataset(root, "val")
    assert model.config.heads.classes == 1
    assert score_dense(model, videos, ALONE)["coco_map50"] > 0.6
    stream = eventful.Stream(eventful.convert(model, eventful.Config.paper(eventful.TopR(16))))
    for frame in videos[0]:
        pixels, placement = model.prepare(frame.pixels)
        (got,), (expected,) = stream(pixels, [placement]), model(pixels, [placement])
        torch.testing.assert_close(got.boxes, expected.boxes, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(got.scores, expected.scores, atol=1e-4, rtol=1e-4)


def test_from_the_command_line(imagenet: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "eventful.cli", "train", "vitdet", "--json"),
        *("--data", str(imagenet), "--also", "det_train", "--val-split", "val"),
        *("--weights", str(imagenet / "start.safetensors"), "--out", str(tmp_path)),
        *("--epochs", "2", "--batch", "3", "--warmup", "0", "--decay-epoch", "1"),
        *("--workers", "1", "--val-frames", "1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["last"]["train/lr"] == pytest.approx(1e-5)
    assert 0 <= report["last"]["val/fgfa_map50"] <= 1
    assert load_model(report["model"]).config.heads.classes == 30
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["frames"] == 6
    assert settings["recipe"]["weight_decay"] == 0.1


def test_half_precision_trains(imagenet: Path, tmp_path: Path) -> None:
    train(imagenet, tmp_path, epochs=1, precision="bfloat16")
    state = load_file(tmp_path / "model.safetensors")
    assert all(value.dtype == torch.float32 for value in state.values())
    assert all(bool(value.isfinite().all()) for value in state.values())


def test_layers_of_other_classes_start_anew(imagenet: Path) -> None:
    model, report = start_from(imagenet / "start.safetensors", 30, size=96, drop_path=0.1)
    assert set(report.mismatched) == {
        "heads.stages.0.scores.weight", "heads.stages.0.scores.bias",
        "heads.stages.0.deltas.weight", "heads.stages.0.deltas.bias",
    }  # fmt: skip
    assert model.config.backbone.size == 96
    assert model.backbone.blocks[1].drop_path == 0.1
    kept = load_file(imagenet / "start.safetensors")["rpn.objectness.weight"]
    assert torch.equal(model.rpn.objectness.weight, kept)


def test_rates_fall_from_the_heads_to_the_embedding() -> None:
    model = tiny(cascade=True)
    freeze(model, "nothing")
    groups = parameter_groups(model, 0.5)
    assert [group["scale"] for group in groups] == [0.125, 0.25, 0.5, 1.0]
    grouped = sum(len(group["params"]) for group in groups)
    assert grouped == sum(not n.startswith("heads.mask") for n, _ in model.named_parameters())
    assert any(p is model.backbone.pos_embed for p in groups[0]["params"])
    freeze(model, "backbone")
    assert [group["scale"] for group in parameter_groups(model, 0.5)] == [1.0]


def test_frames_are_thinned_evenly_and_classes_capped(imagenet: Path) -> None:
    _, frames = training_frames(plan(imagenet, frames_per_video=2))
    assert [index for _, index in frames] == [0, 2, 0, 0]  # of four; then two images of DET
    images = open_dataset(imagenet, "det_train")
    assert len(images) == 2
    assert len(at_most_per_class(images, 1)) == 1


def test_a_mirrored_frame_keeps_its_boxes_on_the_object(imagenet: Path) -> None:
    videos = open_dataset(imagenet, "train")
    frame = videos[0].frame(1)
    (box,) = frame.boxes
    pixels, boxes = flipped(frame.pixels, torch.tensor([[box.x1, box.y1, box.x2, box.y2]]))
    x1, y1, x2, y2 = boxes[0].int().tolist()
    assert int(pixels[:, y1 + 1 : y2 - 1, x1 + 1 : x2 - 1].min()) > 200
    assert float(pixels[:, y1:y2, : x1 - 2].float().mean()) < 60


def test_examples_depend_on_number_and_epoch_alone(imagenet: Path) -> None:
    videos = open_dataset(imagenet, "train")
    frames = [(videos[0], index) for index in range(4)]
    data = FrameExamples(frames, 64, 48, Augment(0.5, (0.5, 1.0)), seed=3)
    first = [data[i] for i in range(4)]
    again = [data[i] for i in (3, 2, 1, 0)][::-1]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    data.epoch = 1
    assert not all(torch.equal(a[0], data[i][0]) for i, a in enumerate(first))
    for pixels, target, placement in first:
        assert pixels.shape == (3, 64, 64)
        assert target.boxes.shape == (1, 4)
        height, width = placement.content
        assert float(target.boxes[:, 2].max()) <= width
        assert float(target.boxes[:, 3].max()) <= height
        x1, y1, x2, y2 = target.boxes[0].round().int().tolist()
        inside = pixels[:, y1 + 2 : y2 - 2, x1 + 2 : x2 - 2]
        assert float(inside.min()) > 1.5  # white is 2.2 to 2.7, grey below 0
        assert float(pixels[:, height:].abs().sum() + pixels[:, :, width:].abs().sum()) == 0


def test_ignored_boxes_are_left_out(tmp_path: Path) -> None:
    videos = open_dataset(miniatures.mot(tmp_path, frames=1), "train")
    assert any(box.ignore for box in videos[0].boxes[0])
    _, target, _ = FrameExamples([(videos[0], 0)], 64, 64)[0]
    assert len(target.boxes) == 1


def test_what_cannot_be_trained_says_why(imagenet: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple"):
        train_detector(
            plan(imagenet), imagenet / "start.safetensors", tmp_path,
            Processes(0, 3, torch.device("cpu")), recipe=QUICK,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="freeze"):
        plan(imagenet, freeze="heads")
    with pytest.raises(NonFiniteError, match="step"):
        train(imagenet, tmp_path / "high", lr=1e30, clip=None, warmup=0, epochs=3)
    train(imagenet, tmp_path / "one", Habits(save_every=1, stop_after=1))
    with pytest.raises(CheckpointError, match="recipe"):
        train(imagenet, tmp_path / "one", seed=1)
