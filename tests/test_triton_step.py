"""Whole steps of the default with Triton's kernels, in its interpreter, against eager."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import eventful
from backends import INTERPRETED
from eventful.engine import plan
from eventful.tokens.packing import Packing

GRID = (2, 4)  # matching one token that moves takes the interpreter 0.3 s
SIZE = (16 * GRID[0], 16 * GRID[1])
FRAMES = 3


@pytest.fixture
def on_device(monkeypatch):
    """Steps run as on a GPU, and memory that nobody has written is NaN."""
    monkeypatch.setattr(plan, "DEVICES", {"cpu"})
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(before)


def frame_of(time: int) -> torch.Tensor:
    """(2, 3, H, W): a camera that pans, and one that stands still with a spot that moves."""
    draw = torch.Generator().manual_seed(0)
    scene = 3 * F.avg_pool2d(torch.randn(2, 3, 120, 120, generator=draw), 5, 1, 2)
    top, left = 20 + 2 * time, 30 + 3 * time
    pans = scene[0, :, top : top + SIZE[0], left : left + SIZE[1]]
    stands = scene[1, :, : SIZE[0], : SIZE[1]].clone()
    stands[:, 8:20, 6 * time : 6 * time + 12] = 2.0
    return torch.stack([pans, stands])


def steps(model: torch.nn.Module, frames: list[torch.Tensor], backend: str):
    """The outputs of two streams with different policies, and their counts and estimates."""
    policies = {"fixed": eventful.TopR(2), "free": eventful.FollowScene()}
    config = eventful.Config.fast(eventful.TopR(1), fallback=False)
    outputs, counts, estimates = [], [], []
    with eventful.use_backend(backend):
        streams = eventful.StreamBatch(eventful.convert(model, config), check="sync")
        for name, policy in (("first", eventful.TopR(1)), *policies.items()):
            streams.join(name, policy)
        streams.call("forward_features", torch.cat([frames[0][:1], frames[0]]))
        streams.leave("first")  # from now on rows of the batch are not those of the memory
        for frame in frames[1:]:
            outputs.append(streams.call("forward_features", frame))
            record = streams.last
            (gate,) = record.gates.values()
            counts.append(gate.counts.tolist())
            estimates.append(record.estimates.tolist())
    return torch.stack(outputs), counts, estimates


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_the_default_is_that_of_eager(on_device):
    transformers = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    model = transformers.VisionTransformer(
        img_size=SIZE, patch_size=16, embed_dim=64, depth=3, num_heads=2, num_classes=0
    ).eval()
    frames = [frame_of(t) for t in range(FRAMES)]
    found, expected = (steps(model, frames, backend) for backend in ("triton", "eager"))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert found[1] == expected[1]
    assert all(max(counts) < 9 for counts in expected[1])  # some of the tokens
    for mine, theirs in zip(found[2], expected[2], strict=True):
        assert min(theirs) > 0
        assert mine == pytest.approx(theirs, rel=1e-4, abs=2)


def packed_steps(model: torch.nn.Module, frames: list[torch.Tensor], backend: str):
    """The outputs of three streams of which one takes most of a pool, and their counts."""
    config = eventful.Config.fast(eventful.Shared(0.4, floor=0.1), fallback=False, motion=False)
    outputs, counts = [], []
    with eventful.use_backend(backend):
        streams = eventful.StreamBatch(eventful.convert(model, config), check="sync")
        for name in "abc":
            streams.join(name)
        for frame in frames:
            batch = torch.cat([frames[0][:1], frame[1:], frames[0][1:]])
            outputs.append(streams.call("forward_features", batch))
            (gate,) = streams.last.gates.values()
            counts.append(gate.counts.tolist())
    return torch.stack(outputs), counts


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_packed_rows_of_a_pool_are_those_of_eager(on_device, monkeypatch):
    """The attention kernel leaves the rest of its output as it is: NaN, here."""
    transformers = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    model = transformers.VisionTransformer(
        img_size=SIZE, patch_size=16, embed_dim=64, depth=3, num_heads=2, num_classes=0
    ).eval()
    packings, made = [], Packing.of
    monkeypatch.setattr(Packing, "of", lambda *args: packings.append(made(*args)) or packings[-1])
    frames = [frame_of(t) for t in range(FRAMES)]
    found, expected = (packed_steps(model, frames, backend) for backend in ("triton", "eager"))
    assert any(packing is not None for packing in packings)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert found[1] == expected[1]
    assert any(len(set(counts)) > 1 for counts in expected[1])
