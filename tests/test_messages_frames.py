"""What the public surface says to a new user's mistakes: frames and batches."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import eventful
import zoo_transformers
from clips import moving_square
from eventful import Config, Stream, StreamBatch, TopR, errors
from guarding import ENTRY, Around, batch, clip, converted, model  # noqa: F401
from small import drifting_tokens, random_trunk

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
