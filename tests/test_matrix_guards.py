"""Guards on plain and resident steps, and levels measured on a sample of more than 512 tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eventful
from clips import moving_square
from eventful import Config, NoiseThreshold, SceneCut, Stream, StreamBatch, Threshold
from eventful.errors import NonFiniteError, TrainingModeError, WeightsChangedError
from eventful.memory.slots import SlotState
from eventful.ops.reference.gates import SAMPLE
from matrix import SUBJECTS
from simulated import clip_of, path
from tolerances import apart, assert_near, limit

__all__ = ["path"]

LATE = 3  # further frames until a resident step has looked at everything


@pytest.fixture(params=["vit", "large windowed"])
def subject(request):
    return SUBJECTS[request.param]


def started(subject, config, path):
    """A model and a stream of it in mid-video."""
    model = subject.make()
    stream = Stream(eventful.convert(model, config))
    clip = moving_square(12, subject.size, noise=0.05)
    for frame in clip[:4]:
        stream(frame)
    assert isinstance(stream._state, SlotState) == (path == "resident")
    return model, stream, clip[4:]


def frames_until(error, stream, clip):
    """Frames that were stepped before one raised `error`."""
    for count, frame in enumerate(clip):
        try:
            stream(frame)
        except error:
            return count
    return len(clip)


def follows(stream, model, clip):
    """After a reset the stream is that of the model as it is now."""
    stream.reset()
    other = Stream(eventful.convert(model, stream.config))
    with torch.no_grad():
        assert_near(stream(clip[0]), model(clip[0]))
    other(clip[0])
    for frame in clip[1:4]:
        assert_near(stream(frame), other(frame), "step")


def replace_parameter(model):
    norm = model.blocks[0].norm1
    norm.weight = nn.Parameter(1.5 * norm.weight.detach())


def replace_data(model):
    norm = model.blocks[0].norm1
    norm.weight.data = 1.5 * norm.weight.detach()


CHANGES = {  # and whether the next call notices on either path
    "in place": (lambda m: m.blocks[1].mlp.fc1.weight.detach().mul_(1.5), True),
    "loaded": (lambda m: m.load_state_dict({k: 1.1 * v for k, v in m.state_dict().items()}), True),
    "parameter": (replace_parameter, False),
    "attribute": (lambda m: setattr(m.blocks[0].norm1, "eps", 0.5), False),
    "data replaced": (replace_data, False),
    "data written": (lambda m: m.blocks[1].attn.qkv.weight.data.mul_(1.5), False),
    "NaN written": (lambda m: m.blocks[1].attn.qkv.weight.detach().fill_(torch.nan), True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_noticed(path, subject, change):
    model, stream, clip = started(subject, Config.fast(), path)
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    write, at_once = CHANGES[change]
    write(model)
    if change == "attribute":  # the two trees share parameters alone
        write(stream.model)
    late = 0 if at_once or path == "plain" else LATE
    assert frames_until(WeightsChangedError, stream, clip) <= late
    assert frames_until(WeightsChangedError, stream, clip) <= late  # until it is reset
    if change == "NaN written":
        model.load_state_dict(expected)
    follows(stream, model, clip)


def test_training_mode_is_noticed(path, subject):
    model, stream, clip = started(subject, Config.fast(), path)
    stream.model.train()
    assert frames_until(TrainingModeError, stream, clip) <= (0 if path == "plain" else LATE)
    stream.model.eval()
    follows(stream, model, clip)


@pytest.mark.parametrize("table", ["pos_embed", "blocks.0.attn.rel_pos_h"])
def test_tables_made_of_old_weights_are_not_used(path, table):
    """Positions are resized once for a size of frames and outlive a stream: not other weights."""
    subject = SUBJECTS["large windowed"]
    model, stream, clip = started(subject, Config.fast(), path)
    with torch.no_grad():
        before = model(clip[0])
        model.get_parameter(table).mul_(-1.5)
        assert apart(model(clip[0]), before) > 100 * limit("model")
    assert frames_until(WeightsChangedError, stream, clip) == 0
    follows(stream, model, clip)
    second = Stream(stream.model)
    with torch.no_grad():
        assert_near(second(clip[0]), model(clip[0]))


def test_a_frame_that_is_not_finite(path, subject):
    """Raised at once, or at the next call; it changed nothing."""
    _, stream, clip = started(subject, Config.fast(), path)
    twin = Stream(stream.model)
    for frame in moving_square(12, subject.size, noise=0.05)[:4]:
        twin(frame)
    bad = clip[0].clone()
    bad[..., 3, 5] = torch.nan
    late = path == "resident"
    assert frames_until(NonFiniteError, stream, [bad, clip[1]]) == int(late)
    for frame in clip[1:4]:
        assert_near(stream(frame), twin(frame), "step")


def test_values_that_overflow_inside_the_model(path, subject):
    """The tokens were finite and the output is not: raised at once, or two calls later."""
    model, poison = subject.make(), []
    model.blocks[-1].mlp.register_forward_hook(
        lambda module, args, out: out + torch.inf if poison else out
    )
    stream = Stream(eventful.convert(model, Config.fast()))
    clip = moving_square(10, subject.size, noise=0.05)
    for frame in clip[:3]:
        stream(frame)
    poison.append(True)
    late = path == "resident"
    if late:
        stream(clip[3])
    else:
        with pytest.raises(NonFiniteError, match="inside"):
            stream(clip[3])
    poison.clear()
    assert frames_until(NonFiniteError, stream, clip[4:7]) == (1 if late else 3)
    with torch.no_grad():
        got, expected = stream(clip[7]), model(clip[7])
    if late:  # the memory was lost, so everything is recomputed
        assert stream.last.flushed == [True]
        assert_near(got, expected)
    follows(stream, model, clip)


def test_a_stream_that_left_leaves_nothing_to_its_successor(path):
    """Another stream in the same slot begins without the counts, and without the bad frame."""
    subject = SUBJECTS["large"]
    config = Config.fast(Threshold(1.0), scene_cut=None, max_age=None, fallback=False)
    model = eventful.convert(subject.make(), config)
    busy, calm = clip_of([0.9] * 4, subject.size), clip_of([0.1] * 5, subject.size)
    alone, batch = Stream(model), StreamBatch(model)
    expected = [alone(frame) for frame in calm]
    batch.join("busy")
    for frame in busy:
        batch(frame)
    resident = path == "resident"
    slots = list(batch._state.rows) if resident else []
    if resident:
        batch(busy[-1] * torch.nan)  # reported at the next call, by when it concerns nobody
    batch.leave("busy")
    batch.join("calm")
    assert not resident or batch._state.rows == slots
    for frame, wanted in zip(calm, expected, strict=True):
        assert_near(batch(frame), wanted, "step")


def lower_median(values):
    return sorted(values)[(len(values) - 1) // 2]


def test_levels_come_from_every_kth_of_many_tokens(path):
    """The noise and the scene level of 601 tokens, worked out by hand from 512 of them."""
    subject = SUBJECTS["large"]
    count = subject.tokens
    assert count > SAMPLE
    places = [k * count // SAMPLE for k in range(SAMPLE)]
    assert len(set(places)) == SAMPLE
    model = subject.make()
    policy, cut = NoiseThreshold(), SceneCut()
    config = Config.fast(policy, scene_cut=cut, fallback=False, motion=False)
    stream = Stream(eventful.convert(model, config), maps=True)
    noise = scene = None
    clip = clip_of([0.6, 0.1, 0.3, 0.55, 0.2, 0.45], subject.size, noise=0.1)
    stream(clip[0])
    previous = reference = embedded(model, clip[0])
    for t, frame in enumerate(clip[1:], start=1):
        stream(frame)
        tokens = embedded(model, frame)
        change = lower_median([float((tokens[n] - previous[n]).norm()) for n in places])
        error = lower_median([float((tokens[n] - reference[n]).norm()) for n in places])
        if noise is None:
            noise, scene = change, error
        else:
            kept = policy.inertia if change > noise else policy.momentum
            noise = kept * noise + (1 - kept) * change
            scene = cut.momentum * scene + (1 - cut.momentum) * error
        assert stream.last.flushed == [False]
        state = stream._detached()
        (level,) = [state[name] for name in state.names() if name.endswith("level")]
        assert float(level) == pytest.approx(noise, rel=1e-5), f"frame {t}"
        assert float(state["frame/scene"]) == pytest.approx(scene, rel=1e-5), f"frame {t}"
        previous = tokens
        reference = torch.where(stream.last.mask[0][:, None], tokens, reference)


def embedded(model, frame):
    """(N, D), what the frame gate sees."""
    with torch.no_grad():
        return model.norm_pre(model._pos_embed(model.patch_embed(frame)))[0]
