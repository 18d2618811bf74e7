"""What objects print."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import pytest
import torch
from torch import nn

import eventful
from eventful import Config, SceneCut, Stream, StreamBatch, Threshold, TopFraction, TopR
from eventful.config import PRESETS
from guarding import ENTRY, batch, clip, converted, model  # noqa: F401


class TestReprs:
    def test_of_a_stream(self, converted, clip):
        stream = Stream(converted)
        assert repr(stream) == "Stream(VisionTransformer, fast, TopR(r=4, order=2.0), no frame yet)"
        for frame in clip[:2]:
            stream(frame)
        assert "(1, 3, 32, 40) float32 on cpu, 2 steps, 0.04" in repr(stream)
        stream.reset()
        assert "no frame yet" in repr(stream)
        assert "no policy" in repr(Stream(eventful.convert(ENTRY.make(), Config.paper())))

    def test_of_a_stream_asks_no_device(self, converted, clip):
        stream = Stream(converted)
        stream(clip[0])
        stream._last = lambda: pytest.fail("the record was made")
        assert "1 step," in repr(stream)

    def test_of_a_batch(self, batch, clip):
        assert repr(batch).endswith("no frame yet: 'gate', 'hall', 'yard')")
        for i in range(30):
            batch.join(f"camera {i}")
        assert "... 33 in all" in repr(batch)
        assert len(repr(batch)) < 300

    @pytest.mark.real_clock
    @pytest.mark.parametrize("preset", PRESETS)
    def test_of_a_record(self, preset, model, clip):
        config = Config.preset(preset, TopR(4), protect=False, max_age=None)
        stream = Stream(eventful.convert(model, config), maps=True)
        stream(clip[0])
        assert repr(stream.last).startswith("StepRecord(1 stream, flushed, 21 of 21 tokens")
        stream(clip[1])
        shown = repr(stream.last)
        assert "4 of 21 tokens updated" in shown
        assert "% of the operations" in shown
        assert " ms)" in shown
        assert len(shown) < 160

    def test_of_a_record_that_fell_back(self, model, clip):
        batch = StreamBatch(eventful.convert(model, Config.fast(TopR(4))))
        batch.join("a")
        batch(clip[0])
        batch.join("b")
        batch(torch.cat(clip[:2]))
        batch.last.fallback = True
        assert "2 streams, flushed 1 of 2, fallback" in repr(batch.last)

    @pytest.mark.parametrize(
        "config",
        [
            *(Config.preset(name) for name in PRESETS),
            *(Config.preset(name, TopR(3), scene_cut=SceneCut(0.5)) for name in PRESETS),
            Config(),
            Config(TopFraction(0.5), gating="block"),
            Config.fast(Threshold({"qkv": 1.0, "default": 2.0}), max_age=None),
        ],
        ids=repr,
    )
    def test_of_a_config_reads_back(self, config):
        assert eval(repr(config)) == config
        assert len(repr(config)) < 200

    def test_a_preset_is_shown_by_name(self):
        assert repr(Config.fast()) == "Config.fast()"
        assert repr(Config.exact(TopR(3), pool=2)) == "Config.exact(TopR(r=3, order=2.0), pool=2)"

    def test_of_an_inspection(self, model):
        shown = str(eventful.inspect(model))
        assert shown == repr(eventful.inspect(model))
        assert "3 of 3 blocks can be made eventful (timm VisionTransformer)." in shown
        assert "32x40 px: 21" in shown
        model.blocks[1] = nn.Identity()
        assert "Not blocks.1 (Identity): " in str(eventful.inspect(model))
        assert "No known" in str(eventful.inspect(nn.Linear(1, 1)))
