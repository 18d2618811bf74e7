"""The model: a frozen backbone, and a head trained on its features of a few views of a frame."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mot15.clips import Clip, fit, load_clips, scaled
from benchmarks.mot15.settings import BACKBONE, PATCH, Clock, Options, say
from eventful import files
from eventful.bench.results import origin
from eventful.models.anchor_free import PointHead, PointHeadConfig
from eventful.models.vitdet import Target
from eventful.paper.data import Box
from eventful.surgery import libraries

PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PROBE = 50  # steps after which the time per step is estimated


def build_backbone(weights: Path, device: torch.device) -> nn.Module:
    timm, safetensors = libraries.load("timm"), importlib.import_module("safetensors.torch")
    model = timm.create_model(BACKBONE, pretrained=False, num_classes=0, dynamic_img_size=True)
    state = {key: value.float() for key, value in safetensors.load_file(weights).items()}
    model.load_state_dict(state)  # strict: a file of another model ends here
    return model.eval().requires_grad_(False).to(device)


def normalised(frames: Tensor, device: torch.device) -> Tensor:
    mean, std = (
        torch.tensor(v, device=device).reshape(1, 3, 1, 1) for v in (PIXEL_MEAN, PIXEL_STD)
    )
    return (frames.to(device).float() / 255 - mean) / std


def as_map(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """Tokens (B, 1 + h*w, D) behind the last norm as a map (B, D, h, w)."""
    return tokens[:, 1:].transpose(1, 2).unflatten(2, (size[0] // PATCH, size[1] // PATCH))


@dataclass(frozen=True)
class Example:
    """The features of one view of one frame, and where people are in it."""

    features: Tensor
    target: Target


def view(
    frames: Tensor, boxes: list[Box], chance: random.Random, number: int
) -> tuple[Tensor, Any]:
    """The frame itself (0), mirrored (1), or a random part of it, enlarged (2 and up)."""
    height, width = frames.shape[-2:]
    kept = boxes
    if number >= 2:
        zoom = chance.uniform(0.45, 0.95)
        h, w = round(height * zoom), round(width * zoom)
        top, left = chance.randint(0, height - h), chance.randint(0, width - w)
        frames = fit(frames[..., top : top + h, left : left + w], (height, width))
        moved = [cut(b, left, top, w, h) for b in boxes]
        kept = scaled([b for b in moved if b is not None], width / w, height / h)
    if number == 1 or (number >= 2 and chance.random() < 0.5):
        frames = frames.flip(-1)
        kept = [replace(b, x1=width - b.x2, x2=width - b.x1) for b in kept]
    return frames, kept


def cut(box: Box, left: float, top: float, width: float, height: float) -> Box | None:
    """A box inside a part of the frame; to be ignored if less than half of it is left."""
    x1, x2 = (min(max(x - left, 0), width) for x in (box.x1, box.x2))
    y1, y2 = (min(max(y - top, 0), height) for y in (box.y1, box.y2))
    if x2 - x1 < 2 or y2 - y1 < 2:
        return None
    share = (x2 - x1) * (y2 - y1) / ((box.x2 - box.x1) * (box.y2 - box.y1))
    return replace(box, x1=x1, x2=x2, y1=y1, y2=y2, ignore=box.ignore or share < 0.5)


def corners(boxes: Sequence[Box], device: torch.device) -> Tensor:
    rows = [(b.x1, b.y1, b.x2, b.y2) for b in boxes]
    return torch.tensor(rows, dtype=torch.float32, device=device).reshape(-1, 4)


@torch.no_grad()
def examples(
    backbone: nn.Module, clips: Sequence[Clip], options: Options, device: torch.device
) -> Iterator[Example]:
    chance = random.Random(options.seed)
    for clip in clips:
        for frame, boxes in zip(clip.frames, clip.truth, strict=True):
            views = [view(frame[None].to(device), boxes, chance, k) for k in range(options.views)]
            pixels = normalised(torch.cat([pixels for pixels, _ in views]), device)
            maps = as_map(backbone.forward_features(pixels), clip.size).half()
            for features, (_, seen) in zip(maps, views, strict=True):
                people = corners([b for b in seen if not b.ignore], device)
                labels = torch.zeros(len(people), dtype=torch.int64, device=device)
                ignored = corners([b for b in seen if b.ignore], device)
                yield Example(features, Target(people, labels, ignored))


def train_head(
    head: PointHead, data: Sequence[Example], options: Options, clock: Clock
) -> list[dict[str, float]]:
    """Train on batches of examples of one size; a warm-up, then a cosine to zero.

    Takes at most half of the time: where all steps would take longer, there are fewer.
    """
    by_size: dict[tuple[int, ...], list[Example]] = {}
    for example in data:
        by_size.setdefault(tuple(example.features.shape), []).append(example)
    groups = list(by_size.values())
    chance = random.Random(options.seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.lr, weight_decay=0.05)
    head.train()
    log, steps, step, began = [], options.steps, 0, clock.spent
    while step < steps:
        optimizer.param_groups[0]["lr"] = options.lr * learning_rate(step, steps)
        (group,) = chance.choices(groups, [len(group) for group in groups])
        losses = train_step(head, optimizer, chance.choices(group, k=options.batch))
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            log.append({"step": step, **{name: value.item() for name, value in losses.items()}})
            say(clock, " ".join(f"{name} {value:.4g}" for name, value in log[-1].items()))
        step += 1
        if step == PROBE:
            each = (clock.spent - began) / PROBE
            steps = max(PROBE, min(steps, step + int((clock.seconds / 2 - clock.spent) / each)))
    head.eval()
    return log


def train_step(
    head: PointHead, optimizer: torch.optim.Optimizer, batch: Sequence[Example]
) -> dict[str, Tensor]:
    features = torch.stack([example.features for example in batch]).float()
    losses = head.losses(features, [example.target for example in batch])
    optimizer.zero_grad()
    (losses["score"] + 2 * losses["box"]).backward()
    nn.utils.clip_grad_norm_(head.parameters(), 5.0)
    optimizer.step()
    return {name: value.detach() for name, value in losses.items()}


def learning_rate(step: int, steps: int, warm: int = 50) -> float:
    """The share of the highest rate at a step."""
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def trained(
    backbone: nn.Module,
    options: Options,
    data: Path,
    folder: Path,
    clock: Clock,
    given: Path | None = None,
) -> tuple[PointHead, dict[str, Any]]:
    """The head of this run: a given file, or from its folder if it is there, else trained now."""
    device = next(backbone.parameters()).device
    torch.manual_seed(options.seed)
    head = PointHead(PointHeadConfig(patch=PATCH)).to(device)
    path = folder / "head.pt" if given is None else given
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        head.load_state_dict(saved["head"])
        return head.eval(), saved["about"]
    clips = load_clips(data, "train", options)
    say(clock, f"read {sum(len(c.truth) for c in clips)} training frames")
    views = list(examples(backbone, clips, options, device))
    say(clock, f"features of {len(views)} views")
    log = train_head(head, views, options, clock)
    about = {
        "sequences": {clip.name: len(clip.truth) for clip in clips},
        "parameters": sum(p.numel() for p in head.parameters()),
        "steps": int(log[-1]["step"]) + 1,
        "commit": origin(str(device))["commit"],
        "log": log,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as partial:
        torch.save({"head": head.state_dict(), "about": about}, partial)
    return head, about
