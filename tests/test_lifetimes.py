"""What streams hold, and when they give it back."""

from __future__ import annotations

import gc

import pytest
import torch

import eventful
import zoo_timm
from clips import moving_square
from eventful import Config, Stream, StreamBatch, TopR
from eventful.engine.store import MOST_SHAPES
from eventful.errors import StreamClosedError

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(
    params=["plain", "resident", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])]
)
def device(request, monkeypatch):
    if request.param == "resident":
        monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def model(device):
    torch.manual_seed(7)
    made = zoo_timm.plain(dynamic_img_size=True)().to(device)
    return eventful.convert(made, Config.fast(TopR(5)))


def frames(count, device, size=(32, 40), batch=1):
    return [frame.to(device) for frame in moving_square(count, size, batch=batch, noise=0.05)]


def kinds(model):
    return len(model._eventful.stores)


class TestClosing:
    def test_a_closed_stream_says_so(self, model, device):
        clip = frames(2, device)
        with Stream(model) as stream:
            stream(clip[0])
            assert stream.nbytes > 0
        assert stream.nbytes == 0
        uses = (lambda: stream(clip[1]), stream.reset, stream.flush, stream.snapshot)
        for use in uses:
            with pytest.raises(StreamClosedError, match="make another"):
                use()
        stream.close()  # again does no harm

    def test_a_batch_closes_too(self, model, device):
        with StreamBatch(model) as batch:
            batch.join("a")
            batch(frames(1, device)[0])
        with pytest.raises(StreamClosedError):
            batch.join("b")

    def test_nothing_is_left_behind(self, model, device):
        with Stream(model) as stream:
            for frame in frames(3, device):
                stream(frame)
        assert kinds(model) == 0

    def test_other_streams_keep_theirs(self, model, device):
        clip = frames(4, device)
        first, second = Stream(model), Stream(model)
        alone = Stream(model)
        expected = [alone(frame) for frame in clip]
        for frame in clip[:2]:
            first(frame)
            second(frame)
        first.close()
        for frame, known in zip(clip[2:], expected[2:], strict=True):
            torch.testing.assert_close(second(frame), known, rtol=1e-4, atol=1e-5)

    def test_a_stream_after_the_last_was_closed(self, model, device):
        clip = frames(3, device)
        runs = []
        for _ in range(2):
            with Stream(model) as stream:
                runs.append([stream(frame) for frame in clip])
        for one, two in zip(*runs, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_few_frame_sizes_are_kept(model, device, monkeypatch):
    """The sizes used last stay, and those of streams that still live."""
    if device == "cpu" and "cpu" not in eventful.engine.plan.DEVICES:
        pytest.skip("plain steps keep nothing in the model")
    living = Stream(model)
    living(frames(1, device, (40, 40))[0])
    for side in range(3, 13):
        Stream(model)(frames(1, device, (8 * side, 32))[0])
        gc.collect()
    assert kinds(model) <= 5
    sizes = {key[0][-2] for key in model._eventful.stores}
    assert {40, 96} <= sizes
    living(frames(2, device, (40, 40))[1])


def test_few_recordings_are_kept(model, device):
    if device == "cpu" and "cpu" not in eventful.engine.plan.DEVICES:
        pytest.skip("plain steps are not recorded")
    torch.manual_seed(7)
    wide = eventful.convert(
        zoo_timm.plain(img_size=(192, 200))().to(device), Config.fast(scene_cut=None)
    )
    stream = Stream(wide)
    clip = frames(2, device, (192, 200))
    stream(clip[0])
    for r in range(1, MOST_SHAPES + 8):
        stream.policy = TopR(16 * r)
        stream(clip[1])
    (home,) = wide._eventful.stores.values()
    assert len(home.shapes) == MOST_SHAPES


@pytest.mark.gpu
@on_cuda
def test_device_memory_returns_to_where_it_began():
    torch.manual_seed(7)
    model = eventful.convert(
        zoo_timm.plain(img_size=(192, 200), dynamic_img_size=True)().cuda(), Config.fast()
    )

    def held():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def run(size):
        with Stream(model) as stream:
            for frame in frames(6, "cuda", size):
                stream(frame)

    run((192, 200))  # kernels are loaded, libraries take their workspaces
    began = held()
    for side in (64, 96, 128, 160, 192):
        run((side, 200))
    ended = held()
    assert ended[0] <= began[0], f"{ended[0] - began[0]} bytes are still allocated"
    assert ended[1] <= began[1], f"{ended[1] - began[1]} bytes are still reserved"
