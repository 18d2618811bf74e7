"""`eventful.Frame`: a tensor for any model, with what is known of the frame."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import eventful
import zoo_timm
from clips import moving_square
from eventful.errors import FrameError
from eventful.video.frame import Region


def make(**given) -> eventful.Frame:
    torch.manual_seed(0)
    given = {"motion": torch.rand(1, 2, 3, 4), "time": 2.5, "index": 7, "source": "a.mp4"} | given
    return eventful.Frame(torch.rand(1, 3, 24, 32), **given)


def same(a: eventful.Frame, b: eventful.Frame) -> bool:
    return a.infos == b.infos and a.motion.equal(b.motion)


def test_operations_give_plain_tensors():
    frame = make()
    for result in (frame + 1, frame * frame, frame[0], frame.mean(), frame.clone(), frame.detach()):
        assert type(result) is Tensor
    assert type(nn.Conv2d(3, 2, 4)(frame)) is Tensor
    assert type(torch.cat([frame, frame])) is Tensor
    assert frame.shape == (1, 3, 24, 32)


def test_attributes_and_their_defaults():
    frame = make()
    assert (frame.time, frame.index, frame.source, frame.key) == (2.5, 7, "a.mp4", False)
    assert frame.motion.shape == (1, 2, 3, 4)
    bare = eventful.Frame(torch.zeros(1, 3, 8, 6))
    assert bare.motion is None
    assert (bare.original_size, bare.region) == ((8, 6), Region(0, 0, 8, 6))


@pytest.mark.parametrize("how", ["half", "bfloat16", "double", "float", "cpu"])
def test_conversions_keep_the_attributes(how):
    frame = make()
    moved = getattr(frame, how)()
    assert type(moved) is eventful.Frame
    assert same(moved, frame)
    assert moved.motion.dtype == torch.float32


def test_to_keeps_the_attributes_and_takes_the_motion_along():
    frame = make()
    assert same(frame.to(torch.float16), frame)
    assert frame.to(torch.float16).dtype == torch.float16
    assert frame.to("cpu") is frame
    away = frame.to("meta")
    assert (type(away), away.device.type, away.motion.device.type) == (
        eventful.Frame,
        "meta",
        "meta",
    )


def test_copies_and_pickles():
    frame = make()
    for other in (copy.deepcopy(frame), pickle.loads(pickle.dumps(frame)), copy.copy(frame)):
        assert type(other) is eventful.Frame
        assert other.equal(frame)
        assert same(other, frame)
    deep = copy.deepcopy(frame)
    deep.zero_()
    deep.motion.zero_()
    assert frame.sum() > 0
    assert frame.motion.sum() > 0


def test_inference_mode():
    frame = make()
    with torch.inference_mode():
        assert type(frame + 1) is Tensor
        assert same(frame.half(), frame)
        assert eventful.Frame(torch.zeros(1, 3, 4, 4), time=1.0).time == 1.0


def test_boxes_go_back_to_the_original_picture():
    frame = make(original_size=(100, 200), region=Region(4, 0, 16, 32))
    boxes = torch.tensor([[[0, 4, 32, 20], [8, 8, 16, 12], [-5, 0, 40, 30]]])
    found = frame.to_original(boxes)
    expected = [[0, 0, 200, 100], [50, 25, 100, 50], [0, 0, 200, 100]]
    assert found.tolist() == [expected]
    with pytest.raises(FrameError, match=r"\(\.\.\., 4\)"):
        frame.to_original(torch.zeros(2, 5))


def test_what_is_no_frame():
    with pytest.raises(FrameError, match=r"a tensor \(3, 8, 8\)"):
        eventful.Frame(torch.zeros(3, 8, 8))
    with pytest.raises(FrameError, match=r"\(1, 2, h, w\), not \(2, 3, 4\)"):
        make(motion=torch.zeros(2, 3, 4))


def test_stack():
    first, second = make(), make(motion=None, index=8)
    both = eventful.stack([first, second])
    assert both.shape == (2, 3, 24, 32)
    assert type(both) is eventful.Frame
    assert [info.index for info in both.infos] == [7, 8]
    assert both.motion[0].equal(first.motion[0])
    assert both.motion[1].isnan().all()
    with pytest.raises(FrameError, match="stack of 2 frames"):
        _ = both.time
    assert eventful.stack([second, second]).motion is None
    assert eventful.stack([first]).time == 2.5


def test_stack_brings_grids_to_the_largest():
    both = eventful.stack(
        [make(motion=torch.ones(1, 2, 2, 2)), make(motion=torch.ones(1, 2, 4, 3))]
    )
    assert both.motion.shape == (2, 2, 4, 3)
    assert (both.motion == 1).all()


def test_stack_of_frames_that_differ():
    with pytest.raises(FrameError, match="same `size`"):
        eventful.stack([make(), eventful.Frame(torch.zeros(1, 3, 8, 8))])
    with pytest.raises(FrameError, match="No frames"):
        eventful.stack([])


@pytest.mark.parametrize("devices", [set(), {"cpu"}], ids=["host", "resident"])
def test_streams_take_frames(devices, monkeypatch):
    monkeypatch.setattr("eventful.engine.plan.DEVICES", devices)
    entry = zoo_timm.ZOO["vit"]
    model = eventful.convert(entry.make())
    plain, framed = eventful.Stream(model), eventful.Stream(model)
    batch = eventful.StreamBatch(model)
    batch.join("a")
    batch.join("b")
    for pixels in moving_square(3, entry.size):
        frame = eventful.Frame(pixels)
        out = framed(frame)
        assert type(out) is Tensor
        assert out.equal(plain(pixels))
        both = eventful.stack([frame, frame])
        assert type(batch(both)) is Tensor
