"""From predictions to boxes and from boxes to detections: kernels against the reference."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import eventful
from backends import DEVICE, also, backends, kinds, make, poison  # noqa: F401
from eventful import ops
from eventful.models.vitdet.boxes import Padded
from eventful.models.vitdet.heads import HeadConfig, RegionHeads
from eventful.models.vitdet.rpn import RPN, PredictionRows, Predictions, all_anchors
from eventful.models.vitdet.updated import pyramid_levels
from eventful.ops import reference
from test_region_ops import some_boxes
from tolerances import SCORES

CLOSE = {"atol": 1e-4, "rtol": 0, "equal_nan": True}  # pixels


def spoiled(values: Tensor, share: float, seed: int) -> Tensor:
    """Some of the numbers are NaN or infinite."""
    draw = torch.Generator().manual_seed(seed)
    chance = torch.rand(values.shape, generator=draw).to(values.device)
    for number, wrong in enumerate((torch.nan, torch.inf, -torch.inf)):
        values = values.masked_fill((chance - number * share).abs() < share / 2, wrong)
    return values


def predictions(levels: ops.MapLevels, case: str, kind: torch.dtype) -> Tensor:
    """(4, P, 15) of four streams."""
    rows = make(4, levels.pixels, 15, kind=kind)
    if case == "not finite":
        rows = spoiled(rows, 0.05, 0)
        rows[1, :, :3] = torch.nan
    elif case == "outside":
        rows[..., 3:] *= 30
    elif case == "ties":
        rows = rows.round()
    return rows


@backends("level_logits", "proposal_boxes")
@kinds
@pytest.mark.parametrize("case", ["not finite", also("outside"), also("ties")])
@pytest.mark.parametrize("grid", [(3, 2), also((6, 5))])
@pytest.mark.parametrize("slots", [[2, 1], also(None)])
def test_proposals(backend, case, grid, slots, kind, poison):
    levels = pyramid_levels(grid)
    rows, where = predictions(levels, case, kind), torch.device(DEVICE)
    own = None if slots is None else torch.tensor(slots, device=DEVICE)
    expected = reference.level_logits(rows, levels, own)
    with eventful.use_backend(backend):
        logits = ops.level_logits(rows, levels, own)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.nan_to_num(7e9), expected.nan_to_num(7e9))
    assert (logits[:, -1, 3 * math.prod(levels.sizes[-1]) :] == -torch.inf).all()

    top, index = logits.topk(40, dim=2)
    anchors = all_anchors(levels.sizes, where)
    sizes = torch.tensor([[40.0, 30.0], [48.0, 24.0], [9.0, 60.0], [48.0, 32.0]], device=DEVICE)
    given = (rows, top, index, anchors, levels, sizes[: len(logits)], own)
    wanted, real = reference.proposal_boxes(*given)
    with eventful.use_backend(backend):
        boxes, valid = ops.proposal_boxes(*given)
    assert torch.equal(valid, real)
    torch.testing.assert_close(boxes, wanted, **CLOSE)
    assert 0 < int(valid.sum()) < int(top.isfinite().sum())
    assert not boxes[~valid].any()


@backends("level_logits", "proposal_boxes", "best_boxes", independent=True)
@pytest.mark.parametrize("case", [also("not finite"), also("outside")])
def test_a_step_proposes_what_lists_of_levels_do(backend, case):
    levels, slots = pyramid_levels((4, 3)), torch.tensor([3, 1, 0], device=DEVICE)
    rows = predictions(levels, case, torch.float32)
    sizes = torch.tensor([[60.0, 30.0], [48.0, 40.0], [64.0, 48.0]], device=DEVICE)
    rpn = RPN(4, keep_before=(1, 60), keep_after=(1, 50)).eval()
    found = PredictionRows(rows, slots, levels)
    lists = Predictions(found.anchors, found.logits, found.codes)
    assert [part.shape[0] for part in lists.anchors] == [part.shape[1] for part in lists.logits]
    wanted = rpn.propose(lists, sizes)
    with eventful.use_backend(backend):
        got = rpn.propose(found, sizes)
    assert torch.equal(got.valid, wanted.valid)
    torch.testing.assert_close(got.boxes, wanted.boxes, **CLOSE)
    assert wanted.valid.any(dim=1).tolist() == [True, case == "outside", True]


@backends("best_boxes")
@pytest.mark.parametrize("case", ["ties", also("random"), also("none kept"), also("all equal")])
@pytest.mark.parametrize(
    ("total", "limit", "step"),
    [(70, 20, 32), *(also(*some, 512) for some in ((1200, 300), (1200, 2000), (512, 512), (1, 1)))],
)
def test_best_boxes(backend, case, total, limit, step, poison, monkeypatch):
    if backend == "triton":
        kernels = pytest.importorskip("eventful.ops.triton.proposals")
        monkeypatch.setattr(kernels, "_STEP", step)
    boxes, scores = some_boxes(2, total).to(DEVICE), make(2, total)
    kept = make(2, total, seed=1) > 0.6
    if case == "ties":
        scores = scores.round()
        scores[1, ::3] = -0.0
    elif case == "all equal":
        scores[:] = 2.0
    elif case == "none kept":
        kept[1] = False
    scores = scores.masked_fill(~kept, torch.nan)  # what is not kept may be anything
    wanted = reference.best_boxes(boxes, scores, kept, limit)
    with eventful.use_backend(backend):
        got = ops.best_boxes(boxes, scores, kept, limit)
    assert got[0].shape == (2, min(limit, total), 4)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@backends("best_boxes", independent=True)
def test_the_best_are_those_of_a_sort(backend):
    boxes, scores, kept = some_boxes(1, 50).to(DEVICE), make(1, 50).round(), make(1, 50) > -0.3
    with eventful.use_backend(backend):
        (got,), (valid,) = ops.best_boxes(boxes, scores, kept, 20)
    places = [place for place in range(50) if kept[0, place]]
    order = sorted(places, key=lambda place: -float(scores[0, place]))  # stable
    assert len(order) > 20
    assert valid.all()
    assert torch.equal(got, boxes[0, order[:20]])


@backends("region_levels")
@pytest.mark.parametrize(("first", "last"), [(2, 5), also(3, 4), also(0, 0)])
def test_region_levels(backend, first, last, poison):
    """Also one step of the rounding below and above the sides where the level changes."""
    sides = torch.tensor([0.0, 1.0, 7.0, 1000.0, 1e9, torch.nan, torch.inf])
    near = 224.0 * 2.0 ** torch.arange(-4, 4)
    near = torch.cat([near * (1 + step * 2.0**-20) for step in (-1, 0, 1)])
    sides = torch.cat([sides, near, -near[:3]])
    boxes = torch.stack([0 * sides, 0 * sides, sides, sides.abs()], dim=1).nan_to_num(
        torch.nan, torch.inf
    )
    boxes = torch.stack([boxes, boxes.flip(0)]).to(DEVICE)
    valid = make(2, len(sides)) > -1
    wanted = reference.region_levels(boxes, valid, first, last)
    assert set(wanted.flatten().tolist()) == {-1, *range(last - first + 1)}
    with eventful.use_backend(backend):
        got = ops.region_levels(boxes, valid, first, last)
    assert torch.equal(got, wanted)


WEIGHTS = (10.0, 10.0, 5.0, 5.0)


def head_outputs(
    case: str, stages: int, classes: int, shared: bool
) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, Tensor]]:
    """Logits, codes and regions of two images with 9 regions each."""
    logits = tuple(3 * make(18, classes + 1, seed=number) for number in range(stages))
    codes = 3 * make(18, 1 if shared else classes, 4)
    boxes, valid = some_boxes(2, 9).to(DEVICE), make(2, 9) > -0.5
    if case == "not finite":
        for number, part in enumerate((*logits, codes)):
            part[::2] = spoiled(part[::2], 0.02, number)
        boxes[0, 3] = torch.nan
        boxes[1, 5, 2] = torch.inf
    elif case == "nothing":
        for part in logits:
            part[:9, -1] = 50.0
        valid[1] = False
    elif case == "ties":
        logits = tuple(part.round() for part in logits)
        logits[0][3:9] = logits[0][3]
    elif case == "wild":
        codes = 100 * codes
    return logits, codes, (boxes, valid)


@backends("region_scores", "refine_boxes")
@pytest.mark.parametrize("case", ["not finite", also("nothing"), also("ties"), also("wild")])
@pytest.mark.parametrize(
    ("stages", "classes", "shared"),
    [(3, 5, True), (1, 30, False), also(2, 80, True), also(1, 1, False), also(1, 1, True)],
)
def test_region_scores(backend, case, stages, classes, shared, poison):
    logits, codes, regions = head_outputs(case, stages, classes, shared)
    # As if logits and codes were columns of one product.
    apart = torch.cat([*logits, codes.flatten(1)], dim=1)
    widths = [classes + 1] * stages + [codes[0].numel()]
    *parts, last = apart.split(widths, dim=1)
    sizes = torch.tensor([[60.0, 90.0], [120.0, 33.0]], device=DEVICE)
    given = (tuple(parts), last.unflatten(1, (-1, 4)), regions, WEIGHTS, sizes, 0.05)
    scores, boxes = reference.region_scores(*given)
    moved = reference.refine_boxes(regions[0], codes, WEIGHTS, sizes)
    with eventful.use_backend(backend):
        got = ops.region_scores(*given)
        refined = ops.refine_boxes(regions[0], given[1], WEIGHTS, sizes)
    assert torch.equal(got[0] > -torch.inf, scores > -torch.inf)
    torch.testing.assert_close(got[0], scores, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got[1], boxes, **CLOSE)
    torch.testing.assert_close(refined, moved, **CLOSE)
    order = scores.sort(dim=1, descending=True, stable=True)[1]
    assert torch.equal(got[0].sort(dim=1, descending=True, stable=True)[1], order)
    assert bool((scores > -torch.inf).any()) == (case != "nothing")


@backends("refine_boxes")
def test_a_side_grows_as_far_as_it_may(backend, poison):
    """To the last bits of it, and from nothing on."""
    growth = torch.cat([torch.linspace(-110, 5, 200), torch.tensor([-torch.inf, torch.inf, 0.0])])
    codes = torch.zeros(len(growth), 1, 4)
    codes[:, 0, 2], codes[:, 0, 3] = growth, growth.flip(0)
    boxes = torch.tensor([500.0, 400.0, 516.0, 408.0]).expand(1, len(growth), 4).contiguous()
    sizes = torch.tensor([[1000.0, 1100.0]], device=DEVICE)
    given = (boxes.to(DEVICE), codes.to(DEVICE), (1.0, 1.0, 1.0, 1.0), sizes)
    wanted = reference.refine_boxes(*given)
    with eventful.use_backend(backend):
        got = ops.refine_boxes(*given)
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert float((wanted[..., 2] - wanted[..., 0]).amax()) == pytest.approx(1000, abs=1e-2)


@backends("take_candidates", "take_found", independent=True)
@pytest.mark.parametrize(
    ("count", "shared"), [([200, 0, 240], True), ([1, 129, 128], False), also([0, 0, 0], True)]
)
def test_candidates_are_taken_in_order(backend, count, shared, poison):
    classes, regions = 5, 48
    total, draw = classes * regions, torch.Generator().manual_seed(0)
    boxes = some_boxes(3, regions if shared else total).to(DEVICE)
    scores = torch.rand(3, total, generator=draw).sort(dim=1, descending=True).values
    for image, number in enumerate(count):
        scores[image, number:] = -torch.inf
    scores = scores.to(DEVICE)
    order = torch.stack([torch.randperm(total, generator=draw) for _ in range(3)]).to(DEVICE)
    places, many = torch.tensor([[7, 0, 3], [0, 1, 0], [9, 11, 127]], device=DEVICE), [3, 0, 2]
    with eventful.use_backend(backend):
        taken, labels, number = ops.take_candidates(scores, order, boxes, classes, shared)
        found = ops.take_found(places, torch.tensor(many, device=DEVICE), taken, scores, labels)
    assert number.tolist() == count
    assert torch.equal(labels, order % classes)
    for image in range(3):
        rows = order[image] // classes if shared else order[image]
        assert torch.equal(taken[image], boxes[image, rows])
        held = places[image, : many[image]]
        for got, source in zip(found, (taken, scores, labels), strict=True):
            assert torch.equal(got[image, : many[image]], source[image, held])
            assert not got[image, many[image] :].any()


@backends("region_scores", "take_candidates", "take_found", independent=True)
@pytest.mark.parametrize("stages", [also(1), also(3)])
@torch.no_grad()
def test_heads_find_the_same(backend, stages):
    torch.manual_seed(0)
    config = HeadConfig(
        3, stages, shared_boxes=stages > 1, convs=0, hidden=8, score_threshold=0.2, detections=6
    )
    heads = RegionHeads(4, config).eval().to(DEVICE)
    for part in heads.parameters():
        part.normal_(std=0.3)
    maps = [make(2, 4, 16 // 2**level, 12 // 2**level) for level in range(4)]
    valid = torch.tensor([[True] * 3 + [False], [True] * 4], device=DEVICE)
    regions = Padded(0.4 * some_boxes(2, 4).to(DEVICE), valid)
    sizes = torch.tensor([[60.0, 30.0], [48.0, 40.0]], device=DEVICE)
    wanted = heads(maps, regions, sizes)
    with eventful.use_backend(backend):
        got = heads(maps, regions, sizes)
    assert got.counts.tolist() == wanted.counts.tolist()
    assert min(wanted.counts) > 0
    assert torch.equal(got.labels, wanted.labels)
    torch.testing.assert_close(got.boxes, wanted.boxes, **CLOSE)
    torch.testing.assert_close(got.scores, wanted.scores, **SCORES)


def test_gradients_go_through_the_reference():
    logits, codes, regions = head_outputs("random", 1, 5, False)
    sizes = torch.full((2, 2), 150.0, device=DEVICE)
    codes.requires_grad_()
    _, boxes = ops.region_scores((logits[0],), codes, regions, WEIGHTS, sizes, 0.05)
    boxes.sum().backward()
    assert codes.grad.any()
    for name, given in (
        ("region_scores", ((logits[0],), codes, regions, WEIGHTS, sizes, 0.05)),
        ("refine_boxes", (regions[0], codes, WEIGHTS, sizes)),
        ("take_candidates", (logits[0], logits[0].long(), boxes, 5, False)),
        ("take_found", (logits[0].long(), sizes, boxes, logits[0], logits[0])),
    ):
        reason = ops.why_not("triton", name, *given)
        assert reason is not None
        if DEVICE == "cuda":
            assert reason == "it has no gradients"
