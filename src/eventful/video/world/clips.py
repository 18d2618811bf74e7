"""Videos of the world: frames with boxes, or clips of motions, by seed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eventful.errors import ConfigError
from eventful.video.world import actions, tracks
from eventful.video.world.camera import CAMERAS, RATE
from eventful.video.world.chance import choice
from eventful.video.world.rendering import Cast, Shot, render
from eventful.video.world.surfaces import Surfaces
from eventful.video.world.truth import Boxes, Truth, boxes_of, truth_of

SIZE = (288, 512)
_AT_ONCE = 4  # frames


@dataclass(frozen=True)
class World:
    """A video of the world; the same seed gives the same video.

    It is a source of frames as `eventful.paper.data` takes them, and iterating over it yields
    them.

    Args:
        camera: one of `CAMERAS`; None for one by seed.
        size: height and width in pixels.
        device: where frames are made; they are returned on the CPU.
        exposures: moments a frame is the mean of, which makes motion blur; odd.
        action: one of `ACTIONS`, for a clip of this motion, which takes all of its frames; None
            for a street.
    """

    seed: int
    frames: int = 100
    camera: str | None = None
    size: tuple[int, int] = SIZE
    device: str = "cpu"
    exposures: int = 3
    action: str | None = None

    def __post_init__(self) -> None:
        if self.camera is not None and self.camera not in CAMERAS:
            raise ConfigError(f"camera is one of {', '.join(CAMERAS)}, not {self.camera!r}.")
        if self.action is not None and self.action not in actions.ACTIONS:
            raise ConfigError(f"action is one of {', '.join(actions.ACTIONS)}, not {self.action!r}")
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not (0 <= self.seed < 2**31)
        ):
            raise ConfigError(f"A seed is a whole number from 0 to 2**31 - 1, not {self.seed!r}.")
        if self.frames < 1 or min(self.size) < 16:
            raise ConfigError("A video of the world needs at least one frame of 16 x 16 pixels.")
        if self.exposures < 1 or self.exposures % 2 == 0:
            raise ConfigError(f"exposures is an odd number, not {self.exposures}.")

    def __len__(self) -> int:
        return self.frames

    def __getstate__(self) -> dict[str, Any]:
        """Without what was computed, which would be large."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __iter__(self) -> Iterator[Tensor]:
        """Every frame in turn, (3, H, W) uint8."""
        for first in range(0, len(self), _AT_ONCE):
            yield from self.read(range(first, min(first + _AT_ONCE, len(self))))

    def read(self, indices: Sequence[int]) -> Tensor:
        """The frames at these positions, uint8 RGB (T, 3, H, W)."""
        parts = [
            as_bytes(self.shot(list(indices[first : first + _AT_ONCE])).pixels).cpu()
            for first in range(0, len(indices), _AT_ONCE)
        ]
        return torch.cat(parts) if parts else torch.empty(0, 3, *self.size, dtype=torch.uint8)

    def shot(self, indices: Sequence[int]) -> Shot:
        """Frames and what is in them, on `device`."""
        wrong = [index for index in indices if not 0 <= index < len(self)]
        if wrong:
            raise ConfigError(f"frame {wrong[0]} of a video of {len(self)} frames.")
        count, seeds = len(indices), self._seeds
        step = 1 / RATE if self.action is None else actions.SECONDS / len(self)
        seconds = torch.tensor([i * step for i in indices], device=seeds.device)
        modes = torch.full((count,), CAMERAS.index(self.mode), device=seeds.device)
        which = torch.zeros(count, dtype=torch.long, device=seeds.device)
        return render(
            seeds.expand(count), modes, seconds, self.size, self._cast(count),
            surfaces=(self._surfaces, which), exposures=self.exposures,
        )  # fmt: skip

    def truth(self, index: int) -> Truth:
        """What is in one frame."""
        return truth_of(self.shot([index]))

    def boxes(self, indices: Sequence[int]) -> Boxes:
        """What is in some frames, without masks, on the CPU."""
        found = [
            boxes_of(self.shot(list(indices[first : first + _AT_ONCE])))
            for first in range(0, len(indices), _AT_ONCE)
        ]
        if not found:
            return boxes_of(self.shot([]))
        names = vars(found[0])
        return Boxes(**{name: torch.cat([getattr(f, name) for f in found]).cpu() for name in names})

    @cached_property
    def mode(self) -> str:
        """How the camera moves."""
        if self.camera is not None:
            return self.camera
        return CAMERAS[int(choice(len(CAMERAS), self._seeds, 301)[0])]

    @cached_property
    def _seeds(self) -> Tensor:
        return torch.tensor([self.seed], dtype=torch.int32, device=self.device)

    @cached_property
    def _surfaces(self) -> Surfaces:
        return Surfaces.make(self._seeds)

    def _cast(self, count: int) -> Cast:
        if self.action is None:
            return tracks.actors
        label = actions.ACTIONS.index(self.action)
        return actions.cast_for(torch.full((count,), label, device=self._seeds.device))


def as_bytes(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1] as uint8."""
    return (pixels * 255).round().to(torch.uint8)
