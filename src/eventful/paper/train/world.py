"""Training on the generated world: scenes are rendered on the device, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.models.vitdet import Placement, Target, ViTDet
from eventful.models.vitdet.frames import PIXEL_MEAN, PIXEL_STD
from eventful.video.world import CLASSES, RATE, Boxes, Shot, boxes_of, render
from eventful.video.world.chance import choice, uniform
from eventful.video.world.sprites import SIDE
from eventful.video.world.surfaces import Surfaces
from eventful.video.world.tracks import actors

FIRST_SEED = 1_000_000  # of scenes to train on; those below are for validation and tests
ASPECTS = (9 / 16, 9 / 16, 3 / 4, 1.0)  # heights of frames, as shares of their width
_STREET_CAMERAS = 5  # the first so many of `CAMERAS`
CELL = 4  # pixels of the cells that tokens are asked about
_BANK = 1024  # surfaces that scenes share
_DETAIL = 96  # pixels of a figure's picture
_LONG = 30.0  # seconds of a scene that frames are taken from


@dataclass(frozen=True)
class Scenes:
    """Seeds (B,) of the scenes of one step, and what they have in common."""

    seeds: Tensor
    aspect: float = 9 / 16
    exposures: int = 1

    def to(self, device: torch.device) -> Scenes:
        """The same on a device."""
        return replace(self, seeds=self.seeds.to(device, non_blocking=True))

    def pin_memory(self) -> Scenes:
        """With seeds that can be copied in the background; DataLoader calls this."""
        return replace(self, seeds=self.seeds.pin_memory())


class SceneSeeds:
    """Scenes to train on.

    Args:
        count: samples of an epoch.
        scenes: how many different ones there are; by default each sample is of another, in every
            epoch.
        first: scenes that were used before.
    """

    def __init__(self, count: int, scenes: int | None = None, first: int = 0) -> None:
        self.count, self.scenes, self.first, self.epoch = count, scenes, first, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        number = self.epoch * self.count + index
        return FIRST_SEED + self.first + (number % self.scenes if self.scenes else number)


def collate(seeds: Sequence[int]) -> Scenes:
    """The scenes of one step; all have frames of one shape."""
    first = seeds[0]
    return Scenes(
        torch.tensor(seeds, dtype=torch.int32),
        ASPECTS[first % len(ASPECTS)],
        3 if first // 8 % 4 == 0 else 1,
    )


class Recorded:
    """A function of seeds (B,) that is recorded as a CUDA graph where it can be.

    Rendering launches thousands of small kernels, which takes the host longer than the GPU. What
    a replay returns is overwritten by the next one of the same key.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self._made: dict[Any, tuple[Any, Tensor, Any]] = {}

    def __call__(self, seeds: Tensor, *key: Any) -> Any:
        """What `run` returns for these seeds."""
        if seeds.device.type != "cuda":
            return self.run(seeds, *key)
        known = (len(seeds), seeds.device, *key)
        if known not in self._made:
            self._made[known] = self._record(seeds, key)
        graph, place, made = self._made[known]
        place.copy_(seeds, non_blocking=True)
        graph.replay()
        return made

    def _record(self, seeds: Tensor, key: tuple[Any, ...]) -> tuple[Any, Tensor, Any]:
        place = seeds.clone()
        self.run(place, *key)  # makes what is made once
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on: one of the data loader pins memory.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = self.run(place, *key)
        return graph, place, made


@cache  # recorded work reads it, so it must stay
def _bank(device: torch.device) -> Surfaces:
    """Surfaces that scenes to train on share: to draw them anew takes as long as the rest."""
    seeds = torch.arange(_BANK, dtype=torch.int32, device=device) + FIRST_SEED
    parts = [Surfaces.make(some) for some in seeds.split(64)]
    return Surfaces(**{name: torch.cat([vars(p)[name] for p in parts]) for name in vars(parts[0])})


def surfaces_for(seeds: Tensor, frames: int, banked: bool) -> tuple[Surfaces, Tensor]:
    """Pictures, and whose of them each frame has: of a bank, or those of each scene alone."""
    if banked:
        pictures, which = _bank(seeds.device), choice(_BANK, seeds, 404).long()
    else:
        pictures, which = Surfaces.make(seeds), torch.arange(len(seeds), device=seeds.device)
    return pictures, which.repeat_interleave(frames)


@torch.no_grad()
def street_frames(
    seeds: Tensor, side: int, aspect: float, exposures: int, banked: bool = True, frames: int = 1
) -> Shot:
    """Frames of each scene, `side` pixels wide, those of a scene one after the other.

    Args:
        banked: surfaces are some of a bank; else each scene has its own.
        frames: of each scene; there are one, two or four frames of a video from each to the next.
    """

    def each(values: Tensor) -> Tensor:
        return values.repeat_interleave(frames)

    number = torch.arange(frames, device=seeds.device).repeat(len(seeds))
    gap = each(2 ** choice(3, seeds, 405)) / RATE
    seconds = each(uniform(seeds, 401, high=_LONG)) + number * gap
    modes = each(choice(_STREET_CAMERAS, seeds, 402))
    size = (max(16, round(side * aspect / 16) * 16), side)
    return render(
        each(seeds), modes, seconds, size, actors, surfaces=surfaces_for(seeds, frames, banked),
        exposures=exposures,
        detail=_DETAIL if banked else SIDE,
    )  # fmt: skip


