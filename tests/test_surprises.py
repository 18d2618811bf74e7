"""Uses of a stream that would be silently wrong if they were not refused or handled."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import eventful
from eventful import Config, NoiseThreshold, TopR, errors
from eventful.tokens.selection import Selection
from guarding import ENTRY, Around, clip, holds, model, refused, stream, unchanged  # noqa: F401
from small import random_trunk
from tolerances import assert_near


class TestSurprises:
    """Ways to use a stream that would be silently wrong if they were not refused or handled."""

    def test_a_failed_join_leaves_no_trace(self, model, clip):
        batch = eventful.StreamBatch(eventful.convert(model, Config.fast(TopR(4))))
        batch.join("a")
        batch(clip[0])
        with pytest.raises(errors.ConfigError):
            batch.join("x", 256)
        alone = eventful.Stream(batch.model)
        batch.join("c")
        got = batch(torch.cat([clip[1], clip[2]]))[1:]
        expected = alone(clip[2])
        assert_near(got, expected)

    def test_joining_a_tapped_batch_from_an_untapped_snapshot(self, model, clip):
        converted = eventful.convert(model, Config.fast(TopR(4)))
        single = eventful.Stream(converted)
        single(clip[0])
        batch = eventful.StreamBatch(converted)
        batch.join("a")
        batch.call("forward_intermediates", clip[0], indices=[0])
        batch.join("b", snapshot=single.snapshot())
        _, taps = batch.call("forward_intermediates", torch.cat(clip[1:3]), indices=[0])
        with torch.no_grad():
            _, expected = model.forward_intermediates(clip[2], indices=[0])
        assert_near(taps[0][1:], expected[0])

    def test_a_block_called_twice_in_one_step(self, model, clip):
        twice = Around(model, lambda vit, x: vit(x) + vit(x.flip(-1)))
        stream = eventful.Stream(eventful.convert(twice, Config.fast(TopR(4))))
        with pytest.raises(errors.UnsupportedError, match="called twice"):
            stream(clip[0])

    def test_frames_folded_into_the_batch(self, model, clip):
        folded = Around(model, lambda vit, x: vit(torch.cat([x, x])))
        stream = eventful.Stream(eventful.convert(folded, Config.fast(TopR(4))))
        with pytest.raises(errors.UnsupportedError, match="batch of 2"):
            stream(clip[0])

    def test_a_step_inside_a_step(self, stream, clip):
        other = eventful.Stream(stream.model)
        hook = stream.model.norm.register_forward_hook(lambda *_: other(clip[1]) and None)
        with pytest.raises(errors.ConcurrentUseError, match="in the middle"):
            stream(clip[0])
        hook.remove()
        stream(clip[0])

    def test_a_replaced_submodule_is_noticed_and_used(self, model, clip):
        converted = eventful.convert(model, Config.fast(TopR(10**6)))
        stream = eventful.Stream(converted)
        stream(clip[0])
        converted.blocks[0].norm1 = nn.LayerNorm(model.embed_dim, elementwise_affine=False).eval()
        refused(stream, errors.WeightsChangedError, clip[1])
        stream.reset()
        with torch.no_grad():
            expected = converted(clip[1])
        assert_near(stream(clip[1]), expected)

    def test_a_subclass_with_its_own_loop_sees_all_tokens(self, clip):
        class Collecting(type(ENTRY.make())):
            def forward(self, x):
                x = self._pos_embed(self.patch_embed(x))
                seen = []
                for block in self.blocks:
                    x = block(x)
                    seen.append(x)
                return torch.stack(seen, dim=1)

        torch.manual_seed(0)
        model = ENTRY.make()
        model.__class__ = Collecting
        for config in (Config.fast(TopR(4)), Config(TopR(4), gating="block")):
            stream = eventful.Stream(eventful.convert(model, config))
            outputs = [stream(frame) for frame in clip[:3]]
            with torch.no_grad():
                assert outputs[2].shape == model(clip[2]).shape
            kept = outputs[0].clone()
            stream(clip[3])
            assert torch.equal(outputs[0], kept)

    def test_noise_is_not_measured_against_an_old_sample(self):
        make = torch.Generator().manual_seed(0)
        model = random_trunk((4, 5), depth=1)
        drift = [0.05 * t + 0.001 * torch.randn(1, 20, 16, generator=make) for t in range(60)]
        drift = [frame * torch.linspace(-1, 1, 16) for frame in drift]
        levels = {}
        for name, plan in {"always": 0, "late": 40}.items():
            config = Config(NoiseThreshold(), gating="frame")
            stream = eventful.Stream(eventful.convert(model, config))
            for t, frame in enumerate(drift):
                stream.policy = TopR(20) if 2 < t < plan else NoiseThreshold()
                stream(frame)
            levels[name] = float(stream._state["frame/memory/NoiseThreshold@2/level"])
        assert levels["late"] < 2 * levels["always"]

    def test_orders_do_not_leak_between_streams(self, model, clip):
        converted = eventful.convert(model, Config.exact())
        policies = {"a": NoiseThreshold(order=1.0), "b": NoiseThreshold(order=2.0)}
        batch = eventful.StreamBatch(converted)
        alone = {name: eventful.Stream(converted, policy) for name, policy in policies.items()}
        for name, policy in policies.items():
            batch.join(name, policy)
        for one, two in pairwise(clip):
            got = batch(torch.cat([one, two]))
            for row, (name, frame) in enumerate(zip("ab", (one, two), strict=True)):
                expected = alone[name](frame)
                assert_near(got[row : row + 1], expected)

    def test_policies_do_not_share_memory(self, model, clip):
        class Hoarder:
            order = 2.0

            def select(self, error, context):
                context.memory["level"] = error.clone()
                context.memory["scene"] = torch.zeros(error.shape[0])
                return Selection.top(error, 3)

        stream = eventful.Stream(eventful.convert(model, Config.fast(NoiseThreshold())))
        for t, frame in enumerate(clip):
            stream.policy = Hoarder() if t % 2 else NoiseThreshold()
            stream(frame)
            assert stream.last.flushed == [t == 0]

    def test_inference_mode_and_batches(self, model, clip):
        with torch.inference_mode():
            batch = eventful.StreamBatch(eventful.convert(model, Config.fast(TopR(4))))
            batch.join("a")
            batch(clip[0])
            batch.join("b")
            batch(torch.cat(clip[:2]))
            batch(clip[2], streams=["b"])
            stream = eventful.Stream.load(batch.model, batch.snapshot("b"))
            stream(clip[3])

    def test_autocast_may_not_come_and_go(self, stream, clip):
        stream(clip[0])
        before = holds(stream)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(errors.FrameError, match="autocast"),
        ):
            stream(clip[1])
        assert unchanged(stream, before)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda x: x.double(),
            lambda x: (x * 100).to(torch.uint8),
            lambda x: x[:, :2],
            lambda x: x[..., :-3],
            lambda x: x[:0],
            lambda x: x.to("meta"),
        ],
        ids=["dtype", "uint8", "channels", "size", "empty", "device"],
    )
    def test_a_first_frame_the_model_cannot_take(self, stream, clip, spoil):
        with pytest.raises(errors.FrameError):
            stream(spoil(clip[0]))
        stream(clip[0])

    def test_one_block_in_training_mode(self, stream, clip):
        stream.model.blocks[1].train()
        with pytest.raises(errors.TrainingModeError):
            stream(clip[0])

    def test_moving_a_stream_does_not_hide_loaded_weights(self, model, clip):
        converted = eventful.convert(model, Config.fast(TopR(4)))
        stream = eventful.Stream(converted)
        stream(clip[0])
        converted.load_state_dict(converted.state_dict())
        with pytest.raises(errors.WeightsChangedError):
            stream.to("cpu")

    def test_restore_puts_back_what_was_there(self, model):
        def own(*args, **kwargs):
            return "own"

        model.forward_intermediates = own
        eventful.restore(eventful.convert(model, inplace=True))
        assert model.forward_intermediates is own
        assert not model._load_state_dict_post_hooks

    def test_a_failed_step_of_some_streams_in_mid_model(self, model, clip):
        converted = eventful.convert(model, Config.exact(TopR(4)))
        batch = eventful.StreamBatch(converted)
        for name in "abc":
            batch.join(name)
        batch(torch.cat(clip[:3]))
        before = {name: tensor.clone() for name, tensor in batch._state.tensors.items()}
        frames = list(batch._state.frames)

        def strike(*_):
            raise RuntimeError("struck")

        for names in (("c", "a"), ("a", "b", "c")):
            hook = converted.norm.register_forward_hook(strike)
            with pytest.raises(RuntimeError, match="struck"):
                batch(torch.cat(clip[: len(names)]), streams=names)
            hook.remove()
            assert all(torch.equal(batch._state[name], before[name]) for name in before)
            assert batch._state.frames == frames
