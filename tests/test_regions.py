"""Boxes and regions against torchvision's Python code and onnxruntime's operators.

Where torchvision's compiled operators load, which is on a machine with a matching torch, regions
are compared with them too.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eventful import ops
from eventful.models.vitdet import boxes, regions
from eventful.surgery.adapters.torchvision_ops import compiled_ops
from eventful.surgery.libraries import load
from tolerances import BOXES, VALUES, limit


def random_boxes(count: int, size: float, seed: int = 0) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    corner = size * torch.rand(count, 2, generator=make)
    return torch.cat([corner, corner + 1 + size / 2 * torch.rand(count, 2, generator=make)], dim=1)


def greedy(given: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[int]:
    """NMS as it is defined, box by box: the oracle."""
    corners = given.double().tolist()
    kept: list[int] = []
    for index in sorted(range(len(corners)), key=lambda i: (-float(scores[i]), i)):
        if all(overlap(corners[index], corners[other]) <= threshold for other in kept):
            kept.append(index)
    return kept


def greedy_in_groups(
    given: torch.Tensor, scores: torch.Tensor, groups: torch.Tensor, threshold: float
) -> list[int]:
    """`greedy` within each group; the best of all groups first."""
    kept = []
    for group in groups.unique():
        members = (groups == group).nonzero()[:, 0]
        kept += [int(members[i]) for i in greedy(given[members], scores[members], threshold)]
    return sorted(kept, key=lambda index: (-float(scores[index]), index))


def overlap(a: list[float], b: list[float]) -> float:
    """Intersection over union."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union > 0 else 0.0


def test_boxes_are_coded_as_in_torchvision() -> None:
    theirs = load("torchvision.models.detection._utils")
    for weights in ((1.0, 1.0, 1.0, 1.0), (10.0, 10.0, 5.0, 5.0)):
        coder, other = boxes.BoxCoder(weights), theirs.BoxCoder(weights)
        reference, target = random_boxes(50, 200, 0), random_boxes(50, 200, 1)
        codes = coder.encode(reference, target)
        torch.testing.assert_close(codes, other.encode_single(target, reference))
        torch.testing.assert_close(coder.decode(reference, codes), target, **BOXES)
        wild = torch.randn(50, 3 * 4) * 20  # growth beyond the limit too
        torch.testing.assert_close(
            coder.decode(reference, wild.unflatten(1, (3, 4))).flatten(1),
            other.decode_single(wild, reference),
        )


def test_anchors_are_those_of_torchvision() -> None:
    theirs = load("torchvision.models.detection.anchor_utils")
    sizes, ratios = (32, 64, 128), (0.5, 1.0, 2.0)
    generator = theirs.AnchorGenerator(tuple((s,) for s in sizes), (ratios,) * len(sizes))
    cells = [boxes.cell_anchors(size, ratios) for size in sizes]
    for ours, rounded in zip(cells, generator.cell_anchors, strict=True):
        assert torch.equal(ours.round(), rounded)
        torch.testing.assert_close(boxes.area(ours), boxes.area(ours)[:1].expand(3))
    generator.cell_anchors = cells  # detectron2 does not round them
    grids, strides = [(5, 7), (3, 4), (2, 2)], [4, 8, 16]
    expected = generator.grid_anchors(grids, [[torch.tensor(s)] * 2 for s in strides])
    for ours, grid, stride, other in zip(cells, grids, strides, expected, strict=True):
        torch.testing.assert_close(boxes.grid_anchors(ours, grid, stride), other)


@pytest.mark.parametrize(("low", "high", "rescue"), [(0.3, 0.7, True), (0.5, 0.5, False)])
def test_matching_is_that_of_torchvision(low: float, high: float, rescue: bool) -> None:
    theirs = load("torchvision.models.detection._utils").Matcher(high, low, rescue)
    for seed in range(5):
        truth, candidates = random_boxes(4, 60, seed), random_boxes(300, 60, seed + 50)
        overlap = boxes.iou(truth, candidates)
        expected = theirs(overlap.clone())  # the object's row, -1 background, -2 ignored
        found = boxes.match(overlap, low, high, rescue=rescue)
        kinds = {0: -1, 1: 1, -1: -2}
        assert [kinds[int(label)] for label in found.label] == [
            min(int(row), 1) if row < 0 else 1 for row in expected
        ]
        matched = found.label == boxes.FOREGROUND
        assert torch.equal(found.index[matched], expected[matched])
    nothing = boxes.match(torch.zeros(0, 6), low, high, rescue=rescue)
    assert nothing.label.tolist() == [boxes.BACKGROUND] * 6


