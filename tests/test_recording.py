"""Recorded blocks inside a model that runs around them, without a device: nothing is launched
anew, so what the blocks return on replay is what they left when recorded."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import eventful
import zoo_timm
import zoo_transformers
from clips import moving_square
from eventful import Config, Stream, TopR
from eventful.engine.graphs import Blocks, DifferentCall, Recorder, Recording, Replay
from eventful.rules.step import Step

FAMILIES = {
    "vit": zoo_timm.ZOO["vit"],
    "yolos": zoo_transformers.ZOO["yolos"],  # adds positions between its layers
    "dinov3": zoo_transformers.ZOO["dinov3"],  # hands rotary tables to its layers
}


class Played(Replay):
    """A replay that also hands the step its record, as a residence does."""

    def __init__(self, blocks: Blocks, kept: Step) -> None:
        super().__init__(blocks, lambda: None)
        self.kept = kept

    def block(self, step, spec, call, run):
        step.record.gates, step.record.blocks = self.kept.record.gates, self.kept.record.blocks
        return super().block(step, spec, call, run)


def through(monkeypatch: pytest.MonkeyPatch, track: object) -> list[Step]:
    """Have every step take this track."""
    made: list[Step] = []

    def make(*args: object, **kwargs: object) -> Step:
        made.append(Step(*args, track=track, **kwargs))
        return made[-1]

    monkeypatch.setattr("eventful.engine.host.Step", make)
    return made


def tensors(output: object) -> list[torch.Tensor]:
    return [v for v in torch.utils._pytree.tree_leaves(output) if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["fast", "exact"])
def test_a_replay_runs_the_model_around_its_blocks(family, preset, monkeypatch) -> None:
    torch.manual_seed(7)
    entry = FAMILIES[family]
    model = eventful.convert(entry.make(), Config.preset(preset, TopR(9), fallback=False))
    first, second = moving_square(2, entry.size)
    plain, stream = Stream(model), Stream(model)
    plain(first)
    expected = plain(second)
    stream(first)
    order: list[str] = []
    recorder = Recorder(lambda: order.append("begin"), lambda: order.append("finish"))
    made = through(monkeypatch, recorder)
    with pytest.raises(Recording):
        stream(second)
    assert order == ["begin", "finish"]
    through(monkeypatch, Played(recorder.blocks, made[-1]))
    got = stream(second)
    for mine, wanted in zip(tensors(got), tensors(expected), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_what_a_replay_returns_is_its_own(monkeypatch) -> None:
    torch.manual_seed(7)
    entry = FAMILIES["vit"]
    model = eventful.convert(entry.make(), Config.fast(TopR(9), fallback=False))
    stream = Stream(model)
    first, second = moving_square(2, entry.size)
    stream(first)
    recorder = Recorder(lambda: None, lambda: None)
    made = through(monkeypatch, recorder)
    with pytest.raises(Recording):
        stream(second)
    left = [part for each in recorder.blocks.left.values() for part in tensors(each.output)]
    kept = [part.clone() for part in left]
    seen: list[torch.Tensor] = []
    last = list(recorder.blocks.left)[-1]
    hook = model.get_submodule(last).register_forward_hook(
        lambda _, __, output: seen.extend(tensors(output))
    )
    through(monkeypatch, Played(recorder.blocks, made[-1]))
    stream(second)
    hook.remove()
    assert seen
    for part in seen:
        part.fill_(torch.nan)
    assert all(torch.equal(a, b) for a, b in zip(left, kept, strict=True))


def test_a_replay_reads_the_new_frame(monkeypatch) -> None:
    torch.manual_seed(7)
    entry = FAMILIES["vit"]
    model = eventful.convert(entry.make(), Config.fast(TopR(9), fallback=False))
    stream = Stream(model)
    first, second, third = moving_square(3, entry.size, noise=0.1)
    stream(first)
    recorder = Recorder(lambda: None, lambda: None)
    made = through(monkeypatch, recorder)
    with pytest.raises(Recording):
        stream(second)
    tokens = recorder.blocks.places[0]
    before = tokens.clone()
    through(monkeypatch, Played(recorder.blocks, made[-1]))
    stream(third)
    assert not torch.allclose(tokens, before)
    seen: list[torch.Tensor] = []
    block = model.get_submodule(next(iter(recorder.blocks.left)))
    block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(third)
    torch.testing.assert_close(tokens, seen[0])
    recorder.blocks.places[0] = tokens[:, :-1]
    with pytest.raises(DifferentCall):
        stream(third)


def test_recorded_blocks_keep_no_stream_alive(monkeypatch) -> None:
    entry = FAMILIES["vit"]
    model = eventful.convert(entry.make(), Config.fast(TopR(9), fallback=False))
    stream = Stream(model)
    first, second = moving_square(2, entry.size)
    stream(first)
    known = [stream]
    recorder = Recorder(known.copy, known.copy)  # as a residence's, they know the step
    made = through(monkeypatch, recorder)
    with pytest.raises(Recording):
        stream(second)
    blocks, state = recorder.blocks, weakref.ref(made[-1].state)
    monkeypatch.undo()
    made.clear()
    del recorder, stream, known
    gc.collect()
    assert blocks.left
    assert state() is None
