"""The estimated error of the outputs in streams, on the host and on the device path."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

import eventful
from eventful import Config, FollowScene, Stream, StreamBatch, TopR, errors

SIZE = (96, 112)
ALL = {"scene_cut": None, "fallback": False, "max_age": None}


@pytest.fixture(params=["host", "resident"], autouse=True)
def path(request, monkeypatch):
    devices = {"cpu"} if request.param == "resident" else set()
    monkeypatch.setattr("eventful.engine.plan.DEVICES", devices)
    return request.param


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=SIZE, patch_size=16, embed_dim=48, depth=3, num_heads=3, num_classes=0
    ).eval()


def frame_of(time: int, seed: int = 0) -> Tensor:
    """(1, 3, H, W) of a camera that moves across a smooth picture."""
    make = torch.Generator().manual_seed(seed)
    picture = 3 * F.avg_pool2d(torch.randn(3, 200, 200, generator=make), 5, 1, 2)
    top, left = 20 + 2 * time, 20 + 3 * time
    return picture[None, :, top : top + SIZE[0], left : left + SIZE[1]].contiguous()


def step(stream, frame: Tensor) -> list[float]:
    """The estimates of a step, in millionths; NaN where there are none."""
    stream.call("forward_features", frame)
    estimates = stream.last.estimates
    return [math.nan] * len(frame) if estimates is None else estimates.tolist()


def test_estimates_follow_the_errors_that_are_left_and_the_changes_of_outputs(vit):
    """The formula, from what the record and the outputs of the last block show."""
    outputs: list[Tensor] = []
    converted = eventful.convert(vit, Config.fast(TopR(9), motion=False, context=None, **ALL))
    converted.norm.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
    stream, moved = Stream(converted, maps=True), None
    for time in range(4):
        (estimate,) = step(stream, frame_of(time))
        if time == 0:
            continue
        (gate,) = stream.last.gates.values()
        tokens = (vit.patch_embed(frame_of(time)) + vit.pos_embed[:, 1:])[0].detach()
        contrast = float((tokens - tokens.mean(dim=0)).square().sum(dim=1).mean().sqrt())
        left = gate.error[0].masked_fill(gate.mask[0], 0) / contrast
        waiting = float(left.square().mean().sqrt())
        expected = 0.41 * waiting**0.05 * (waiting if moved is None else moved) ** 0.55
        assert estimate == pytest.approx(1e6 * expected, rel=1e-3)
        new, old = (F.layer_norm(x[0][gate.mask[0]], (48,)) for x in (outputs[-1], outputs[-2]))
        now = float((new - old).square().mean().sqrt())
        moved = now if moved is None else (now + moved) / 2


def test_a_batch_equals_its_streams(vit):
    """Also where the rows of the memory are not those of the batch."""
    policies = {"few": TopR(4), "some": TopR(9), "many": TopR(20)}
    model = eventful.convert(vit, Config.fast(TopR(1), **ALL))
    batch = StreamBatch(model)
    for name, policy in (("first", TopR(3)), *policies.items()):
        batch.join(name, policy)
    alone = [Stream(eventful.convert(vit, Config.fast(p, **ALL))) for p in policies.values()]
    for time in range(5):
        frames = [frame_of(time * seed, seed) for seed in range(len(policies))]
        if time == 0:
            found = step(batch, torch.cat([frame_of(0), *frames]))[1:]
            batch.leave("first")
        else:
            found = step(batch, torch.cat(frames))
        expected = [step(*pair)[0] for pair in zip(alone, frames, strict=True)]
        assert found == pytest.approx(expected, rel=1e-4, abs=2, nan_ok=True)


@pytest.mark.parametrize("fails", ["frame", "model"])
def test_a_frame_that_fails_leaves_the_estimates_as_they_were(vit, path, fails):
    """The one that fails inside the model does so after the change of outputs was measured."""
    if fails == "model" and path == "resident":
        pytest.skip("recomputes everything")
    estimates = []
    for broken in (False, True):
        model = eventful.convert(vit, Config.fast(TopR(9), **ALL))
        stream = Stream(model, check="sync")
        found = [step(stream, frame_of(time)) for time in range(3)]
        if broken and fails == "frame":
            with pytest.raises(errors.NonFiniteError):
                step(stream, frame_of(3, seed=1) + math.nan)
        elif broken:

            def fail(*args):
                raise RuntimeError("no")

            hook = model.norm.register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="no"):
                step(stream, frame_of(3, seed=1))
            hook.remove()
        estimates.append(found[1:] + [step(stream, frame_of(time)) for time in (3, 4)])
    assert estimates[0] == estimates[1]


@pytest.mark.parametrize("renewal", [0.1, None])
def test_a_stream_starts_over_once_its_error_has_lasted(vit, renewal):
    policy = FollowScene(renewal=renewal)
    stream = Stream(eventful.convert(vit, Config.fast(policy, **ALL)), check="sync")
    flushed = []
    for time in range(10):
        step(stream, frame_of(time))
        flushed += stream.last.flushed
    assert flushed[:2] == [True, False]
    assert any(flushed[1:]) == (renewal is not None)


def test_the_numbers_in_the_docs_are_those_of_the_stored_measurements():
    from benchmarks.estimate import quality

    found = quality()
    page = (Path(__file__).parent.parent / "docs" / "default.md").read_text()
    assert f"rank correlation with\nthe true error is {found['rank']:.2f}" in page
    assert f"{found['caught']:.0%} of the frames" in page.replace(" %", "%")
    assert f"and {found['false']:.0%} of" in page.replace(" %", "%")
    assert found["rank"] > 0.8