def test_overlaps_are_those_of_torchvision() -> None:
    theirs = load("torchvision.ops")
    a, b = random_boxes(20, 50, 0), random_boxes(20, 50, 1)
    torch.testing.assert_close(boxes.iou(a, b), theirs.box_iou(a, b))
    torch.testing.assert_close(boxes.giou_loss(a, b), theirs.generalized_box_iou_loss(a, b))
    empty = torch.tensor([[3.0, 3.0, 3.0, 3.0]])
    assert boxes.iou(empty, empty).item() == 0


def onnx_session(kind: str, names: list[str], opset: int, **attributes: object):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    helper, types = onnx.helper, onnx.TensorProto
    whole = {"batch_indices", "max_output_boxes_per_class"}
    inputs = [
        helper.make_tensor_value_info(name, types.INT64 if name in whole else types.FLOAT, None)
        for name in names
    ]
    made = types.INT64 if kind == "NonMaxSuppression" else types.FLOAT
    output = helper.make_tensor_value_info("out", made, None)
    graph = helper.make_graph(
        [helper.make_node(kind, names, ["out"], **attributes)], "g", inputs, [output]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    session = runtime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return lambda *values: session.run(None, dict(zip(names, values, strict=True)))[0]


DEGENERATE = torch.tensor(
    [
        [5.0, 5.0, 5.0, 20.0],  # no width
        [5.0, 5.0, 5.0, 5.0],  # a point
        [5.0, 5.0, 30.0, 30.0],
        [5.0, 5.0, 30.0, 30.0],  # the same again
        [-40.0, -40.0, -20.0, -20.0],  # outside
        [-10.0, -10.0, 90.0, 90.0],  # all around
        [60.0, 60.0, 61.0, 61.0],  # smaller than a pixel of the map
        [10.0, 12.0, 60.0, 14.0],  # flat
    ]
)
NAN, INF = float("nan"), float("inf")
UNREAL = torch.tensor(
    [
        [NAN, NAN, NAN, NAN],
        [5.0, 5.0, NAN, 30.0],
        [5.0, 5.0, INF, 30.0],
        [-INF, -INF, INF, INF],
        [5.0, 5.0, 30.0, 30.0],
        [6.0, 5.0, 30.0, 30.0],
        [3e38, 3e38, 3.4e38, 3.4e38],
    ]
)
BOX_CASES = {
    "random": random_boxes(120, 60, 3),
    "crowded": random_boxes(200, 8, 4),
    "identical": DEGENERATE[2:3].repeat(30, 1),
    "outside": random_boxes(30, 20, 7) + torch.tensor([90.0, -70.0, 90.0, -70.0]),
    "cut off": random_boxes(30, 60, 8) - 40,
    "empty": DEGENERATE[:2].repeat(3, 1),
    "degenerate": DEGENERATE,
    "one": DEGENERATE[2:3],
}


def scores_of(given: torch.Tensor, ties: str) -> torch.Tensor:
    scores = torch.rand(len(given), generator=torch.Generator().manual_seed(5))
    scores[:: 7 if ties == "some" else 1] = scores[0]  # the earlier box is the better
    return scores


@pytest.mark.parametrize("ties", ["some", "all"])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("case", [*BOX_CASES, "unreal"])
def test_nms_equals_onnxruntime(case: str, threshold: float, ties: str) -> None:
    given = BOX_CASES.get(case, UNREAL)
    scores = scores_of(given, ties)
    names = ["boxes", "scores", "max_output_boxes_per_class", "iou_threshold", "score_threshold"]
    theirs = onnx_session("NonMaxSuppression", names, 11)(
        given[None].numpy(),
        scores[None, None].numpy(),
        np.array([len(given)]),
        np.array([threshold], dtype=np.float32),
        np.array([-1.0], dtype=np.float32),
    )
    assert regions.nms_torch(given, scores, threshold).tolist() == theirs[:, 2].tolist()


@pytest.mark.parametrize("ties", ["some", "all"])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("case", BOX_CASES)
def test_nms_keeps_what_the_definition_keeps(case: str, threshold: float, ties: str) -> None:
    given = BOX_CASES[case]
    scores = scores_of(given, ties)
    expected = greedy(given, scores, threshold)
    assert regions.nms_torch(given, scores, threshold).tolist() == expected


@pytest.mark.parametrize("output", [7, 14])
@pytest.mark.parametrize("case", BOX_CASES)
def test_roi_align_equals_onnxruntime(case: str, output: int) -> None:
    given = BOX_CASES[case][:40]
    features = torch.randn(2, 3, 16, 21, generator=torch.Generator().manual_seed(6))
    images = torch.arange(len(given)) % 2
    theirs = onnx_session(
        "RoiAlign",
        ["X", "rois", "batch_indices"],
        16,
        output_height=output,
        output_width=output,
        sampling_ratio=0,
        spatial_scale=0.25,
        coordinate_transformation_mode="half_pixel",
    )(features.numpy(), given.numpy(), images.numpy())
    ours = ops.roi_align(features, given, images, output, 0.25)
    torch.testing.assert_close(ours, torch.from_numpy(theirs), **VALUES)


def test_regions_of_boxes_that_are_not_finite_are_empty() -> None:
    """onnxruntime refuses them; here they do no harm to the others."""
    features = torch.randn(1, 3, 16, 16)
    images = torch.zeros(len(UNREAL), dtype=torch.int64)
    found = ops.roi_align(features, UNREAL, images, 7, 0.25)
    fine = UNREAL.isfinite().all(dim=1)
    assert not found[~fine].any()
    alone = ops.roi_align(features, UNREAL[fine], images[fine], 7, 0.25)
    assert torch.equal(found[fine], alone)


def test_regions_without_boxes_and_gradients() -> None:
    features = torch.randn(1, 3, 8, 8, requires_grad=True)
    none = ops.roi_align(features, torch.zeros(0, 4), torch.zeros(0).long(), 7, 0.25)
    assert none.shape == (0, 3, 7, 7)
    assert regions.nms_torch(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []
    whole = torch.tensor([[0.0, 0.0, 32.0, 32.0]])
    ops.roi_align(features, whole, torch.zeros(1).long(), 7, 0.25).sum().backward()
    # Every bin's weights add up to one.
    assert features.grad is not None
    assert features.grad.sum() == pytest.approx(3 * 49, rel=limit("operation"))


def test_groups_do_not_suppress_each_other() -> None:
    pair = torch.tensor([[0.0, 0.0, 10.0, 10.0]]).expand(4, 4)
    kept = regions.grouped_nms(
        pair, torch.tensor([0.1, 0.4, 0.3, 0.2]), torch.tensor([0, 0, 1, 1]), 0.5
    )
    assert kept.tolist() == [1, 2]


@pytest.mark.parametrize("way", ["at once", "one by one", "compiled"])
def test_groups_are_suppressed_alike_in_every_way(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = 1000 * random_boxes(150, 1, 9) / 3  # fractions of pixels, far from the origin
    make = torch.Generator().manual_seed(10)
    groups = torch.randint(80, (150,), generator=make)
    scores = torch.rand(150, generator=make)
    scores[::5] = 0.5
    expected = greedy_in_groups(given, scores, groups, 0.3)
    assert len(expected) < 150
    monkeypatch.setattr(regions, "_AT_ONCE", {"at once": 150}.get(way, 10))
    if way == "compiled":

        def checked(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
            assert boxes.dtype == scores.dtype  # torchvision insists
            return torch.tensor(greedy(boxes, scores, threshold))

        monkeypatch.setattr(regions, "compiled_ops", lambda: SimpleNamespace(nms=checked))
    assert regions.grouped_nms(given, scores, groups, 0.3).tolist() == expected
    none = regions.grouped_nms(given[:0], scores[:0], groups[:0], 0.3)
    assert none.tolist() == []


def test_compiled_operators_are_used_where_they_load(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    fake = SimpleNamespace(
        nms=lambda *args: asked.append(args) or torch.tensor([0]),
        roi_align=lambda *args: asked.append(args) or torch.zeros(1, 3, 7, 7),
    )
    monkeypatch.setattr(regions, "compiled_ops", lambda: fake)
    features, box = torch.zeros(2, 3, 8, 8), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert regions.nms(box, torch.ones(1), 0.6).tolist() == [0]
    regions.roi_align(features, box, torch.tensor([1]), 7, 0.5)
    assert asked[0][2] == 0.6
    assert asked[1][1].tolist() == [[1.0, 1.0, 2.0, 3.0, 4.0]]
    assert asked[1][2:] == (7, 0.5, 0, True)


def test_compiled_regions_are_read_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision rounds corners to 4 or 8 pixels, and CUDA's operator does not take it."""

    def align(features, rois, output, scale, ratio, aligned):
        assert features.dtype == rois.dtype == torch.float32
        return ops.roi_align(features, rois[:, 1:], rois[:, 0].long(), output, scale)

    monkeypatch.setattr(regions, "compiled_ops", lambda: SimpleNamespace(roi_align=align))
    features, box = torch.randn(1, 3, 64, 64), torch.tensor([[201.0, 3.0, 243.0, 31.0]])
    half = regions.roi_align(features.bfloat16(), box, torch.tensor([0]), 7, 0.25)
    assert half.dtype == torch.bfloat16
    exact = ops.roi_align(features, box, torch.tensor([0]), 7, 0.25)
    bound = limit("operation", torch.bfloat16)
    torch.testing.assert_close(half.float(), exact, atol=bound, rtol=bound)


def test_regions_are_read_from_the_level_of_their_size() -> None:
    maps = [torch.full((1, 1, 256 // 2**i, 256 // 2**i), float(i + 2)) for i in range(4)]
    given = torch.tensor([[0.0, 0.0, s, s] for s in (30.0, 112.0, 224.0, 448.0, 900.0)])
    none = torch.tensor([[0.0, 0.0, 30.0, math.nan]])
    padded = boxes.Padded(torch.cat([given, none, given[:1]])[None], torch.ones(1, 7).bool())
    padded.valid[0, -1] = False
    pooled = regions.pool_regions(maps, padded, 7)
    assert pooled.shape == (7, 1, 7, 7)
    expected = pytest.approx([2.0, 3.0, 4.0, 5.0, 5.0, 0.0, 0.0], rel=1e-6)
    assert pooled.amax((1, 2, 3)).tolist() == expected
    assert pooled.is_contiguous(memory_format=torch.channels_last)
    assert boxes.pyramid_level(given, 2, 5).tolist() == [2, 3, 4, 5, 5]


needs_operators = pytest.mark.skipif(
    compiled_ops() is None, reason="torchvision's compiled operators do not load here"
)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@needs_operators
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threshold", [0.3, 0.7])
@pytest.mark.parametrize("case", BOX_CASES)
def test_nms_equals_torchvision(case: str, threshold: float, device: str) -> None:
    theirs = load("torchvision.ops")
    given = BOX_CASES[case].to(device)
    scores = torch.rand(len(given), generator=torch.Generator().manual_seed(5)).to(device)
    expected = theirs.nms(given, scores, threshold).tolist()
    assert regions.nms_torch(given, scores, threshold).tolist() == expected
    assert greedy(given, scores, threshold) == expected
    groups = torch.arange(len(given), device=device) % 3
    expected = theirs.batched_nms(given, scores, groups, threshold).tolist()
    assert regions.grouped_nms(given, scores, groups, threshold).tolist() == expected
    assert regions.nms_torch(given, scores, threshold, groups).tolist() == expected


@needs_operators
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("output", [7, 14])
@pytest.mark.parametrize("case", BOX_CASES)
def test_roi_align_equals_torchvision(case: str, output: int, device: str) -> None:
    given = BOX_CASES[case][:40].to(device)
    features = torch.randn(2, 3, 16, 21, generator=torch.Generator().manual_seed(6)).to(device)
    images = torch.arange(len(given), device=device) % 2
    rois = torch.cat([images[:, None].float(), given], dim=1)
    expected = load("torchvision.ops").roi_align(features, rois, output, 0.25, 0, True)
    ours = ops.roi_align(features, given, images, output, 0.25)
    torch.testing.assert_close(ours, expected, **VALUES)
