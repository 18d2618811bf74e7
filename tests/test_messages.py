"""What the public surface says: mistakes of a new user, and what objects print."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import eventful
import zoo_transformers
from clips import moving_square
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
from guarding import ENTRY, Around, clip, model  # noqa: F401
from small import drifting_tokens, random_trunk


@pytest.fixture
def converted(model):
    return eventful.convert(model, Config.fast(TopR(4)))


@pytest.fixture
def batch(converted):
    made = StreamBatch(converted)
    for name in ("gate", "hall", "yard"):
        made.join(name)
    return made


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
        with pytest.raises(errors.ConfigError, match="where is a function"):
            eventful.convert(model, where="blocks.1")
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


SPOILT = {
    "uint8": (lambda x: (40 * x).clamp(0, 255).to(torch.uint8), r"frame\.float\(\) / 255"),
    "no batch": (lambda x: x[0], r"frame\[None\]"),
    "picture": (lambda x: x[0].permute(1, 2, 0), r"permute\(2, 0, 1\)\[None\]"),
    "channels last": (lambda x: x.permute(0, 2, 3, 1), r"permute\(0, 3, 1, 2\)"),
    "grey": (lambda x: x[:, :1], r"expand\(-1, 3"),
    "alpha": (lambda x: torch.cat([x, x[:, :1]], dim=1), r"frame\[:, :3\]"),
    "two channels": (lambda x: x[:, :2], "2 channels"),
    "clip": (lambda x: x[:, None], r"stream\(clip\[:, t\]\)"),
}


class TestFrames:
    @pytest.mark.parametrize("how", SPOILT)
    @pytest.mark.parametrize("entry", ["timm", "transformers"])
    def test_of_a_kind_the_model_cannot_take(self, entry, how):
        entry = {"timm": ENTRY, "transformers": zoo_transformers.ZOO["vit"]}[entry]
        model = eventful.convert(entry.make(), Config.fast(TopR(4)))
        frame = moving_square(1, entry.size)[0]
        spoil, advice = SPOILT[how]
        stream, batch = Stream(model), StreamBatch(model)
        batch.join("a")
        for run in (stream, batch):
            with pytest.raises(errors.FrameError, match=rf"takes frames \(B, 3.*{advice}"):
                entry.call(run, spoil(frame))
            entry.call(run, frame)
        with pytest.raises(errors.FrameError):
            entry.call(stream, spoil(frame))

    @pytest.mark.parametrize(
        ("given", "advice"),
        [
            (np.zeros((1, 3, 8, 8), np.float32), r"torch\.from_numpy\(frame\)\.$"),
            (np.zeros((8, 8, 3), np.uint8), r"permute\(2, 0, 1\)\[None\].*/ 255"),
            ([torch.zeros(1, 3, 8, 8)], "for frame in frames"),
            ({"pixel_values": torch.zeros(1, 3, 8, 8)}, r"stream\(\*\*inputs\)"),
            ({"gate": torch.zeros(1, 3, 8, 8)}, r"streams=list\(frames\)"),
            ("street.mp4", r"eventful\.read"),
            (torch.zeros(8, 8), r"frame\[None\]"),
        ],
        ids=["array", "picture", "list", "processor", "names", "path", "2-D"],
    )
    def test_something_else(self, converted, given, advice):
        with pytest.raises(errors.FrameError, match=advice):
            Stream(converted)(given)

    def test_advice_after_a_failure(self, model, clip):
        """A model of one's own is not judged; what it fails on is explained."""

        own = Around(model, lambda vit, x: vit(x))
        stream = Stream(eventful.convert(own, Config.fast(TopR(4))))
        for how in ("uint8", "no batch", "channels last"):
            spoil, advice = SPOILT[how]
            with pytest.raises(errors.FrameError, match=rf"cannot take this frame.*{advice}"):
                stream(spoil(clip[0]))
        with pytest.raises(errors.FrameError, match=r"frame\.to\(torch\.float32\)"):
            stream(clip[0].double())
        stream(clip[0])

    def test_a_model_that_normalises_by_itself(self, model, clip):
        camera = Around(model, lambda vit, pixels: vit(pixels.float() / 255))

        def normalise(_, args):
            return (args[0].float() / 255,)

        pixels = SPOILT["uint8"][0](clip[0])
        stream = Stream(eventful.convert(camera, Config.fast(TopR(4))))
        stream(pixels)
        hooked = eventful.convert(model, Config.fast(TopR(4)))
        hooked.register_forward_pre_hook(normalise)
        Stream(hooked)(pixels)

    def test_a_subclass_that_normalises_by_itself(self, clip):
        class Camera(type(ENTRY.make())):
            def forward(self, x):
                return super().forward(x.float() / 255)

        model = ENTRY.make()
        model.__class__ = Camera
        Stream(eventful.convert(model, Config.fast(TopR(4))))(SPOILT["uint8"][0](clip[0]))

    def test_tokens_and_clips_are_not_pictures(self):
        tokens = Stream(eventful.convert(random_trunk((4, 5)), Config.fast(TopR(4))))
        tokens(drifting_tokens(1, 1, 20, 16, share=0)[0])

    def test_arguments_and_methods_that_do_not_exist(self, converted, clip):
        stream = Stream(converted)
        with pytest.raises(errors.FrameError, match=r"these arguments.*'foo'"):
            stream(clip[0], foo=1)
        with pytest.raises(errors.UnsupportedError, match="forward_features"):
            stream.call("forward_featurs", clip[0])


