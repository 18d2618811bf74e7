"""What timm hands out from the middle of a model: intermediate layers, features."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import eventful
from clips import moving_square
from eventful import Config, TopR
from eventful.errors import UnsupportedError
from tolerances import assert_near
from zoo_timm import (
    FRAME,
    TINY,
    ZOO,
    Entry,
    make,
    run,
    spread,
    stream_of,
    timm,
)

EVERYTHING = TopR(10**6)


# One of each kind of `forward_intermediates`.
TAPPED = ("vit_registers", "dinov3", "eva_mixed", "sam")


@pytest.fixture(params=TAPPED)
def tapped(request: pytest.FixtureRequest) -> Entry:
    return ZOO[request.param]


def test_copies_are_their_own(tapped: Entry) -> None:
    converted = eventful.convert(make(tapped), Config.fast(EVERYTHING))
    twin = copy.deepcopy(converted)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.mul_(0.9)
    (frame,) = moving_square(1, tapped.size)
    got = eventful.Stream(twin).call("forward_intermediates", frame, intermediates_only=True)
    with torch.no_grad():
        expected = twin.forward_intermediates(frame, intermediates_only=True)
    for a, b in zip(got, expected, strict=True):
        assert_near(a, b)


def intermediates(target: Callable[..., Any], frame: Tensor, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return target(frame, *args, **kwargs)


def test_intermediates_are_whole(tapped: Entry) -> None:
    model = make(tapped)
    stream = stream_of(model, Config.fast(TopR(8), scene_cut=None))
    stream.policy = EVERYTHING
    for t, frame in enumerate(moving_square(6, tapped.size, batch=2, noise=0.1)):
        if t == 4:
            stream.policy = TopR(8)
        final, layers = stream.call("forward_intermediates", frame, [0, 2])
        dense, expected = intermediates(model.forward_intermediates, frame, [0, 2])
        assert final.shape == dense.shape
        assert [x.shape for x in layers] == [x.shape for x in expected]
        if t < 4:
            assert_near(final, dense)
            for got, layer in zip(layers, expected, strict=True):
                assert_near(got, layer)


def test_intermediates_handed_out_stay_as_they_are(tapped: Entry) -> None:
    stream = stream_of(make(tapped), Config.fast(TopR(8), scene_cut=None))
    first, second = moving_square(2, tapped.size, noise=0.1)
    _, layers = stream.call("forward_intermediates", first)
    kept = [layer.clone() for layer in layers]
    stream.call("forward_intermediates", second)
    assert all(torch.equal(a, b) for a, b in zip(layers, kept, strict=True))


def test_a_newly_tapped_layer_flushes(tapped: Entry) -> None:
    model = make(tapped)
    stream = stream_of(model, Config.fast(TopR(8), scene_cut=None))
    clip = moving_square(7, tapped.size, noise=0.1)
    flushed = []
    for frame, indices in zip(clip, ([0], [0], [1], [0], None, [1], 1), strict=True):
        if indices is None:
            tapped.call(stream, frame)
        else:
            _, layers = stream.call("forward_intermediates", frame, indices=indices)
            _, expected = intermediates(model.forward_intermediates, frame, indices=indices)
            assert [x.shape for x in layers] == [x.shape for x in expected]
        flushed.append(stream.last.flushed[0])
        if flushed[-1]:
            assert_near(layers[0], expected[0])
    assert flushed == [True, False, True, False, False, False, False]


def test_a_layer_tapped_now_and_then_misses_nothing(tapped: Entry) -> None:
    model = make(tapped)
    stream = stream_of(model, Config.fast(EVERYTHING, protect=False, max_age=None, motion=False))
    first, second, third = moving_square(3, tapped.size, noise=0.1)
    stream.call("forward_intermediates", first, indices=[0])
    tapped.call(stream, second)
    stream.policy = TopR(0)
    _, (layer,) = stream.call("forward_intermediates", third, indices=[0])
    _, (expected,) = intermediates(model.forward_intermediates, second, indices=[0])
    assert_near(layer, expected)


def test_stopping_early_keeps_later_blocks_right(tapped: Entry) -> None:
    model = make(tapped)
    stream = stream_of(model, Config.fast(EVERYTHING, protect=False, max_age=None, motion=False))
    first, second, third = moving_square(3, tapped.size, noise=0.1)
    for frame in (first, second):
        options = {"indices": [0], "stop_early": True, "intermediates_only": True}
        (layer,) = stream.call("forward_intermediates", frame, **options)
        (expected,) = intermediates(model.forward_intermediates, frame, **options)
        assert_near(layer, expected)
    stream.policy = TopR(0)
    assert_near(run(tapped, stream, third), run(tapped, model, second))
    with pytest.raises(UnsupportedError, match="intermediates_only=True"):
        stream.call("forward_intermediates", third, indices=[0], stop_early=True)


def test_intermediate_layers_of_dino() -> None:
    model = make(ZOO["vit_registers"])
    stream = stream_of(model, Config.fast(EVERYTHING))
    for frame in moving_square(3, (40, 24), noise=0.1):
        options = {"n": [1, 2], "reshape": True, "return_prefix_tokens": True, "norm": True}
        got = stream.call("get_intermediate_layers", frame, **options)
        expected = intermediates(model.get_intermediate_layers, frame, **options)
        for pair, known in zip(got, expected, strict=True):
            for a, b in zip(pair, known, strict=True):
                assert_near(a, b)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {}),
        ("eva02_tiny_patch14_224", {}),
        ("samvit_base_patch16_224", {"window_size": 3, "global_attn_indexes": (1,)}),
    ],
)
def test_features_only(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    small = {k: v for k, v in TINY.items() if k != "num_classes"} | options
    model = timm.create_model(
        name, features_only=True, out_indices=(0, 1), img_size=FRAME, patch_size=8, **small
    )
    spread(model)
    stream = stream_of(model, Config.fast(EVERYTHING))
    for t, frame in enumerate(moving_square(4, FRAME, noise=0.1)):
        if t == 3:
            stream.policy = TopR(8)
        got, expected = stream(frame), intermediates(model, frame)
        assert [x.shape for x in got] == [x.shape for x in expected]
        for a, b in zip(got, expected, strict=True):
            if t < 3:
                assert_near(a, b)
    assert len(stream.last.blocks) == 2  # timm cuts off the blocks behind the last feature


def test_a_part_of_the_blocks() -> None:
    """Blocks before and behind the converted ones run dense, and taps count from the first."""
    model = make(ZOO["dinov3"])
    chosen = eventful.convert(
        model, Config.fast(EVERYTHING), where=lambda name, _: name != "blocks.0"
    )
    stream = eventful.Stream(chosen)
    for frame in moving_square(3, FRAME, noise=0.1):
        got = stream.call("forward_intermediates", frame, intermediates_only=True)
        expected = intermediates(model.forward_intermediates, frame, intermediates_only=True)
        for a, b in zip(got, expected, strict=True):
            assert_near(a, b)
