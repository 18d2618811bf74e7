"""Fine-tuning a detector on a miniature VID and DET: learn, stop, go on, evaluate, convert."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import eventful
import miniatures
from commands import here  # noqa: F401
from eventful.errors import CheckpointError, ConfigError, DamagedMediaError, NonFiniteError
from eventful.models.loading import load_model
from eventful.models.saving import save_model
from eventful.models.vitdet import ViTDet, vitdet_b
from eventful.models.vitdet.model import detector_config
from eventful.paper.data import Problems, open_dataset
from eventful.paper.train import checkpoints
from eventful.paper.train.detector import (
    DetectorPlan,
    faster_rcnn,
    freeze,
    parameter_groups,
    score_dense,
    start_from,
    train_detector,
    training_frames,
)
from eventful.paper.train.engine import LoopOptions
from eventful.paper.train.frames import Augment, FrameExamples, at_most_per_class, collate, flipped
from eventful.paper.train.journal import read
from eventful.paper.train.processes import Processes
from eventful.paper.train.recipes import VID, Recipe
from tolerances import BOXES, SCORES
from torchrun import pair

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


def train(root: Path, out: Path, options: LoopOptions | None = None, **changes: object) -> ViTDet:
    recipe = replace(QUICK, **changes)
    return train_detector(
        plan(root), root / "start.safetensors", out, ALONE, recipe=recipe, options=options
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
    train(imagenet, halves, LoopOptions(save_every=2, keep=1, log_every=1, stop_after=2))
    train(imagenet, halves, LoopOptions(save_every=2, keep=1, log_every=1, stop_after=5))
    assert [p.name for p in checkpoints.found(halves / "checkpoints")] == [
        "step_00000003.pt",  # the end of an epoch stays
        "step_00000004.pt",
    ]
    train(imagenet, halves, LoopOptions(log_every=1, workers=1))
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
        made,
        tmp_path / "start.safetensors",
        run,
        ALONE,
        recipe=recipe,
        options=LoopOptions(log_every=1),
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
        torch.testing.assert_close(got.boxes, expected.boxes, **BOXES)
        torch.testing.assert_close(got.scores, expected.scores, **SCORES)


def test_from_the_command_line(imagenet: Path, tmp_path: Path, here) -> None:
    done = here(
        *("train", "vitdet", "--json"),
        *("--data", str(imagenet), "--also", "det_train", "--val-split", "val"),
        *("--weights", str(imagenet / "start.safetensors"), "--out", str(tmp_path)),
        *("--epochs", "2", "--batch", "3", "--warmup", "0", "--decay-epoch", "1"),
        *("--workers", "1", "--val-frames", "1"),
    )
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


def test_a_mask_head_stays_only_with_its_classes(tmp_path: Path) -> None:
    save_model(tiny(5, cascade=True), tmp_path / "start.safetensors")
    same, report = start_from(tmp_path / "start.safetensors", 5)
    assert same.heads.mask is not None
    assert report.complete
    other, report = start_from(tmp_path / "start.safetensors", 7)
    assert other.heads.mask is None
    assert all(key.startswith("heads.mask.") for key in report.unexpected)
    assert all(".scores." in key for key in report.mismatched)  # boxes are shared by the classes


def test_a_faster_rcnn_starts_from_a_cascade(tmp_path: Path) -> None:
    """As the paper did: COCO's weights are those of a cascade, its VID detector has one stage."""
    cascade = tiny(5, cascade=True)
    save_model(cascade, tmp_path / "start.safetensors")
    model, report = start_from(tmp_path / "start.safetensors", 30, heads="faster")
    published = detector_config(30, 64, False, "bicubic").heads
    assert model.config.heads == replace(published, hidden=64, convs=1)
    assert model.config.backbone.rel_pos_resize == "bicubic"
    assert (model.config.proposals, model.config.short_side) == ((1000, 300), 40)
    assert torch.equal(model.heads.stages[0].fc.weight, cascade.heads.stages[0].fc.weight)
    assert torch.equal(model.pyramid.p2[0].weight, cascade.pyramid.p2[0].weight)
    assert not report.missing
    assert {key.rpartition(".")[0] for key in report.mismatched} == {
        "heads.stages.0.scores",
        "heads.stages.0.deltas",
    }
    assert all(key.startswith(("heads.stages.", "heads.mask.")) for key in report.unexpected)
    with torch.device("meta"):
        coco, vid = vitdet_b(80, cascade=True).config, vitdet_b(30).config
    assert replace(faster_rcnn(coco), heads=vid.heads) == vid
    assert faster_rcnn(coco).heads == replace(vid.heads, classes=80)
    with pytest.raises(ConfigError, match="faster"):
        plan(tmp_path, heads="slower")


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
    pixels = frame.pixels.flip(-1)
    boxes = flipped(torch.tensor([[box.x1, box.y1, box.x2, box.y2]]), pixels.shape[-1])
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


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_ignored_boxes_are_kept_apart(flip: float, tmp_path: Path) -> None:
    videos = open_dataset(miniatures.mot(tmp_path, frames=1), "train")
    (spared,) = (box for box in videos[0].boxes[0] if box.ignore)
    data = FrameExamples([(videos[0], 0)], 64, 48, Augment(flip))
    _, target, place = data[0]
    assert place.content == place.original == (48, 64)
    assert len(target.boxes) == len(target.labels) == 1
    x1, x2 = (64 - spared.x2, 64 - spared.x1) if flip else (spared.x1, spared.x2)
    assert target.ignored.tolist() == [[x1, spared.y1, x2, spared.y2]]
    moved = collate([data[0]] * 2).to(torch.device("meta"))
    assert all(target.ignored.is_meta for target in moved.targets)


