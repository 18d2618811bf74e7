"""The default policy, the estimate of the error, and the summary, on both paths."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import eventful
from eventful import Config, FollowScene, Stream, StreamBatch, TopR, errors
from eventful.ops.reference.scores import UNIT
from eventful.rules.record import STALE

PATCH, GRID = 8, (12, 15)
SIZE = (PATCH * GRID[0], PATCH * GRID[1])
N = 1 + GRID[0] * GRID[1]


@pytest.fixture(params=["host", "resident"], autouse=True)
def path(request, monkeypatch):
    devices = {"cpu"} if request.param == "resident" else set()
    monkeypatch.setattr("eventful.engine.plan.DEVICES", devices)
    return request.param


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(4)
    return VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=48, depth=3, num_heads=3, num_classes=0
    ).eval()


@pytest.fixture
def model(vit):
    return eventful.convert(vit, Config.fast(fallback=False, context=None))


@pytest.fixture
def make():
    return torch.Generator().manual_seed(9)


@pytest.fixture
def still(make):
    picture = torch.nn.functional.avg_pool2d(torch.randn(1, 3, *SIZE, generator=make), 3, 1, 1)
    return 2 * picture


def shares(stream, clip):
    """Share of the tokens that each frame after the first updates by itself."""
    found = []
    for frame in clip:
        stream(frame)
        found.append(stream.last.fraction)
    return found[1:]


def due(frames):
    """Most tokens that are updated whatever they show: the class token and the refresh."""
    return 1 + -(-N // eventful.policies.refresh_period(128, 3))


def test_the_default_is_this_policy():
    assert Config.fast().policy == FollowScene()


def test_exact_repeats_cost_no_more_than_the_refresh(model, still):
    found = shares(Stream(model), [still] * 6)
    assert max(found) * N <= due(6)


def test_every_frame_twice_is_not_taken_for_noise(model, still, make):
    """The former default took the repeated frame's change of zero for the noise."""
    clip = [still + 0.03 * torch.randn(still.shape, generator=make) for _ in range(4)]
    twice = [frame for frame in clip for _ in range(2)]
    assert max(shares(Stream(model), twice)) < 0.1


def test_noise_is_not_updated(model, still, make):
    clip = [still + 0.05 * torch.randn(still.shape, generator=make) for _ in range(6)]
    assert max(shares(Stream(model), clip)) < 0.1


def test_motion_at_the_start_is_not_taken_for_noise(vit, make):
    """Another picture at every frame: all tokens want to pass from the second frame on."""
    config = Config.fast(fallback=False, scene_cut=None, motion=False)
    stream = Stream(eventful.convert(vit, config))
    for _ in range(4):
        stream(2 * torch.randn(1, 3, *SIZE, generator=make))
    assert stream.last.wanted > 0.9 * N
    assert stream.last.at_ceiling
    assert stream.last.fraction <= 0.25 + (due(4) + 1) / N


def test_a_change_is_updated_at_once(model, still, make):
    stream = Stream(model, maps=True)
    stream(still)
    changed = still.clone()
    changed[..., :24, :24] = 2 * torch.randn(3, 24, 24, generator=make)
    stream(changed)
    mask = stream.last.mask[0, 1:].unflatten(0, GRID)
    assert mask[:3, :3].all()
    assert int(mask[4:, 4:].sum()) <= 0.1 * N


def test_drift_is_noticed(model, still):
    """The light goes down slowly: what was computed in the light is updated in time."""
    dimmer = shares(Stream(model), [still * (1 - 0.06 * t) for t in range(12)])
    steady = shares(Stream(model), [still] * 12)
    assert sum(dimmer) > 0.8
    assert sum(steady) < 0.4


