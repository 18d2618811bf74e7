"""Bad input and misuse: a typed error that says what to do, and a stream left as it was."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import eventful
from eventful import Config, NoiseThreshold, Threshold, TopFraction, TopR, errors
from eventful.tokens.selection import Selection
from guarding import clip, holds, model, refused, stream, unchanged  # noqa: F401
from small import drifting_tokens, random_trunk
from tolerances import assert_near


class TestFrames:
    @pytest.mark.parametrize(
        "spoil",
        [
            lambda x: x[..., :-8],
            lambda x: x.double(),
            lambda x: torch.cat([x, x]),
            lambda x: x.to("meta"),
        ],
        ids=["size", "dtype", "batch", "device"],
    )
    def test_a_frame_of_another_kind(self, stream, clip, spoil):
        stream(clip[0])
        refused(stream, errors.FrameError, spoil(clip[1]), "stream.reset|move one")

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_frame_that_is_not_finite(self, stream, clip, value):
        good = eventful.Stream(stream.model)
        for x in clip[:2]:
            assert torch.equal(stream(x), good(x))
        bad = clip[2].clone()
        bad[0, 1, 3, 3] = value
        refused(stream, errors.NonFiniteError, bad)
        assert torch.equal(stream(clip[3]), good(clip[3]))

    def test_a_bad_first_frame(self, stream, clip):
        with pytest.raises(errors.NonFiniteError):
            stream(clip[0] * float("nan"))
        assert stream.nbytes == 0
        stream(clip[0])

    def test_values_that_overflow_inside_the_model(self, stream, clip):
        stream(clip[0])
        refused(stream, errors.NonFiniteError, torch.full_like(clip[1], 3e38))

    def test_no_frame_at_all(self, stream):
        with pytest.raises(errors.FrameError, match="No frame"):
            stream("street.mp4")

    def test_gradients_through_a_stream(self, stream, clip):
        stream(clip[0])
        refused(stream, errors.GradientError, clip[1].clone().requires_grad_(), "detach")

    def test_outputs_need_no_gradient_and_do_not_alias_the_state(self, stream, clip):
        outputs = [stream(frame) for frame in clip]
        kept = [output.clone() for output in outputs]
        stream(clip[0])
        assert all(torch.equal(a, b) for a, b in zip(outputs, kept, strict=True))
        assert not outputs[0].requires_grad


class TestPolicies:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: TopR(-1),
            lambda: TopR(2.5),
            lambda: TopFraction(1.5),
            lambda: TopFraction(-0.1),
            lambda: Threshold(-1.0),
            lambda: NoiseThreshold(k=-1),
            lambda: NoiseThreshold(max_fraction=2),
            lambda: TopR(3, order=0),
        ],
    )
    def test_settings_that_make_no_sense(self, make):
        with pytest.raises(errors.ConfigError):
            make()

    def test_an_unset_policy(self, model, clip):
        stream = eventful.Stream(eventful.convert(model, Config.paper()))
        with pytest.raises(errors.ConfigError, match=r"stream\.policy = TopR"):
            stream(clip[0])
        stream.policy = TopR(3)
        stream(clip[0])

    def test_something_that_is_no_policy(self, stream):
        with pytest.raises(errors.ConfigError, match="TopR"):
            stream.policy = 256

    def test_a_policy_that_returns_nonsense(self, model, clip):
        class Wrong:
            order = 2.0

            def select(self, error, context):
                return Selection.everything(error.shape[0], error.shape[1] + 1, error.device)

        stream = eventful.Stream(eventful.convert(model), Wrong())
        stream(clip[0])
        refused(stream, errors.ConfigError, clip[1], "must return a Selection")

    def test_a_threshold_without_a_value_for_a_gate(self, model, clip):
        stream = eventful.Stream(eventful.convert(model, Config.paper(Threshold({"qkv": 1.0}))))
        stream(clip[0])
        refused(stream, errors.ConfigError, clip[1], "projection")

    def test_a_new_policy_counts_at_once(self, stream, clip):
        # On top of r: one class token, and of 21 tokens one in 48 frames is due (max_age = 64).
        on_top = (1.0 if stream.config.protect else 0.0) + (1.0 if stream.config.max_age else 0.0)
        for r, frame in zip((6, 2, 5), clip, strict=False):
            stream.policy = TopR(r)
            stream(frame)
        assert set(stream.last.updated.values()) == {5.0 + on_top}
        stream.policy = TopR(0)
        stream(clip[4])
        assert set(stream.last.updated.values()) == {on_top}


@pytest.mark.parametrize(
    "options",
    [
        {"gating": "frame", "attention": "exact"},
        {"gating": "block", "attention": "delta"},
        {"gating": "token"},
        {"gating": "operator", "attention": "magic"},
        {"attention": "query", "overlap": "once"},
        {"gating": "operator", "attention": "exact", "accumulate": "half"},
        {"pool": 0},
        {"max_age": 0},
        {"rebase": 0.5},
        {"policy": 12},
        {"reference": "next"},
    ],
    ids=str,
)
def test_combinations_that_make_no_sense_raise_at_construction(options):
    with pytest.raises(errors.ConfigError):
        Config(**options)


class TestModels:
    def test_no_block_matched(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        with pytest.raises(errors.NoMatchError, match=r"Conv2d.*register_adapter"):
            eventful.convert(model)

    def test_where_rejects_every_block(self, model):
        with pytest.raises(errors.NoMatchError, match="where"):
            eventful.convert(model, where=lambda name, block: False)

    def test_frame_gating_needs_consecutive_blocks(self, model):
        with pytest.raises(errors.UnsupportedError, match=r"blocks\.1"):
            eventful.convert(model, Config.fast(TopR(3)), where=lambda name, _: name != "blocks.1")
        with pytest.raises(errors.UnsupportedError):
            eventful.convert(
                model, Config.fast(), inplace=True, where=lambda name, _: name != "blocks.1"
            )
        assert not any("forward" in vars(module) for module in model.modules())

    def test_where_converts_some_blocks(self, model, clip):
        some = eventful.convert(
            model, Config.exact(TopR(10**6)), where=lambda name, _: name == "blocks.1"
        )
        stream = eventful.Stream(some)
        for frame in clip:
            with torch.no_grad():
                expected = model(frame)
            assert_near(stream(frame), expected)
        assert list(stream.last.blocks) == ["blocks.1"]

    def test_an_unconverted_model(self, model):
        with pytest.raises(errors.ConfigError, match=r"eventful\.convert"):
            eventful.Stream(model)

    def test_converting_twice(self, model):
        with pytest.raises(errors.ConfigError, match="already"):
            eventful.convert(eventful.convert(model))

    def test_restoring_what_is_not_converted(self, model):
        with pytest.raises(errors.ConfigError, match="nothing to restore"):
            eventful.restore(model)

    def test_something_that_is_no_config(self, model):
        with pytest.raises(errors.ConfigError, match="Config"):
            eventful.convert(model, TopR(3))

    def test_training_mode(self, stream, clip):
        stream(clip[0])
        stream.model.train()
        refused(stream, errors.TrainingModeError, clip[1], "eval")

    def test_a_call_that_reaches_no_block(self, stream, clip):
        stream(clip[0])
        before = holds(stream)
        with pytest.raises(errors.UnsupportedError, match="no converted block"):
            stream.call("patch_embed", clip[1])
        assert unchanged(stream, before)

    def test_a_converted_part_of_a_larger_model(self, model, clip):
        whole = nn.Sequential(
            eventful.convert(model, Config.fast(TopR(10**6))), nn.Identity()
        ).eval()
        stream = eventful.Stream(whole)
        with torch.no_grad():
            assert_near(stream(clip[0]), model(clip[0]))

    def test_a_copy_of_a_converted_model_is_its_own(self, model, clip):
        first = eventful.convert(model, Config.fast(TopR(3)))
        second = copy.deepcopy(first)
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.mul_(0.5)
        one, two = eventful.Stream(first), eventful.Stream(second)
        for frame in clip[:2]:
            assert not torch.allclose(one(frame), two(frame))


class TestWeights:
    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.blocks[0].attn.qkv.weight.data_ptr() and m.load_state_dict(m.state_dict()),
            lambda m: m.blocks[1].mlp.fc1.weight.detach().mul_(1.1),
            lambda m: setattr(m.blocks[0].norm1, "weight", nn.Parameter(torch.ones(m.embed_dim))),
            lambda m: setattr(
                m.blocks[0].norm1.weight, "data", m.blocks[0].norm1.weight.detach().clone()
            ),
        ],
        ids=["load", "in place", "parameter", "data"],
    )
    @pytest.mark.parametrize("through", ["original", "converted"])
    def test_weights_changed_under_a_live_stream(self, model, clip, change, through):
        converted = eventful.convert(model, Config.fast(TopR(3)))
        stream = eventful.Stream(converted)
        stream(clip[0])
        change(model if through == "original" else converted)
        refused(stream, errors.WeightsChangedError, clip[1], r"stream\.reset")
        stream.reset()
        stream(clip[1])

    def test_loading_is_noticed_even_where_no_version_moves(self, model, clip):
        """Writes through `.data` leave the version counter alone; the load hook sees them."""
        converted = eventful.convert(model, Config.fast(TopR(3)))
        stream = eventful.Stream(converted)
        stream(clip[0])
        weights = {name: tensor.clone() for name, tensor in converted.state_dict().items()}
        versions = [parameter._version for parameter in converted.parameters()]
        load_through_data(converted, weights)
        assert versions == [parameter._version for parameter in converted.parameters()]
        refused(stream, errors.WeightsChangedError, clip[1])


def load_through_data(model, weights):
    """A loader that writes behind the version counter, then tells the hooks, as loaders do."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])
    model.load_state_dict({}, strict=False)


