"""A detector's heads on a CUDA device: no wait for the host, and one recording. `pytest -m gpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import eventful
import tiny_models
from eventful import ops
from eventful.models.vitdet import Detections, Found, Placement, ViTDet
from eventful.models.vitdet.rpn import all_anchors
from eventful.models.vitdet.updated import pyramid_levels
from eventful.ops import MapLevels, reference
from eventful.ops.reference.proposals import decoded_boxes
from test_fixed_heads import PLACES, crowded
from test_region_ops import some_boxes
from tolerances import BOXES, SCORES, limit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("full_precision"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same(got: Detections, wanted: Detections) -> None:
    assert got.labels.tolist() == wanted.labels.tolist()
    torch.testing.assert_close(got.boxes, wanted.boxes, **BOXES)
    torch.testing.assert_close(got.scores, wanted.scores, **SCORES)
    assert (got.masks is None) == (wanted.masks is None)
    if got.masks is not None:
        torch.testing.assert_close(got.masks, wanted.masks, **SCORES)


@pytest.mark.parametrize("side", [15.0, 60.0, 400.0])
def test_nms_at_its_real_size_is_that_of_the_cpu(side: float) -> None:
    """Five levels of 1000 boxes; kept until 100 are enough of 9000 in 30 classes."""
    boxes = some_boxes(10, 1000, side=side)
    valid = torch.rand(10, 1000) > 0.1
    wanted = reference.suppress(boxes, valid, 0.7)
    given = (boxes.cuda(), valid.cuda())
    with eventful.use_backend("triton"):
        ops.suppress(*given, 0.7)
        with no_waits():
            got = ops.suppress(*given, 0.7)
    assert torch.equal(got.cpu(), wanted)
    assert 0 < int(wanted.sum()) < int(valid.sum())

    boxes, groups = some_boxes(2, 9000, side=side), torch.randint(30, (2, 9000))
    for count in (torch.tensor([9000, 250]), torch.tensor([0, 33])):
        wanted, number = reference.keep_apart(boxes, groups, count, 0.3, 100)
        given = tuple(part.cuda() for part in (boxes, groups, count))
        with eventful.use_backend("triton"):
            ops.keep_apart(*given, 0.3, 100)
            with no_waits():
                got, found = ops.keep_apart(*given, 0.3, 100)
        assert found.tolist() == number.tolist()
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("output", [7, 14])
def test_regions_at_their_real_size_are_those_of_the_cpu(output: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    maps = tuple(torch.randn(2, side, side, 256).to(dtype) for side in (128, 64, 32, 16))
    scales = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
    boxes, level = some_boxes(2, 50, side=300.0), torch.randint(-1, 4, (2, 50))
    wanted = reference.align_regions(maps, scales, boxes, level, output)
    given = (tuple(part.cuda() for part in maps), scales, boxes.cuda(), level.cuda(), output)
    with eventful.use_backend("triton"):
        ops.align_regions(*given)
        with no_waits():
            got = ops.align_regions(*given)
    bound = limit("library", dtype, "cuda")
    torch.testing.assert_close(got.float().cpu(), wanted.float(), atol=bound, rtol=bound)


def on_device(values: object) -> object:
    """A copy of tensors, in tuples or alone, on the device."""
    if isinstance(values, tuple):
        return tuple(on_device(part) for part in values)
    return values.cuda() if isinstance(values, Tensor) else values


def served(name: str, *given: object) -> tuple[Tensor, ...]:
    """What the kernel of an operation gives, without a wait, brought back to the host."""
    moved = on_device(given)
    with eventful.use_backend("triton"):
        getattr(ops, name)(*moved)  # compiles
        with no_waits():
            found = getattr(ops, name)(*moved)
    return tuple(part.cpu() for part in (found if isinstance(found, tuple) else (found,)))


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_proposals_at_their_real_size_are_those_of_the_cpu(images: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    levels, slots = pyramid_levels((64, 64)), torch.arange(images).flip(0)
    rows = torch.randn(images, levels.pixels, 15).to(dtype)
    rows[0, ::7, 3] = torch.nan
    rows[0, ::11, 0] = torch.inf
    wanted = reference.level_logits(rows, levels, slots)
    (logits,) = served("level_logits", rows, levels, slots)
    assert torch.equal(logits, wanted)

    top, index = logits.topk(1000, dim=2)
    sizes = torch.tensor([[600.0, 1024.0], [1024.0, 768.0], [300.0, 500.0]])[:images]
    anchors = all_anchors(levels.sizes, torch.device("cpu"))
    given = (rows, top, index, anchors, levels, sizes, slots)
    wanted_boxes, wanted_valid = reference.proposal_boxes(*given)
    boxes, valid = served("proposal_boxes", *given)
    assert torch.equal(valid, wanted_valid)
    assert 0 < int(valid.sum()) < valid.numel()
    # A side is the sum of a middle and half a length, which may lie far outside the image.
    whole = decoded_boxes(rows, top, index, anchors, levels, slots)
    middle, half = (whole[..., :2] + whole[..., 2:]) / 2, (whole[..., 2:] - whole[..., :2]) / 2
    unit = torch.finfo(torch.float32).eps * (middle.abs() + half).repeat(1, 1, 1, 2)
    apart = (boxes - wanted_boxes).abs() / unit
    assert apart[valid].max() <= 2

    kept, scores = torch.rand(images, 5000) > 0.6, torch.randn(images, 5000).mul(50).round()
    given = (boxes.flatten(1, 2), scores, kept, 1000)
    wanted_best = reference.best_boxes(*given)
    for got, expected in zip(served("best_boxes", *given), wanted_best, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("stages", "classes"), [(1, 30), (3, 80)])
def test_candidates_at_their_real_size_are_those_of_the_cpu(
    images: int, stages: int, classes: int
) -> None:
    torch.manual_seed(0)
    boxes, valid = 8 * some_boxes(images, 1000, side=60.0), torch.rand(images, 1000) > 0.1
    boxes[0, 5] = torch.nan
    (level,) = served("region_levels", boxes, valid, 2, 5)
    apart = (level != reference.region_levels(boxes, valid, 2, 5)).sum()
    assert int(apart) <= 1  # a side at a bound may round to either level

    logits = tuple(4 * torch.randn(images * 1000, classes + 1) for _ in range(stages))
    logits[0][7, 3] = torch.nan
    codes = torch.randn(images * 1000, 1 if stages > 1 else classes, 4)
    weights, sizes = (10.0, 10.0, 5.0, 5.0), torch.tensor([[600.0, 1000.0]]).repeat(images, 1)
    (refined,) = served("refine_boxes", boxes, codes, weights, sizes)
    expected = reference.refine_boxes(boxes, codes, weights, sizes)
    torch.testing.assert_close(refined, expected, atol=2e-4, rtol=0, equal_nan=True)

    given = (logits, codes, (boxes, valid), weights, sizes, 0.05)
    wanted, wanted_boxes = reference.region_scores(*given)
    scores, found = served("region_scores", *given)
    differ = (scores > -torch.inf) != (wanted > -torch.inf)
    assert int(differ.sum()) <= 3  # next to the threshold
    torch.testing.assert_close(scores[~differ], wanted[~differ], **SCORES)
    torch.testing.assert_close(found, wanted_boxes, atol=2e-4, rtol=0, equal_nan=True)

    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    given = (ordered, order, found, classes, stages > 1)
    taken = served("take_candidates", *given)
    for got, expected in zip(taken, reference.take_candidates(*given), strict=True):
        torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)
    assert 0 < int(taken[2].min()) < ordered.shape[1]
    index, count = torch.randint(100, (images, 100)), torch.tensor([100, 0, 33])[:images]
    given = (index, count, taken[0], ordered, taken[1])
    for got, expected in zip(
        served("take_found", *given), reference.take_found(*given), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_maps_of_a_batch_are_read_where_they_lie() -> None:
    torch.manual_seed(0)
    levels = MapLevels(((64, 64), (32, 32)))
    held = torch.randn(3, levels.pixels, 256)
    maps = tuple(levels.part(held, level) for level in range(2))
    boxes, level = some_boxes(3, 40, side=100.0), torch.randint(-1, 2, (3, 40))
    wanted = reference.align_regions(maps, (1 / 4, 1 / 8), boxes, level, 7)
    there = held.cuda()
    given = tuple(levels.part(there, number) for number in range(2))
    assert ops.why_not("triton", "align_regions", given, (), boxes.cuda(), level.cuda(), 7) is None
    with eventful.use_backend("triton"):
        got = ops.align_regions(given, (1 / 4, 1 / 8), boxes.cuda(), level.cuda(), 7)
    bound = limit("library", torch.float32, "cuda")
    torch.testing.assert_close(got.cpu(), wanted, atol=bound, rtol=bound)


def recorded_time(work) -> float:
    """Milliseconds of a recorded call."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 10


