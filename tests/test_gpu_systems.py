"""The paper's two systems on a CUDA device: trained, evaluated and timed. `pytest -m gpu`."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import eventful
import miniatures
import tiny_models
from eventful.cli.app import app
from eventful.models.vitdet import Detections, Target, boxes
from eventful.models.vitdet.frames import Targets
from eventful.models.vitdet.losses import RPN_SAMPLING, box_losses, label_candidates, rpn_losses
from eventful.models.vitdet.regions import grouped_nms, roi_align
from test_vitdet_batches import SIZES, everyone, some_predictions, some_targets
from tolerances import BOXES, SCORES, limit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("full_precision"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
scores = pytest.mark.skipif(
    find_spec("faster_coco_eval") is None, reason="COCO's score needs the extra `eval`"
)


@pytest.fixture(scope="module")
def vid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = miniatures.imagenet(tmp_path_factory.mktemp("vid"), frames=5)
    tiny_models.write(tiny_models.detector(), root / "start.safetensors")
    return root


@pytest.fixture(scope="module")
def epic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = miniatures.epic(tmp_path_factory.mktemp("epic"), frames=True)
    tiny_models.write(tiny_models.recogniser(), root / "start.safetensors")
    return root


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def moved(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_regions_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    corner = torch.rand(400, 2) * 200
    boxes = torch.cat([corner, corner + torch.rand(400, 2) * 60], dim=1)
    scores, labels = torch.rand(400), torch.randint(0, 3, (400,))
    expected = grouped_nms(boxes, scores, labels, 0.5)
    got = grouped_nms(*moved("cuda", boxes, scores, labels), 0.5)
    assert torch.equal(got.cpu(), expected)
    maps = torch.randn(2, 8, 32, 32)
    rows = torch.randint(0, 2, (400,))
    wanted = roi_align(maps, boxes, rows, 7, 1 / 8)
    made = roi_align(maps.to("cuda", dtype), boxes.cuda(), rows.cuda(), 7, 1 / 8)
    bound = limit("library", dtype, "cuda")
    torch.testing.assert_close(made.float().cpu(), wanted, atol=bound, rtol=bound)


def same(got: Detections, wanted: Detections) -> None:
    torch.testing.assert_close(got.boxes, wanted.boxes, **BOXES)
    torch.testing.assert_close(got.scores, wanted.scores, **SCORES)


@pytest.mark.parametrize("placed", [False, True], ids=["pixels", "pixels and placements"])
@pytest.mark.parametrize("preset", ["fast", "exact", "paper"])
def test_a_whole_detector_streams(preset: str, placed: bool) -> None:
    """All of it is recorded: its heads do not ask the host how many objects there are."""
    model = tiny_models.detector().to("cuda").eval()
    config = eventful.Config.preset(preset, eventful.TopR(16), fallback=False)
    stream = eventful.Stream(eventful.convert(model, config))
    frame, place = model.prepare(torch.rand(3, 48, 64) * 255)
    more = ([place],) if placed else ()
    for _ in range(6):
        frame = frame + 0.5 * torch.randn_like(frame)
        with torch.no_grad():
            (wanted,) = model(frame, *more)
        (got,) = stream(frame, *more)
        same(got, wanted)
    if preset == "fast":
        works = [w for w in stream._executor.store.shapes.values() if w.recorded is not None]
        assert works
        assert all(work.recorded.blocks is None for work in works)


@pytest.mark.parametrize("preset", ["fast", "exact"])
def test_few_tokens_of_a_detector_are_those_of_the_cpu(preset: str) -> None:
    model = tiny_models.detector().eval()
    config = eventful.Config.preset(preset, eventful.TopR(5), fallback=False, scene_cut=None)
    here = eventful.Stream(eventful.convert(model.backbone, config))
    there_model = tiny_models.detector().cuda().eval()
    there = eventful.Stream(eventful.convert(there_model, config))
    frame = torch.randn(1, 3, 64, 64)
    for t in range(6):
        frame = frame + 0.3 * torch.randn_like(frame) * (torch.rand(1, 1, 64, 64) > 0.7)
        with torch.no_grad():
            (wanted,) = model.detect(model.pyramid(here(frame)), [(64, 64)])
        (got,) = there(frame.cuda())
        assert len(got.scores) == len(wanted.scores), t
        # Other rounding of the features, which the memory carries through six frames.
        torch.testing.assert_close(got.scores.cpu(), wanted.scores, atol=1e-3, rtol=1e-2)


def test_a_detector_in_bf16_finds_something() -> None:
    model = tiny_models.detector().to("cuda", torch.bfloat16).eval()
    stream = eventful.Stream(eventful.convert(model, eventful.Config.fast(eventful.TopR(4))))
    for _ in range(4):
        (found,) = stream(torch.randn(1, 3, 64, 64, device="cuda", dtype=torch.bfloat16))
        assert len(found.scores) > 0
        assert torch.isfinite(found.boxes).all()


def test_detectors_join_a_batch_late() -> None:
    model = tiny_models.detector().to("cuda").eval()
    config = eventful.Config.fast(eventful.TopR(16), fallback=False)
    batch = eventful.StreamBatch(eventful.convert(model, config))
    batch.join("a")
    frames = torch.randn(4, 2, 3, 64, 64, device="cuda")
    batch(frames[0, :1])
    batch.join("b")
    for pair in frames:
        found = batch(pair)
        with torch.no_grad():
            wanted = model(pair)
        assert len(found) == 2
        for got, expected in zip(found, wanted, strict=True):
            same(got, expected)


def on(device: str, seed: int = 0) -> list[Target]:
    return [target.to(torch.device(device)) for target in some_targets(seed)]


def test_losses_are_those_of_the_cpu() -> None:
    """With all proposals trained on; anchors are drawn by the chance of the device."""
    results = {}
    for device in ("cpu", "cuda"):
        model = everyone(tiny_models.detector()).to(device)
        frames = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)).to(device)
        found = model.losses(frames, on(device))
        torch.stack(list(found.values())).sum().backward()
        results[device] = {name: found[name].detach().cpu() for name in ("class", "box")}
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for name, wanted in results["cpu"].items():
        bound = limit("library", device="cuda")
        torch.testing.assert_close(results["cuda"][name], wanted, atol=0, rtol=bound)


def test_proposals_of_a_batch_are_those_of_the_cpu() -> None:
    rpn, here, there = tiny_models.detector().rpn.train(), some_predictions(0), some_predictions(0)
    for parts in (there.anchors, there.logits, there.codes):
        parts[:] = moved("cuda", *parts)
    wanted = rpn.propose(here, torch.tensor(SIZES))
    got = rpn.propose(there, torch.tensor(SIZES, device="cuda"))
    assert torch.equal(got.valid.cpu(), wanted.valid)
    torch.testing.assert_close(got.boxes.cpu(), wanted.boxes, **BOXES)


def test_labels_and_losses_do_not_wait_for_the_device() -> None:
    found, given = some_predictions(0), on("cuda")
    for parts in (found.anchors, found.logits, found.codes):
        parts[:] = moved("cuda", *parts)
    corners = torch.rand(4, 50, 2, device="cuda") * 40
    proposed = boxes.Padded(
        torch.cat([corners, corners + 20], dim=2), torch.rand(4, 50, device="cuda") > 0.2
    )
    logits, codes = torch.randn(64, 6, device="cuda"), torch.zeros(64, 5, 4, device="cuda")
    learned = [logits, codes, *found.logits, *found.codes]
    for tensor in learned:
        tensor.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        targets = Targets.of(given, torch.device("cuda"))
        losses = rpn_losses(found, targets)
        sampling = replace(RPN_SAMPLING, count=16, low=0.5, high=0.5, rescue=False)
        sampled = label_candidates(proposed, targets, sampling, 5)
        losses |= box_losses(logits, codes, sampled, boxes.BoxCoder(), loss="giou")
        torch.stack(list(losses.values())).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(tensor.grad is not None for tensor in learned)
    assert all(bool(loss.isfinite()) for loss in losses.values())


def test_training_a_detector_and_going_on(vid: Path, tmp_path: Path) -> None:
    command = [
        *("train", "vitdet", "--data", vid, "--weights", vid / "start.safetensors"),
        *("--epochs", 1, "--batch", 2, "--device", "cuda", "--precision", "bfloat16"),
    ]
    invoke(*command, "--out", tmp_path / "a")
    made = load_file(tmp_path / "a/model.safetensors")
    start = load_file(vid / "start.safetensors")
    assert all(torch.isfinite(value).all() for value in made.values())
    assert any(not torch.equal(made[key], start[key]) for key in made)
    invoke(*command, "--out", tmp_path / "a")  # done: nothing left to do
    again = load_file(tmp_path / "a/model.safetensors")
    assert all(torch.equal(made[key], again[key]) for key in made)


def test_tuning_the_temporal_model(epic: Path, tmp_path: Path) -> None:
    command = [
        *("train", "vivit", "--data", epic, "--weights", epic / "start.safetensors", "--r", 6),
        *("--cache", tmp_path / "cache", "--out", tmp_path / "run", "--epochs", 1, "--batch", 2),
        *("--temporal-views", 1, "--spatial-views", 1, "--device", "cuda"),
    ]
    invoke(*command)
    scores = json.loads((tmp_path / "run/scores.json").read_text())
    assert scores
    made = load_file(tmp_path / "run/model.safetensors")
    start = load_file(epic / "start.safetensors")
    assert torch.equal(made["spatial.class_token"], start["spatial.class_token"])
    assert not torch.equal(made["classifier.weight"], start["classifier.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@scores
def test_evaluation_by_one_worker_and_by_two(vid: Path, tmp_path: Path, dtype: str) -> None:
    reports = {}
    for workers in (1, 2):
        text = invoke(
            *("evaluate", "vitdet", "--data", vid, "--weights", vid / "start.safetensors"),
            *("--preset", "dense", "--preset", "exact", "--preset", "paper", "--preset", "skip"),
            *("--r", 4, "--device", "cuda", "--dtype", dtype, "--workers", workers),
            *("--out", tmp_path / str(workers), "--json"),
        )
        reports[workers] = json.loads(text)["rows"]
    assert reports[1] == reports[2]
    dense, exact, *_ = reports[1]
    assert exact["operations"] < dense["operations"]


@scores
def test_accuracy_is_that_of_the_cpu(epic: Path, vid: Path) -> None:
    for kind, data in (("vitdet", vid), ("vivit", epic)):
        command = [
            *("evaluate", kind, "--data", data, "--weights", data / "start.safetensors"),
            *("--preset", "dense", "--preset", "paper", "--r", 4, "--json"),
        ]
        here = json.loads(invoke(*command, "--device", "cpu"))["rows"]
        there = json.loads(invoke(*command, "--device", "cuda"))["rows"]
        for a, b in zip(here, there, strict=True):
            assert a["operations"] == pytest.approx(b["operations"])
            for name in ("coco_map50", "top1"):
                assert (a[name] is None) == (b[name] is None)
                assert a[name] is None or a[name] == pytest.approx(b[name], abs=0.5)


def test_runtimes(vid: Path, epic: Path) -> None:
    text = invoke(
        *("bench", "runtime", "--size", 1024, "--device", "cuda", "--dtype", "bfloat16"),
        *(
            "--no-compile",
            "--frames",
            2,
            "--json",
            "--weights",
            f"base={vid / 'start.safetensors'}",
        ),
    )
    rows = json.loads(text)["rows"]
    assert {"Base model", "Temporal", "fast", "exact"} <= {row["label"] for row in rows}
    assert any(row["label"].startswith("Base model, ") for row in rows)


def test_recorded_steps_outlive_a_region_of_autocast() -> None:
    """Autocast drops its cast weights when a region ends; a graph must not have read them."""
    model = tiny_models.detector().cuda().eval()
    config = eventful.Config.fast(eventful.TopR(16), fallback=False)
    stream = eventful.Stream(eventful.convert(model.backbone, config))
    frames = torch.randn(8, 1, 3, 64, 64, device="cuda")
    for part in (frames[:5], frames[5:]):
        with torch.autocast("cuda", torch.bfloat16):
            for frame in part:
                got = stream(frame)
                with torch.no_grad():
                    wanted = model.backbone(frame)
                # Far from rounding: memory that was freed and overwritten shows as NaN.
                torch.testing.assert_close(got, wanted, atol=0.1, rtol=0.1)
        torch.empty(1 << 22, device="cuda").fill_(torch.nan)  # over what was freed


def test_a_stream_that_ends_gives_its_slot_back() -> None:
    model = eventful.convert(
        tiny_models.detector().cuda().eval(),
        eventful.Config.fast(eventful.TopR(4), fallback=False),
    )
    for _ in range(3):
        stream = eventful.Stream(model)
        for _ in range(5):
            stream(torch.randn(1, 3, 64, 64, device="cuda"))
        pool = stream._executor.store.pool
        del stream
        gc.collect()
        assert pool.capacity == 1
