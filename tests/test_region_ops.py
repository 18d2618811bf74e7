"""NMS and RoIAlign of fixed shapes: kernels against the reference, the reference against laws."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import pytest
import torch
from torch import Tensor

import eventful
from backends import DEVICE, also, backends, close, kinds, make, poison  # noqa: F401
from eventful import ops
from eventful.ops import reference


def some_boxes(*shape: int, side: float = 40.0, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    corner = 100 * torch.rand(*shape, 2, generator=draw)
    return torch.cat([corner, corner + side * torch.rand(*shape, 2, generator=draw)], dim=-1)


def greedy(boxes: Tensor, valid: list[bool], groups: list[int], threshold: float) -> list[int]:
    """The definition, one box after the other."""
    overlap, kept = ops.iou(boxes, boxes), []
    for place, it in enumerate(valid):
        near = (k for k in kept if groups[k] == groups[place])
        if it and all(float(overlap[k, place]) <= threshold for k in near):
            kept.append(place)
    return kept


CASES = [
    "crowded",
    "chain",
    *(also(name) for name in ("random", "all equal", "empty", "none valid")),
]


def case_of(case: str, sets: int, count: int) -> tuple[Tensor, Tensor]:
    boxes = some_boxes(sets, count, side=150.0 if case == "crowded" else 40.0)
    valid = torch.rand(sets, count, generator=torch.Generator().manual_seed(1)) > 0.2
    if case == "all equal":
        boxes[:] = boxes[:, :1]
    elif case == "empty":
        boxes[:, ::2, 2:] = boxes[:, ::2, :2]
        boxes[-1] = 0
    elif case == "none valid":
        valid[-1] = False
    elif case == "chain":  # each suppresses the next one alone: as many rounds as boxes
        x = 4.0 * torch.arange(count)
        zero = torch.zeros(count)
        boxes[:] = torch.stack([x, zero, x + 10, zero + 10], dim=1)
        valid[:] = True
    return boxes, valid


@backends("suppress", independent=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("sets", "count"), [(3, 70), also(1, 1), also(2, 32), also(2, 600)])
@pytest.mark.parametrize("threshold", [0.3, also(0.7), also(0.0)])
def test_suppress_is_greedy(backend, case, sets, count, threshold, poison):
    boxes, valid = case_of(case, sets, count)
    with eventful.use_backend(backend):
        got = ops.suppress(boxes.to(DEVICE), valid.to(DEVICE), threshold)
    assert got.dtype == torch.bool
    for part, mask, row in zip(boxes, valid.tolist(), got.cpu(), strict=True):
        expected = greedy(part, mask, [0] * count, threshold)
        assert row.nonzero()[:, 0].tolist() == expected


@backends("keep_apart", independent=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("images", "total", "limit"), [(3, 70, 9), also(2, 70, 100), also(2, 600, 40)]
)
@pytest.mark.parametrize("classes", [also(1), 4])
def test_keep_apart_is_greedy_until_enough(
    backend, case, images, total, limit, classes, poison, monkeypatch
):
    monkeypatch.setattr(reference.regions, "_CHUNK", 16)
    boxes, _ = case_of(case, images, total)
    groups = torch.randint(classes, (images, total), generator=torch.Generator().manual_seed(2))
    count = torch.tensor([total - 3, 0, total][:images] if case != "none valid" else [0] * images)
    with eventful.use_backend(backend):
        index, found = ops.keep_apart(*(t.to(DEVICE) for t in (boxes, groups, count)), 0.3, limit)
    assert index.shape == (images, limit)
    for image, number in enumerate(count.tolist()):
        valid = [place < number for place in range(total)]
        expected = greedy(boxes[image], valid, groups[image].tolist(), 0.3)[:limit]
        assert int(found[image]) == len(expected)
        assert index[image].tolist() == expected + [0] * (limit - len(expected))


@backends("align_regions")
@kinds
@pytest.mark.parametrize(("channels", "output"), [(5, 2), also(16, 7), also(130, 14)])
@pytest.mark.parametrize("levels", [also(1), 4])
def test_align_regions(backend, kind, channels, output, levels, poison):
    maps = tuple(
        make(2, 24 // 2**i + 1, 31 // 2**i + 1, channels, kind=kind) for i in range(levels)
    )
    scales = tuple(0.25 / 2**i for i in range(levels))
    boxes = some_boxes(2, 9, side=40.0).to(DEVICE)
    boxes[0, 0] = torch.tensor([-40.0, -30.0, -5.0, 20.0])
    boxes[0, 1] = torch.tensor([3.0, 3.0, 3.0, 9.0])
    boxes[0, 2] = torch.nan
    boxes[1, 0, 2] = torch.inf
    boxes[1, 1] = torch.tensor([110.0, 80.0, 150.0, 110.0])
    level = torch.arange(18, device=DEVICE).reshape(2, 9) % (levels + 1) - 1
    level[0, 2] = level[1, 0] = 0
    expected = reference.align_regions(maps, scales, boxes, level, output)
    assert not expected[0].any()
    assert expected.float().norm() > 1
    with eventful.use_backend(backend):
        got = ops.align_regions(maps, scales, boxes, level, output)
    assert got.shape == (18, output, output, channels)
    assert got.dtype == kind
    close(got, expected, kind)
    assert not got[(level.flatten() < 0)].any()


@backends("align_regions")
def test_images_of_a_map_may_lie_apart(backend, poison):
    """As in the memory of a batch of streams, where other levels lie between them."""
    held = make(2, 6 * 7 + 3 * 4, 8)
    maps = (held[:, :42].view(2, 6, 7, 8), held[:, 42:].view(2, 3, 4, 8))
    boxes, level = some_boxes(2, 3, side=30.0).to(DEVICE), torch.tensor([[0, 1, 0], [1, 0, 1]])
    boxes, level = 0.2 * boxes, level.to(DEVICE)
    expected = reference.align_regions(maps, (0.25, 0.125), boxes, level, 2)
    whole = tuple(part.contiguous() for part in maps)
    assert torch.equal(expected, reference.align_regions(whole, (0.25, 0.125), boxes, level, 2))
    assert expected[3:].float().norm() > 1
    with eventful.use_backend(backend):
        got = ops.align_regions(maps, (0.25, 0.125), boxes, level, 2)
    close(got, expected, torch.float32)


@backends("align_regions", independent=True)
def test_a_region_of_a_constant_map_is_constant(backend):
    maps = tuple(torch.full((1, 40, 40, 3), float(i), device=DEVICE) for i in range(1, 4))
    boxes = torch.tensor([[[8.0, 8.0, 40.0, 30.0]] * 3], device=DEVICE)
    level = torch.tensor([[2, 0, 1]], device=DEVICE)
    with eventful.use_backend(backend):
        got = ops.align_regions(maps, (0.25, 0.25, 0.25), boxes, level, 2)
    assert got.amin((1, 2, 3)).tolist() == pytest.approx([3.0, 1.0, 2.0], rel=1e-6)
    assert got.amax((1, 2, 3)).tolist() == pytest.approx([3.0, 1.0, 2.0], rel=1e-6)
