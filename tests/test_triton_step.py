"""Whole steps of the default with Triton's kernels, in its interpreter, against eager."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import eventful
from backends import INTERPRETED
from eventful.engine import plan

GRID = (3, 4)  # matching one token takes the interpreter 0.1 s
FRAMES = 5


@pytest.fixture
def on_device(monkeypatch):
    """Steps run as on a GPU, and memory that nobody has written is NaN."""
    monkeypatch.setattr(plan, "DEVICES", {"cpu"})
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(before)


def steps(model: torch.nn.Module, frames: list[torch.Tensor], backend: str):
    """The outputs of two streams with different policies, and their counts and estimates."""
    policies = {"fixed": eventful.TopR(4), "free": eventful.FollowScene()}
    config = eventful.Config.fast(eventful.TopR(1), fallback=False)
    outputs, counts, estimates = [], [], []
    with eventful.use_backend(backend):
        streams = eventful.StreamBatch(eventful.convert(model, config), check="sync")
        for name, policy in policies.items():
            streams.join(name, policy)
        for frame in frames:
            outputs.append(streams.call("forward_features", frame))
            record = streams.last
            (gate,) = record.gates.values()
            counts.append(gate.counts.tolist())
            estimates.append(None if record.estimates is None else record.estimates.tolist())
    return torch.stack(outputs), counts, estimates


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_the_default_is_that_of_eager(on_device):
    transformers = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    size = (16 * GRID[0], 16 * GRID[1])
    model = transformers.VisionTransformer(
        img_size=size, patch_size=16, embed_dim=64, depth=3, num_heads=2, num_classes=0
    ).eval()
    scene = 3 * F.avg_pool2d(torch.randn(2, 3, 120, 120), 5, 1, 2)
    frames = [
        scene[
            ..., 20 + 2 * t : 20 + 2 * t + size[0], 30 + 3 * t : 30 + 3 * t + size[1]
        ].contiguous()
        for t in range(FRAMES)
    ]
    found, expected = (steps(model, frames, backend) for backend in ("triton", "eager"))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert found[1] == expected[1]
    assert expected[1][0] == [13, 13]  # every token of the first frame, then fewer
    assert all(max(counts) < 13 for counts in expected[1][1:])
    for mine, theirs in zip(found[2][1:], expected[2][1:], strict=True):
        assert min(theirs) > 0
        assert mine == pytest.approx(theirs, rel=1e-4, abs=2)
