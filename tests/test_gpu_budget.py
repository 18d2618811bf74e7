"""Budgets on a GPU, where steps are recorded and what they tell arrives late."""

from __future__ import annotations

import statistics

import pytest
import torch

import eventful
import eventful.budget
from eventful import Config, ErrorBudget, LatencyBudget, OperationsBudget, Stream, StreamBatch
from simulated import clip_of, large_vit
from test_budget import drifting

pytestmark = pytest.mark.gpu


@pytest.fixture
def model():
    return eventful.convert(large_vit().cuda())


def test_an_error_is_held(model):
    stream, errors = Stream(model, budget=ErrorBudget(0.15)), []
    for frame in drifting(100):
        got = stream.call("forward_features", frame.cuda())
        with torch.no_grad():
            dense = model.forward_features(frame.cuda())
        errors.append(float((got - dense).norm() / dense.norm()))
    assert 0.105 < sum(errors[10:]) / 90 < 0.195
    assert stream.audits
    assert stream.summary().frames == 100


@pytest.mark.real_clock
def test_a_latency_is_followed(model):
    """By the device's own times: far more than is needed is dense, far less is the floor."""
    clip = [frame.cuda() for frame in clip_of([0.7] * 60)]
    stream = Stream(model, eventful.TopFraction(0.1))
    times = []
    for frame in clip[:20]:
        stream(frame)
        times.append(stream.last.ms)
    few = statistics.median(times[5:])  # one step alone may have waited for another process
    stream.budget = LatencyBudget(20 * few)
    for frame in clip[20:40]:
        stream(frame)
    assert stream.last.fraction > 0.5
    stream.budget = LatencyBudget(few / 10)
    with pytest.warns(eventful.budget.BudgetWarning, match="nearest possible"):
        _ = [stream(frame) for frame in clip]
    assert stream.last.fraction < 0.2


def test_one_budget_for_a_batch(model):
    batch = StreamBatch(model, budget=OperationsBudget(share=0.6))
    batch.join("still")
    batch.join("busy")
    busy = [frame.cuda() for frame in clip_of([0.6] * 8)]
    for frame in busy:
        batch(torch.cat([busy[0], frame]))
    counts = batch.last.gates["frame"].counts.tolist()
    assert counts[1] > 3 * counts[0]
    assert batch.last.macs / batch.last.dense_macs < 0.61


def test_audits_leave_outputs_as_they_are():
    # Without the fallback to dense steps, which follows measured times.
    model = eventful.convert(large_vit().cuda(), Config.fast(fallback=False))
    clip = [frame.cuda() for frame in clip_of([0.2] * 9)]
    plain, audited = Stream(model), Stream(model)
    audited.audit(every=4)
    for frame in clip:
        assert torch.equal(
            plain.call("forward_features", frame), audited.call("forward_features", frame)
        )
    assert [audit.step for audit in audited.audits] == [0, 4, 8]
