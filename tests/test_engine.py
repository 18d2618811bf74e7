"""Streams that share memory, and first frames that fail: on the host and on the device path."""

from __future__ import annotations

import pytest
import torch

import eventful
import zoo_timm
from clips import moving_square
from eventful import Config, NoiseThreshold, Stream, StreamBatch, TopR, errors

ENTRY = zoo_timm.ZOO["vit"]


@pytest.fixture(params=["host", "resident"], autouse=True)
def path(request, monkeypatch):
    devices = {"cpu"} if request.param == "resident" else set()
    monkeypatch.setattr("eventful.engine.plan.DEVICES", devices)
    return request.param


@pytest.fixture
def model():
    torch.manual_seed(3)
    return eventful.convert(ENTRY.make(), Config.fast(TopR(3), fallback=False))


@pytest.fixture
def clip():
    return moving_square(6, ENTRY.size, noise=0.05)


def test_a_layer_that_another_stream_tapped_is_whole(model, clip):
    """A stream that never kept the outputs of a layer recomputes all to return them."""
    first, second = Stream(model), Stream(model)
    for frame in clip[:2]:
        second(frame)
    for frame in clip[:2]:
        first.call("forward_intermediates", frame)
    _, layers = second.call("forward_intermediates", clip[2])
    with torch.no_grad():
        _, expected = model.forward_intermediates(clip[2])
    for got, wanted in zip(layers, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    third = Stream(model)
    third(clip[0])
    _, layers = third.call("forward_intermediates", clip[1])
    assert all(bool((layer.abs().sum(dim=1) > 0).all()) for layer in layers)


def test_streams_of_a_batch_beside_one_that_tapped(model, clip):
    batch = StreamBatch(model)
    batch.join("a")
    batch.join("b")
    pair = [torch.cat([frame, frame.flip(-1)]) for frame in clip]
    batch(pair[0])
    batch(pair[1])
    batch.call("forward_intermediates", clip[2], streams=["a"])
    _, layers = batch.call("forward_intermediates", clip[3].flip(-1), streams=["b"])
    assert all(bool((layer.abs().sum(dim=1) > 0).all()) for layer in layers)


def test_a_batch_goes_on_with_another_size_after_a_first_frame_that_failed(clip):
    torch.manual_seed(3)
    make = zoo_timm.plain(img_size=(32, 40), dynamic_img_size=True)
    model = eventful.convert(make(), Config.fast(TopR(3), fallback=False))
    batch = StreamBatch(model)
    batch.join("a")
    hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch(torch.rand(1, 3, 32, 40))
    hook.remove()
    frame = torch.rand(1, 3, 48, 40)
    with torch.no_grad():
        expected = model(frame)
    torch.testing.assert_close(batch(frame), expected, rtol=1e-4, atol=1e-5)


def test_a_bad_first_frame_leaves_no_size_behind(model, clip):
    stream = Stream(model, check="sync")
    with pytest.raises(errors.NonFiniteError):
        stream(torch.full((2, 3, *ENTRY.size), torch.nan))
    stream(clip[0])
    assert stream.last.flushed == [True]


@pytest.mark.parametrize("between", ["snapshot", "flush"])
def test_what_lies_between_steps_loses_no_report(model, clip, between, path):
    """NaN that arises inside the model is reported, whatever is called in the meantime."""
    if path == "host":
        pytest.skip("the host reports it at once")
    batch = StreamBatch(model)
    batch.join("a")
    batch.join("b")
    pair = [torch.cat([frame, frame.flip(-1)]) for frame in clip]
    batch(pair[0])
    handle = model.blocks[0].mlp.fc2.register_forward_hook(lambda m, i, out: out * torch.nan)
    batch(pair[1])
    handle.remove()
    if between == "snapshot":
        with pytest.raises(errors.NonFiniteError, match="inside the model"):
            batch.snapshot("a")
        return
    batch.flush("a")
    batch.flush("b")
    batch(pair[2])
    with pytest.raises(errors.NonFiniteError, match="inside the model"):
        batch(pair[3])


class Quieter:
    """A user's policy that follows the noise through parameters."""

    needs_change = True

    def __init__(self, order: float) -> None:
        self.order, self._inner = order, NoiseThreshold(k=1.0, order=order)

    def params(self, tokens):
        return self._inner.params(tokens)

    def select(self, error, context):
        return self._inner.select(error, context)


def test_a_users_noise_policy_is_measured_in_its_own_norm(clip, path):
    if path == "resident":
        pytest.skip("L1 runs on the host")
    torch.manual_seed(3)
    config = Config.fast(TopR(1), fallback=False, max_age=None, scene_cut=None)
    model = eventful.convert(ENTRY.make(), config)

    def counts(*policies):
        batch = StreamBatch(model)
        for place, policy in enumerate(policies):
            batch.join(str(place), policy)
        for frame in clip[:5]:
            batch(torch.cat([frame] * len(policies)))
        return next(iter(batch.last.gates.values())).counts.tolist()

    one, two = NoiseThreshold(k=1.0, order=1.0), NoiseThreshold(k=1.0)
    assert counts(Quieter(1.0)) == counts(one)
    assert counts(one, two, Quieter(2.0)) == [*counts(one), *counts(two), *counts(two)]


def test_passes_over_some_streams_are_not_timed_as_steps_of_all(model, path):
    if path == "resident":
        pytest.skip("passes over some streams are not timed there")
    asked = []
    batch = StreamBatch(model)
    for name in "abc":
        batch.join(name)
    known = batch._fallbacks.of
    batch._fallbacks.of = lambda frame, layouts: asked.append(len(frame)) or known(frame, layouts)
    frames = torch.rand(3, 3, *ENTRY.size)
    batch(frames)
    batch(frames)
    asked.clear()
    batch.flush("b")
    batch(frames)
    assert sorted(asked) == [1, 2]
