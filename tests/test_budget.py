"""Budgets: controllers on simulated machines, and streams that hold them."""

from __future__ import annotations

import math
import random
import threading
import warnings

import pytest
import torch

import eventful
from eventful import (
    Config,
    ErrorBudget,
    LatencyBudget,
    MemoryBudget,
    OperationsBudget,
    RateBudget,
    Stream,
    StreamBatch,
    TopR,
)
from eventful.budget import BudgetWarning, Facts, Told
from eventful.budget.error import LEVELS, ErrorController
from eventful.budget.operations import most_tokens
from eventful.errors import ConfigError
from simulated import LARGE, Machine, affine, clip_of, large_vit, path

__all__ = ["path"]  # a fixture

TOKENS = 600
FACTS = Facts(TOKENS, 10, lambda count: 1000 + 100 * count, 70_000, 10**6)


class Plant:
    """A machine whose steps take (base + slope * share) * load ms, with noise.

    Args:
        scene: share of the tokens that wants to pass, by frame; the controller's cap limits it.
    """

    def __init__(self, controller, *, base=5.0, slope=100.0, noise=0.0, lag=0, seed=0):
        self.controller, self.base, self.slope, self.noise, self.lag = (
            controller, base, slope, noise, lag,
        )  # fmt: skip
        self.random = random.Random(seed)
        self.times: list[float] = []
        self.shares: list[float] = []
        self._waiting: list[tuple[Told, float]] = []
        controller.timed(Told(1.0, 0.0, True), (base + slope) * 1.3, None)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self, load: float = 1.0, scene: float = 1.0, rest: float | None = None) -> float:
        policy = self.controller.turn().policy
        cap = getattr(policy, "max_fraction", None) or getattr(policy, "fraction", 1.0)
        share = min(cap, scene)
        jitter = 1 + self.noise * self.random.gauss(0, 1)
        ms = (self.base + self.slope * share) * load * max(jitter, 0.2)
        self._waiting.append((Told(share, None, share >= 1), ms))
        if len(self._waiting) > self.lag:
            told, past = self._waiting.pop(0)
            interval = None if rest is None else past + rest
            self.controller.timed(told, past, interval)
        self.times.append(ms)
        self.shares.append(share)
        return ms


class TestLatency:
    @pytest.mark.parametrize("lag", [0, 2])
    @pytest.mark.parametrize("base", [1.0, 20.0])
    def test_settles_within_thirty_frames_and_does_not_swing(self, lag, base):
        plant = Plant(LatencyBudget(40).controller(FACTS), base=base, lag=lag)
        for _ in range(80):
            plant.step()
        assert all(34 < ms <= 40.5 for ms in plant.times[30:])
        assert max(plant.shares[30:]) - min(plant.shares[30:]) < 0.02

    def test_follows_a_load_that_comes_and_goes(self):
        plant = Plant(LatencyBudget(40).controller(FACTS))
        for t in range(150):
            plant.step(load=2.0 if 50 <= t < 100 else 1.0)
        for settled in (plant.times[30:50], plant.times[80:100], plant.times[130:]):
            assert all(30 < ms <= 41 for ms in settled)
        assert plant.shares[95] < 0.7 * plant.shares[45]

    def test_follows_a_ramp(self):
        plant = Plant(LatencyBudget(40).controller(FACTS))
        for t in range(140):
            plant.step(load=1 + max(0, min(t - 40, 80)) / 40)
        assert sum(ms > 44 for ms in plant.times[30:]) == 0
        assert 30 < plant.times[-1] <= 41

    def test_noise_does_not_move_it_much(self):
        plant = Plant(LatencyBudget(40).controller(FACTS), noise=0.1)
        for _ in range(300):
            plant.step()
        late = [ms > 40 for ms in plant.times[30:]]
        assert sum(late) / len(late) < 0.2
        mean = sum(plant.times[30:]) / len(late)
        assert 28 < mean < 40
        shares = plant.shares[30:]
        assert max(shares) - min(shares) < 0.6 * (sum(shares) / len(shares))

    def test_single_spikes_are_not_believed(self):
        plant = Plant(LatencyBudget(40).controller(FACTS))
        for t in range(100):
            plant.step(load=50.0 if t % 25 == 24 else 1.0)
        calm = [s for t, s in enumerate(plant.shares) if t > 30 and t % 25 > 20]
        assert min(calm) > 0.25

    @pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
    def test_a_stalled_clock_changes_nothing(self, wrong):
        controller = LatencyBudget(40).controller(FACTS)
        plant = Plant(controller)
        for _ in range(40):
            plant.step()
        before = controller.turn()
        for _ in range(20):
            controller.timed(Told(0.3, None, False), wrong, None)
        assert controller.turn() == before

    def test_a_calm_scene_keeps_a_cap_that_holds_when_it_wakes(self):
        plant = Plant(LatencyBudget(40).controller(FACTS))
        for t in range(120):
            plant.step(scene=0.02 if 30 <= t < 80 else 1.0)
        assert max(plant.times[80:]) < 46
        assert all(ms <= 41 for ms in plant.times[100:])

    def test_the_floor_holds_and_the_nearest_is_said(self):
        controller = LatencyBudget(3, floor=0.05).controller(FACTS)
        plant = Plant(controller)
        said = r"5\.0% of the tokens.*takes (9\.\d+|10\.?\d*) ms.*nearest"
        with pytest.warns(BudgetWarning, match=said):
            plant.steps(60)
        assert min(plant.shares) >= 0.05
        assert not controller.report().holding
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once
            for _ in range(30):
                plant.step()

    def test_an_infinite_budget_is_dense(self):
        controller = LatencyBudget(math.inf).controller(FACTS)
        plant = Plant(controller)
        for _ in range(5):
            plant.step()
        assert controller.turn().dense