def test_a_crowd_of_coco_is_ignored_where_it_is_and_nowhere_else(tmp_path: Path) -> None:
    root = miniatures.coco(tmp_path, videos=1, frames=1)
    table = root / "annotations/val.json"
    content = json.loads(table.read_text())
    crowd = {"id": 9, "image_id": 0, "bbox": [30, 10, 20, 30], "category_id": 2, "iscrowd": 1}
    content["annotations"].append(crowd)
    table.write_text(json.dumps(content))
    videos = open_dataset(root, "val")
    _, target, _ = FrameExamples([(videos[0], 0)], 64, 48, Augment(0.0))[0]
    assert target.boxes.tolist() == [[4.0, 8.0, 24.0, 28.0]]
    assert target.ignored.tolist() == [[30.0, 10.0, 50.0, 40.0]]


def test_a_frame_that_cannot_be_read_is_replaced_where_problems_are_noted(tmp_path: Path) -> None:
    videos = open_dataset(miniatures.mot(tmp_path, frames=3), "train")
    frames = [(videos[0], index) for index in range(3)]
    broken = next(tmp_path.glob(f"train/{videos[0].name}/img1/000002.jpg"))
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(DamagedMediaError, match="000002"):
        FrameExamples(frames, 64, 48)[1]
    problems = Problems()
    data = FrameExamples(frames, 64, 48, Augment(0.0), on_problem=problems)
    with pytest.warns(UserWarning, match="000002"):
        taken = data[1]
    assert torch.equal(taken[0], data[2][0])
    assert len(problems.damaged) == 1


PAIR = """
import sys
from pathlib import Path
from eventful.paper.train.detector import DetectorPlan, train_detector
from eventful.paper.train.engine import LoopOptions
from eventful.paper.train.processes import joined
from eventful.paper.train.recipes import Recipe

root, out = Path(sys.argv[1]), Path(sys.argv[2])
plan = DetectorPlan(root, also=("det_train",))
recipe = Recipe(epochs=2, batch=2, lr=1e-3, weight_decay=0.1, warmup=2, decay_epochs=(1,), clip=1.0)
with joined("cpu") as processes:
    assert processes.world == 2
    for name, stop in (("whole", None), ("halves", 2), ("halves", None), ("moved", 2)):
        options = LoopOptions(save_every=1, log_every=1, stop_after=stop)
        train_detector(plan, root / "cascade.safetensors", out / name, processes, recipe=recipe,
                       options=options)
"""


@pytest.mark.slow
def test_two_processes_train_stop_and_go_on_as_two_or_as_one(
    imagenet: Path, tmp_path: Path
) -> None:
    """With a mask head, which learns nothing: its parameters must not be waited for."""
    save_model(tiny(30, cascade=True), imagenet / "cascade.safetensors")
    (tmp_path / "pair.py").write_text(PAIR)
    pair(tmp_path / "pair.py", imagenet, tmp_path)

    start = load_file(imagenet / "cascade.safetensors")
    whole, halves = (load_file(tmp_path / f"{n}/model.safetensors") for n in ("whole", "halves"))
    assert all(torch.equal(whole[key], halves[key]) for key in whole)
    masks = [key for key in whole if key.startswith("heads.mask.")]
    assert masks
    assert all(torch.equal(start[key], whole[key]) for key in masks)
    assert not torch.equal(start["rpn.objectness.weight"], whole["rpn.objectness.weight"])

    train_detector(
        DetectorPlan(imagenet, also=("det_train",)),
        imagenet / "cascade.safetensors",
        tmp_path / "moved",
        ALONE,
        recipe=QUICK,
        options=LoopOptions(log_every=1),
    )
    scalars = {name: read(tmp_path / name / "scalars.csv") for name in ("whole", "moved")}
    losses = {
        name: [(row["step"], row["value"]) for row in rows if row["name"] == "train/loss"]
        for name, rows in scalars.items()
    }
    assert [step for step, _ in losses["moved"]] == list("123456")
    assert losses["moved"][:2] == losses["whole"][:2]
    assert losses["moved"][2:] != losses["whole"][2:]  # other chance, so other candidates
    ended = load_file(tmp_path / "moved/model.safetensors")
    assert all(bool(value.isfinite().all()) for value in ended.values())


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
    train(imagenet, tmp_path / "one", LoopOptions(save_every=1, stop_after=1))
    with pytest.raises(CheckpointError, match=r"recipe\.seed \(0 there, 1 here\)"):
        train(imagenet, tmp_path / "one", seed=1)
