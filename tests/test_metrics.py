"""The metrics: against pycocotools, against a slow implementation, and by hand."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eventful.errors import ConfigError, MissingDependencyError
from eventful.models.vitdet import Detections
from eventful.paper.data.records import Box
from eventful.paper.evaluate import metrics
from eventful.paper.evaluate.metrics import average_views, coco_map50, fgfa_map50, top_k
from eventful.paper.evaluate.precision import vid_thresholds
from tolerances import limit

CLASSES = ("car", "dog", "fox", "bus")  # no example shows a bus
# Two implementations sum the same float64 terms in another order.
SAME = limit("operation", torch.float64)


def detections(*found: tuple[float, float, float, float, float, int]) -> Detections:
    """From (left, top, right, bottom, score, label)."""
    table = torch.tensor(found, dtype=torch.float64).reshape(-1, 6)
    return Detections(table[:, :4], table[:, 4], table[:, 5].long())


def example(
    seed: int, frames: int = 12, *, whole: bool = False, crowded: bool = False
) -> tuple[list[Detections], list[list[Box]]]:
    """Frames with objects, near misses, doubles, wrong labels and ignored boxes.

    Args:
        whole: Whole pixels, so that overlaps tie; scores tie in any case.
        crowded: More detections of a class than COCO looks at.
    """
    make = np.random.default_rng(seed)
    found, truth = [], []
    for _ in range(frames):
        boxes, guesses = [], []
        for _ in range(make.integers(0, 8)):
            x, y, w, h = (*make.uniform(0, 80, 2), *make.uniform(3, 30, 2))
            if whole:
                x, y, w, h = map(round, (x, y, w, h))
            ignore = bool(make.random() < 0.2)
            boxes.append(Box(x, y, x + w, y + h, int(make.integers(3)), ignore=ignore))
        for box in boxes:
            for _ in range(make.integers(0, 40 if crowded else 4)):
                noise = make.normal(0, 2, 4)
                moved = np.array([box.x1, box.y1, box.x2, box.y2]) + (noise, noise.round())[whole]
                left, right = sorted(moved[[0, 2]])
                top, bottom = sorted(moved[[1, 3]])
                label = box.label if make.random() < 0.9 else int(make.integers(3))
                guesses.append((left, top, right, bottom, round(make.random(), 1), label))
        for _ in range(make.integers(0, 3)):
            x, y = make.uniform(0, 80, 2)
            guesses.append((x, y, x + 10, y + 10, make.random(), int(make.integers(3))))
        found.append(detections(*guesses))
        truth.append(boxes)
    return found, truth


# COCO


def pycocotools_scores(
    found: list[Detections], truth: list[list[Box]], classes: tuple[str, ...] | list[str]
) -> list[float | None]:
    """Average precision of each class by COCO's own code."""
    dataset = pytest.importorskip("pycocotools.coco").COCO
    evaluator = pytest.importorskip("pycocotools.cocoeval").COCOeval
    frames = metrics._arrays(found, truth, classes)
    return metrics.coco_precisions(frames, classes, dataset, evaluator)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_coco_equals_pycocotools(seed: int, whole: bool) -> None:
    found, truth = example(seed, whole=whole)
    ours = coco_map50(found, truth, CLASSES)
    assert ours.backend == "faster-coco-eval"
    assert ours.per_class["bus"] is None
    assert list(ours.per_class.values()) == pytest.approx(
        pycocotools_scores(found, truth, CLASSES), abs=SAME
    )
    assert 0.05 < ours.value < 0.95  # an example that everyone gets right shows nothing


def borderline(seed: int) -> tuple[list[Detections], list[list[Box]]]:
    """Boxes in tenths of a pixel and few scores: overlaps tie and lie at the threshold.

    Halves of objects have an IoU of 0.5, give or take the last bit; some boxes have no area or are
    turned inside out; some frames and classes have nothing in them.
    """
    make = np.random.default_rng(seed)
    found, truth = [], []
    for _ in range(make.integers(1, 12)):
        count = make.integers(0, 12)
        corner = make.uniform(-2, 10, (count, 2))
        sides = np.exp(make.normal(2.5, 1, (count, 2))) * (make.random((count, 2)) < 0.95)
        boxes = np.concatenate([corner, corner + sides], axis=1).round(1)
        labels, ignore = make.integers(0, 3, count), make.random(count) < 0.2
        of = make.integers(0, count, 3 * count) if count else np.zeros(0, int)
        guesses = boxes[of] + make.normal(0, 1, (len(of), 4)) * (make.random((len(of), 1)) < 0.7)
        half = make.random(len(of)) < 0.3
        guesses[half, 2] = (guesses[half, 0] + guesses[half, 2]) / 2
        scores = make.random((len(of), 1)).round(1)
        rows = np.concatenate([guesses.round(1), scores, labels[of][:, None]], axis=1)
        found.append(detections(*map(tuple, rows)))
        truth.append(
            [
                Box(*map(float, box), int(label), ignore=bool(aside))
                for box, label, aside in zip(boxes, labels, ignore, strict=True)
            ]
        )
    return found, truth


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31))
def test_coco_equals_pycocotools_at_the_border(seed: int) -> None:
    found, truth = borderline(seed)
    ours = coco_map50(found, truth, CLASSES)
    theirs = pycocotools_scores(found, truth, CLASSES)
    assert list(ours.per_class.values()) == pytest.approx(theirs, abs=SAME)


