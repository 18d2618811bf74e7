"""Models small enough to measure in a test, and a plan that measures one of them."""

from __future__ import annotations

import pytest
from torch import nn

from eventful.bench import cases
from eventful.bench.rows import Setting
from eventful.cli import bench
from eventful.surgery import libraries


def tiny_vit(size: int, depth: int) -> nn.Module:
    timm = libraries.load("timm")
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=size, depth=depth, num_classes=0, global_pool=""
    ).eval()


def tiny_windowed(size: int, depth: int) -> nn.Module:
    made = libraries.load("timm.models.vision_transformer_sam").VisionTransformerSAM(
        img_size=size, patch_size=16, embed_dim=48, depth=depth, num_heads=2, window_size=4,
        global_attn_indexes=(1,), use_rel_pos=True, num_classes=0,
    )  # fmt: skip
    for name, parameter in made.named_parameters():
        if "rel_pos" in name:
            nn.init.normal_(parameter, std=0.1)
    made.neck = made.head = nn.Identity()
    return made.eval()


@pytest.fixture
def small(monkeypatch):
    """Models small enough to measure in a test."""
    for name, make in {"small": tiny_vit, "windowed": tiny_windowed}.items():
        about = cases.Subject(make, 96, 5, "a test model", depth=2)
        monkeypatch.setitem(cases.SUBJECTS, name, about)
    return Setting("small", presets=("fast", "exact"), frames=5, compiled=False)


@pytest.fixture
def plan(small):
    return bench.Plan(models=("small",), presets=("fast",), frames=3, compiled=False)
