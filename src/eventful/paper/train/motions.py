"""Training on clips of motions: each is rendered once, kept, and shown in many places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.models.vivit import ViViT, steps, views
from eventful.paper.train.world import CELL, Recorded, Scenes, Sight, TokenTask, surfaces_for
from eventful.video.world import ACTIONS, Shot, boxes_of, render
from eventful.video.world.actions import SECONDS, cast_for
from eventful.video.world.chance import choice

_CAMERAS = 3  # the first so many of `CAMERAS`
_DETAIL = 64  # pixels of a figure's picture
_BLOCK = 32  # clips that are rendered together
_SHIFT = 4  # cells that a clip may be shifted by, each way
_LEFT, _RIGHT = ACTIONS.index("go left"), ACTIONS.index("go right")


@torch.no_grad()
def motion_clips(seeds: Tensor, frames: int, side: int, banked: bool = True) -> tuple[Shot, Tensor]:
    """The frames of one clip of each scene, one clip after the other, and the labels (B,)."""
    labels = (seeds % len(ACTIONS)).long()
    modes = choice(_CAMERAS, seeds, 403)
    moment = torch.arange(frames, device=seeds.device) * (SECONDS / frames)

    def each(values: Tensor) -> Tensor:
        return values.repeat_interleave(frames)

    shot = render(
        each(seeds), each(modes), moment.repeat(len(seeds)), (side, side), cast_for(each(labels)),
        surfaces=surfaces_for(seeds, frames, banked), exposures=1, detail=_DETAIL,
    )  # fmt: skip
    return shot, labels


@dataclass(frozen=True)
class Clips:
    """B clips and what is asked about them, small enough to keep thousands on a GPU.

    Attributes:
        pixels: (B, 3, T, H, W), bytes.
        labels: (B,)
        owner: (B, S, h, w) of the first frames of tubelets, as in `Sight`, bytes with a sign.
        kinds, boxes, seen: as in `Sight`, with S frames a clip; boxes in half precision.
    """

    pixels: Tensor
    labels: Tensor
    owner: Tensor
    kinds: Tensor
    boxes: Tensor
    seen: Tensor

    @classmethod
    def of(cls, shot: Shot, labels: Tensor, tubelet: int) -> Clips:
        """Those of a shot."""
        first = shot.every(tubelet)
        sight = Sight.of(first, boxes_of(first))
        owner, kinds, boxes, seen = (
            part.unflatten(0, (len(labels), -1))
            for part in (sight.owner.to(torch.int8), sight.kinds, sight.boxes.half(), sight.seen)
        )
        pixels = (clips_of(shot, len(labels)) * 255).round().to(torch.uint8)
        return cls(pixels, labels, owner, kinds, boxes, seen)

    @property
    def sight(self) -> Sight:
        """What is where, tubelet by tubelet."""
        parts = (self.owner, self.kinds, self.boxes.float(), self.seen)
        return Sight(*(part.flatten(0, 1) for part in parts))

    def moved(self, shift: Tensor, mirrored: Tensor) -> Clips:
        """Each clip shifted by whole cells, (B, 2) down and right, and some of them mirrored.

        At the borders pixels are repeated, with nobody in them.
        """
        height, width = self.pixels.shape[3:]
        away, across = shift[:, 0], shift[:, 1]
        rows, columns = _places(height, away * CELL), _places(width, across * CELL)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        batch = torch.arange(len(shift), device=shift.device)[:, None, None]
        y, x = (part.clamp(0, part.shape[1] - 1) for part in (rows, columns))
        pixels = self.pixels[batch, :, :, y[:, :, None], x[:, None, :]].permute(0, 3, 4, 1, 2)
        cells = (rows[:, ::CELL] // CELL, columns[:, ::CELL] // CELL)
        down, right = (part.clamp(0, part.shape[1] - 1) for part in cells)
        owner = self.owner[batch, :, down[:, :, None], right[:, None, :]].permute(0, 3, 1, 2)
        inside = [(part >= 0) & (part < part.shape[1]) for part in cells]
        held = (inside[0][:, :, None] & inside[1][:, None, :])[:, None]
        boxes = self.boxes + CELL * torch.stack([across, away] * 2, dim=1)[:, None, None].half()
        x1, y1, x2, y2 = boxes.unbind(-1)
        turned = mirrored[:, None, None]
        x1, x2 = torch.where(turned, width - x2, x1), torch.where(turned, width - x1, x2)
        boxes = torch.stack([x1.clamp(0, width), y1.clamp(0, height), x2.clamp(0, width),
                             y2.clamp(0, height)], dim=-1)  # fmt: skip
        sides = boxes[..., 2:] - boxes[..., :2]
        other = torch.where(self.labels == _LEFT, _RIGHT, self.labels)
        other = torch.where(self.labels == _RIGHT, _LEFT, other)
        return replace(
            self, pixels=pixels, labels=torch.where(mirrored, other, self.labels), boxes=boxes,
            owner=torch.where(held, owner, -1), seen=self.seen & (sides > 0).all(dim=-1),
        )  # fmt: skip


def _places(length: int, shift: Tensor) -> Tensor:
    """Where (B, length) each place of a shifted line comes from; it may lie outside."""
    return torch.arange(length, device=shift.device)[None] - shift[:, None]


class Pool:
    """Clips of a range of scenes, rendered when they are first asked for.

    To render a clip takes seven times as long as to learn from it.

    Args:
        make: clips of seeds (B,); called with blocks of neighbours, so that a clip does not
            depend on the others of a step.
    """

    def __init__(self, make: Callable[[Tensor], Clips], scenes: range) -> None:
        self.make, self.scenes = make, scenes
        self._clips: Clips | None = None

    def __call__(self, seeds: Tensor) -> Clips:
        """The clips of some seeds of the range."""
        if self._clips is None:
            self._clips = self._all(seeds.device)
        place = seeds.long() - self.scenes.start
        return Clips(**{name: part[place] for name, part in vars(self._clips).items()})

    def _all(self, device: torch.device) -> Clips:
        kept: dict[str, Tensor] = {}
        for first in range(0, len(self.scenes), _BLOCK):
            some = list(self.scenes[first : first + _BLOCK])
            rest = _BLOCK - len(some) if device.type == "cuda" else 0
            whole = some + some[-1:] * rest  # one size, so that it is recorded once
            made = self.make(torch.tensor(whole, dtype=torch.int32, device=device))
            for name, part in vars(made).items():
                if name not in kept:
                    kept[name] = part.new_empty(len(self.scenes), *part.shape[1:])
                kept[name][first : first + len(some)] = part[: len(some)]
        return Clips(**kept)


class MotionObjective(nn.Module):
    """ViViT on clips of motions, whole: spatial and temporal model together.

    The spatial model's tokens are also asked what is in their patches, and its vectors where those
    who act are: in 1357 steps by the motion's name and these places alone it learned nothing. The
    layers for that are not part of the model.
    """

    def __init__(self, model: ViViT, dropout: float) -> None:
        super().__init__()
        self.model, self._shots = model, Recorded(motion_clips)
        self.clips: Callable[[Tensor], Clips] = self._rendered
        self.tokens = TokenTask(model.config.dim, model.config.patch)
        self.where = nn.Linear(model.config.dim, 8)
        self.around = nn.Linear(model.config.dim, 4)
        model.dropout.p = dropout

    def keep(self, scenes: range) -> None:
        """Train on these scenes, each rendered once."""
        self.clips = Pool(self._rendered, scenes)

    def _rendered(self, seeds: Tensor) -> Clips:
        config = self.model.config
        with torch.no_grad(), torch.autocast(seeds.device.type, enabled=False):
            shot, labels = self._shots(seeds, config.frames, config.size)
            return Clips.of(shot, labels, config.tubelet)

    def forward(self, scenes: Scenes) -> dict[str, Tensor]:
        """Losses of one step."""
        config, spatial = self.model.config, self.model.spatial
        device, count = scenes.seeds.device, len(scenes.seeds)
        shift = torch.randint(-_SHIFT, _SHIFT + 1, (count, 2), device=device)
        clips = self.clips(scenes.seeds).moved(shift, torch.rand(count, device=device) < 0.5)
        pixels, sight = normalised(clips.pixels / 255), clips.sight
        cut = torch.stack(steps(pixels, config.tubelet), dim=1).flatten(0, 1)
        tokens = spatial.forward_features(cut)
        vectors = spatial.norm(tokens[:, 0])
        logits = self.model.classify(vectors.unflatten(0, (count, -1)))
        side = config.size // config.patch
        image = tokens[:, 1:].transpose(1, 2).unflatten(2, (side, side))
        losses = self.tokens(image, sight)
        losses["token_place"] = self._places(tokens[:, 1:], sight)
        places, seen = sight.boxes[:, :2] / config.size, sight.seen[:, :2]
        off = (self.where(vectors).unflatten(-1, (2, 4)).float() - places).abs().mean(dim=-1)
        losses["place"] = 4 * (off * seen).sum() / seen.sum().clamp_min(1)
        losses["class"] = F.cross_entropy(logits.float(), clips.labels, label_smoothing=0.05)
        return losses

    def _places(self, tokens: Tensor, sight: Sight) -> Tensor:
        """How far tokens (B, N, D) on somebody are from telling where in the frame that one is.

        What they learn so is what the class token has to gather.
        """
        config = self.model.config
        cells = config.patch // CELL
        owner = sight.owner[:, cells // 2 :: cells, cells // 2 :: cells].flatten(1).long()
        held = owner >= 0
        goal = sight.boxes.gather(1, owner.clamp_min(0)[..., None].expand(-1, -1, 4))
        off = (self.around(tokens).float() - goal / config.size).abs().mean(dim=-1)
        return 4 * (off * held).sum() / held.sum().clamp_min(1)


def clips_of(shot: Shot, count: int) -> Tensor:
    """Frames of `count` clips as (count, 3, T, H, W)."""
    return shot.pixels.unflatten(0, (count, -1)).transpose(1, 2)


def normalised(clips: Tensor) -> Tensor:
    """Clips in [0, 1] as ViViT takes them."""
    return (clips - views.PIXEL_MEAN) / views.PIXEL_STD