class TestRate:
    def test_leaves_room_for_the_rest_of_the_program(self):
        """40 ms a frame, 15 of them decoding: the step gets 25."""
        plant = Plant(RateBudget(25).controller(FACTS))
        for _ in range(100):
            plant.step(rest=15.0)
        assert all(21 < ms < 26.5 for ms in plant.times[50:])

    def test_a_camera_that_is_waited_for_does_not_look_late(self):
        controller = RateBudget(25).controller(FACTS)
        plant = Plant(controller)
        for _ in range(150):
            ms = plant.base + plant.slope * (plant.shares[-1] if plant.shares else 0.1)
            plant.step(rest=max(0.0, 40 - ms))
        assert 30 < plant.times[-1] <= 38
        assert controller.report().holding


class TestError:
    """A plant whose error grows with the frames since the last dense step."""

    def run(self, error, scale, *, bias=1.0, frames=400, power=0.35):
        controller, since, errors, dense = ErrorController(error), 0, [], 0
        for t in range(frames):
            scene = scale(t) if callable(scale) else scale
            turn = controller.turn()
            share = min(0.25, 0.15 / turn.policy.level)
            since += 1
            true = scene * since**power * (1 + turn.policy.level) / 2
            told = Told(share, true / since**power / bias, False)
            if turn.audit:
                controller.audited(told, true)
                controller.learn(Told(1.0, 0.0, True))
                since, dense = 0, dense + 1
                errors.append(0.0)
            else:
                controller.learn(told)
                errors.append(true)
        return controller, errors, dense

    @pytest.mark.parametrize("bias", [0.3, 1.0, 3.0])
    @pytest.mark.parametrize("scale", [0.05, 0.15, 0.4])
    def test_the_mean_is_held_whatever_the_estimate_gets_wrong(self, scale, bias):
        _, errors, _ = self.run(0.1, scale, bias=bias)
        assert 0.07 < sum(errors[40:]) / len(errors[40:]) < 0.13

    def test_what_enters_is_noticed_at_once(self):
        _, errors, _ = self.run(0.1, lambda t: 0.02 if t < 200 else 0.5)
        assert 0.07 < sum(errors[200:]) / 200 < 0.16  # what was saved up may be spent
        assert sum(errors[200:216]) / 16 < 0.35

    def test_a_still_scene_costs_the_least_and_says_so(self):
        controller, _, dense = self.run(0.1, 0.001)
        assert controller.turn().policy.level == pytest.approx(LEVELS[1], rel=0.05)
        assert "costs no more" in controller.report().limit
        assert dense <= 8

    @pytest.mark.parametrize("wrong", [math.nan, math.inf])
    def test_a_broken_comparison_is_not_learned(self, wrong):
        controller = ErrorController(0.1)
        controller.learn(Told(0.1, 0.1, False))
        before = controller.turn()
        controller.audited(Told(0.1, 0.1, False), wrong)
        assert math.isfinite(controller.turn().policy.level)
        assert controller.turn().policy.max_fraction == before.policy.max_fraction


class TestOperations:
    def test_as_many_tokens_as_fit(self):
        for limit in (1000, 1001, 1100, 30_000, 60_999):
            count = most_tokens(limit, FACTS)
            assert FACTS.operations(count) <= limit < FACTS.operations(count + 1)
        assert most_tokens(70_000, FACTS) == TOKENS
        assert most_tokens(10, FACTS) == -1

    def test_laws(self):
        assert OperationsBudget(math.inf).controller(FACTS).turn().dense
        assert OperationsBudget(1.0).controller(FACTS).turn().dense
        assert OperationsBudget(0.0).controller(FACTS).turn().policy == TopR(0)

    def test_below_the_least_is_said_at_once(self):
        with pytest.warns(BudgetWarning, match=r"refresh in turn alone need 0\.0286"):
            controller = OperationsBudget(0.01).controller(FACTS)
        assert controller.turn().policy == TopR(0)
        assert not controller.report().holding