def test_two_threads_on_one_stream(model, clip):
    converted = eventful.convert(model, Config.fast(TopR(3)))
    stream = eventful.Stream(converted)
    stream(clip[0])
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        assert go_on.wait(60)

    hook = converted.norm.register_forward_hook(wait)
    slow = threading.Thread(target=stream, args=(clip[1],))
    slow.start()
    assert inside.wait(60)
    with pytest.raises(errors.ConcurrentUseError, match="its own Stream"):
        stream(clip[2])
    go_on.set()
    slow.join()
    hook.remove()
    stream(clip[2])


def test_two_streams_on_two_threads_share_a_model(model, clip):
    converted = eventful.convert(model, Config.exact(TopR(5)))
    expected = [s(f) for s in [eventful.Stream(converted)] for f in clip]
    results = {}

    def work(name):
        stream = eventful.Stream(converted)
        results[name] = [stream(frame) for frame in clip]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outputs in results.values():
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


class TestBatches:
    @pytest.fixture
    def batch(self, model):
        return eventful.StreamBatch(eventful.convert(model, Config.fast(TopR(4))))

    def test_names(self, batch):
        batch.join("a")
        with pytest.raises(errors.StreamNameError, match="already"):
            batch.join("a")
        with pytest.raises(errors.StreamNameError, match="there: a"):
            batch.leave("b")
        with pytest.raises(errors.StreamNameError):
            batch.set_policy("b", TopR(1))

    def test_a_policy_for_all(self, batch, clip):
        for name in "ab":
            batch.join(name)
        batch(torch.cat(clip[:2]))
        batch.policy = TopR(9)
        batch(torch.cat(clip[1:3]))
        assert batch.last.updated == {"frame": 11.0}  # the class token, and one that is due
        with pytest.raises(errors.ConfigError):
            batch.policy = 9

    def test_frames_and_streams_must_agree(self, batch, clip):
        with pytest.raises(errors.FrameError, match="join"):
            batch(clip[0])
        batch.join("a")
        batch.join("b")
        with pytest.raises(errors.FrameError, match="1 frames for 2 streams"):
            batch(clip[0])
        with pytest.raises(errors.FrameError):
            batch(torch.cat(clip[:2]), streams=["a", "a"])

    def test_a_failed_step_of_some_streams_changes_none(self, batch, clip):
        for name in "abc":
            batch.join(name)
        batch(torch.cat(clip[:3]))
        before = {name: tensor.clone() for name, tensor in batch._state.tensors.items()}
        frames = list(batch._state.frames)
        with pytest.raises(errors.NonFiniteError):
            batch(torch.cat(clip[1:3]) * float("nan"), streams=["c", "a"])
        assert all(torch.equal(batch._state[name], before[name]) for name in before)
        assert batch._state.frames == frames


