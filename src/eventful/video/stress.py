"""Clips that are hard for a model that updates only what changed, made from a picture or a scene.

    for frame in StressClip("pan", frames=48, size=(252, 448)):
        ...  # uint8 RGB (3, H, W)

Each clip has one property that is known exactly. The same arguments give the same frames.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import ConfigError
from eventful.video.textures import dead_leaves, patch_of

MARGIN = 1.6  # side of the picture a moving camera looks at, in sides of the frame
KEY_EVERY = 25  # frames from one key frame to the next: a second
DIMMING = 50  # frames in which `exposure` reaches its darkest
DARKEST = 0.4
_BLOCK = 8  # of the quantised cosine transform


@dataclass(frozen=True)
class StressClip:
    """A generated clip.

    Args:
        name: one of `NAMES`.
        size: height and width of the frames.
        base: what it shows: one picture (3, h, w), or frames of a video (T, 3, h, w), uint8. Only
            `repeat`, `keyframes` and `cut` use more than the first frame. None for a generated
            scene.
    """

    name: str
    frames: int = 100
    size: tuple[int, int] = (252, 448)
    base: Tensor | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in _CLIPS:
            close = difflib.get_close_matches(self.name, NAMES, 1)
            advice = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(NAMES)}."
            raise ConfigError(f"There is no stress clip {self.name!r}. {advice}")
        if self.frames < 1 or min(self.size) < _BLOCK:
            raise ConfigError(
                f"A stress clip has at least one frame of {_BLOCK} x {_BLOCK} pixels; got "
                f"{self.frames} of {self.size}."
            )

    @property
    def about(self) -> str:
        """What happens in it, in one line."""
        return _CLIPS[self.name][0]

    def __len__(self) -> int:
        return self.frames

    def __iter__(self) -> Iterator[Tensor]:
        """Every frame in turn, uint8 RGB (3, H, W)."""
        for frame in _CLIPS[self.name][1](_Scene(self)):
            yield (frame * 255).round().clamp(0, 255).to(torch.uint8)


class _Scene:
    """The picture a clip is made of, and its random numbers."""

    def __init__(self, clip: StressClip) -> None:
        self.frames, self.size, self.seed = clip.frames, clip.size, clip.seed
        self.make = torch.Generator().manual_seed(clip.seed)
        self._base = clip.base if clip.base is None or clip.base.dim() == 4 else clip.base[None]

    def picture(self, scale: float = 1.0, frame: int = 0) -> Tensor:
        """A frame of the base (3, H, W) in [0, 1], `scale` times as large as those of the clip."""
        size = round(self.size[0] * scale), round(self.size[1] * scale)
        if self._base is None:
            return dead_leaves(size, torch.Generator().manual_seed(self.seed + 1000 * frame))
        return _cover(self._base[frame % len(self._base)].float() / 255, size)

    def moving(self) -> Iterator[Tensor]:
        """The frames of the base; without a video, an object that crosses its picture."""
        if self._base is not None and len(self._base) > 1:
            for t in range(self.frames):
                yield self.picture(frame=min(t, len(self._base) - 1))
            return
        still, (skin, mask) = self.picture(), patch_of(self._object_size(), self.make)
        speed = max(1, round(0.008 * self.size[1]))
        for t in range(self.frames):
            x = (round(0.1 * self.size[1]) + speed * t) % self.size[1]
            yield _paste(still, skin, mask, round(0.45 * self.size[0]), x)

    def _object_size(self) -> tuple[int, int]:
        return max(4, round(0.3 * self.size[0])), max(4, round(0.12 * self.size[1]))

    def noise(self, deviation: float) -> Tensor:
        """Sensor noise of a frame."""
        return deviation * torch.randn(3, *self.size, generator=self.make)


def _still(scene: _Scene) -> Iterator[Tensor]:
    picture = scene.picture()
    for _ in range(scene.frames):
        yield picture


def _noise(scene: _Scene) -> Iterator[Tensor]:
    picture = scene.picture()
    for _ in range(scene.frames):
        yield picture + scene.noise(2.5 / 255)


def _repeat(scene: _Scene) -> Iterator[Tensor]:
    for t, frame in zip(range((scene.frames + 1) // 2), scene.moving(), strict=False):
        yield frame
        if 2 * t + 1 < scene.frames:
            yield frame


def _pan(scene: _Scene) -> Iterator[Tensor]:
    wide, room = scene.picture(MARGIN), (MARGIN - 1) / 2
    for t in range(scene.frames):
        yield _view(wide, scene.size, across=_bounce(0.008 * t, room), down=0.0)


def _walk(scene: _Scene) -> Iterator[Tensor]:
    wide, room = scene.picture(MARGIN), (MARGIN - 1) / 4
    for t in range(scene.frames):
        step = 2 * math.pi * t / 14
        yield _view(
            wide,
            scene.size,
            across=_bounce(0.004 * t, room) + 0.004 * math.sin(step / 2),
            down=0.010 * math.sin(step),
            zoom=1 + 0.1 * (1 - math.cos(2 * math.pi * t / 160)),
            turn=math.radians(0.7) * math.sin(step / 2 + 0.5),
        )


def _exposure(scene: _Scene) -> Iterator[Tensor]:
    picture = scene.picture()
    for t in range(scene.frames):
        yield picture * (1 - (1 - DARKEST) * min(t / DIMMING, 1.0))


def _lights_off(scene: _Scene) -> Iterator[Tensor]:
    picture = scene.picture()
    for t in range(scene.frames):
        yield picture * (1.0 if t < scene.frames // 2 else 0.25) + scene.noise(1.0 / 255)


def _cut(scene: _Scene) -> Iterator[Tensor]:
    before, after = scene.picture(), scene.picture(frame=-1)
    if torch.equal(before, after):  # a single picture: the other side of it
        after = before.flip(-1)
    for t in range(scene.frames):
        yield (before if t < scene.frames // 2 else after) + scene.noise(1.0 / 255)


def cursor_box(t: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Top, left, bottom and right of the cursor of clip `cursor` in frame t."""
    side = max(4, min(size) // 20)
    top = round((size[0] - side) * (0.5 + 0.3 * math.sin(0.11 * t)))
    left = round((size[1] - side) * (0.5 + 0.35 * math.cos(0.07 * t)))
    return top, left, top + side, left + side


def _cursor(scene: _Scene) -> Iterator[Tensor]:
    picture = scene.picture()
    for t in range(scene.frames):
        top, left, bottom, right = cursor_box(t, scene.size)
        frame = picture.clone()
        frame[:, top:bottom, left:right] = 1.0
        frame[:, top + 1 : bottom - 1, left + 1 : right - 1] = 0.0
        yield frame


def _flicker(scene: _Scene) -> Iterator[Tensor]:
    picture = scene.picture()
    for t in range(scene.frames):
        gain = 1 + 0.06 * math.sin(2 * math.pi * t / 5.3)
        yield picture * gain + scene.noise(1.5 / 255)


def _enter(scene: _Scene) -> Iterator[Tensor]:
    picture = scene.picture()
    skin, mask = patch_of(
        (max(4, round(0.5 * scene.size[0])), max(4, round(0.2 * scene.size[1]))), scene.make
    )
    begin = min(8, scene.frames // 3)
    for t in range(scene.frames):
        x = round(scene.size[1] * 0.012 * (t - begin)) - skin.shape[2]
        yield _paste(picture, skin, mask, round(0.3 * scene.size[0]), x)


def _keyframes(scene: _Scene) -> Iterator[Tensor]:
    """A small codec: key frames are quantised anew, the others code what differs from the last."""
    last: Tensor | None = None
    for t, frame in zip(range(scene.frames), scene.moving(), strict=False):
        if last is None or t % KEY_EVERY == 0:
            step = 0.10 + 0.05 * float(torch.rand((), generator=scene.make))
            offset = float(torch.rand((), generator=scene.make))
            last = _quantised(frame, step, offset)
        else:
            last = last + _quantised(frame - last, 0.2, 0.0)
        yield last.clamp(0, 1)


def _quantised(picture: Tensor, step: float, offset: float) -> Tensor:
    """A picture (3, H, W) with the cosine transform of its 8x8 blocks rounded to steps.

    Coarser steps for higher frequencies. Whatever is below a step goes to zero, so blocks that
    hardly changed stay as they were.
    """
    height, width = picture.shape[-2:]
    padded = F.pad(picture[None], (0, -width % _BLOCK, 0, -height % _BLOCK), mode="replicate")[0]
    k = torch.arange(_BLOCK, dtype=torch.float32)
    basis = torch.cos(math.pi / _BLOCK * (k[None, :] + 0.5) * k[:, None]) * (2 / _BLOCK) ** 0.5
    basis[0] /= 2**0.5
    blocks = padded.unflatten(1, (-1, _BLOCK)).unflatten(3, (-1, _BLOCK))  # (3, h, 8, w, 8)
    waves = torch.einsum("ik,chkwl,jl->chiwj", basis, blocks, basis)
    steps = step * (1 + 0.5 * (k[:, None] + k[None, :]))[:, None, :]
    level = waves / steps
    rounded = (level.abs() - 0.3 + 0.3 * offset).round().clamp_min(0) * level.sign() * steps
    blocks = torch.einsum("ik,chiwj,jl->chkwl", basis, rounded, basis)
    return blocks.flatten(3, 4).flatten(1, 2)[:, :height, :width]


def _view(
    picture: Tensor,
    size: tuple[int, int],
    *,
    across: float,
    down: float,
    zoom: float = 1.0,
    turn: float = 0.0,
) -> Tensor:
    """What a camera sees of a picture: a part of this size.

    Args:
        across: of the middle, in widths of the frame; `down` in heights of it.
        turn: radians.
    """
    rows, columns = (torch.arange(side) - (side - 1) / 2 for side in size)
    y, x = rows[:, None] / zoom, columns[None, :] / zoom
    height, width = picture.shape[-2:]
    far = x * math.cos(turn) - y * math.sin(turn) + across * size[1]
    low = x * math.sin(turn) + y * math.cos(turn) + down * size[0]
    grid = torch.stack([far * 2 / width, low * 2 / height], dim=-1)
    seen = F.grid_sample(
        picture[None], grid[None], mode="bicubic", padding_mode="reflection", align_corners=False
    )
    return seen[0].clamp(0, 1)


def _paste(picture: Tensor, skin: Tensor, mask: Tensor, top: int, left: int) -> Tensor:
    """A picture with an object on it, as much of it as is inside."""
    frame = picture.clone()
    height, width = picture.shape[-2:]
    y0, y1 = max(top, 0), min(top + mask.shape[0], height)
    x0, x1 = max(left, 0), min(left + mask.shape[1], width)
    if y0 < y1 and x0 < x1:
        part = (..., slice(y0 - top, y1 - top), slice(x0 - left, x1 - left))
        under = frame[:, y0:y1, x0:x1]
        frame[:, y0:y1, x0:x1] = under * (1 - mask[part]) + skin[part] * mask[part]
    return frame


def _cover(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """A picture resized and cut, so that it fills this size without being distorted."""
    height, width = picture.shape[-2:]
    scale = max(size[0] / height, size[1] / width)
    large = max(size[0], round(height * scale)), max(size[1], round(width * scale))
    made = F.interpolate(picture[None], large, mode="bilinear", antialias=True)[0]
    top, left = (large[0] - size[0]) // 2, (large[1] - size[1]) // 2
    return made[:, top : top + size[0], left : left + size[1]].clamp(0, 1)


def _bounce(way: float, room: float) -> float:
    """A way at constant speed that turns round at -room and room."""
    folded = (way + room) % (4 * room)
    return folded - room if folded <= 2 * room else 3 * room - folded


_Maker = Callable[[_Scene], Iterator[Tensor]]
_CLIPS: dict[str, tuple[str, _Maker]] = {
    "still": ("a still picture, repeated exactly", _still),
    "noise": ("a still picture with sensor noise", _noise),
    "repeat": ("every frame is stored twice", _repeat),
    "pan": ("a camera that pans from the first frame on", _pan),
    "walk": ("a walking camera: it moves on, bobs, zooms and turns slightly", _walk),
    "exposure": (f"brightness drifts from 1 to {DARKEST} in {DIMMING} frames", _exposure),
    "lights-off": ("the lights go out half-way", _lights_off),
    "cut": ("a cut to another scene half-way", _cut),
    "cursor": ("a small cursor moves on a still screen, nothing else changes", _cursor),
    "flicker": ("brightness flickers periodically, with noise", _flicker),
    "keyframes": ("compression noise that changes every second, at key frames", _keyframes),
    "enter": ("an object enters a still scene", _enter),
}
NAMES: Sequence[str] = tuple(_CLIPS)
