"""Training on several frames at once: the losses of single frames, without a wait for each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from eventful.models.vitdet import Placement, Target, ViTDet, boxes, regions
from eventful.models.vitdet import losses as losses_module
from eventful.models.vitdet.frames import Targets
from eventful.models.vitdet.heads import CASCADE_IOU
from eventful.models.vitdet.losses import RPN_SAMPLING, Sampling, rpn_losses
from eventful.models.vitdet.rpn import ANCHOR_RATIOS, RPN, Predictions
from eventful.ops import reference
from fixed_heads import literal_proposals
from test_training_vitdet import tiny
from test_vitdet import stir
from tolerances import limit

CPU = torch.device("cpu")
EVERYONE = replace(RPN_SAMPLING, count=5000, positive=1.0)
SIZES = [(64, 64), (48, 64), (64, 20), (9, 9)]
WAITS = ("aten::nonzero", "aten::item", "aten::_local_scalar_dense", "aten::equal")


def some_boxes(count: int, make: torch.Generator, side: float = 30.0) -> Tensor:
    corner = 40 * torch.rand(count, 2, generator=make)
    return torch.cat([corner, corner + 3 + side * torch.rand(count, 2, generator=make)], dim=1)


def some_targets(seed: int) -> list[Target]:
    """Objects alone, with places to be ignored, without area, in the same place, and none."""
    make = torch.Generator().manual_seed(seed)
    flat, twice = some_boxes(4, make), some_boxes(1, make).repeat(2, 1)
    flat[:2, 2] = flat[:2, 0]
    return [
        Target(some_boxes(3, make), torch.tensor([1, 2, 3]), some_boxes(2, make)),
        Target(flat, torch.tensor([0, 1, 2, 3])),
        Target(twice, torch.tensor([3, 4]), some_boxes(1, make)),
        Target(torch.zeros(0, 4), torch.zeros(0).long(), some_boxes(3, make)),
    ]


def literal_labels(target: Target, candidates: Tensor, rule: Sampling) -> list[tuple[int, int]]:
    """The object and the label of each candidate of one image, one candidate after the other."""
    overlap = boxes.iou(candidates, target.boxes)
    real = [row for row, it in enumerate(boxes.nonempty(target.boxes)) if it]
    most = {row: overlap[:, row].max() for row in real}
    share = torch.zeros(len(candidates))
    if target.ignored is not None:
        share = boxes.covered(candidates, target.ignored)
    found = []
    for row, part in zip(overlap, share, strict=True):
        mine = max(real, key=lambda it: float(row[it]), default=0)
        best = float(row[mine]) if real else 0.0
        label = boxes.BACKGROUND if best < rule.low else boxes.IGNORED
        label = boxes.FOREGROUND if best >= rule.high else label
        if rule.rescue and any(row[it] == most[it] > 0 for it in real):
            label = boxes.FOREGROUND
        elif label != boxes.FOREGROUND and part >= rule.ignore:
            label = boxes.IGNORED
        found.append((mine, label))
    return found


def some_predictions(seed: int, images: int = 4) -> Predictions:
    make = torch.Generator().manual_seed(seed)
    found = Predictions([], [], [])
    for size, grid, stride in ((12, 12, 6), (24, 6, 12), (40, 2, 32)):
        anchors = boxes.grid_anchors(boxes.cell_anchors(size, ANCHOR_RATIOS), (grid, grid), stride)
        found.anchors.append(anchors)
        found.logits.append(torch.randn(images, len(anchors), generator=make))
        found.codes.append(0.5 * torch.randn(images, len(anchors), 4, generator=make))
    return found


@pytest.mark.parametrize("pairs", [1, 1 << 25], ids=["image by image", "at once"])
@pytest.mark.parametrize("rescue", [True, False], ids=["rescued", "by overlap"])
@pytest.mark.parametrize("seed", range(3))
def test_the_losses_of_the_proposals_are_those_of_single_images(
    seed: int, rescue: bool, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_module, "_MOST_PAIRS", pairs)
    rule, targets = replace(EVERYONE, rescue=rescue, high=0.4), some_targets(seed)
    found, coder = some_predictions(seed), boxes.BoxCoder()
    anchors = torch.cat(found.anchors)
    logits, codes = torch.cat(found.logits, dim=1), torch.cat(found.codes, dim=1)
    entropy, distance, kinds = torch.zeros(()), torch.zeros(()), Counter()
    for image, target in enumerate(targets):
        for place, (row, label) in enumerate(literal_labels(target, anchors, rule)):
            kinds[label] += 1
            if label == boxes.IGNORED:
                continue
            truth = torch.tensor(float(label == boxes.FOREGROUND))
            entropy += F.binary_cross_entropy_with_logits(logits[image, place], truth)
            if label == boxes.FOREGROUND:
                goal = coder.encode(anchors[place], target.boxes[row])
                distance += (codes[image, place] - goal).abs().sum()
    assert len(kinds) == 3
    share = rule.count * len(targets)
    got = rpn_losses(found, Targets.of(targets, CPU), rule)
    bound = {"rtol": limit("model"), "atol": 0}
    torch.testing.assert_close(got["rpn_objectness"], entropy / share, **bound)
    torch.testing.assert_close(got["rpn_box"], distance / share, **bound)


def padded(part: Tensor) -> boxes.Padded:
    """The boxes of one image."""
    return boxes.Padded(part[None], torch.ones(1, len(part), dtype=torch.bool))


def literal_head_losses(
    model: ViTDet,
    maps: list[Tensor],
    proposals: list[Tensor],
    targets: list[Target],
    sizes: list[tuple[int, int]],
) -> dict[str, Tensor]:
    """Class and box losses of every stage, one image and one candidate after the other."""
    heads, results = model.heads, {}
    config = heads.config
    proposals = [
        torch.cat([part, target.boxes[boxes.nonempty(target.boxes)]])
        for part, target in zip(proposals, targets, strict=True)
    ]
    for number, stage in enumerate(heads.stages):
        rule = Sampling(1, 1.0, CASCADE_IOU[number], CASCADE_IOU[number])
        entropy, distance, count = torch.zeros(()), torch.zeros(()), 0
        following = []
        for image, (part, target) in enumerate(zip(proposals, targets, strict=True)):
            labels = literal_labels(target, part, rule)
            kept = [place for place, (_, label) in enumerate(labels) if label != boxes.IGNORED]
            own = [features[image : image + 1] for features in maps]
            logits, codes = stage(regions.pool_regions(own[:4], padded(part[kept]), 7))
            refined = stage.coder.decode(part[kept], codes)
            for slot, place in enumerate(kept):
                row, label = labels[place]
                fine = label == boxes.FOREGROUND
                truth = int(target.labels[row]) if fine else config.classes
                entropy += F.cross_entropy(logits[slot], torch.tensor(truth))
                if fine and config.box_loss == "giou":
                    column = truth if codes.shape[1] > 1 else 0
                    distance += boxes.giou_loss(refined[slot, column], target.boxes[row])
                elif fine:
                    goal = stage.coder.encode(part[place], target.boxes[row])
                    distance += (codes[slot, 0] - goal).abs().sum()
            count += len(kept)
            clipped = boxes.clip(refined[:, 0].detach(), sizes[image])
            following.append(clipped[boxes.nonempty(clipped)])
        proposals = following
        suffix = f"_{number}" if len(heads.stages) > 1 else ""
        results[f"class{suffix}"] = entropy / count
        results[f"box{suffix}"] = config.box_loss_weight * distance / count
    return results


@pytest.mark.parametrize("cascade", [False, True], ids=["faster", "cascade"])
@pytest.mark.parametrize("seed", range(2))
def test_the_losses_of_the_heads_are_those_of_single_images(seed: int, cascade: bool) -> None:
    model = everyone(tiny(cascade=cascade))
    stir(model)
    targets, sizes = some_targets(seed), SIZES[:3] + SIZES[:1]
    frames = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        maps = model.features(frames)
        found = model.rpn(maps)
        proposals = padded_as_lists(model.rpn.propose(found, torch.tensor(sizes)))
        assert all(len(part) for part in proposals)
        wanted = literal_head_losses(model, maps, proposals, targets, sizes)
        got = model.losses(frames, targets, [Placement(size, size) for size in sizes])
    assert all(value > 0 for value in wanted.values())
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=limit("model"), atol=0)


def everyone(model: ViTDet) -> ViTDet:
    """Its heads train on all proposals."""
    model.heads.config = replace(model.heads.config, samples=1000, positive=1.0)
    return model.train()


def padded_as_lists(found: boxes.Padded) -> list[Tensor]:
    assert not found.boxes[~found.valid].any()
    # The places without a proposal are the last ones.
    assert not (found.valid[:, 1:] & ~found.valid[:, :-1]).any()
    return [part[valid] for part, valid in zip(found.boxes, found.valid, strict=True)]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    "case", ["random", "ties", "all equal", "not finite", "outside", "crowded"]
)
@pytest.mark.parametrize("chunks", [False, True], ids=["at once", "in parts"])
@pytest.mark.parametrize("seed", range(3))
def test_proposals_of_a_batch_are_those_of_its_images(
    seed: int, chunks: bool, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "compiled_ops", lambda: None)
    found, make = some_predictions(seed), torch.Generator().manual_seed(seed)
    for logits, codes in zip(found.logits, found.codes, strict=True):
        if case == "ties":
            logits.copy_(logits.round())
        elif case == "all equal":
            logits.zero_()
        elif case == "not finite":
            logits[torch.rand(logits.shape, generator=make) < 0.2] = torch.nan
            logits[torch.rand(logits.shape, generator=make) < 0.2] = torch.inf
            logits[torch.rand(logits.shape, generator=make) < 0.2] = -torch.inf
            codes[torch.rand(codes.shape, generator=make) < 0.1] = torch.nan
            codes[torch.rand(codes.shape, generator=make) < 0.1] = -torch.inf
            codes[1] = torch.nan
        elif case == "outside":
            codes.mul_(20)
        elif case == "crowded":
            codes.mul_(0.1)
    if chunks:
        monkeypatch.setattr(reference.regions, "_CACHED_PAIRS", 1)
        monkeypatch.setattr(reference.regions, "_MOST_BYTES", 1 << 20)
    lengths = set()
    for counts in ((2000, 1000), (60, 1000), (60, 15), (7, 3)):
        rpn = RPN(4, keep_before=(counts[0], 1), keep_after=(counts[1], 1), nms_threshold=0.5)
        expected = literal_proposals(rpn, found, SIZES)
        got = padded_as_lists(rpn.propose(found, torch.tensor(SIZES)))
        assert [len(part) for part in got] == [len(part) for part in expected]
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        lengths |= {len(part) for part in expected}
    assert len(lengths) > 1
    assert (0 in lengths) == (case == "not finite")


def labels_of(foreground: int, background: int, ignored: int) -> Tensor:
    kinds = (boxes.FOREGROUND, boxes.BACKGROUND, boxes.IGNORED)
    counts = torch.tensor([foreground, background, ignored])
    return torch.tensor(kinds).repeat_interleave(counts)


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ((5, 9, 2), (3, 3)),  # enough of both
        ((1, 9, 2), (1, 5)),  # the background fills up
        ((0, 9, 2), (0, 6)),
        ((9, 1, 2), (3, 1)),  # the foreground does not
        ((9, 0, 2), (3, 0)),
        ((0, 0, 9), (0, 0)),
        ((1, 1, 0), (1, 1)),  # fewer candidates than places
        ((3, 1, 1), (3, 1)),
    ],
)
def test_as_many_are_drawn_as_there_are_and_as_are_allowed(
    given: tuple[int, int, int], drawn: tuple[int, int]
) -> None:
    rule, label = Sampling(6, 0.5, 0.5, 0.5), labels_of(*given).expand(50, -1)
    index, valid = rule.draw(label)
    assert index.shape == valid.shape == (50, min(6, label.shape[1]))
    for rows, mask, kinds in zip(index, valid, label, strict=True):
        assert len(set(rows[mask].tolist())) == int(mask.sum())
        foreground, background = boxes.FOREGROUND, boxes.BACKGROUND
        assert kinds[rows[mask]].tolist() == [foreground] * drawn[0] + [background] * drawn[1]
        assert not mask[sum(drawn) :].any()


def test_every_choice_is_as_likely_as_any_other() -> None:
    torch.manual_seed(0)
    images, rule = 20_000, Sampling(5, 0.4, 0.5, 0.5)
    label = labels_of(4, 6, 2)[torch.randperm(12)]
    index, valid = rule.draw(label.expand(images, -1))
    assert valid.all()
    for columns, kind, taken in ((slice(2), boxes.FOREGROUND, 2), (slice(2, 5), 0, 3)):
        found = Counter(tuple(row) for row in index[:, columns].sort(dim=1).values.tolist())
        members = (label == kind).nonzero()[:, 0].tolist()
        choices = list(combinations(members, taken))
        assert set(found) == set(choices)
        chance = 1 / len(choices)
        spread = (images * chance * (1 - chance)) ** 0.5
        assert all(abs(found[it] - images * chance) < 5 * spread for it in choices)


def test_a_seed_draws_the_same_again_and_another_does_not() -> None:
    label, rule = labels_of(40, 40, 4).expand(3, -1), Sampling(16, 0.5, 0.5, 0.5)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(rule.draw(label)[0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_targets_are_padded_with_nothing() -> None:
    targets = some_targets(0)
    padded = Targets.of(targets, CPU)
    assert padded.objects.valid.tolist() == [
        [True, True, True, False],
        [True, True, False, False],
        [True, True, False, False],
        [False] * 4,
    ]
    for image, target in enumerate(targets):
        valid = padded.objects.valid[image]
        fine = boxes.nonempty(target.boxes)
        assert torch.equal(padded.objects.boxes[image, valid], target.boxes[fine])
        assert torch.equal(padded.labels[image, valid], target.labels[fine])
        ignored = torch.zeros(0, 4) if target.ignored is None else target.ignored
        assert torch.equal(padded.ignored[image, : len(ignored)], ignored)
        assert not padded.ignored[image, len(ignored) :].any()
    assert not padded.objects.boxes[~padded.objects.valid].any()
    none = Targets.of([Target(torch.zeros(0, 4), torch.zeros(0))] * 2, CPU)
    assert none.objects.valid.tolist() == [[False]] * 2
    assert none.ignored.shape == (2, 0, 4)


@pytest.mark.parametrize("cascade", [False, True], ids=["faster", "cascade"])
def test_the_host_waits_as_often_for_many_frames_as_for_few(cascade: bool) -> None:
    """And calls as many operators, but for views."""
    model = tiny(cascade=cascade).train()
    stir(model)
    frames, targets = torch.randn(2, 3, 64, 64), some_targets(0)[:2]
    places = [Placement(size, size) for size in SIZES[:2]]
    counts = {}
    for times in (1, 3):  # the same frames, so that NMS has as many rounds

        def step(times: int = times) -> None:
            found = model.losses(frames.repeat(times, 1, 1, 1), targets * times, places * times)
            torch.stack(list(found.values())).sum().backward()

        step()
        with profile(activities=[ProfilerActivity.CPU]) as record:
            step()
        counts[times] = Counter(event.name for event in record.events())
    assert any(counts[1][name] for name in WAITS)
    assert [counts[3][name] for name in WAITS] == [counts[1][name] for name in WAITS]
    assert counts[3].total() < 1.01 * counts[1].total()
