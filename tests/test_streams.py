"""What streams do by themselves: refresh, protect, flush on a cut, measure noise, keep records."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch

import eventful
import zoo_timm
from clips import moving_square
from eventful import (
    Always,
    Config,
    NoiseThreshold,
    SceneCut,
    Selection,
    Threshold,
    TopFraction,
    TopR,
)
from eventful.config import PRESETS
from eventful.policies import policy_from_dict, policy_to_dict
from eventful.tokens.layout import TokenLayout
from small import drifting_tokens, random_trunk
from tolerances import assert_near

RULES = {
    "frame": lambda p, **o: Config(p, gating="frame", **o),
    "block": lambda p, **o: Config(p, gating="block", **o),
    "operator": lambda p, **o: Config.exact(p, **o),
}


def masks_of(config, clip, model=None):
    """Update masks of the first gate, frame by frame."""
    model = model or random_trunk((4, 5))
    stream = eventful.Stream(eventful.convert(model, config), maps=True)
    masks = []
    for frame in clip:
        stream(frame)
        masks.append(stream.last.mask)
    return stream, torch.stack(masks, dim=1)  # (B, T, N)


@pytest.mark.parametrize("gating", RULES)
@pytest.mark.parametrize("period", [1, 3, 7, 25])
def test_no_token_is_older_than_max_age(gating, period):
    config = RULES[gating](TopR(1), max_age=period, scene_cut=None)
    clip = drifting_tokens(3 * period + 2, 2, 20, 16, share=0.2)
    stream, masks = masks_of(config, clip)
    for start in range(1, masks.shape[1] - period + 1):
        assert masks[:, start : start + period].any(dim=1).all()
    gate = next(name for name in stream._state.names() if name.endswith("/age"))
    ages = torch.zeros(2, 20, dtype=torch.int32)
    for t in range(masks.shape[1]):
        ages = (ages + 1).masked_fill(masks[:, t], 0)
    assert torch.equal(stream._state[gate], ages)
    assert int(ages.max()) < period


def test_tokens_due_come_on_top_of_r():
    """Two blocks, so the period is 6, and 3 or 4 of the 20 tokens are due in each frame."""
    _, masks = masks_of(
        Config(TopR(8), gating="frame", max_age=10), drifting_tokens(6, 1, 20, 16, share=0.5)
    )
    for t, mask in enumerate(masks[0, 1:], start=1):
        due = TokenLayout((4, 5)).phases(6) == t % 6
        assert mask[due].all()
        assert mask[~due].sum() == 8


def test_a_small_r_follows_a_change():
    """More tokens are due in a frame than r, and there are more special ones."""
    model = random_trunk((20, 25), special=3, depth=2)
    clip = drifting_tokens(1, 1, 503, 16, share=0.0) * 4
    changed = clip[0].clone()
    changed[:, [77, 400]] += 5
    clip[3] = changed
    config = Config.fast(TopR(2), scene_cut=None, max_age=30)
    _, masks = masks_of(config, clip, model)
    assert masks[0, 3, [0, 1, 2, 77, 400]].all()
    due = 503 // 20 + 1
    assert 25 <= masks[0, 3].sum() <= due + 3 + 2


@pytest.mark.parametrize("gating", RULES)
def test_special_tokens_are_always_selected_on_top_of_r(gating):
    clip = drifting_tokens(5, 2, 22, 16, share=0.2)
    for r, expected in ((0, 2), (1, 3), (6, 8), (99, 22)):
        model = random_trunk((4, 5), special=2)
        _, masks = masks_of(RULES[gating](TopR(r), scene_cut=None), clip, model)
        assert masks[:, :, :2].all()
        assert masks[:, 1:].sum(-1).unique().tolist() == [expected]
    _, masks = masks_of(RULES[gating](TopR(1), scene_cut=None, protect=False), clip, model)
    assert not masks[:, 1:, :2].all()


def test_a_scene_cut_flushes_by_itself_and_motion_does_not():
    model = random_trunk((4, 5))
    clip = drifting_tokens(20, 1, 20, 16, share=0.2)
    clip = [frame + 0.01 * torch.randn_like(frame) for frame in clip]
    clip[12:] = [
        frame + 5 * torch.randn(1, 20, 16, generator=torch.Generator().manual_seed(1))
        for frame in clip[12:]
    ]
    for config in (Config.fast(TopR(3)), Config.exact(TopR(3))):
        stream = eventful.Stream(eventful.convert(model, config))
        flushed = []
        for frame in clip:
            got = stream(frame)
            flushed.append(stream.last.flushed[0])
            if flushed[-1]:
                fresh = eventful.Stream(stream.model)(frame)
                assert_near(got, fresh)
        assert [t for t, flush in enumerate(flushed) if flush] == [0, 12]


def test_a_lasting_change_of_pace_is_no_endless_cut():
    """A camera that starts to pan raises the level; after a few frames flushing stops."""
    model = random_trunk((4, 5))
    make = torch.Generator().manual_seed(0)
    still = torch.randn(1, 20, 16, generator=make)
    clip = [still + 0.01 * torch.randn(1, 20, 16, generator=make) for _ in range(10)]
    clip += [torch.randn(1, 20, 16, generator=make) for _ in range(30)]
    stream = eventful.Stream(eventful.convert(model, Config.fast(TopR(3))))
    flushed = []
    for frame in clip:
        stream(frame)
        flushed.append(stream.last.flushed[0])
    assert flushed[10]
    assert sum(flushed[10:]) < 8
    assert not any(flushed[-15:])


def test_published_presets_do_nothing_by_themselves():
    for preset in ("paper", "tokenwise", "stgt"):
        config = Config.preset(preset)
        assert (config.scene_cut, config.max_age, config.protect) == (None, None, False)
        assert (config.overlap, config.windows, config.gating) == ("twice", "all", "operator")


class TestNoiseThreshold:
    def noisy(self, level, frames=12, count=400):
        make = torch.Generator().manual_seed(3)
        base = torch.randn(1, count, 16, generator=make)
        return [base + level * torch.randn(1, count, 16, generator=make) for _ in range(frames)]

    @pytest.mark.parametrize("level", [1e-3, 1e-2, 1e-1])
    def test_calibrates_itself_to_the_sensor(self, level):
        """Noise alone selects next to nothing, an object everything it covers, at any level."""
        model = random_trunk((20, 20), depth=1)
        clip = self.noisy(level)
        moved = clip[-1].clone()
        moved[:, 150:180] += 20 * level * torch.randn(1, 30, 16)
        _, masks = masks_of(Config(NoiseThreshold(), gating="frame"), [*clip, moved], model)
        assert masks[0, 1:-1].float().mean() < 0.01
        assert masks[0, -1, 150:180].all()
        assert masks[0, -1].sum() < 40

    def test_the_ceiling_holds(self):
        model = random_trunk((20, 20), depth=1)
        clip = [*self.noisy(1e-3, 4), torch.randn(1, 400, 16)]
        config = Config(NoiseThreshold(max_fraction=0.1), gating="frame")
        _, masks = masks_of(config, clip, model)
        assert int(masks[0, -1].sum()) == 40

    def test_motion_of_most_tokens_is_not_soon_taken_for_noise(self):
        """A pan after a rest: the ceiling is used for a hundred frames, not a handful."""
        model = random_trunk((20, 20), depth=1)
        make = torch.Generator().manual_seed(5)
        pan = [torch.randn(1, 400, 16, generator=make) for _ in range(60)]
        config = Config(NoiseThreshold(max_fraction=0.5), gating="frame")
        _, masks = masks_of(config, [*self.noisy(1e-2), *pan], model)
        assert (masks[0, -60:].float().mean(-1) > 0.45).all()

    def test_a_still_video_selects_nothing(self):
        clip = [torch.ones(1, 20, 16)] * 4
        _, masks = masks_of(Config(NoiseThreshold(), gating="frame"), clip)
        assert not masks[:, 1:].any()

    def test_can_be_assigned_in_mid_stream(self):
        model = random_trunk((4, 5))
        stream = eventful.Stream(eventful.convert(model, Config.exact(TopR(3))))
        for t, frame in enumerate(drifting_tokens(6, 2, 20, 16, share=0.2)):
            if t == 3:
                stream.policy = NoiseThreshold()
            stream(frame)
        assert any(name.endswith("@2/level") for name in stream._state.names())


def test_a_policy_of_ones_own_sees_its_context_and_keeps_memory():
    seen = []

    @dataclass(frozen=True)
    class EveryOther:
        """Selects at every second frame, counted in its memory."""

        order: float = 1.0

        def select(self, error, context):
            seen.append((context.gate, context.kind, context.block, context.frame.tolist()))
            turn = context.memory.get("turn", torch.zeros(error.shape[0]))
            context.memory["turn"] = turn + 1
            return Selection.from_mask((turn % 2 == 1)[:, None].expand_as(error))

    model = random_trunk((4, 5))
    _, masks = masks_of(
        Config(EveryOther(), gating="block"), drifting_tokens(5, 2, 20, 16, share=0.5), model
    )
    assert masks[0].all(-1).tolist() == [True, False, True, False, True]
    assert seen[:2] == [
        ("blocks.0.block", "block", 0, [1, 1]),
        ("blocks.1.block", "block", 1, [1, 1]),
    ]
    assert seen[-1][-1] == [4, 4]


def test_threshold_per_gate():
    policy = Threshold({"blocks.1.mlp": 1e9, "mlp": 0.0, "default": 1e9})
    model = random_trunk((4, 5))
    stream = eventful.Stream(eventful.convert(model, Config.paper(policy)))
    for frame in drifting_tokens(3, 1, 20, 16, share=1.0):
        stream(frame)
    updated = stream.last.updated
    assert updated["blocks.0.mlp"] > 0
    assert updated["blocks.1.mlp"] == updated["blocks.0.qkv"] == 0


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_the_order_of_the_norm_decides(order):
    model = random_trunk((1, 3), depth=1)
    frame = torch.zeros(1, 3, 16)
    moved = frame.clone()
    moved[0, 0, :] = 1.0  # L1 16, L2 4, max 1
    moved[0, 1, :4] = 3.0  # L1 12, L2 6, max 3
    moved[0, 2, 0] = 5.0  # L1 5, L2 5, max 5
    _, masks = masks_of(Config(TopR(1, order=order), gating="frame"), [frame, moved], model)
    assert masks[0, 1].nonzero().item() == {1.0: 0, 2.0: 1, float("inf"): 2}[order]


def test_previous_reference_forgets_slow_changes():
    """The loss that the paper's reference mends: many small steps, each below the threshold."""
    model = random_trunk((4, 5), depth=1)
    clip = [torch.full((1, 20, 16), 0.01) * t + torch.arange(16) * 0.02 * t for t in range(30)]
    chosen = {}
    for reference in ("update", "previous"):
        config = Config(Threshold(1.0), gating="frame", reference=reference)
        _, masks = masks_of(config, clip, model)
        chosen[reference] = int(masks[:, 1:].sum())
    assert chosen["update"] > 0
    assert chosen["previous"] == 0


