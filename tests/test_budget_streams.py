"""Streams under a budget in unusual cases: boxes, bad frames, other presets, other threads."""

from __future__ import annotations

import math
import threading

import pytest
import torch

import eventful
from eventful import (
    Config,
    ErrorBudget,
    LatencyBudget,
    OperationsBudget,
    Stream,
    StreamBatch,
    TopR,
)
from eventful.budget import Facts, Told
from eventful.budget.error import ErrorController
from eventful.budget.time import LatencyController
from eventful.errors import NonFiniteError
from simulated import Machine, affine, clip_of, large_vit, path

__all__ = ["path"]  # a fixture

FACTS = Facts(600, 10, lambda count: 1000 + 100 * count, 70_000, 10**6)


@pytest.fixture
def model():
    return eventful.convert(large_vit(), Config.fast(fallback=False))


def test_boxes_are_compared_by_what_is_remembered(path, model):
    """Their number differs between the two outputs of a frame, and they are no features."""
    calls = []

    def boxes(frame):
        calls.append(1)
        found = model.forward_features(frame)
        return [{"boxes": row[: 1 + len(calls) % 3, :4]} for row in found]

    model.boxes = boxes
    stream = Stream(model, budget=ErrorBudget(0.02))
    for frame in clip_of([0.3] * 8):
        stream.call("boxes", frame.expand(2, -1, -1, -1))
    assert stream.audits
    assert all(0 < audit.error < 2 for audit in stream.audits)


@pytest.mark.parametrize("estimate", [0.0, 0.004, 0.03])
def test_an_error_that_nothing_estimates_is_held(estimate):
    """Comparisons show it, and it is booked from then on."""
    controller, errors = ErrorController(0.05), []
    for _ in range(400):
        if controller.turn().audit:
            controller.audited(Told(0.02, estimate, False), 0.1)
            controller.learn(Told(1.0, 0.0, True))
            errors.append(0.0)
        else:
            controller.learn(Told(0.02, estimate, False))
            errors.append(0.1)
    assert sum(errors[100:]) / 300 < 0.065


@pytest.mark.parametrize("preset", ["fast", "exact"])
def test_operations_do_not_depend_on_the_machine(path, preset):
    """Dense is cheaper here, so a stream without a budget falls back on it."""
    with Machine(affine(601, overhead=150)) as machine:
        vit = machine.watch(large_vit())
        stream = Stream(eventful.convert(vit, Config.preset(preset, scene_cut=None)))
        clip = clip_of([0.2] * 30)
        for frame in clip[:16]:
            stream(frame)
        assert stream.summary().fallbacks
        stream.budget = OperationsBudget(share=0.6)
        shares = []
        for frame in clip[16:]:
            stream(frame)
            shares.append(stream.last.macs / stream.last.dense_macs)
        assert max(shares) < 0.61
        stream.budget = None
        for frame in clip:
            stream(frame)
        assert stream.last.fallback


@pytest.mark.parametrize("config", [Config.fast(fallback=False), Config.paper(TopR(10))], ids=str)
def test_dense_costs_what_dense_costs(path, config):
    stream = Stream(eventful.convert(large_vit(), config), budget=OperationsBudget(share=1.0))
    for frame in clip_of([0.3] * 4):
        stream(frame)
        assert stream.last.macs == stream.last.dense_macs
    assert stream.budget_report.held == 1.0


def test_a_budget_assigned_while_another_is_being_set_up(model):
    """Whatever the moment: the last one assigned is held from the next frame on."""

    class Slow(OperationsBudget):
        def controller(self, facts):
            other = threading.Thread(
                target=lambda: setattr(stream, "budget", OperationsBudget(share=1.0))
            )
            other.start()
            other.join()
            return super().controller(facts)

    stream = Stream(model, budget=Slow(share=0.6))
    fractions = []
    for frame in clip_of([0.3] * 4):
        stream(frame)
        fractions.append(stream.last.fraction)
    assert fractions[1] < 0.7
    assert fractions[2:] == [1.0, 1.0]


def test_a_due_dense_step_is_made_though_the_budget_changes(model):
    """In mid-frame: it is of the frame that is running."""
    clip = clip_of([0.5] * 12)
    stream = Stream(model, budget=ErrorBudget(0.001))
    changed = []

    def change(*_):
        if stream._control.wanted.audit and not changed:
            changed.append(len(stream.audits))
            thread = threading.Thread(target=lambda: setattr(stream, "budget", None))
            thread.start()
            thread.join()

    handle = model.blocks[0].register_forward_pre_hook(change)
    for frame in clip:
        stream.call("forward_features", frame)
    handle.remove()
    assert changed
    assert len(stream.audits) == changed[0] + 1


def test_a_bad_frame_in_a_batch_that_is_audited(path, model):
    batch = StreamBatch(model)
    batch.join("a")
    batch.join("b")
    batch.audit(every=1)
    frame = clip_of([0.3])[0]
    batch(torch.cat([frame, frame]))
    bad = torch.cat([frame, frame * math.nan])
    with pytest.raises(NonFiniteError):
        _ = [batch(bad) for _ in range(2)]  # on a device the next call says so
    batch(torch.cat([frame, frame]))
    assert math.isfinite(batch.summary().audit_error)


def test_a_latency_that_dense_steps_hold_is_held():
    controller = LatencyController(250, 0.02, FACTS)
    controller.timed(Told(1.0, 0.0, True), 200, None)
    for _ in range(30):
        controller.timed(Told(0.1, None, False), 300, None)
    for _ in range(30):
        controller.timed(Told(1.0, 0.0, True), 200, None)
    report = controller.report()
    assert report.held == pytest.approx(200, rel=0.05)
    assert report.holding


def test_a_budget_chooses_the_policy_where_there_is_none(path):
    stream = Stream(eventful.convert(large_vit(), Config.paper()), budget=OperationsBudget(0.5))
    for frame in clip_of([0.3] * 3):
        stream(frame)
    assert stream.last.macs <= 0.5 * stream.last.dense_macs


def test_a_ceiling_is_as_many_tokens_as_were_meant():
    for count in range(1, 1369):
        policy = eventful.FollowScene(max_fraction=count / 1369)
        assert policy.params(1369).cap == count


def test_errors_of_what_was_not_returned_are_left_out_of_a_summary(model):
    stream = Stream(model, budget=ErrorBudget(0.01))
    stream.audit(every=1)
    for frame in clip_of([0.3] * 6):
        stream.call("forward_features", frame)
    assert any(audit.recomputed for audit in stream.audits)
    own = [audit.error for audit in stream.audits if not audit.recomputed]
    assert stream.summary().worst_audit_error == max(own)


def test_latency_takes_a_number_of_tokens_that_fits_the_slots():
    facts = Facts(600, 10, lambda count: count, 600, 1, fit=lambda count: count // 64 * 64)
    controller = LatencyBudget(40).controller(facts)
    assert (controller.turn().policy.params(600).cap + 10) % 64 == 0