def test_nms_and_the_order_are_quick(record_property) -> None:
    """About 0.1 ms is expected; the bound leaves room for other devices."""
    boxes, valid = some_boxes(5, 1000, side=60.0).cuda(), torch.ones(5, 1000).bool().cuda()
    groups, count = torch.randint(30, (1, 5000)).cuda(), torch.tensor([1000]).cuda()
    many, scores = boxes.reshape(1, 5000, 4), torch.randn(1, 5000).cuda()
    some = torch.rand(1, 5000).cuda() > 0.5
    times = {
        "suppress": recorded_time(lambda: ops.suppress(boxes, valid, 0.7)),
        "keep_apart": recorded_time(lambda: ops.keep_apart(many, groups, count, 0.5, 100)),
        "best_boxes": recorded_time(lambda: ops.best_boxes(many, scores, some, 1000)),
    }
    for name, ms in times.items():
        record_property(f"{name} ms", ms)
        print(f"{name}: {ms:.3f} ms")  # pytest -s shows it
    assert max(times.values()) < 1.0


def detector(cascade: bool) -> ViTDet:
    return crowded(cascade).cuda()


@pytest.mark.parametrize("cascade", [False, True], ids=["faster", "cascade"])
@pytest.mark.parametrize("places", [None, PLACES], ids=["pixels", "placements"])
@torch.no_grad()
def test_a_detector_does_not_wait(cascade: bool, places: list[Placement] | None) -> None:
    model, pixels = detector(cascade), torch.randn(2, 3, 96, 96, device="cuda")
    for _ in range(2):  # kernels compile
        wanted = list(model(pixels, places))
    with no_waits():
        found = model(pixels, places)
        assert len(found) == 2
    assert isinstance(found, Found)
    assert min(len(part) for part in found) >= 100
    for got, expected in zip(found, wanted, strict=True):
        same(got, expected)