@pytest.mark.parametrize(
    "make",
    [
        lambda x: ErrorBudget(x),
        lambda x: LatencyBudget(x),
        lambda x: RateBudget(x),
        lambda x: OperationsBudget(share=x),
        lambda x: OperationsBudget(gmacs=x),
        lambda x: MemoryBudget(x),
        lambda x: LatencyBudget(10, floor=x),
    ],
)
@pytest.mark.parametrize("wrong", [math.nan, -1.0, "5", None, True])
def test_bad_numbers_are_refused(make, wrong):
    with pytest.raises(ConfigError):
        make(wrong)


@pytest.mark.parametrize("wrong", [{}, {"share": 0.1, "gmacs": 1.0}])
def test_operations_take_one_number(wrong):
    with pytest.raises(ConfigError, match="one of share and gmacs"):
        OperationsBudget(**wrong)


def drifting(count, size=LARGE):
    """A picture that changes everywhere, slowly, in another way at each place."""
    make = torch.Generator().manual_seed(1)
    first, second = (torch.randn(1, 3, *size, generator=make) for _ in range(2))
    speed = torch.rand(1, 1, *size, generator=make) * 0.05
    return [first * torch.cos(speed * t) + second * torch.sin(speed * t) for t in range(count)]


@pytest.fixture
def model():
    return eventful.convert(large_vit(), Config.fast(fallback=False))


def outputs(stream, clip):
    return [stream.call("forward_features", frame) for frame in clip]