class TestRecords:
    @pytest.mark.real_clock
    def test_numbers(self):
        model = random_trunk((4, 5))
        stream = eventful.Stream(eventful.convert(model, Config.paper(TopR(5))))
        clip = drifting_tokens(2, 3, 20, 16, share=0.5)
        stream(clip[0])
        assert stream.last.flushed == [True] * 3
        assert stream.last.macs == stream.last.dense_macs
        stream(clip[1])
        record = stream.last
        assert record.flushed == [False] * 3
        assert set(record.updated) == {
            f"blocks.{b}.{g}" for b in (0, 1) for g in ("qkv", "projection", "mlp")
        }
        assert set(record.updated.values()) == {5.0}
        assert record.fraction == pytest.approx(0.25)
        assert 0 < record.macs < record.dense_macs
        assert record.ms > 0
        assert record.mask is None
        assert record.error is None

    def test_maps_on_request(self):
        stream, _ = masks_of(
            Config(TopR(3), gating="frame"), drifting_tokens(3, 2, 20, 16, share=0.5)
        )
        record = stream.last
        assert record.mask.shape == record.error.shape == (2, 20)
        inside = record.error.masked_fill(~record.mask, float("inf")).min(1).values
        outside = record.error.masked_fill(record.mask, -1.0).max(1).values
        assert (inside >= outside).all()

    @pytest.mark.parametrize("name", ["vit", "sam", "eva02", "vit_registers"])
    def test_memory_is_what_inspect_foretold(self, name):
        entry = zoo_timm.ZOO[name]
        for dtype in (torch.float32, torch.bfloat16):
            model = entry.make().to(dtype)
            foretold = eventful.inspect(model, entry.size).state_bytes
            for preset in PRESETS:
                policy = None if preset in ("fast", "exact") else TopR(4)
                stream = eventful.Stream(eventful.convert(model, Config.preset(preset, policy)))
                for frame in moving_square(3, entry.size):
                    stream(frame.to(dtype))
                assert stream.nbytes == pytest.approx(foretold[preset], rel=0.1), preset

    def test_vit_b_at_1024_px_in_bf16_fits_in_205_mb(self):
        timm = eventful_load("timm")
        with torch.device("meta"):
            model = timm.create_model("vit_base_patch16_224").to(torch.bfloat16)
        report = eventful.inspect(model, 1024)
        assert report.state_bytes["fast"] <= 205e6
        assert report.matched == 12

    def test_flush_and_reset(self):
        model = random_trunk((4, 5))
        clip = drifting_tokens(6, 1, 20, 16, share=0.5)
        stream = eventful.Stream(eventful.convert(model, Config.fast(TopR(2))))
        for frame in clip[:3]:
            stream(frame)
        stream.flush()
        assert torch.equal(stream(clip[3]), eventful.Stream(stream.model)(clip[3]))
        stream.reset()
        assert stream.nbytes == 0
        assert torch.equal(
            stream(clip[4].repeat(2, 1, 1))[:1], eventful.Stream(stream.model)(clip[4])
        )


