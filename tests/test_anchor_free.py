"""The anchor-free head: which place finds what, losses that mean it, detections that come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eventful.models.anchor_free import PointHead, PointHeadConfig, assign
from eventful.models.vitdet import Target


def places(rows: int, columns: int, stride: float) -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return (torch.stack([x, y], -1).reshape(-1, 2) + 0.5) * stride


def test_a_place_belongs_to_the_smallest_box_whose_centre_is_near() -> None:
    at = places(8, 8, 10.0)
    boxes = torch.tensor([[0.0, 0.0, 80.0, 80.0], [30.0, 30.0, 50.0, 50.0]])
    owner = assign(at, boxes, radius=15.0).reshape(8, 8)
    assert (owner[3:5, 3:5] == 1).all()  # both centres are at 40, 40: the small one is preferred
    ring = [owner[2, 3], owner[5, 4], owner[3, 2], owner[4, 5]]
    assert all(int(value) == 0 for value in ring)  # outside the small box, near the centre
    assert owner[0, 0] == -1


def test_a_box_smaller_than_a_place_is_found_by_the_nearest() -> None:
    owner = assign(places(4, 4, 10.0), torch.tensor([[11.0, 11.0, 13.0, 13.0]]), radius=15.0)
    assert owner.reshape(4, 4)[1, 1] == 0
    assert int((owner >= 0).sum()) == 1


def test_no_boxes_means_no_owners() -> None:
    assert (assign(places(2, 2, 10.0), torch.zeros(0, 4), 15.0) == -1).all()


def features(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 8, 4, 6, generator=torch.Generator().manual_seed(seed))


def head() -> PointHead:
    torch.manual_seed(0)
    return PointHead(PointHeadConfig(dim=8, patch=14, classes=2, channels=16, depth=1))


def target() -> Target:
    boxes = torch.tensor([[7.0, 7.0, 35.0, 49.0], [50.0, 10.0, 80.0, 40.0]])
    return Target(boxes, torch.tensor([1, 0]))


def test_it_learns_one_frame_and_finds_its_objects() -> None:
    model, seen = head(), target()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        losses = model.losses(features(), [seen])
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    (found,) = model.eval().detect(features(), (56, 84))
    assert found.labels[:2].sort().values.tolist() == [0, 1]
    order = found.labels[:2].argsort(descending=True)
    # What a short training learns, in pixels.
    torch.testing.assert_close(found.boxes[order], seen.boxes, atol=2.0, rtol=0)
    assert float(found.scores[:2].min()) > 0.5
    assert len(found) == 2 or float(found.scores[2]) < 0.3


def test_places_in_ignored_boxes_are_not_background() -> None:
    model, nothing = head(), Target(torch.zeros(0, 4), torch.zeros(0).long())
    whole = torch.tensor([[-1.0, -1.0, 85.0, 57.0]])
    plain = model.losses(features(), [nothing])["score"]
    spared = model.losses(features(), [replace(nothing, ignored=whole)])["score"]
    assert plain.item() > 0
    assert spared.item() == 0


def test_a_frame_without_objects_trains_the_scores_alone() -> None:
    model = head()
    losses = model.losses(features(), [Target(torch.zeros(0, 4), torch.zeros(0).long())])
    sum(losses.values()).backward()
    assert float(model.sides.weight.grad.abs().sum()) == 0
    assert float(model.scores.weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("most", [1, 3])
def test_detections_stay_in_the_frame_best_first(most: int) -> None:
    config = PointHeadConfig(dim=8, channels=16, depth=1, score_threshold=0.0, detections=most)
    torch.manual_seed(0)
    (found,) = PointHead(config).eval().detect(features(), (50, 80))
    assert len(found) == most
    assert float(found.boxes.min()) >= 0
    assert float(found.boxes[:, 2].max()) <= 80
    assert float(found.boxes[:, 3].max()) <= 50
    assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