def test_a_right_edge_is_what_left_and_width_add_up_to() -> None:
    """By its corners the detection covers half of the ignored object; COCO's code, which is given
    widths, finds a little less, and so counts a wrong detection."""
    truth = [[Box(2.0, 4.9, 95.4, 11.1, 0, ignore=True), Box(60, 60, 70, 70, 0)]]
    found = [detections((4.6, 2.1, 10.4, 7.7, 0.9, 0), (60, 60, 70, 70, 0.8, 0))]
    assert coco_map50(found, truth, ["car"]).value == pytest.approx(0.5)


def test_a_box_turned_inside_out_is_no_wrong_detection() -> None:
    found = [detections((9, 0, 2, 10, 0.9, 0), (0, 0, 10, 10, 0.8, 0))]
    truth = [[Box(0, 0, 10, 10, 0)]]
    assert coco_map50(found, truth, ["car"]).value == pytest.approx(1.0)


def test_coco_looks_at_a_hundred_detections_of_a_class() -> None:
    found, truth = example(3, crowded=True)
    assert max(int(frame.labels.bincount().max()) for frame in found) > 100
    ours = coco_map50(found, truth, CLASSES)
    theirs = pycocotools_scores(found, truth, CLASSES)
    assert list(ours.per_class.values()) == pytest.approx(theirs, abs=SAME)
    # The hundred and first detection finds the object, which is too late.
    misses = [(50, 50, 60, 60, 0.9, 0)] * 100
    late = detections(*misses, (0, 0, 10, 10, 0.1, 0))
    assert coco_map50([late], [[Box(0, 0, 10, 10, 0)]], ["car"]).value == 0


def test_coco_breaks_ties_between_objects_as_pycocotools_does() -> None:
    """The first detection overlaps both objects alike; the second can only have the left one."""
    left, right = Box(0, 0, 10, 10, 0), Box(4, 0, 14, 10, 0)
    found = [detections((2, 0, 12, 10, 0.9, 0), (-1, 0, 9, 10, 0.8, 0))]
    values = []
    for truth in ([left, right], [right, left]):
        values.append(coco_map50(found, [truth], ["car"]).value)
        assert [values[-1]] == pytest.approx(pycocotools_scores(found, [truth], ["car"]), abs=SAME)
    assert values[0] != values[1]


@pytest.mark.parametrize("metric", [coco_map50, fgfa_map50])
def test_nothing_found_and_nothing_to_find(metric) -> None:
    box = Box(0, 0, 10, 10, 0)
    assert metric([detections()], [[box]], CLASSES).value == 0
    nothing = metric([detections((0, 0, 9, 9, 0.5, 1))], [[]], CLASSES)
    assert math.isnan(nothing.value)
    assert set(nothing.per_class.values()) == {None}


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(MissingDependencyError, match=r"eventful-transformers\[eval\]"):
        coco_map50(*example(0), CLASSES)


# Both, by hand


def test_average_precision_by_hand() -> None:
    """Right, wrong, right: precision 1 up to recall 1/2, then 2/3."""
    truth = [[Box(0, 0, 40, 40, 0), Box(50, 50, 90, 90, 0)]]
    found = [
        detections((0, 0, 40, 40, 0.9, 0), (0, 60, 40, 99, 0.8, 0), (50, 50, 90, 90, 0.7, 0)),
    ]
    assert fgfa_map50(found, truth, ["car"]).value == pytest.approx((1 + 2 / 3) / 2)
    coco = coco_map50(found, truth, ["car"])
    assert coco.value == pytest.approx((51 + 50 * 2 / 3) / 101)
    assert (coco.frames, coco.objects, coco.detections) == (1, 2, 3)