def as_inputs(shot: Shot, found: Boxes, side: int) -> tuple[Tensor, list[Target], list[Placement]]:
    """A shot, and the boxes in it, as `ViTDet.losses` takes them."""
    height, width = shot.pixels.shape[2:]
    mean, std = (shot.pixels.new_tensor(v).view(1, 3, 1, 1) for v in (PIXEL_MEAN, PIXEL_STD))
    pixels = F.pad((shot.pixels * 255 - mean) / std, (0, side - width, 0, side - height))
    wanted, spared = found.seen & ~found.ignore, found.seen & found.ignore
    # A box without area is no object.
    boxes, ignored = (found.boxes * mask[..., None] for mask in (wanted, spared))
    targets = [Target(*parts) for parts in zip(boxes, found.labels, ignored, strict=True)]
    return pixels, targets, [Placement((height, width), (height, width))] * len(pixels)


@dataclass(frozen=True)
class Sight:
    """What is where in B frames, as tokens are asked about it.

    Attributes:
        owner: (B, h, w) whose each cell of 4 x 4 pixels is: a column of the others, or -1.
        kinds: (B, n) classes of everybody.
        boxes: (B, n, 4).
        seen: (B, n) whether anything is seen of them.
    """

    owner: Tensor
    kinds: Tensor
    boxes: Tensor
    seen: Tensor

    @classmethod
    def of(cls, shot: Shot, found: Boxes) -> Sight:
        """That of the frames of a shot."""
        half = CELL // 2
        owner = shot.owner[:, half::CELL, half::CELL]
        return cls(owner, shot.actors.kind.long(), found.boxes, found.seen)


class TokenTask(nn.Module):
    """Asks each token what is in its patch: the class of every cell, and how far its box reaches.

    A denser signal than boxes, from masks, that only the world has. The layer is not part of the
    detector.
    """

    def __init__(self, dim: int, patch: int) -> None:
        super().__init__()
        self.cells = (patch // CELL) ** 2
        self.norm = nn.LayerNorm(dim)
        self.classes = nn.Linear(dim, self.cells * (len(CLASSES) + 1))
        self.reach = nn.Linear(dim, self.cells * 4)

    def forward(self, features: Tensor, sight: Sight) -> dict[str, Tensor]:
        """Losses of features (B, D, h, w) that may reach beyond the frame."""
        owner, boxes = sight.owner.long(), sight.boxes
        height, width = owner.shape[1:]
        tokens = self.norm(features.permute(0, 2, 3, 1))
        logits = self._spread(self.classes(tokens))[:, :, :height, :width]
        reach = self._spread(self.reach(tokens))[:, :, :height, :width]
        held = owner >= 0
        kinds = sight.kinds.gather(1, owner.clamp_min(0).flatten(1)).view_as(owner)
        labels = torch.where(held, kinds, torch.full_like(kinds, len(CLASSES)))
        wrong = F.cross_entropy(logits.float(), labels, reduction="none")
        weight = torch.where(held, 1.0, 0.25)
        place = owner.clamp_min(0).flatten(1)[..., None].expand(-1, -1, 4)
        mine = boxes.gather(1, place).view(*owner.shape, 4).permute(0, 3, 1, 2)
        half = CELL // 2
        y = (torch.arange(height, device=owner.device) * CELL + half)[:, None]
        x = (torch.arange(width, device=owner.device) * CELL + half)[None, :]
        edges = torch.stack([x - mine[:, 0], y - mine[:, 1], mine[:, 2] - x, mine[:, 3] - y], dim=1)
        goal = edges.clamp_min(0).sqrt() / 4
        off = (reach.float() - goal).abs().mean(dim=1) * held
        return {
            "token_class": (wrong * weight).sum() / weight.sum(),
            "token_reach": off.sum() / held.sum().clamp_min(1),
        }

    def _spread(self, values: Tensor) -> Tensor:
        """(B, h, w, cells * C) as (B, C, h * n, w * n)."""
        side = int(self.cells**0.5)
        parts = values.unflatten(3, (-1, side, side))  # (B, h, w, C, n, n)
        return parts.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


class StreetObjective(nn.Module):
    """A detector's losses on frames of the world.

    Args:
        boxes: train the whole detector; else the backbone alone, by its tokens.
    """

    def __init__(self, model: ViTDet, *, boxes: bool) -> None:
        super().__init__()
        self.model, self.boxes, self.frames = model, boxes, Recorded(street_frames)
        config = model.config.backbone
        self.tokens = TokenTask(config.dim, config.patch)

    @property
    def partial(self) -> bool:
        """Whether some parameters have no gradient."""
        return not self.boxes

    def forward(self, scenes: Scenes) -> dict[str, Tensor]:
        """Losses of one step."""
        side = self.model.config.backbone.size
        with torch.autocast(scenes.seeds.device.type, enabled=False):
            shot = self.frames(scenes.seeds, side, scenes.aspect, scenes.exposures)
            found = boxes_of(shot)
            pixels, targets, placements = as_inputs(shot, found, side)
        features = self.model.backbone(pixels)
        losses = self.tokens(features, Sight.of(shot, found))
        if self.boxes:
            losses |= self.model.head_losses(features, targets, placements)
        return losses
