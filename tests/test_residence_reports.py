"""What steps that never ask the host report, a frame late: bad frames, scene cuts, changed models.

`test_residence.py` says on which devices they run.
"""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import contextlib

import pytest
import torch

import eventful
from clips import moving_square
from eventful import Config, Stream, StreamBatch, TopFraction, TopR
from eventful.errors import NonFiniteError, WeightsChangedError
from resident import RULES, device, near, outputs, vit  # noqa: F401


class TestReports:
    @pytest.mark.parametrize("at", [0, 1, 3])
    def test_a_bad_frame_is_told_of_at_the_next_step(self, vit, device, at):
        """... changes nothing, and the stream goes on as if it had not come."""
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
        clip = moving_square(6, vit.size, noise=0.05)
        expected = outputs(vit, Stream(model), clip, device)
        stream, got = Stream(model), []
        bad = clip[at].clone()
        bad[..., 3, 5] = torch.nan
        for t, frame in enumerate(clip):
            if t == at:
                stream(bad.to(device))
                with pytest.raises(NonFiniteError, match="last frame"):
                    stream(frame.to(device))
            got += outputs(vit, stream, [frame], device)
        near(got, expected, device)

    @pytest.mark.parametrize("rule", RULES)
    def test_a_bad_frame_leaves_the_memory_as_it_was(self, vit, device, rule):
        """To the bit, though gates behind the first one have finite inputs of their own."""
        model = eventful.convert(vit.make().to(device), RULES[rule](TopFraction(0.2)))
        stream = Stream(model)
        for frame in moving_square(4, vit.size, noise=0.3):
            stream(frame.to(device))
        stream._executor.settle()
        before = stream._detached().tensors
        stream(torch.full((1, 3, *vit.size), torch.nan, device=device))
        after = stream._state.detached().tensors
        for name, tensor in before.items():
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=0, equal_nan=True)

    def test_at_once_if_asked(self, vit, device):
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
        clip = moving_square(5, vit.size, noise=0.05)
        expected = outputs(vit, Stream(model), clip, device)
        stream = Stream(model, check="sync")
        got = outputs(vit, stream, clip[:2], device)
        with pytest.raises(NonFiniteError):
            stream(torch.full_like(clip[0], torch.inf).to(device))
        got += outputs(vit, stream, clip[2:], device)
        near(got, expected, device)

    def test_check_may_change_between_frames(self, vit, device):
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
        frame = moving_square(1, vit.size)[0].to(device)
        bad = torch.full_like(frame, torch.nan)
        stream = Stream(model)
        stream(frame)
        stream.check = "sync"
        with pytest.raises(NonFiniteError):
            stream(bad)
        stream.check = "async"
        stream(bad)
        with pytest.raises(NonFiniteError, match="last frame"):
            stream(frame)

    def test_a_bad_stream_is_named(self, vit, device):
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
        frames = torch.cat([moving_square(1, vit.size, seed=s)[0] for s in (1, 2)]).to(device)
        batch = StreamBatch(model)
        batch.join("a")
        batch.join("b")
        batch(frames)
        spoilt = frames.clone()
        spoilt[1] = torch.nan
        batch(spoilt)
        with pytest.raises(NonFiniteError, match="stream 'b' of 2") as caught:
            batch(frames)
        assert caught.value.streams == ("b",)
        batch(frames)

    def test_a_scene_cut_flushes_one_frame_late(self, vit, device):
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(4)))
        stream = Stream(model)
        calm, other = moving_square(6, vit.size, noise=0.02), moving_square(3, vit.size, seed=9)
        flushed = []
        for frame in calm + other:
            stream((frame if len(flushed) < 6 else frame + 3).to(device))
            flushed.append(stream.last.flushed)
        assert flushed == [[True]] + [[False]] * 6 + [[True]] + [[False]]

    def test_a_stream_takes_over_nothing_from_the_one_that_left(self, vit, device):
        """Its slot is used again; the bad frame of the stream before it is not its own."""
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
        frames = torch.cat([moving_square(1, vit.size, seed=s)[0] for s in (1, 2)]).to(device)
        batch = StreamBatch(model)
        for name in "ab":
            batch.join(name)
        batch(frames)
        slot = batch._state.rows[1]
        spoilt = frames.clone()
        spoilt[1] = torch.nan
        batch(spoilt)
        batch.leave("b")
        batch.join("c")
        assert batch._state.rows[1] == slot
        for _ in range(3):
            batch(frames)

    def test_an_unsound_output_is_reported(self, vit, device):
        """NaN arises inside the model: the next frame but one, at the latest, says so."""
        model = vit.make().to(device)
        model.blocks[1].mlp = Spoiled(model.blocks[1].mlp).eval()
        stream = Stream(eventful.convert(model, Config.fast(TopR(5), scene_cut=None)))
        clip = [frame.to(device) for frame in moving_square(8, vit.size, noise=0.05)]
        for frame in clip[:3]:
            stream(frame)
        stream.model.blocks[1].mlp.spoil.data.fill_(torch.nan)
        with pytest.raises(NonFiniteError, match="arose inside"):
            outputs(vit, stream, clip[3:6], device)
        stream.model.blocks[1].mlp.spoil.data.zero_()
        stream.reset()
        got = outputs(vit, stream, [clip[6]], device)
        near(got, outputs(vit, model, [clip[6]], device), device)


class Spoiled(torch.nn.Module):
    """An MLP to whose output something is added: a buffer that is written behind torch's back."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        self.spoil = torch.zeros((), device=next(mlp.parameters()).device)

    def forward(self, x):
        return self.mlp(x) + self.spoil


@pytest.mark.parametrize(
    ("change", "late"),
    [
        (lambda model: model.blocks[1].mlp.fc1.weight.mul_(2), 0),
        (lambda model: model.blocks[1].mlp.fc1.weight.data.mul_(2), 1),
        (lambda model: model.load_state_dict(model.state_dict()), 0),
        (lambda model: setattr(model.blocks[1], "mlp", torch.nn.Identity().eval()), 3),
        (lambda model: setattr(model.blocks[1].norm1, "eps", 0.1), 3),
    ],
    ids=["in place", "data", "loaded", "module", "attribute"],
)
def test_a_change_of_the_model_is_noticed(vit, device, change, late):
    """At once, or up to so many frames late, and the stream can start over."""
    model = vit.make().to(device)
    stream = Stream(eventful.convert(model, Config.fast(TopR(5), scene_cut=None)))
    clip = [frame.to(device) for frame in moving_square(8, vit.size, noise=0.05)]
    for frame in clip[:3]:
        stream(frame)
    with torch.no_grad():
        change(stream.model)
    for frame in clip[3 : 3 + late]:
        with contextlib.suppress(WeightsChangedError):
            stream(frame)
    with pytest.raises(WeightsChangedError):
        stream(clip[6])
    stream.reset()
    got = outputs(vit, stream, [clip[7]], device)
    near(got, outputs(vit, stream.model, [clip[7]], device), device)