def test_the_floor_is_filled_with_small_changes(vit, still, make):
    """Fewer tokens than the floor are above the level, so the largest of the others pass."""
    options = {"max_age": None, "fallback": False, "context": None}
    stream = Stream(
        eventful.convert(vit, Config.fast(FollowScene(low=0.01, floor=0.2), **options)), maps=True
    )
    stream(still)
    noisy = still + 0.1 * torch.randn(still.shape, generator=make)
    stream(noisy)
    count = round(stream.last.fraction * N)
    assert count == 1 + -(-N // 5)  # the class token, and a fifth of the tokens
    error, mask = stream.last.error[0, 1:], stream.last.mask[0, 1:]
    assert error[mask].min() >= error[~mask].max()


@pytest.mark.parametrize(
    "wrong",
    [
        {"level": -1},
        {"low": 2.0},
        {"floor": 1.5},
        {"max_fraction": -1},
        {"renewal": 0},
        {"level": "a"},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(errors.ConfigError):
        FollowScene(**wrong)


def test_streams_of_a_batch_decide_for_themselves(vit, still, make):
    model = eventful.convert(vit, Config.fast(fallback=False, motion=False))
    batch = StreamBatch(model)
    batch.join("still")
    batch.join("busy")
    for _ in range(3):
        busy = 2 * torch.randn(1, 3, *SIZE, generator=make)
        batch(torch.cat([still, busy]))
    counts = batch.last.gates["frame"].counts.tolist()
    assert counts[0] <= due(3)
    assert counts[1] > 0.12 * N  # the ceiling


class TestEstimate:
    def test_it_is_zero_after_a_dense_step(self, model, still):
        stream = Stream(model)
        stream(still)
        assert stream.last.estimate == 0.0
        assert not stream.last.stale

    def test_a_still_scene_has_next_to_none(self, model, still):
        stream = Stream(model)
        for _ in range(4):
            stream(still)
        assert stream.last.estimate < 0.01

    def test_it_grows_with_what_is_left_behind(self, vit, still, make):
        estimates = []
        for strength in (0.05, 0.3, 2.0):
            stream = Stream(eventful.convert(vit, Config.fast(TopR(5), scene_cut=None)))
            for _ in range(4):
                stream(still + strength * torch.randn(still.shape, generator=make))
            estimates.append(stream.last.estimate)
        assert estimates == sorted(estimates)
        assert estimates[2] > 2 * estimates[0]
        assert stream.last.stale == (estimates[2] > STALE)

    def test_nothing_is_estimated_around_operators(self, vit, still):
        stream = Stream(eventful.convert(vit, Config.exact(TopR(5))))
        stream(still)
        stream(still)
        assert stream.last.estimate is None
        assert not stream.last.stale

    def test_streams_of_a_batch_have_their_own(self, vit, still, make):
        model = eventful.convert(vit, Config.fast(TopR(5), scene_cut=None))
        batch = StreamBatch(model)
        batch.join("still")
        batch.join("busy")
        for _ in range(4):
            busy = 2 * torch.randn(1, 3, *SIZE, generator=make)
            batch(torch.cat([still, busy]))
        own = batch.last.estimates.tolist()
        assert 0 <= own[0] < 0.05 * own[1]
        assert batch.last.estimate == pytest.approx(own[1] / UNIT)


class TestRenewal:
    def clip(self, make):
        return [2 * torch.randn(1, 3, *SIZE, generator=make) for _ in range(10)]

    def flushes(self, vit, policy, clip):
        options = {"scene_cut": None, "fallback": False, "motion": False}
        stream = Stream(eventful.convert(vit, Config.fast(policy, **options)))
        found = []
        for frame in clip:
            stream(frame)
            found.append(stream.last.flushed[0])
        return found[1:]

    def test_a_stream_whose_error_lasts_starts_over(self, vit, make):
        clip = self.clip(make)
        assert any(self.flushes(vit, FollowScene(renewal=0.1), clip))
        assert not any(self.flushes(vit, FollowScene(renewal=None), clip))

    def test_a_smaller_number_starts_over_sooner(self, vit, make):
        clip = self.clip(make)
        counts = [sum(self.flushes(vit, FollowScene(renewal=x), clip)) for x in (0.05, 0.15, 50.0)]
        assert counts[0] > counts[1] > counts[2] == 0

    def test_a_still_scene_never_starts_over(self, vit, make):
        clip = [2 * torch.randn(1, 3, *SIZE, generator=make)] * 10
        assert not any(self.flushes(vit, FollowScene(renewal=0.001), clip))

    def test_budgets_are_kept(self, vit, make):
        clip = self.clip(make)
        assert not any(self.flushes(vit, FollowScene(max_fraction=0.2, renewal=0.01), clip))
        assert not any(self.flushes(vit, TopR(20), clip))


class TestSceneCuts:
    def test_the_first_change_after_a_still_scene_is_none(self, model, still):
        """All tokens change a little where they did not change at all before."""
        stream = Stream(model)
        for _ in range(4):
            stream(still)
        for t in range(3):
            stream(still * (1.02 + 0.01 * t))
            assert stream.last.flushed == [False]

    def test_another_scene_is_one(self, model, still, make, path):
        stream = Stream(model)
        for _ in range(4):
            stream(still)
        other = 2 * torch.randn(still.shape, generator=make)
        stream(other)
        if path == "resident":  # one frame later
            stream(other)
        assert stream.last.flushed == [True]


class TestSummary:
    def test_it_adds_up_the_records(self, model, still, make):
        stream, records = Stream(model), []
        assert stream.summary().steps == 0
        for _ in range(6):
            stream(still + 0.5 * torch.randn(still.shape, generator=make))
            records.append(stream.last)
        found = stream.summary()
        assert found.steps == found.frames == 6
        assert found.operations == sum(record.macs for record in records)
        assert found.dense_operations == sum(record.dense_macs for record in records)
        assert found.tokens == pytest.approx(sum(r.fraction for r in records) / 6)
        assert found.flushed == sum(sum(r.flushed) for r in records)
        assert found.worst_estimate == max(r.estimate for r in records)
        assert "6 frames" in str(found)

    def test_it_needs_no_look_at_records(self, model, still):
        stream = Stream(model)
        for _ in range(3):
            stream(still)
        assert stream.summary().frames == 3
        assert stream.summary() == stream.summary()

    def test_frames_of_a_batch_count_each(self, model, still):
        batch = StreamBatch(model)
        batch.join("a")
        batch.join("b")
        batch(torch.cat([still, still]))
        batch(still, streams=["a"])
        assert batch.summary().steps == 2
        assert batch.summary().frames == 3

    def test_it_stays_small(self, model, still, monkeypatch):
        """A stream may run for ever."""
        monkeypatch.setattr("eventful.engine.summary.RECENT", 3)
        stream = Stream(model)
        for _ in range(8):
            stream(still)
        found = stream.summary()
        assert found.frames == 8
        assert len(stream._tally._ms) == len(stream._tally._estimates) == 3

    def test_a_reset_starts_over(self, model, still):
        stream = Stream(model)
        stream(still)
        stream.reset()
        assert stream.summary().steps == 0
        assert str(stream.summary()) == "No frame yet."


def test_a_stream_that_never_starts_over_can_be_written_down():
    policy = FollowScene(0.5, renewal=None)
    assert policy == FollowScene(0.5, renewal=float("inf"))
    assert Config.from_toml(Config.fast(policy).to_toml()).policy == policy
    assert Config.from_dict(Config.fast(policy).to_dict()).policy == policy