class TestStreams:
    def test_an_error_of_zero_is_dense(self, path, model):
        clip = clip_of([0.3] * 6)
        stream = Stream(model, budget=ErrorBudget(0))
        for frame, got in zip(clip, outputs(stream, clip), strict=True):
            with torch.no_grad():
                torch.testing.assert_close(got, model.forward_features(frame), rtol=1e-4, atol=1e-4)

    def test_an_infinite_error_refreshes_only(self, path, model):
        clip = clip_of([0.3] * 6)
        stream, plain = Stream(model, budget=ErrorBudget(math.inf)), Stream(model, TopR(0))
        for a, b in zip(outputs(stream, clip)[2:], outputs(plain, clip)[2:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=0.2)
        assert stream.last.fraction == plain.last.fraction

    def test_an_error_is_held(self, path):
        """The true error of the outputs, on the default settings."""
        model = eventful.convert(large_vit())
        clip = drifting(100)
        stream, errors = Stream(model, budget=ErrorBudget(0.15)), []
        for frame, got in zip(clip, outputs(stream, clip), strict=True):
            with torch.no_grad():
                dense = model.forward_features(frame)
            errors.append(float((got - dense).norm() / dense.norm()))
        assert 0.105 < sum(errors[10:]) / 90 < 0.195
        assert stream.audits
        assert all(audit.recomputed for audit in stream.audits)
        assert all(errors[audit.step] < 1e-3 for audit in stream.audits)  # the dense output
        assert stream.summary().frames == 100

    def test_a_budget_acts_through_the_selection_alone(self, path, model):
        """The same policies assigned by hand give the same bits."""
        clip = clip_of([0.2] * 12)
        stream = Stream(model, budget=OperationsBudget(share=0.3))
        policy = None
        got = []
        for frame in clip:
            got.append(stream.call("forward_features", frame))
            policy = stream._control.wanted.policy or policy
        by_hand = Stream(model)
        first = [by_hand.call("forward_features", clip[0])]
        by_hand.policy = policy
        again = first + [by_hand.call("forward_features", frame) for frame in clip[1:]]
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))

    def test_operations_are_held(self, path, model):
        clip = clip_of([0.5] * 8)
        stream = Stream(model, budget=OperationsBudget(share=0.6))
        shares = []
        for frame in clip:
            stream.call("forward_features", frame)
            shares.append(stream.last.macs / stream.last.dense_macs)
        assert all(0.58 < share <= 0.6 for share in shares[1:]), shares
        held = stream.budget_report.held
        assert held == pytest.approx(shares[-1], abs=0.01)

    def test_latency_on_a_simulated_machine(self, path):
        """An eventful step takes 2 * (10 + 100 * share) ms; 60 are asked for, then 40."""
        with Machine(affine(601, overhead=10)) as machine:
            vit = machine.watch(large_vit())
            stream = Stream(eventful.convert(vit, Config.fast(fallback=False, scene_cut=None)))
            stream.budget = LatencyBudget(60)
            clip = clip_of([0.7] * 80)
            times = []
            for t, frame in enumerate(clip):
                if t == 50:
                    stream.budget = LatencyBudget(40)
                stream.call("forward_features", frame)
                times.append(stream.last.ms)
        assert all(40 < ms <= 62 for ms in times[30:50]), times
        assert all(25 < ms <= 42 for ms in times[65:]), times

    def test_it_can_change_while_a_frame_is_on_its_way(self, model):
        """Assigned from another thread in mid-frame, it waits for the next frame."""
        clip = clip_of([0.3] * 4)
        stream = Stream(model, budget=OperationsBudget(share=0.3))
        outputs(stream, clip[:2])
        hook = model.blocks[0].register_forward_pre_hook(
            lambda *_: threading.Thread(
                target=lambda: setattr(stream, "budget", OperationsBudget(share=1.0))
            ).start()
        )
        stream.call("forward_features", clip[2])
        hook.remove()
        assert stream.last.fraction < 0.4
        stream.call("forward_features", clip[3])
        assert stream.last.fraction == 1.0

    def test_it_takes_effect_at_the_next_frame(self, path, model):
        stream, clip = Stream(model, TopR(5)), clip_of([0.3] * 4)
        outputs(stream, clip[:3])
        stream.budget = OperationsBudget(share=1.0)
        outputs(stream, clip[3:])
        assert stream.last.fraction == 1.0

    def test_a_frame_that_failed_is_not_learned_from(self, path, model):
        """A bad frame changes neither the account nor the level."""
        clip = drifting(8)
        stream, other = (Stream(model, budget=ErrorBudget(0.15), check="sync") for _ in range(2))
        for t, frame in enumerate(clip):
            if t == 5:
                with pytest.raises(eventful.EventfulError):
                    stream.call("forward_features", frame * math.nan)
            a = stream.call("forward_features", frame)
            b = other.call("forward_features", frame)
            assert torch.equal(a, b)
        assert vars(stream._control._controller) == vars(other._control._controller)

    def test_none_gives_the_policy_back(self, path, model):
        stream = Stream(model, TopR(5), budget=OperationsBudget(share=1.0))
        clip = clip_of([0.3] * 5)
        outputs(stream, clip[:3])
        assert stream.last.fraction == 1.0
        stream.budget = None
        outputs(stream, clip[3:])
        assert stream.last.fraction < 0.1
        assert stream.budget_report is None

    def test_reset_takes_another_size(self, model):
        stream = Stream(model, budget=OperationsBudget(share=0.3))
        outputs(stream, clip_of([0.3] * 3))
        stream.reset()
        assert stream.budget == OperationsBudget(share=0.3)
        outputs(stream, clip_of([0.3] * 3))
        assert stream.last.fraction < 0.4

    def test_memory_is_refused_with_the_nearest(self, model):
        stream = Stream(model, budget=MemoryBudget(0.01))
        frame = clip_of([0.3])[0]
        stream(frame)
        with pytest.raises(ConfigError, match="the nearest possible"):
            stream(frame)
        stream.budget = MemoryBudget(1000)
        stream(frame)

    def test_a_batch_has_as_many_streams_as_fit(self, model):
        frame = clip_of([0.3])[0]
        batch = StreamBatch(model)
        batch.join("a")
        batch(frame)
        batch.budget = MemoryBudget(1.5 * batch.nbytes / 1e6)
        batch(frame)
        batch(frame)
        with pytest.raises(ConfigError, match="enough for 1"):
            batch.join("b")
        assert batch.streams == ("a",)
        batch(frame)

    def test_wrong_budgets_are_refused(self, model):
        with pytest.raises(ConfigError, match="ErrorBudget"):
            Stream(model, budget=0.1)
        exact = eventful.convert(large_vit(), Config.exact())
        with pytest.raises(ConfigError, match="gating"):
            Stream(exact, budget=ErrorBudget(0.1))
        with pytest.raises(ConfigError, match="Stream of its own"):
            StreamBatch(model, budget=ErrorBudget(0.1))

    def test_a_batch_spends_one_budget_where_it_changes(self, path, model):
        batch = StreamBatch(model, budget=OperationsBudget(share=0.6))
        batch.join("still")
        batch.join("busy")
        busy = clip_of([0.6] * 6)
        for frame in busy:
            batch(torch.cat([busy[0], frame]))
        counts = batch.last.gates["frame"].counts.tolist()
        assert counts[1] > 3 * counts[0]
        assert counts[0] >= 0.02 * 601
        assert batch.last.macs / batch.last.dense_macs < 0.61