def eventful_load(name):
    from eventful.surgery import libraries

    return libraries.load(name)


class TestWrittenDown:
    @pytest.mark.parametrize("preset", PRESETS)
    def test_configs_survive_toml_and_dicts(self, preset):
        policies = [
            None,
            TopR(5),
            TopFraction(0.2),
            Threshold({"qkv": 1.0, "default": 2.0}),
            NoiseThreshold(3),
            Always(),
        ]
        for policy in policies:
            config = Config.preset(preset, policy, pool=2, scene_cut=SceneCut(0.5))
            assert Config.from_dict(config.to_dict()) == config
            assert Config.from_toml(config.to_toml()) == config

    def test_writing_toml_without_its_library_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tomli_w", None)
        with pytest.raises(eventful.errors.MissingDependencyError, match=r"\[cli\]"):
            Config.paper(TopR(5)).to_toml()

    def test_a_preset_can_be_named_in_toml(self):
        text = 'preset = "paper"\npool = 2\n[policy]\npolicy = "TopR"\nr = 8\n'
        assert Config.from_toml(text) == Config.paper(TopR(8), pool=2)

    @pytest.mark.parametrize(
        "text",
        [
            'gating = "token"',
            "colour = 3",
            'preset = "faster"',
            "gating = ",
            '[policy]\npolicy = "Best"',
            '[policy]\npolicy = "TopR"\nspeed = 1',
        ],
    )
    def test_nonsense_is_refused(self, text):
        with pytest.raises(eventful.EventfulError):
            Config.from_toml(text)

    def test_a_registered_policy_survives(self):
        @eventful.register_policy
        @dataclass(frozen=True)
        class Mine:
            share: float = 0.1
            order: float = 2.0

            def select(self, error, context):
                return Selection.top(error, int(self.share * error.shape[1]))

        assert policy_from_dict(policy_to_dict(Mine(0.3))) == Mine(0.3)
