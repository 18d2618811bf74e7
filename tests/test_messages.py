"""What the public surface says to a new user's mistakes: models and settings."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import eventful
from eventful import (
    Config,
    NoiseThreshold,
    SceneCut,
    Stream,
    StreamBatch,
    Threshold,
    TopFraction,
    TopR,
    errors,
)
from eventful.config import PRESETS
from guarding import clip, converted, model  # noqa: F401


class TestWrappedModels:
    def test_compiled(self, model):
        with pytest.raises(errors.ConfigError, match=r"Convert the model itself.*not needed"):
            eventful.convert(torch.compile(model))

    def test_compiled_inside(self, model):
        outer = nn.Sequential(torch.compile(model)).eval()
        with pytest.raises(errors.ConfigError, match=r"part '0'.*compiled"):
            eventful.convert(outer)
        with pytest.raises(errors.ConfigError, match="compiled"):
            eventful.inspect(outer)

    def test_a_compiled_block(self, model):
        model.blocks[1] = torch.compile(model.blocks[1])
        with pytest.raises(errors.ConfigError, match=r"'blocks\.1'.*compiled"):
            eventful.convert(model)

    def test_compiled_in_place(self, model):
        model.compile()
        with pytest.raises(errors.ConfigError, match=r"\.compile\(\)"):
            eventful.convert(model)

    def test_a_compiled_forward(self, model):
        model.forward = torch.compile(model.forward)
        with pytest.raises(errors.ConfigError, match="compiled"):
            eventful.convert(model)

    def test_compiled_after_conversion(self, converted):
        with pytest.raises(errors.ConfigError, match=r"eventful\.Stream\(converted\)"):
            Stream(torch.compile(converted))

    def test_a_compiled_head_is_no_obstacle(self, model, clip):
        class Pooled(nn.Module):
            def forward(self, x):
                return x.mean(dim=1)

        whole = nn.Sequential(model, torch.compile(Pooled(), backend="eager")).eval()
        stream = Stream(eventful.convert(whole, Config.fast(TopR(10**6))))
        for frame in clip[:2]:
            with torch.no_grad():
                expected = model(frame).mean(dim=1)
            assert (stream(frame) - expected).abs().max() <= 1e-5 * expected.abs().max()

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize("fix", [torch.jit.script, torch.fx.symbolic_trace])
    def test_a_head_of_fixed_code_is_no_obstacle(self, model, clip, fix):
        head = nn.Sequential(nn.Linear(model.embed_dim, 4), nn.ReLU())
        whole = nn.Sequential(model, fix(head)).eval()
        stream = Stream(eventful.convert(whole, Config.fast(TopR(10**6))))
        for frame in clip[:2]:
            with torch.no_grad():
                expected = whole(frame)
            assert (stream(frame) - expected).abs().max() <= 1e-5 * expected.abs().max()

    @pytest.mark.parametrize("method", ["forward", "forward_features"])
    def test_a_replaced_forward(self, model, clip, method):
        """It sees all tokens of every block, since its loop is not the library's."""
        seen = []

        def loop(x, *_, **__):
            x = model._pos_embed(model.patch_embed(x))
            for block in model.blocks:
                x = block(x)
                seen.append(x.shape[1])
            return x

        setattr(model, method, loop)
        with pytest.raises(errors.ConfigError, match=f"`{method}` of the model was replaced"):
            eventful.convert(model, Config.fast(TopR(4)))
        stream = Stream(eventful.convert(model, Config.fast(TopR(4)), inplace=True))
        for frame in clip[:2]:
            stream(frame)
        assert set(seen) == {21}

    def test_data_parallel(self, model):
        with pytest.raises(errors.ConfigError, match=r"DataParallel.*`module`"):
            eventful.convert(nn.DataParallel(model))

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
    def test_torchscript(self, model, clip):
        with pytest.raises(errors.NoMatchError, match="TorchScript"):
            eventful.convert(torch.jit.trace(model, clip[0]))

    def test_a_traced_graph(self, model):
        with pytest.raises(errors.NoMatchError, match=r"torch\.fx"):
            eventful.convert(torch.fx.symbolic_trace(model))


class TestNoModels:
    @pytest.mark.parametrize(
        ("given", "advice"),
        [
            ("vit", "create_model"),
            (None, "Make the model"),
            (nn.Linear, r"Linear\(\.\.\.\)"),
            ({"weight": torch.zeros(1)}, "load_state_dict"),
            (SimpleNamespace(model=nn.Identity()), "attribute `model`"),
        ],
    )
    @pytest.mark.parametrize(
        "use", [eventful.convert, eventful.inspect, eventful.restore, Stream, StreamBatch]
    )
    def test_refused(self, use, given, advice):
        with pytest.raises(errors.ConfigError, match=rf"{use.__name__} takes a model.*{advice}"):
            use(given)

    def test_where_and_size(self, model):
        with pytest.raises(errors.ConfigError, match="or a function of"):
            eventful.convert(model, where=3)
        for size in ("224", (1, 2, 3), 0):
            with pytest.raises(errors.ConfigError, match="size is one side"):
                eventful.inspect(model, size)

    def test_no_adapter(self):
        with pytest.raises(errors.ConfigError, match="register_adapter"):
            eventful.register_adapter(3)