class TestBatches:
    def test_a_string_is_no_sequence_of_names(self, batch, clip):
        with pytest.raises(errors.StreamNameError, match=r"streams=\['gate'\]"):
            batch(clip[0], streams="gate")
        for streams in (3, [3], [["gate"]]):
            with pytest.raises(errors.StreamNameError, match="sequence of names"):
                batch(clip[0], streams=streams)

    @pytest.mark.parametrize("name", [3, None, ("a",)])
    def test_a_name_is_a_string(self, batch, name):
        with pytest.raises(errors.StreamNameError, match="string"):
            batch.join(name)
        assert len(batch) == 3

    @pytest.mark.parametrize("at", [0, 2])
    @pytest.mark.parametrize("names", [("gate", "hall", "yard"), ("yard", "gate")])
    def test_one_bad_frame_concerns_its_stream_alone(self, batch, clip, at, names):
        """The others are stepped, and the bad one goes on as if the frame had not come."""
        alone = {name: Stream(batch.model) for name in batch.streams}

        def compare(got, names, frames):
            for row, name in enumerate(names):
                expected = alone[name](frames[row])
                assert (got[row] - expected[0]).abs().max() <= 1e-5 * expected.abs().max()

        for t in range(4):
            frames = [clip[t + i] for i in range(len(names))]
            if t == at:
                spoilt = [frames[0] * float("nan"), *frames[1:]]
                with pytest.raises(errors.NonFiniteError, match=f"'{names[0]}'") as caught:
                    batch(torch.cat(spoilt), streams=names)
                assert caught.value.streams == names[:1]
                assert caught.value.good == names[1:]
                assert caught.value.rows == (0,)
                compare(caught.value.result, names[1:], frames[1:])
                assert len(batch.last.flushed) == len(names) - 1
            else:
                compare(batch(torch.cat(frames), streams=names), names, frames)

    def test_all_bad_frames_step_nothing(self, batch, clip):
        batch(torch.cat(clip[:3]))
        before = {name: tensor.clone() for name, tensor in batch._state.tensors.items()}
        with pytest.raises(errors.NonFiniteError, match="'hall', 'gate'") as caught:
            batch(torch.cat(clip[:2]) * float("inf"), streams=["hall", "gate"])
        assert caught.value.streams == ("hall", "gate")
        assert caught.value.good == ()
        assert all(torch.equal(batch._state[name], before[name]) for name in before)

    def test_other_arguments_of_the_frames_step_nothing(self, batch, clip):
        batch.model = Around(batch.model, lambda vit, x, shift: vit(x) + shift[:, None, None])
        shift = torch.arange(3.0)
        batch(torch.cat(clip[:3]), shift)
        frames = list(batch._state.frames)
        bad = torch.cat([clip[0], clip[1] * float("nan"), clip[2]])
        with pytest.raises(errors.NonFiniteError) as caught:
            batch(bad, shift)
        assert caught.value.streams == ("hall",)
        assert caught.value.good == ()
        assert batch._state.frames == frames

    def test_nan_that_arises_inside_names_the_stream(self, batch, clip):
        batch(torch.cat(clip[:3]))
        frames = list(batch._state.frames)

        def strike(_, __, output):
            output[1] = float("nan")

        hook = batch.model.blocks[-1].mlp.register_forward_hook(strike)
        with pytest.raises(errors.NonFiniteError, match=r"inside the model.*'hall'") as caught:
            batch(torch.cat(clip[1:4]))
        assert caught.value.streams == ("hall",)
        spoilt = torch.cat(clip[1:4])
        spoilt[0] = float("nan")
        with pytest.raises(errors.NonFiniteError) as caught:
            batch(spoilt)
        hook.remove()
        assert caught.value.streams == ("gate", "yard")  # the second of those that were stepped
        assert batch._state.frames == frames
        batch(torch.cat(clip[1:4]))

    def test_the_error_can_be_sent_to_another_process(self):
        error = errors.NonFiniteError("bad", rows=(1,), streams=("a",), good=("b",), result=3)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.streams, again.result) == ("bad", ("a",), 3)

    def test_an_empty_list_of_streams(self, batch, clip):
        with pytest.raises(errors.FrameError, match="`streams` is empty"):
            batch(clip[0], streams=[])

    def test_a_stream_is_not_copied(self, converted):
        for use in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(errors.UnsupportedError, match="snapshot"):
                use(Stream(converted))


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
