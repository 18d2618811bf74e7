"""When the blocks of a converted model are described anew."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import pytest
import torch
from torch import nn

import eventful
from eventful import Config, Stream, TopR, errors
from guarding import clip, converted, model  # noqa: F401


class TestSpecs:
    """The blocks' descriptions are made anew when parts of the model change, and only then."""

    @pytest.fixture
    def made(self, model, monkeypatch):
        """How often a block was described."""
        counts = []
        adapter = next(a for a in eventful.surgery.adapters.adapters() if a.matches(model))
        describe = type(adapter).spec

        def counting(self, trunk, block):
            counts.append(block)
            return describe(self, trunk, block)

        monkeypatch.setattr(type(adapter), "spec", counting)
        return counts

    def test_steady_frames_make_none(self, converted, clip, made):
        streams = [Stream(converted), Stream(converted)]
        streams[0](clip[0])
        assert made
        made.clear()
        streams[1](clip[0])
        for frame in clip[1:]:
            for stream in streams:
                stream(frame)
        streams[0].reset()
        streams[0](clip[0])
        assert not made

    def test_steady_frames_walk_no_modules(self, converted, clip, monkeypatch):
        stream = Stream(converted)
        stream(clip[0])
        monkeypatch.setattr(nn.Module, "named_modules", lambda *_, **__: pytest.fail("walked"))
        for frame in clip[1:]:
            stream(frame)

    def test_a_part_replaced_and_put_back_between_streams(self, model, clip):
        """A stream that starts over uses the parts, whatever another stream saw meanwhile."""
        converted = eventful.convert(model, Config.fast(TopR(10**6)))
        first, second = Stream(converted), Stream(converted)
        first(clip[0])
        norm = converted.blocks[0].norm1
        converted.blocks[0].norm1 = nn.LayerNorm(model.embed_dim, elementwise_affine=False).eval()
        for stream, step in ((second, clip[0]), (second, clip[1])):
            with torch.no_grad():
                expected = converted(step)
            assert (stream(step) - expected).abs().max() <= 1e-5 * expected.abs().max()
        with pytest.raises(errors.WeightsChangedError):
            first(clip[1])
        converted.blocks[0].norm1 = norm
        first.reset()
        with torch.no_grad():
            expected = converted(clip[1])
        assert (first(clip[1]) - expected).abs().max() <= 1e-5 * expected.abs().max()
        with pytest.raises(errors.WeightsChangedError):
            second(clip[2])

    def test_a_parameter_that_was_not_there(self, converted, clip):
        stream = Stream(converted)
        stream(clip[0])
        converted.blocks[0].ls1.register_parameter("extra", nn.Parameter(torch.ones(1)))
        with pytest.raises(errors.WeightsChangedError):
            stream(clip[1])