def test_moving_a_stream_keeps_its_memory(model, clip):
    stream = eventful.Stream(eventful.convert(model, Config.fast(TopR(4))))
    straight = eventful.Stream(stream.model)
    for frame in clip[:2]:
        stream(frame)
        straight(frame)
    assert stream.to("cpu") is stream
    assert torch.equal(stream(clip[2]), straight(clip[2]))


def test_output_attentions_is_refused(model, clip):
    stream = eventful.Stream(eventful.convert(model))
    with pytest.raises(errors.UnsupportedError, match="output_attentions"):
        stream(clip[0], output_attentions=True)


def test_an_adapter_that_miscounts_tokens():
    model = random_trunk((3, 3))
    stream = eventful.Stream(eventful.convert(model, Config.fast(TopR(3))))
    with pytest.raises(errors.UnsupportedError, match="layout"):
        stream(drifting_tokens(1, 1, 8, 16, share=0)[0])


def test_inference_mode_may_come_and_go(stream, clip):
    straight = eventful.Stream(stream.model)
    for t, frame in enumerate(clip):
        with torch.inference_mode(t % 2 == 0):
            got = stream(frame)
        assert torch.equal(got, straight(frame))


def test_autocast(model, clip):
    for preset in ("fast", "exact", "paper", "tokenwise", "stgt"):
        stream = eventful.Stream(eventful.convert(model, Config.preset(preset, TopR(10**6))))
        for frame in clip:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                got, expected = stream(frame), model(frame)
            assert got.dtype == expected.dtype
            assert_near(got, expected, dtype=torch.bfloat16)


def test_a_converted_model_survives_a_file(model, clip, tmp_path):
    converted = eventful.convert(model, Config.fast(TopR(3)))
    torch.save(converted, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    one, two = eventful.Stream(converted), eventful.Stream(loaded)
    for frame in clip[:3]:
        assert torch.equal(one(frame), two(frame))