@pytest.mark.parametrize("metric", [coco_map50, fgfa_map50])
def test_perfect_detections_score_one_and_doubles_cost(metric) -> None:
    _, truth = example(1)
    truth = [[box for box in frame if not box.ignore] for frame in truth]
    perfect = [
        detections(*((b.x1, b.y1, b.x2, b.y2, 0.9, b.label) for b in frame)) for frame in truth
    ]
    assert metric(perfect, truth, CLASSES).value == pytest.approx(1.0)
    double = detections((0, 0, 40, 40, 0.9, 0), (0, 0, 40, 40, 0.8, 0), (50, 0, 90, 40, 0.7, 0))
    two = [Box(0, 0, 40, 40, 0), Box(50, 0, 90, 40, 0)]
    assert metric([double], [two], ["car"]).value < 1


@pytest.mark.parametrize("metric", [coco_map50, fgfa_map50])
def test_what_is_to_be_ignored_counts_for_nothing(metric) -> None:
    box, other = Box(0, 0, 40, 40, 0), Box(50, 0, 90, 40, 0, ignore=True)
    right, on_ignored = (0, 0, 40, 40, 0.5, 0), (52, 0, 90, 40, 0.9, 0)
    assert metric([detections(right, on_ignored)], [[box, other]], ["car"]).value == 1
    assert metric([detections(right, on_ignored)], [[box]], ["car"]).value < 1
    assert metric([detections(right)], [[box, other]], ["car"]).objects == 1


@pytest.mark.parametrize("metric", [coco_map50, fgfa_map50])
def test_order_of_frames_does_not_matter(metric) -> None:
    found, truth = example(5)
    make = np.random.default_rng(0)
    # Ties between frames go by their order, so there must be none.
    found = [Detections(f.boxes, torch.tensor(make.random(len(f.scores))), f.labels) for f in found]
    order = make.permutation(len(found))
    shuffled = metric([found[i] for i in order], [truth[i] for i in order], CLASSES)
    assert shuffled.value == pytest.approx(metric(found, truth, CLASSES).value, abs=SAME)


# VID


def test_small_boxes_ask_for_less() -> None:
    boxes = np.array([[0, 0, 9, 9], [0, 0, 99, 99], [0, 0, 0, 0], [0, 0, 49, 4]], float)
    expected = [100 / 400, 0.5, 1 / 121, 250 / (60 * 15)]
    assert vid_thresholds(boxes) == pytest.approx(expected)


def test_a_loose_box_around_a_small_object_is_right_for_vid_and_wrong_for_coco() -> None:
    found, truth = [detections((-5, -5, 14, 14, 0.9, 0))], [[Box(0, 0, 9, 9, 0)]]
    assert fgfa_map50(found, truth, ["car"]).value == 1
    assert coco_map50(found, truth, ["car"]).value == 0


def test_vid_precision_by_hand() -> None:
    """A small object at exactly its threshold, a large one just below its own, a far miss.

    Small: 10 x 10 pixels ask for 100/400 = 0.25; a box of 20 x 20 around it has 100/400: right.
    Large: 40 x 40 pixels ask for min(0.5, 1600/2500) = 0.5; a strip of 40 x 19 has 0.475: wrong.
    In order of score: wrong, right, wrong. Precision 1/2 at recall 1/2, so the area is 1/4.
    """
    truth = [[Box(0, 0, 9, 9, 0)], [Box(100, 100, 139, 139, 0)]]
    found = [
        detections((-5, -5, 14, 14, 0.8, 0), (60, 60, 69, 69, 0.1, 0)),
        detections((100, 100, 139, 118, 0.9, 0)),
    ]
    assert fgfa_map50(found, truth, ["car"]).value == pytest.approx(1 / 4)
    strip = detections((100, 100, 139, 119, 0.9, 0))  # one row more: exactly half
    assert fgfa_map50([found[0], strip], truth, ["car"]).value == pytest.approx(1.0)
    narrow = detections((-5, -5, 15, 14, 0.8, 0))  # one column more: 100/420
    assert fgfa_map50([narrow], truth[:1], ["car"]).value == 0


