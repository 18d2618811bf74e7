"""What a detector learns from: sampled candidates, places to be ignored, frames with nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eventful.errors import ConfigError
from eventful.models.vitdet import BackboneConfig, HeadConfig, Placement, Target, ViTDet, boxes
from eventful.models.vitdet.frames import Targets
from eventful.models.vitdet.losses import RPN_SAMPLING, Sampling, label_candidates, rpn_losses
from eventful.models.vitdet.rpn import Predictions
from test_training_vitdet import tiny
from test_vitdet import stir

HALVES = Sampling(64, 0.25, 0.5, 0.5)


def nothing(ignored: Tensor | None = None) -> Target:
    return Target(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), ignored)


def together(*targets: Target) -> Targets:
    return Targets.of(targets, torch.device("cpu"))


def same(*candidates: Tensor) -> boxes.Padded:
    """As many candidates in every image, all of them valid."""
    stacked = torch.stack(candidates)
    return boxes.Padded(stacked, torch.ones(stacked.shape[:2], dtype=torch.bool))


def test_candidates_in_ignored_places_are_neither_right_nor_wrong() -> None:
    crowd = torch.tensor([[0.0, 0.0, 40.0, 40.0]])
    target = Target(torch.tensor([[10.0, 10.0, 30.0, 30.0]]), torch.tensor([3]), crowd)
    candidates = torch.tensor(
        [
            [10.0, 10.0, 30.0, 30.0],  # the object, although it lies in the crowd
            [0.0, 20.0, 20.0, 40.0],  # in the crowd
            [30.0, 30.0, 50.0, 50.0],  # a quarter in it
            [60.0, 60.0, 80.0, 80.0],
        ]
    )
    labels = [boxes.FOREGROUND, boxes.IGNORED, boxes.BACKGROUND, boxes.BACKGROUND]
    # Ignored without objects, too; and a share counts, not the overlap of two equals.
    images = [target, replace(target, ignored=None), nothing(crowd)]
    expected = [labels, [1, 0, 0, 0], [-1, -1, 0, 0]]
    assert HALVES.match(together(*images), candidates).label.tolist() == expected
    for image, label in zip(images, expected, strict=True):
        assert HALVES.match(together(image), candidates).label.tolist() == [label]
    for choose in (True, False):
        found = label_candidates(same(candidates), together(target), HALVES, 5, choose=choose)
        kept, kinds = found.boxes[found.valid], found.labels[found.valid]
        assert not (kept == candidates[1]).all(dim=1).any()
        assert sorted(kinds.tolist()) == [3, *([3] if choose else []), 5, 5]


def test_anchors_in_ignored_places_get_no_gradient() -> None:
    anchors = boxes.grid_anchors(boxes.cell_anchors(8, (0.5, 1.0, 2.0)), (16, 16), 4)
    target = Target(
        torch.tensor([[40.0, 40.0, 48.0, 48.0]]),
        torch.tensor([0]),
        torch.tensor([[-8.0, -8.0, 32.0, 72.0]]),
    )
    logits = torch.zeros(1, len(anchors), requires_grad=True)
    codes = torch.zeros(1, len(anchors), 4, requires_grad=True)
    everyone = replace(RPN_SAMPLING, count=10_000)
    losses = rpn_losses(Predictions([anchors], [logits], [codes]), together(target), everyone)
    torch.stack(list(losses.values())).sum().backward()
    assert logits.grad is not None
    inside = boxes.covered(anchors, target.ignored) >= 0.5
    assert 0 < int(inside.sum()) < len(anchors)
    assert not logits.grad[0, inside].any()
    overlap = boxes.iou(target.boxes, anchors)[0]
    certain = ~inside & ((overlap < 0.3) | (overlap >= 0.7))
    assert logits.grad[0, certain].all()


@pytest.mark.parametrize("cascade", [False, True], ids=["faster", "cascade"])
def test_a_frame_to_be_ignored_teaches_nothing_and_leaves_no_parameter_out(cascade: bool) -> None:
    """Several processes wait for the gradient of every parameter, whatever their frames hold."""
    model = tiny(cascade=cascade).train()
    model.rpn.keep_after = (50, 50)
    if model.heads.mask is not None:
        model.heads.mask.requires_grad_(False)
    whole = torch.tensor([[-1e3, -1e3, 2e3, 2e3]])
    losses = model.losses(torch.randn(1, 3, 64, 64), [nothing(whole)])
    assert all(loss.item() == 0 for loss in losses.values())
    torch.stack(list(losses.values())).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


TARGETS = {
    "empty": nothing(),
    "one": Target(torch.tensor([[5.0, 6.0, 30.0, 40.0]]), torch.tensor([1])),
    "no area": Target(
        torch.tensor([[5.0, 6.0, 5.0, 40.0], [9.0, 9.0, 9.0, 9.0], [20.0, 20.0, 40.0, 40.0]]),
        torch.tensor([1, 2, 3]),
    ),
    "all around": Target(torch.tensor([[0.0, 0.0, 48.0, 64.0]]), torch.tensor([4])),
    "twice": Target(torch.tensor([[5.0, 6.0, 30.0, 40.0]] * 2), torch.tensor([1, 2])),
}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cascade", [False, True], ids=["faster", "cascade"])
@pytest.mark.parametrize("case", TARGETS)
def test_losses_are_finite_whatever_is_in_the_frame(
    case: str, cascade: bool, precision: torch.dtype
) -> None:
    model = tiny(cascade=cascade).train()
    stir(model)
    place = Placement((48, 64), (64, 48))
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        losses = model.losses(torch.randn(1, 3, 64, 64), [TARGETS[case]], [place])
    total = torch.stack(list(losses.values())).sum()
    total.backward()
    assert all(loss.dtype == torch.float32 for loss in losses.values())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_objects_without_area_are_no_objects() -> None:
    """Matched as they stand, the best anchors of one would be all that do not touch it."""
    overlap = torch.tensor([[0.0, 0.0, 0.0], [0.2, 0.0, 0.0]])
    found = boxes.match(overlap, 0.3, 0.7, rescue=True)
    assert found.label.tolist() == [boxes.FOREGROUND, boxes.BACKGROUND, boxes.BACKGROUND]
    model, frame = tiny().train(), torch.randn(1, 3, 64, 64)
    given, losses = TARGETS["no area"], []
    for target in (given, Target(given.boxes[2:], given.labels[2:])):
        torch.manual_seed(0)
        losses.append(model.losses(frame, [target]))
    assert losses[0] == losses[1]


def test_a_batch_of_frames_with_and_without_objects() -> None:
    model = tiny().train()
    targets = [TARGETS["one"], TARGETS["empty"], nothing(torch.tensor([[0.0, 0.0, 20.0, 20.0]]))]
    places = [Placement(size, size) for size in ((64, 64), (64, 32), (9, 9))]
    losses = model.losses(torch.randn(3, 3, 64, 64), targets, places)
    assert set(losses) == {"rpn_objectness", "rpn_box", "class", "box"}
    assert all(bool(loss.isfinite()) for loss in losses.values())


def test_regions_of_a_broken_stage_do_not_end_the_program() -> None:
    """Codes that are no numbers give no detections, in every stage of the cascade."""
    model = tiny(cascade=True).eval()
    with torch.no_grad():
        model.heads.stages[0].deltas.bias.fill_(float("nan"))
        (found,) = model(torch.randn(1, 3, 64, 64))
    assert bool(found.boxes.isfinite().all())
    with torch.no_grad():
        model.heads.stages[2].scores.bias.fill_(float("nan"))
        (none,) = model(torch.randn(1, 3, 64, 64))
    assert len(none) == 0
    assert none.masks is not None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stages": 3}, "shared_boxes"),
        ({"stages": 0}, "cascade"),
        ({"classes": 0}, "at least one"),
        ({"box_loss": "l2"}, "l1, giou"),
    ],
)
def test_heads_that_make_no_sense(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HeadConfig(**wrong)


def test_drop_path_is_a_probability_below_one() -> None:
    with pytest.raises(ConfigError, match="below 1"):
        BackboneConfig(drop_path=1.0)
    model = ViTDet(replace(tiny().config, backbone=replace(tiny().config.backbone, drop_path=0.9)))
    losses = model.train().losses(torch.randn(1, 3, 64, 64), [TARGETS["one"]])
    assert all(bool(loss.isfinite()) for loss in losses.values())
