"""Selection by context, on the host and on the device path."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import eventful
from eventful import Config, Context, SceneCut, Stream, StreamBatch, TopFraction, TopR, errors
from small import random_trunk

PATCH, GRID = 16, (6, 7)
SIZE = (PATCH * GRID[0], PATCH * GRID[1])
N = 1 + GRID[0] * GRID[1]


@pytest.fixture(params=["host", "resident"], autouse=True)
def path(request, monkeypatch):
    devices = {"cpu"} if request.param == "resident" else set()
    monkeypatch.setattr("eventful.engine.plan.DEVICES", devices)
    return request.param


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(2)
    model = VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=48, depth=6, num_heads=3, num_classes=0
    ).eval()
    for block in model.blocks:  # attention that tells tokens apart
        block.attn.qkv.weight.data[: 2 * 48] *= 4
    return model


def selecting(vit, policy, **options):
    plain = {"motion": False, "max_age": None, "scene_cut": None, "fallback": False}
    return eventful.convert(vit, Config.fast(policy, **{**plain, **options}))


def scene(changed: bool, seed: int = 0) -> Tensor:
    """A still scene; in it, perhaps, one patch that is new."""
    make = torch.Generator().manual_seed(seed)
    frame = torch.randn(1, 3, *SIZE, generator=make)
    if changed:
        frame[..., 2 * PATCH : 3 * PATCH, 3 * PATCH : 4 * PATCH] = 2 * torch.randn(
            3, PATCH, PATCH, generator=make
        )
    return frame


def test_tokens_count_as_changed_where_others_did(vit):
    found = {}
    for context in (Context(), None):
        stream = Stream(selecting(vit, TopR(1), context=context), maps=True)
        stream(scene(False))
        stream(scene(True))  # updates the patch and the class token
        stream(scene(True))
        found[context is not None] = stream.last.error[0, 1:]
    assert (found[False] == 0).all()
    assert (found[True] > 0).sum() == N - 2  # all but the patch that changed, and the class token


def test_the_context_of_an_updated_token_starts_anew(vit):
    stream = Stream(selecting(vit, TopR(4)), maps=True)
    stream(scene(False))
    for _ in range(2):
        stream(scene(True))
    updated = stream.last.mask[0]
    stream.policy = TopR(0)
    stream(scene(True))  # updates the class token alone
    scores = stream.last.error[0]
    others = scores[~updated][1:]
    assert scores[updated].max() < others.median()


def test_what_enters_a_still_scene_is_seen_by_others_within_three_frames(vit):
    """As many tokens each frame; with context they are spent on those that look at the change."""
    error = {}
    for context in (Context(), None):
        stream = Stream(selecting(vit, TopFraction(0.35), context=context))
        stream.call("forward_features", scene(False))
        for _ in range(4):  # the frame it enters, and three more
            output = stream.call("forward_features", scene(True))
        with torch.no_grad():
            dense = vit.forward_features(scene(True))
        error[context is not None] = float((output - dense).norm() / dense.norm())
    assert error[True] < 0.5 * error[False]


def test_all_tokens_are_dense(vit):
    stream = Stream(selecting(vit, TopR(N)))
    for changed in (False, True, True, False):
        output = stream.call("forward_features", scene(changed))
        with torch.no_grad():
            dense = vit.forward_features(scene(changed))
        torch.testing.assert_close(output, dense, rtol=1e-4, atol=1e-4)


def test_a_ragged_batch_equals_its_streams(vit):
    """Padded slots add nothing to the context."""
    policies = {"few": TopR(2), "many": TopR(17), "none": TopR(0)}
    model = selecting(vit, TopR(1))
    batch = StreamBatch(model, maps=True)
    alone = {}
    for name, policy in policies.items():
        batch.join(name, policy)
        alone[name] = Stream(model, policy, maps=True)
    for t in range(5):
        frames = [scene(t % 2 == 1, seed) for seed in range(3)]
        together = batch(torch.cat(frames))
        for row, (name, stream) in enumerate(alone.items()):
            single = stream(frames[row])
            torch.testing.assert_close(together[row : row + 1], single, rtol=1e-4, atol=1e-4)
            if t:
                scores = (batch.last.error[row], stream.last.error[0])
                torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-4)
            assert name in batch.streams


def test_a_dense_step_leaves_no_context(vit):
    stream = Stream(selecting(vit, TopR(1)), maps=True)
    stream(scene(False))
    stream(scene(True))
    stream.flush()
    stream(scene(True))
    stream(scene(True))
    assert (stream.last.error == 0).all()


def test_a_snapshot_keeps_the_context(vit):
    model = selecting(vit, TopR(2))
    stream = Stream(model)
    stream(scene(False))
    stream(scene(True))
    other = Stream.load(model, stream.snapshot(), maps=True)
    stream.maps = True
    for one in (stream, other):
        one(scene(True))
    torch.testing.assert_close(other.last.error, stream.last.error, rtol=1e-5, atol=1e-6)
    assert stream.last.error[0, 5:].max() > 0


def test_a_change_of_context_is_no_scene_cut(vit):
    """One patch changes; everything that looks at it has a large score, but no error."""
    options = {"context": Context(weight=50.0), "scene_cut": SceneCut()}
    stream = Stream(selecting(vit, TopR(1), **options), maps=True)
    for changed in (False, False, False, True, True, True):
        stream(scene(changed))
        assert stream.last.flushed == [stream.last.error is None]
    assert (stream.last.error[0] > stream.last.error[0].max() / 50).float().mean() > 0.7


def test_layers_follow_the_depth(vit):
    def followed(**options):
        model = selecting(vit, TopR(1), **options)
        return model.blocks[0].forward.spec.context

    assert followed() == ("blocks.1", "blocks.3", "blocks.5")
    assert followed(context=Context(layers=1)) == ("blocks.5",)
    assert followed(context=Context(layers=99)) == tuple(f"blocks.{i}" for i in range(6))
    assert followed(context=None) == ()


@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("relative", [False, True])
def test_windows_relative_position_and_pooling(relative, pool):
    """The score of a token is the change of its attention output, whatever the attention is.

    One context layer, the last block; the windowed blocks are left out.
    """
    grid = (6, 8)
    trunk = random_trunk(grid, depth=3, window=(3, 4), relative=relative, gain=2.0)
    options = {"context": Context(layers=1), "pool": pool, "protect": False}
    model = selecting(trunk, TopR(3), **options)
    assert model.blocks[0].forward.spec.context == ("blocks.2",)
    stream = Stream(model, maps=True)
    make = torch.Generator().manual_seed(5)
    first = torch.randn(1, grid[0] * grid[1], 16, generator=make)
    second = first.clone()
    second[:, [5, 20, 33]] += 3 * torch.randn(1, 3, 16, generator=make)
    stream(first)
    stream(second)
    stream(second)
    scores = stream.last.error[0]
    assert stream.last.updated == {"frame": 3.0}
    touched = [5, 20, 33]
    rest = [n for n in range(48) if n not in touched]
    assert (scores[rest] > 0).all()


def test_operations_of_the_context_are_counted(vit):
    counts = {}
    for context in (Context(layers=2), None):
        stream = Stream(selecting(vit, TopR(5), context=context))
        stream(scene(False))
        stream(scene(True))
        counts[context is not None] = stream.last.operations()[0]
    updated = 5 + 1  # and the class token
    assert counts[True].matmul - counts[False].matmul == 2 * 4 * N * updated * 48
    assert counts[True].gate - counts[False].gate == 2 * N * 48


def test_state_is_what_inspect_says(vit):
    for options in ({}, {"context": None}, {"motion": False}):
        stream = Stream(eventful.convert(vit, Config.fast(TopR(2), max_age=None, **options)))
        stream(scene(False))
        stream(scene(True))
        expected = eventful.cost.footprint.state_bytes(
            eventful.surgery.inspection.block_shapes(vit, SIZE, stream.config),
            stream.config,
            torch.float32,
        )
        assert abs(stream.nbytes - expected) <= 16  # a few numbers for each stream


@pytest.mark.parametrize(
    "wrong", [Context, {"weight": -1}, {"weight": 0}, {"layers": 0}, {"weight": True}]
)
def test_wrong_contexts_are_refused(wrong):
    with pytest.raises(errors.ConfigError, match=r"[cC]ontext"):
        Config.fast(context=Context(**wrong) if isinstance(wrong, dict) else wrong)


def test_context_needs_one_selection_per_frame():
    with pytest.raises(errors.ConfigError, match="gating='frame'"):
        Config(TopR(3), gating="block", context=Context())


def test_a_config_with_context_is_read_back():
    config = Config.fast(context=Context(weight=2.0, layers=4), motion=False)
    assert Config.from_dict(config.to_dict()) == config
    assert eval(repr(config), {"Config": Config, "Context": Context}) == config