def whole_recordings(stream) -> list[bool]:
    works = [work.recorded for work in stream._executor.store.shapes.values()]
    return [recorded.blocks is None for recorded in works if recorded is not None]


@pytest.mark.parametrize("cascade", [False, True], ids=["faster", "cascade"])
@pytest.mark.parametrize("placed", [False, True], ids=["pixels", "placements"])
def test_a_whole_detector_is_recorded(cascade: bool, placed: bool) -> None:
    """And finds what it finds when every kernel is launched anew, as with a hook."""
    config = eventful.Config.fast(eventful.TopR(9), fallback=False, scene_cut=None)
    recorded = eventful.Stream(eventful.convert(detector(cascade), config))
    launched_model = detector(cascade)
    launched_model.heads.register_forward_hook(lambda *_: None)
    launched = eventful.Stream(eventful.convert(launched_model, config))
    frame, more = torch.randn(1, 3, 96, 96, device="cuda"), (PLACES[:1],) if placed else ()
    results: list[tuple[Found, Found]] = []
    for _ in range(8):
        frame = frame + 0.3 * torch.randn_like(frame)
        results.append((recorded(frame, *more), launched(frame, *more)))
    assert whole_recordings(recorded)
    assert all(whole_recordings(recorded))
    assert not whole_recordings(launched)
    for got, wanted in results:  # read after later frames: outputs are copies
        assert len(got[0]) >= 100
        same(got[0], wanted[0])


def test_recorded_frames_do_not_wait() -> None:
    config = eventful.Config.fast(eventful.TopR(9), fallback=False, scene_cut=None)
    stream = eventful.Stream(eventful.convert(detector(False), config))
    frames = torch.randn(10, 1, 3, 96, 96, device="cuda")
    for frame in frames[:6]:
        stream(frame, PLACES[:1])
    assert whole_recordings(stream)
    assert all(whole_recordings(stream))
    outcomes = [flight.outcome for flight in stream._executor._pending]
    assert all(outcome.replayed and outcome.whole for outcome in outcomes)
    found = stream(frames[6], PLACES[:1])
    assert found._list is None
    assert len(found) == 1
    assert len(found[0]) >= 100


def test_placements_that_change_have_recordings_of_their_own() -> None:
    model = tiny_models.detector().cuda().eval()
    config = eventful.Config.fast(eventful.TopR(16), fallback=False)
    stream = eventful.Stream(eventful.convert(model, config))
    places = [Placement((48, 64), (48, 64)), Placement((30, 30), (64, 64))]
    for turn in range(12):
        frame, place = torch.randn(1, 3, 64, 64, device="cuda"), places[turn % 2]
        with torch.no_grad():
            (wanted,) = model(frame, [place])
        (got,) = stream(frame, [place])
        torch.testing.assert_close(got.boxes, wanted.boxes, **BOXES)
        torch.testing.assert_close(got.scores, wanted.scores, **SCORES)
    assert len(whole_recordings(stream)) == 2
    assert all(whole_recordings(stream))


def test_a_batch_is_recorded_whole() -> None:
    config = eventful.Config.fast(eventful.TopR(36), fallback=False, scene_cut=None)
    model = detector(False)
    batch = eventful.StreamBatch(eventful.convert(model, config))
    for name in "ab":
        batch.join(name)
    for _ in range(6):
        frames: Tensor = torch.randn(2, 3, 96, 96, device="cuda")
        found = batch(frames)
    assert all(whole_recordings(batch))
    with torch.no_grad():
        wanted = model(frames)
    for got, expected in zip(found, wanted, strict=True):
        assert abs(len(got) - len(expected)) <= 2  # other rounding, near the thresholds
        torch.testing.assert_close(got.boxes[:5], expected.boxes[:5], **BOXES)


def test_training_runs_through_the_regions() -> None:
    model = tiny_models.detector().cuda().train()
    target = tiny_models.Target(
        torch.tensor([[5.0, 5.0, 40.0, 40.0]], device="cuda"), torch.tensor([1], device="cuda")
    )
    losses = model.losses(torch.randn(1, 3, 64, 64, device="cuda"), [target])
    torch.stack(list(losses.values())).sum().backward()
    assert float(model.pyramid.p4[0].weight.grad.norm()) > 0