class TestSettings:
    @pytest.mark.parametrize("preset", PRESETS)
    def test_options_of_a_policy(self, preset):
        expected = rf"Config\.{preset} has no option 'r'. Pass a policy: Config\.{preset}\(TopR\(9"
        with pytest.raises(errors.ConfigError, match=expected):
            Config.preset(preset, r=9)

    def test_misspelt_and_unknown_options(self):
        with pytest.raises(errors.ConfigError, match="Did you mean 'max_age'"):
            Config.fast(maxage=3)
        with pytest.raises(errors.ConfigError, match="options are gating"):
            Config.fast(zzz=3)

    @pytest.mark.parametrize(
        ("given", "advice"),
        [
            (128, r"TopR\(128\)"),
            (0.25, r"TopFraction\(0.25\)"),
            (0, r"TopR\(256\)"),
            (TopR, r"TopR is a class.*TopR\(256\)"),
            (NoiseThreshold, r"NoiseThreshold\(\)"),
            (Config.fast(), r"config\.policy"),
        ],
    )
    def test_no_policy(self, converted, given, advice):
        stream, batch = Stream(converted), StreamBatch(converted)
        batch.join("a")
        for use in (
            lambda: Config.fast(given),
            lambda: Config(given),
            lambda: Stream(converted, given),
            lambda: StreamBatch(converted, given),
            lambda: setattr(stream, "policy", given),
            lambda: setattr(batch, "policy", given),
            lambda: batch.join("b", given),
            lambda: batch.set_policy("a", given),
        ):
            with pytest.raises(errors.ConfigError, match=advice):
                use()

    @pytest.mark.parametrize(
        "make",
        [
            lambda: TopR("5"),
            lambda: TopR(None),
            lambda: TopFraction(None),
            lambda: TopFraction("0.5"),
            lambda: TopFraction(True),
            lambda: Threshold(None),
            lambda: NoiseThreshold(k=None),
            lambda: NoiseThreshold(k="2"),
            lambda: NoiseThreshold(momentum=None),
            lambda: NoiseThreshold(max_fraction="half"),
            lambda: SceneCut(None),
            lambda: SceneCut(factor="4"),
            lambda: Config(protect="no"),
            lambda: Config.from_dict("fast"),
            lambda: Config.from_dict({"policy": "TopR"}),
        ],
    )
    def test_values_of_another_type(self, make):
        with pytest.raises(errors.ConfigError):
            make()

    def test_numbers_of_numpy_are_numbers(self):
        assert TopFraction(np.float32(0.5)).params(10).cap == 5

    @pytest.mark.parametrize("check", ["snyc", True, None])
    def test_check(self, converted, check):
        for use in (
            lambda: Stream(converted, check=check),
            lambda: StreamBatch(converted, check=check),
            lambda: setattr(Stream(converted), "check", check),
        ):
            with pytest.raises(errors.ConfigError, match="'async' or 'sync'"):
                use()

    def test_check_of_a_loaded_stream(self, converted, clip):
        stream = Stream(converted)
        stream(clip[0])
        assert Stream.load(converted, stream.snapshot(), check="sync").check == "sync"

    def test_snapshots_in_places_that_are_none(self, converted, clip, tmp_path):
        stream = Stream(converted)
        stream(clip[0])
        with pytest.raises(errors.SnapshotError, match="folder must exist"):
            stream.snapshot(tmp_path / "none" / "a.safetensors")
        with pytest.raises(errors.SnapshotError):
            Stream.load(converted, tmp_path)


class TestBlocksThatNoLongerFit:
    def test_a_block_changed_after_conversion(self):
        """What an adapter says at conversion, a stream says of a block that was changed later."""
        transformers = pytest.importorskip("transformers")
        config = transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            image_size=32, patch_size=8,
        )  # fmt: skip
        changed = eventful.convert(transformers.ViTModel(config).eval(), inplace=True)
        block = next(m for m in changed.modules() if type(m).__name__ == "ViTLayer")
        attention = block.attention
        attention.forward = lambda *args, **kwargs: type(attention).forward(
            attention, *args, **kwargs
        )
        with pytest.raises(errors.UnsupportedError, match=r"layers?\.0 was changed since.*again\."):
            Stream(changed)(torch.rand(1, 3, 32, 32))

    def test_a_mask_of_positions(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.VJEPA2Config(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, crop_size=32,
            patch_size=16, frames_per_clip=2, tubelet_size=2, pred_hidden_size=48,
            pred_num_hidden_layers=1, pred_num_attention_heads=2,
        )  # fmt: skip
        model = eventful.convert(transformers.VJEPA2Model(config).eval())
        encoder = model.encoder
        encoder.forward = lambda pixel_values_videos, **_: encoder.layer[0](
            encoder.embeddings(pixel_values_videos), torch.arange(4)[None]
        )
        with pytest.raises(errors.UnsupportedError, match="position_mask was passed to a block"):
            Stream(model)(torch.rand(1, 2, 3, 32, 32), skip_predictor=True)

    def test_every_exception_of_the_package_is_an_eventful_error(self):
        for name, kind in vars(errors).items():
            if isinstance(kind, type) and issubclass(kind, Exception):
                assert issubclass(kind, eventful.EventfulError), name
        assert errors.Mismatch.__mro__[1] is errors.UnsupportedError
