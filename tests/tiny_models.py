"""Tiny detectors and recognisers in files, as evaluation takes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from eventful.models.key_formats import KeyReport
from eventful.models.loading import Converted, save
from eventful.models.vitdet import Target, ViTDet
from eventful.models.vitdet.model import detector_config
from eventful.models.vivit import ViViT, ViViTConfig
from eventful.paper.data import open_dataset
from test_vitdet import stir


def detector(classes: int = 30, size: int = 64, seed: int = 0) -> ViTDet:
    """16 tokens, a windowed and a global block."""
    torch.manual_seed(seed)
    config = detector_config(
        classes,
        size,
        False,
        "linear",
        trained_size=64,
        dim=32,
        depth=2,
        heads=2,
        window=2,
        global_blocks=(1,),
        pretrained_grid=4,
    )
    heads = replace(config.heads, hidden=16, detections=10, samples=16, score_threshold=0.02)
    config = replace(config, channels=16, heads=heads, proposals=(24, 12), short_edge=64)
    model = ViTDet(config)
    stir(model.backbone)
    return model


def trained(model: ViTDet, data: Path, split: str, steps: int) -> ViTDet:
    """A detector that knows the objects of a miniature set."""
    frames = [frame for video in open_dataset(data, split) for frame in video][::2]
    batch, targets = [], []
    for frame in frames:
        pixels, place = model.prepare(frame.pixels)
        corners = torch.tensor([[b.x1, b.y1, b.x2, b.y2] for b in frame.boxes if not b.ignore])
        labels = torch.tensor([b.label for b in frame.boxes if not b.ignore])
        batch.append(pixels)
        targets.append(Target(place.into(corners), labels))
    optimiser = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.stack(list(model.losses(torch.cat(batch), targets).values())).sum().backward()
        optimiser.step()
    return model.eval()


def recogniser(classes: int = 97) -> ViViT:
    """Views of 8 frames at 32 px: 4 steps of 17 tokens."""
    torch.manual_seed(0)
    sizes = {"frames": 8, "patch": 8, "dim": 16, "depth": 2, "temporal_depth": 1, "heads": 2}
    model = ViViT(ViViTConfig(classes=classes, size=32, **sizes)).eval()
    stir(model)
    return model


def write(model: ViTDet | ViViT, path: Path) -> Path:
    kind = "vitdet" if isinstance(model, ViTDet) else "vivit"
    report = KeyReport("own", used={})
    save(Converted(kind, model.config.to_dict(), model.state_dict(), report), path)
    return path
