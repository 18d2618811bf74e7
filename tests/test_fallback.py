"""Never slower than dense for long: a stream runs dense where that is cheaper, and comes back."""

from __future__ import annotations

import pytest
import torch

import eventful
from eventful import Config, NoiseThreshold, Stream, StreamBatch, Threshold, TopFraction, TopR
from eventful.cost.fallback import HOLD, Demand, Fallback
from eventful.cost.times import ENOUGH, Costs
from simulated import LARGE, Machine, affine, clip_of, large_vit, path

__all__ = ["path"]

N = 1600
TOKENS = 601


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENTFUL_CACHE", str(tmp_path))


class Simulation:
    """A stream's decisions where dense takes `dense` ms and a step of m tokens `step(m)` ms."""

    def __init__(self, dense=10.0, step=lambda m: 2 + 10 * m / N):
        self.fallback = Fallback(Costs("k", N))
        self.fallback.costs.note_first(1.4 * dense)
        self.dense, self.step, self.load = dense, step, 1.0

    def run(self, counts):
        ran = []
        for count in counts:
            dense = self.fallback.decide(Demand(count, count))
            ms = self.load * (self.dense if dense else self.step(count))
            self.fallback.costs.note(count, ms, dense=dense)
            ran.append(dense)
        return ran


class TestDecisions:
    def test_calm_is_never_dense(self):
        assert not any(Simulation().run([100] * 300))

    def test_dense_once_both_were_compared(self):
        """Eventful steps seem slow, take turns with dense ones, and lose."""
        ran = Simulation().run([1500] * 40)
        assert ran[:ENOUGH] == [False] * ENOUGH
        assert ran[ENOUGH : 3 * ENOUGH] == [True, False] * ENOUGH
        again = 3 * ENOUGH + 1 + HOLD
        assert all(ran[3 * ENOUGH : again])
        assert ran[again : again + 2 * ENOUGH] == [True, False] * ENOUGH  # and compared again

    def test_finds_its_way_back(self):
        simulation = Simulation()
        assert all(simulation.run([1500] * (3 * ENOUGH + 10))[-10:])
        assert not any(simulation.run([100] * 40))

    def test_does_not_swing_at_the_break_even(self):
        simulation = Simulation()
        simulation.run([1500] * (3 * ENOUGH + 1))
        edge = simulation.fallback.costs.break_even
        ran = simulation.run([edge + 1, edge - 1] * (HOLD // 2))
        assert all(ran)
        assert not any(simulation.run([int(0.89 * edge)] * 3))

    def test_a_wrong_belief_is_put_right_after_a_while(self):
        """Measured slow while the machine was busy, and never run again: the clock says so."""
        simulation = Simulation(step=lambda m: 40.0)
        assert all(simulation.run([800] * (3 * ENOUGH + 10))[-10:])
        simulation.step = lambda m: 5.0
        ran = simulation.run([800] * (HOLD + 40))
        assert not any(ran[-20:])
        assert 0 < sum(ran) <= HOLD + ENOUGH

    @pytest.mark.parametrize("period", [7, 16, 48])
    def test_load_that_comes_and_goes_costs_few_dense_steps(self, period):
        """An eventful step takes 60 % of a dense one; each wave of load slows both four times."""
        simulation = Simulation(dense=10.0, step=lambda m: 6.0)
        waves, dense = 12, 0
        for wave in range(waves):
            simulation.load = 4.0 if wave % 2 else 1.0
            dense += sum(simulation.run([192] * period))
        assert dense <= ENOUGH * waves

    def test_comparing_again_and_again_costs_little(self):
        """Where dense wins by a third, 3000 frames cost at most 2 % more than dense."""
        simulation = Simulation(step=lambda m: 15.0)
        ran = simulation.run([1500] * 3000)
        cost = sum(10.0 if dense else 15.0 for dense in ran)
        assert cost <= 1.02 * 10.0 * len(ran)

    def test_a_scene_that_calms_down_ends_the_comparison(self):
        simulation = Simulation()
        simulation.run([1500] * (ENOUGH + 1))
        assert not any(simulation.run([100] * 50))

    def test_a_clock_that_stands_still_says_nothing(self):
        assert not any(Simulation(dense=0.0, step=lambda m: 0.0).run([1500] * 50))


def fallbacks(stream, clip):
    ran = []
    for frame in clip:
        stream(frame)
        ran.append(stream.last.fallback)
    return ran


CALM, BUSY = [0.1] * 8, [0.75] * 24


class TestStream:
    @pytest.mark.parametrize("preset", ["fast", "exact"])
    def test_the_default_follows_the_scene(self, path, preset):
        """Eventful while it is calm, dense while all of it moves, and back within two frames."""
        with Machine(affine(TOKENS, overhead=40)) as machine:
            model = machine.watch(large_vit())
            config = Config.preset(preset, scene_cut=None)
            stream = Stream(eventful.convert(model, config))
            ran = fallbacks(stream, clip_of(CALM + BUSY + CALM + BUSY + CALM))
        calm = [ran[:8], ran[34:40], ran[66:]]
        assert not any(any(part) for part in calm), ran
        assert all(ran[27:32]), ran
        assert all(ran[59:64]), ran

    def test_dense_steps_count_what_wanted_to_pass(self, path):
        with Machine(affine(TOKENS, overhead=40)) as machine:
            model = machine.watch(large_vit())
            stream = Stream(
                eventful.convert(
                    model, Config.fast(Threshold(2.0), scene_cut=None, context=None, motion=False)
                )
            )
            for frame in clip_of(BUSY):
                stream(frame)
            assert stream.last.fallback
            assert stream.last.flushed == [True]
            assert 0.7 * TOKENS < stream.last.wanted < 0.8 * TOKENS
            stream(clip_of([*BUSY, 0.25])[-1])
            assert 0.2 * TOKENS < stream.last.wanted < 0.35 * TOKENS

    def test_a_dense_step_is_the_dense_model(self, path):
        with Machine(affine(TOKENS, overhead=40)) as machine:
            model = machine.watch(large_vit())
            stream = Stream(eventful.convert(model, Config.fast(scene_cut=None)))
            for frame in clip_of(CALM[:3] + BUSY):
                got = stream(frame)
            assert stream.last.fallback
            with torch.no_grad():
                torch.testing.assert_close(got, model(frame), rtol=1e-4, atol=1e-5)

    def test_goes_on_from_the_memory_of_a_dense_step(self, path):
        """After dense steps an eventful one has the whole last frame as its reference."""
        with Machine(affine(TOKENS, overhead=40)) as machine:
            model = machine.watch(large_vit())
            stream = Stream(
                eventful.convert(model, Config.fast(Threshold(0.5), scene_cut=None, context=None))
            )
            clip = clip_of(BUSY, noise=0.0)
            for frame in clip:
                last = stream(frame)
            assert stream.last.fallback
            for _ in range(3):
                got = stream(clip[-1])
            assert not stream.last.fallback
            assert sum(stream.last.updated.values()) < 30
            torch.testing.assert_close(got, last, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "policy", [TopFraction(0.12), TopR(70), NoiseThreshold(max_fraction=0.1)]
    )
    def test_an_explicit_budget_is_left_alone(self, path, policy):
        """Everything moves and dense would be worth it, but not at this budget."""
        with Machine(affine(TOKENS, overhead=40)) as machine:
            model = machine.watch(large_vit())
            stream = Stream(eventful.convert(model, Config.fast(policy, scene_cut=None)))
            assert not any(fallbacks(stream, clip_of(BUSY)))
            assert max(stream.last.updated.values()) <= 100

    @pytest.mark.parametrize("policy", [TopFraction(0.9), TopR(550)])
    def test_unless_it_lies_beyond_the_break_even(self, path, policy):
        with Machine(affine(TOKENS, overhead=40)) as machine:
            model = machine.watch(large_vit())
            stream = Stream(eventful.convert(model, Config.fast(policy, scene_cut=None)))
            assert all(fallbacks(stream, clip_of(CALM + CALM))[-6:])
            stream.policy = TopR(60)
            assert not any(fallbacks(stream, clip_of(CALM))[1:])

    def test_steps_slower_than_dense_are_not_kept(self, path):
        """Where even a few tokens cost more than all of them, a calm scene runs dense too."""
        with Machine(affine(TOKENS, overhead=150)) as machine:
            model = machine.watch(large_vit())
            stream = Stream(eventful.convert(model, Config.fast(scene_cut=None)))
            assert all(fallbacks(stream, clip_of(CALM * 3))[-12:])

    @pytest.mark.parametrize("off", ["option", "deterministic", "variable"])
    def test_not_if_told_so(self, path, off, monkeypatch):
        options = {"option": {"fallback": False}, "deterministic": {"deterministic": True}}
        if off == "variable":
            monkeypatch.setenv("EVENTFUL_FALLBACK", "0")
        with Machine(affine(TOKENS, overhead=150)) as machine:
            model = machine.watch(large_vit())
            config = Config.fast(scene_cut=None, **options.get(off, {}))
            assert not any(fallbacks(Stream(eventful.convert(model, config)), clip_of(BUSY)))

    def test_the_published_presets_never_do(self):
        assert not any(Config.preset(name).fallback for name in ("paper", "tokenwise", "stgt"))

    def test_a_batch_follows_its_busiest_stream(self, path):
        with Machine(affine(TOKENS, overhead=40)) as machine:
            model = machine.watch(large_vit())
            batch = StreamBatch(eventful.convert(model, Config.fast(scene_cut=None)))
            for name in ("calm", "busy"):
                batch.join(name)
            clips = zip(clip_of(CALM * 6), clip_of(CALM + BUSY + CALM * 2), strict=True)
            ran = fallbacks(batch, [torch.cat(pair) for pair in clips])
        assert not any(ran[:8])
        assert all(ran[27:32])
        assert not any(ran[34:])

    def test_streams_of_a_model_share_what_they_learned(self, path):
        with Machine(affine(TOKENS, overhead=150)) as machine:
            model = eventful.convert(machine.watch(large_vit()), Config.fast(scene_cut=None))
            assert all(fallbacks(Stream(model), clip_of(CALM * 3))[-6:])
            second = fallbacks(Stream(model), clip_of(CALM))
        assert second[: 2 + 2 * ENOUGH].count(True) >= ENOUGH
        assert all(second[2 + 2 * ENOUGH :])


def test_the_size_has_room_for_samples_and_buckets():
    assert large_vit().patch_embed.num_patches == TOKENS - 1 > 512
    assert LARGE[0] * LARGE[1] // 64 == TOKENS - 1
