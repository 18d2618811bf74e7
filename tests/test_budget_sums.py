"""What a stream tells of frames that it computed twice: an eventful step, then a dense one."""

from __future__ import annotations

import math

import pytest
import torch

import eventful
import zoo_timm
from eventful import Config, ErrorBudget, Stream
from eventful.budget.base import Told
from eventful.budget.error import BASE, ErrorController

FRAMES = 8


@pytest.fixture
def stream():
    """Each step is compared with a dense one: no error is small enough."""
    torch.manual_seed(3)
    config = Config.fast(fallback=False, scene_cut=None)
    return Stream(eventful.convert(zoo_timm.ZOO["vit"].make(), config), budget=ErrorBudget(1e-9))


@pytest.fixture
def frames():
    make = torch.Generator().manual_seed(0)
    return [torch.randn(1, 3, *zoo_timm.ZOO["vit"].size, generator=make) for _ in range(FRAMES)]


def test_dense_operations_count_each_frame_once(stream, frames):
    for frame in frames:
        stream(frame)
    found, dense = stream.summary(), stream.last.dense_macs
    assert found.audits > 0
    assert found.frames == FRAMES
    assert found.dense_operations == FRAMES * dense
    assert found.operations > (found.audits + 1) * dense  # the eventful steps before them, too


def test_comparisons_name_the_frame(stream, frames):
    seen = []
    for number, frame in enumerate(frames):
        before = len(stream.audits)
        stream(frame)
        seen += [number] * (len(stream.audits) - before)
    assert seen
    assert [audit.step for audit in stream.audits] == seen


def test_frames_computed_twice_do_not_shift_audits(stream, frames):
    stream.audit(every=3)
    for frame in frames:
        stream(frame)
    assert [audit.step for audit in stream.audits if not audit.recomputed] == [0, 3, 6]


def test_the_controller_tells_what_it_predicted():
    controller = ErrorController(0.1)
    assert math.isnan(controller.predicted)
    controller.learn(Told(share=0.1, estimate=0.04, flushed=False))
    assert controller.predicted == pytest.approx(0.04 + BASE)
    controller.learn(Told(share=0.1, estimate=0.04, flushed=False))
    assert controller.predicted > 0.04 + BASE  # a frame further from the last dense step
    controller.learn(Told(share=1.0, estimate=0.0, flushed=True))
    assert controller.predicted == 0
