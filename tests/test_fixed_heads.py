"""Heads of fixed shape find what heads of any shape find, and never wait for the device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import eventful
from clips import moving_square
from eventful import ops
from eventful.engine import plan
from eventful.engine.call import Call
from eventful.engine.shaped import _cloned
from eventful.models.vitdet import (
    Detections,
    Found,
    Placement,
    ViTDet,
    boxes,
    heads,
    regions,
    rpn,
)
from eventful.models.vitdet.heads import HeadConfig, RegionHeads
from fixed_heads import literal_detections, literal_pick
from test_vitdet import tiny
from tolerances import BOXES, SCORES

PLACES = [Placement((48, 60), (77, 96)), Placement((96, 96), (96, 96))]


def crowded(cascade: bool) -> ViTDet:
    """A detector that finds more than 100 objects in noise."""
    return tiny(cascade, detections=150, score_threshold=0.02, nms_threshold=0.7)


EQUAL_FEATURES = {"atol": 1e-4, "rtol": 0.0}  # of corners, where the heads alone run two ways


def same(got: Detections, wanted: Detections, corners: dict[str, float] = EQUAL_FEATURES) -> None:
    assert got.labels.tolist() == wanted.labels.tolist()
    torch.testing.assert_close(got.boxes, wanted.boxes, **corners)
    torch.testing.assert_close(got.scores, wanted.scores, **SCORES)
    assert (got.masks is None) == (wanted.masks is None)
    if got.masks is not None:
        torch.testing.assert_close(got.masks, wanted.masks, **SCORES)


@pytest.mark.parametrize("cascade", [False, True], ids=["faster", "cascade"])
def test_a_detector_finds_what_single_images_give(cascade: bool) -> None:
    model = crowded(cascade)
    model.rpn.keep_after = (1, 200)
    pixels = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        wanted = literal_detections(model, pixels, PLACES)
        found = model(pixels, PLACES)
    assert min(len(part) for part in wanted) >= 100
    assert found.boxes.shape == (2, 150, 4)
    for got, expected in zip(found, wanted, strict=True):
        same(got, expected)


def test_compiled_operators_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pixels, asked = crowded(False), torch.randn(2, 3, 96, 96), []

    def align(features, rois, output, scale, ratio, aligned):
        asked.append("roi_align")
        return ops.roi_align(features, rois[:, 1:], rois[:, 0].long(), output, scale)

    def nms(found, scores, threshold):
        asked.append("nms")
        return regions.nms_torch(found, scores, threshold)

    with torch.no_grad():
        wanted = model(pixels, PLACES)
        compiled = SimpleNamespace(roi_align=align, nms=nms)
        monkeypatch.setattr(regions, "compiled_ops", lambda: compiled)
        found = model(pixels, PLACES)
    assert set(asked) == {"roi_align", "nms"}
    for got, expected in zip(found, wanted, strict=True):
        same(got, expected)


CASES = ["random", "ties", "all scores equal", "not finite", "nothing", "all boxes equal", "empty"]


def some_results(case: str, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Boxes (3, 90, columns, 4) and scores (3, 90, 6) of three images."""
    make = torch.Generator().manual_seed(seed)
    corner = 100 * torch.rand(3, 90, columns, 2, generator=make) - 10
    found = torch.cat([corner, corner + 30 * torch.rand(corner.shape, generator=make)], dim=-1)
    scores = (2 * torch.randn(3, 90, 6, generator=make)).softmax(dim=2)
    if case == "ties":
        scores = (10 * scores).round() / 10
    elif case == "all scores equal":
        scores[:] = 0.25
    elif case == "not finite":
        found[torch.rand(found.shape, generator=make) < 0.02] = torch.nan
        found[torch.rand(found.shape, generator=make) < 0.02] = torch.inf
        scores[torch.rand(scores.shape, generator=make) < 0.02] = torch.nan
        scores[torch.rand(scores.shape, generator=make) < 0.02] = torch.inf
    elif case == "nothing":
        scores[1] = 0
    elif case == "all boxes equal":
        found[:] = found[:, :1, :1]
    elif case == "empty":
        found[:, ::2, :, 2] = found[:, ::2, :, 0]
    return found, scores


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("columns", [1, 5], ids=["shared boxes", "boxes of each class"])
@pytest.mark.parametrize("fixed", [False, True], ids=["in use", "all places"])
def test_picked_are_those_of_each_image(
    case: str, columns: int, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fixed:
        monkeypatch.setattr(heads, "_used", lambda values, none: values.shape[1])
    sizes, lengths = [(90, 70), (64, 100), (100, 100)], set()
    for limit in (7, 120):
        config = HeadConfig(5, convs=0, hidden=4, shared_boxes=columns == 1, detections=limit)
        model = RegionHeads(4, config)
        found, scores = some_results(case, columns, limit)
        valid = torch.ones(3, 90, dtype=torch.bool)
        valid[0, 80:] = False
        valid[2, :] = case != "empty"
        floor = config.score_threshold
        picked = model._pick(*ops.candidates(found, scores, valid, torch.tensor(sizes), floor))
        assert picked.boxes.shape == (3, limit, 4)
        assert not picked.boxes[~picked.valid].any()
        assert not picked.scores[~picked.valid].any()
        for image, got in enumerate(picked):
            rows = valid[image]
            wanted = literal_pick(config, found[image, rows], scores[image, rows], sizes[image])
            lengths.add(len(wanted))
            assert torch.equal(got.labels, wanted.labels)
            assert torch.equal(got.boxes, wanted.boxes)
            assert torch.equal(got.scores, wanted.scores)
    assert (0 in lengths) == (case in ("nothing", "empty"))
    assert max(lengths) >= (100 if case == "random" else 5)


@pytest.mark.parametrize("cascade", [False, True], ids=["faster", "cascade"])
@pytest.mark.parametrize("what", ["no proposals", "no detections"])
def test_nothing_at_all_is_found(cascade: bool, what: str) -> None:
    model = tiny(cascade)
    if what == "no proposals":
        model.rpn.objectness.bias.data.fill_(torch.nan)
    else:
        model.heads.config = replace(model.heads.config, score_threshold=1.0)
    with torch.no_grad():
        found = model(torch.randn(2, 3, 96, 96), PLACES)
    assert [len(part) for part in found] == [0, 0]
    assert found[0].boxes.shape == (0, 4)
    assert (found[0].masks is not None) == cascade
    assert not any(bool(leaf.any()) for leaf in pytree.tree_leaves(found) if leaf is not None)


class NoWaits(TorchDispatchMode):
    """Refuses what waits for a device, or copies to it from the host."""

    REFUSED = ("nonzero", "_local_scalar_dense", "equal", "lift_fresh", "unique", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.REFUSED, name
        if name in ("index", "index_put", "index_put_"):
            kinds = {part.dtype for part in args[1] if part is not None}
            assert not kinds & {torch.bool, torch.uint8}, name
        if name == "repeat_interleave":
            assert "output_size" in (kwargs or {}), name
        return func(*args, **(kwargs or {}))


def aside(operation: Callable) -> Callable:
    """The host's way of an operation, which may wait as the kernels do not."""

    def call(*args):
        with _disable_current_modes():
            return operation(*args)

    return call


@contextlib.contextmanager
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may wait but the operations that have kernels of their own."""
    monkeypatch.setattr(heads, "_used", lambda values, none: values.shape[1])
    monkeypatch.setattr(regions, "compiled_ops", lambda: None)
    for name in ("suppress", "keep_apart", "align_regions"):
        monkeypatch.setattr(ops, name, aside(getattr(ops, name)))
    with NoWaits():
        yield


@pytest.mark.parametrize("cascade", [False, True], ids=["faster", "cascade"])
def test_nothing_waits_for_the_device(cascade: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pixels = crowded(cascade), torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        wanted = model(pixels, PLACES)
        with as_on_a_device(monkeypatch):
            found = model(pixels, PLACES)
            assert len(found) == 2
            with pytest.raises(AssertionError, match="_local_scalar_dense"):
                int(found.scores.max())
    for got, expected in zip(found, wanted, strict=True):
        same(got, expected)


def made(counts: list[int], places: int = 6) -> Found:
    make = torch.Generator().manual_seed(0)
    corner = 90 * torch.rand(len(counts), places, 2, generator=make)
    return Found(
        torch.cat([corner, corner + 20], dim=2),
        torch.rand(len(counts), places, generator=make),
        torch.randint(4, (len(counts), places), generator=make),
        torch.tensor(counts),
        torch.rand(len(counts), places, 28, 28, generator=make),
    )


def test_found_is_a_sequence_of_detections() -> None:
    found = made([2, 0, 6])
    assert len(found) == 3
    assert repr(found) == "Found(frames=3, places=6)"
    assert [len(part) for part in found] == [2, 0, 6]
    assert found[0] is found[0]
    assert [len(part) for part in found[1:]] == [0, 6]
    assert torch.equal(found[-1].masks, found.masks[2])
    first, *_ = found
    assert torch.equal(first.boxes, found.boxes[0, :2])
    with pytest.raises(IndexError):
        found[3]


def test_a_copy_of_found_is_of_its_tensors() -> None:
    found = made([2, 1])
    assert len(found[0]) == 2
    copied = _cloned(found)
    assert isinstance(copied, Found)
    found.boxes.zero_()
    found.counts.zero_()
    assert [len(part) for part in copied] == [2, 1]
    assert copied[0].boxes.all()
    assert len(pytree.tree_leaves(found)) == 5
    assert [len(part) for part in copy.deepcopy(copied)] == [2, 1]


def test_boxes_come_back_as_those_of_each_frame() -> None:
    """Some lie in the padding, between others that stay."""
    found = made([6, 5, 0])
    places = [Placement((40, 200), (50, 100)), Placement((300, 9), (110, 20)), PLACES[0]]
    got = found.back(places)
    assert got.boxes.shape == found.boxes.shape
    lengths = []
    for part, before, place in zip(got, found, places, strict=True):
        wanted = before.back(place)
        torch.testing.assert_close(part.boxes, wanted.boxes, atol=1e-4, rtol=0)
        assert torch.equal(part.scores, wanted.scores)
        assert torch.equal(part.labels, wanted.labels)
        assert torch.equal(part.masks, wanted.masks)
        lengths.append(len(wanted))
    assert 0 < lengths[0] < 6
    assert 0 < lengths[1] < 5


def test_numbers_of_the_host_as_a_table() -> None:
    rows = [(1.5, 2.0, 0.1), (1.5, 3.0, 0.1)]
    assert torch.equal(boxes.table(rows, torch.device("cpu")), torch.tensor(rows))


@dataclass(frozen=True)
class Record:
    side: int
    parts: tuple[float, ...] = ()


@dataclass(frozen=True)
class Hidden:
    side: int = field(repr=False)


@dataclass(frozen=True)
class Silent:
    side: int

    def __repr__(self) -> str:
        return "Silent"


class Larger(Record):
    """Holds more than its fields."""


@dataclass
class Loose:
    side: int


@dataclass(frozen=True)
class Heavy:
    values: Tensor


def test_calls_with_records_repeat_but_are_not_divided() -> None:
    model, frame = torch.nn.Identity(), torch.zeros(2, 3)

    def call(*more: object) -> Call:
        return Call.of(model, "forward", (frame, *more), {}, frame)

    assert call().divisible
    assert call(3, [1.0, "a"]).divisible
    for simple in (PLACES, Record(3), (Record(3, (1.0,)),)):
        assert call(simple).repeatable
        assert not call(simple).divisible
    assert call([PLACES[0]]).key() == call([replace(PLACES[0])]).key()
    assert call([PLACES[0]]).key() != call([PLACES[1]]).key()
    for quiet in (Silent, Hidden):  # their texts do not say what they hold
        assert call(quiet(1)).key() == call(quiet(1)).key()
        assert call(quiet(1)).key() != call(quiet(2)).key()
    for other in (Larger(3), Loose(3), Heavy(frame), [Heavy(frame)], Record):
        assert not call(other).repeatable


def test_streams_that_join_late_share_their_output() -> None:
    model = eventful.convert(tiny(), eventful.Config.fast(eventful.TopR(9)))
    batch, alone = eventful.StreamBatch(model), [eventful.Stream(model) for _ in range(2)]
    frames = moving_square(3, (96, 96), batch=2)
    batch.join("a")
    batch(frames[0][:1])
    alone[0](frames[0][:1])
    batch.join("b")
    for pair in frames[1:]:
        together = batch(pair)
        assert isinstance(together, Found)
        for i, stream in enumerate(alone):
            same(together[i], stream(pair[i : i + 1])[0], BOXES)
            assert len(together[i])


@pytest.mark.parametrize(
    "cascade", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["faster", "cascade"]
)
def test_a_step_as_on_a_device_finds_the_same(
    cascade: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams have slots of a memory, and proposals are made from it for all levels at once."""
    found: dict[str, list[list[Detections]]] = {"host": [], "device": []}
    for way, made in found.items():
        if way == "device":
            monkeypatch.setattr(plan, "DEVICES", {"cpu"})
            monkeypatch.setattr(rpn, "_on_device", lambda rows: True)
        config = eventful.Config.fast(eventful.TopR(9), fallback=False, scene_cut=None)
        batch = eventful.StreamBatch(eventful.convert(tiny(cascade), config), check="sync")
        frames = moving_square(3, (96, 96), batch=3)
        for name in "abc":
            batch.join(name)
        batch(frames[0])
        batch.leave("a")  # from now on rows of the batch are not those of the memory
        made += [list(batch(frame[1:])) for frame in frames[1:]]
    assert len(found["host"]) == 2
    for one, other in zip(found["device"], found["host"], strict=True):
        assert all(len(part) for part in other)
        for got, wanted in zip(one, other, strict=True):
            same(got, wanted, BOXES)


def test_anchors_of_a_dry_run_are_not_kept() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from eventful.models.vitdet.rpn import anchors_of

    grids, device = ((17, 3), (8, 1), (4, 1), (2, 1), (1, 1)), torch.device("cpu")
    with FakeTensorMode():
        anchors_of(grids, device)
    assert type(anchors_of(grids, device)[0]) is Tensor