def slow_vid(found: list[Detections], truth: list[list[Box]], label: int) -> float:
    """The development kit's rule, one detection after another."""

    def width(a: float, b: float) -> float:
        return max(0.0, b - a + 1)

    outcomes, objects = [], 0
    for frame, boxes in zip(found, truth, strict=True):
        mine = [box for box in boxes if box.label == label]
        objects += len(mine)
        taken: set[int] = set()
        rows = [
            (score, box)
            for score, box, name in zip(
                frame.scores.tolist(), frame.boxes.tolist(), frame.labels.tolist(), strict=True
            )
            if name == label
        ]
        for score, (x1, y1, x2, y2) in sorted(rows, key=lambda row: -row[0]):
            best, where = -1.0, None
            for k, box in enumerate(mine):
                w, h = width(box.x1, box.x2), width(box.y1, box.y2)
                both = width(max(x1, box.x1), min(x2, box.x2)) * width(
                    max(y1, box.y1), min(y2, box.y2)
                )
                iou = both / (width(x1, x2) * width(y1, y2) + w * h - both)
                if k not in taken and iou > best and iou >= min(0.5, w * h / (w + 10) / (h + 10)):
                    best, where = iou, k
            if where is not None:
                taken.add(where)
            outcomes.append((score, where is not None))
    outcomes.sort(key=lambda outcome: -outcome[0])
    area, right, points = 0.0, 0, []
    for count, (_, good) in enumerate(outcomes, start=1):
        right += good
        points.append((right / objects, right / count))
    before = 0.0
    for i, (recall, _) in enumerate(points):
        area += (recall - before) * max(precision for _, precision in points[i:])
        before = recall
    return area


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_vid_equals_its_slow_twin(seed: int, whole: bool) -> None:
    found, truth = example(seed, whole=whole)
    truth = [[box for box in frame if not box.ignore] for frame in truth]
    score = fgfa_map50(found, truth, CLASSES)
    for label, name in enumerate(CLASSES[:3]):
        assert score.per_class[name] == pytest.approx(slow_vid(found, truth, label), abs=SAME)
    assert score.per_class["bus"] is None
    assert 0.05 < score.value < 0.95


# What makes no sense


def test_bad_input_is_refused() -> None:
    found, truth = example(0)
    with pytest.raises(ConfigError, match="12 frames of detections and 11 of boxes"):
        coco_map50(found, truth[1:], CLASSES)
    with pytest.raises(ConfigError, match="classes the model was trained on"):
        fgfa_map50(found, truth, CLASSES[:2])
    with pytest.raises(ConfigError, match=r"boxes \(2, 4\)"):
        Detections(torch.zeros(2, 5), torch.zeros(2), torch.zeros(2).long())
    with pytest.raises(ConfigError, match="NaN"):
        coco_map50([detections((0, 0, 1, math.nan, 0.5, 0))], [[]], CLASSES)
    with pytest.raises(ConfigError, match="left of the left"):
        coco_map50([detections()], [[Box(5, 0, 4, 1, 0)]], CLASSES)
    with pytest.raises(ConfigError, match="of the truth"):
        fgfa_map50([detections()], [[Box(0, 0, math.nan, 1, 0)]], CLASSES)


def test_scores_are_frozen_and_plain() -> None:
    score = coco_map50(*example(0), CLASSES)
    with pytest.raises(AttributeError):
        score.value = 1.0  # type: ignore[misc]
    assert score.to_dict()["metric"] == "coco_map50"
    assert fgfa_map50(*example(0), CLASSES).metric == "fgfa_map50"
    assert fgfa_map50([], [], CLASSES).to_dict()["value"] is None  # JSON has no NaN


# Recognition


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(5, 40), st.integers(1, 20))
def test_top_k_equals_sorting(seed: int, classes: int, videos: int) -> None:
    make = torch.Generator().manual_seed(seed)
    scores = torch.randn(videos, classes, generator=make, dtype=torch.float64)
    labels = torch.randint(classes, (videos,), generator=make)
    score = top_k(scores, labels)
    ranked = scores.argsort(dim=1, descending=True)
    for k, share in ((1, score.top1), (5, score.top5)):
        hits = sum(label in row[:k] for label, row in zip(labels, ranked, strict=True))
        assert share == pytest.approx(hits / videos)
    assert score.videos == videos


def test_top_k_by_hand() -> None:
    scores = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]])
    score = top_k(scores, torch.tensor([1, 1, 0]))
    assert score.top1 == pytest.approx(1 / 3)  # the third ties, which is no win
    assert score.top5 == 1.0
    assert math.isnan(top_k(torch.zeros(0, 3), torch.zeros(0).long()).top1)
    with pytest.raises(ConfigError, match="one label per video"):
        top_k(scores, torch.tensor([1]))
    with pytest.raises(ConfigError, match="NaN"):
        top_k(scores * math.nan, torch.tensor([1, 1, 0]))


def test_views_are_averaged_before_the_softmax() -> None:
    """One sure view must weigh more than two that hardly prefer the other class."""
    logits = torch.tensor([[4.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert average_views(logits) == pytest.approx(torch.tensor([2 / 3, 0]).softmax(0))
    assert average_views(logits.expand(5, 3, 2)).shape == (5, 2)
    assert top_k(average_views(logits)[None], torch.tensor([0])).top1 == 1.0
