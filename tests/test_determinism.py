"""The same bits in every run: no decision by the clock, fixed numbers of slots, ties by index."""

from __future__ import annotations

import pytest
import torch

import eventful
from eventful import Config, NoiseThreshold, Stream, Threshold, TopR
from simulated import Machine, clip_of, large_vit, path

__all__ = ["path"]


def outputs(config, ms):
    """All outputs of a run on a machine of the given speed."""
    with Machine(ms) as machine:
        stream = Stream(eventful.convert(machine.watch(large_vit()), config))
        return [stream(frame) for frame in clip_of([0.1, 0.1, 0.1, 0.6, 0.6, 0.3, 0.1, 0.1] * 2)]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("preset", ["fast", "exact"])
@pytest.mark.parametrize("policy", [None, Threshold(1.0), TopR(90)], ids=str)
def test_does_not_depend_on_the_speed_of_the_machine(path, preset, policy, tmp_path, monkeypatch):
    config = Config.preset(preset, policy, deterministic=True, scene_cut=None)
    runs = []
    for number, ms in enumerate([lambda n: 1.0, lambda n: 100.0 if n < 600 else 1.0]):
        monkeypatch.setenv("EVENTFUL_CACHE", str(tmp_path / str(number)))
        runs.append(outputs(config, ms))
    assert all(map(torch.equal, *runs))


def test_the_default_does(path, tmp_path, monkeypatch):
    """What the option is for: a machine where steps are slow runs dense."""
    monkeypatch.setenv("EVENTFUL_CACHE", str(tmp_path))
    config = Config.fast(scene_cut=None)
    fast, slow = outputs(config, lambda n: 1.0), outputs(config, lambda n: 9.0 if n < 600 else 1.0)
    assert not all(map(torch.equal, fast, slow))


def test_one_number_of_slots_serves_all_frames(monkeypatch):
    """A threshold's selections differ from frame to frame; the shape of the step does not."""
    monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    widths = {}
    for deterministic in (False, True):
        config = Config.fast(NoiseThreshold(), deterministic=deterministic, scene_cut=None)
        stream = Stream(eventful.convert(large_vit(), config))
        for frame in clip_of([0.1, 0.1, 0.5, 0.5, 0.1, 0.1]):
            stream(frame)
        (home,) = stream.model._eventful.stores.values()
        widths[deterministic] = {key[1] for key in home.shapes} - {601}
    assert len(widths[False]) > 1
    assert len(widths[True]) == 1


@pytest.mark.parametrize("r", [1, 5, 40])
def test_equal_errors_are_taken_in_order(path, r):
    """A frame that changes every patch by the same amount: the first r are updated."""
    model = large_vit(pos_embed="none")
    config = Config.fast(TopR(r), protect=False, max_age=None, scene_cut=None, deterministic=True)
    stream = Stream(eventful.convert(model, config), maps=True)
    stream(torch.zeros(1, 3, 192, 200))
    stream(torch.ones(1, 3, 192, 200))
    changed = stream.last.mask[0, 1:].nonzero().flatten()
    assert changed.tolist() == list(range(r))
