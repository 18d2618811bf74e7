"""Where the camera is and where it looks: it stands, pans, shakes in a hand, walks, or cuts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eventful.video.world.chance import mixed, uniform

CAMERAS = ("stand", "hand", "pan", "walk", "cut")
RATE = 25.0  # frames a second
_SCENE = 2.4  # seconds from one cut to the next
_FAR = 3.0  # half of the metres that a walking camera goes


@dataclass(frozen=True)
class Pose:
    """Of B frames: place (B, 3) in metres, angles (B, 3) yaw, pitch and roll, focal (B,).

    The focal length is in widths of the frame.
    """

    place: Tensor
    angles: Tensor
    focal: Tensor

    def rays(self, size: tuple[int, int]) -> Tensor:
        """Directions (B, 3, H, W); their third component would be 1 in an unturned camera."""
        height, width = size
        device = self.place.device
        x = (torch.arange(width, device=device) - (width - 1) / 2) / width
        y = ((height - 1) / 2 - torch.arange(height, device=device)) / width
        flat = torch.stack(
            [x.expand(size), y[:, None].expand(size), torch.ones(size, device=device)]
        )
        scaled = flat[None] / torch.stack(
            [self.focal, self.focal, torch.ones_like(self.focal)], dim=1
        )[:, :, None, None]  # fmt: skip
        turned: Tensor = torch.einsum("bij,bjhw->bihw", self._rotation(), scaled)
        return turned

    def depth_of(self, points: Tensor) -> Tensor:
        """Distance along the view (B, n) of points (B, n, 3)."""
        forward = self._rotation()[:, :, 2]
        return ((points - self.place[:, None]) * forward[:, None]).sum(dim=-1)

    def across(self, points: Tensor) -> Tensor:
        """Distance to the right of the view (B, n) of points (B, n, 3)."""
        right = self._rotation()[:, :, 0]
        return ((points - self.place[:, None]) * right[:, None]).sum(dim=-1)

    def _rotation(self) -> Tensor:
        """(B, 3, 3) from the camera to the world."""
        yaw, pitch, roll = self.angles.unbind(dim=1)
        zero, one = torch.zeros_like(yaw), torch.ones_like(yaw)

        def matrix(*values: Tensor) -> Tensor:
            return torch.stack(values, dim=1).view(-1, 3, 3)

        about_y = matrix(yaw.cos(), zero, yaw.sin(), zero, one, zero, -yaw.sin(), zero, yaw.cos())
        about_x = matrix(
            one, zero, zero, zero, pitch.cos(), pitch.sin(), zero, -pitch.sin(), pitch.cos()
        )
        about_z = matrix(
            roll.cos(), -roll.sin(), zero, roll.sin(), roll.cos(), zero, zero, zero, one
        )
        return about_y @ about_x @ about_z


def wobble(keys: Tensor, key: int, time: Tensor, slow: float, fast: float) -> Tensor:
    """A smooth random path (B,) about 0 with deviation near 1, of frequencies in hertz."""
    total = torch.zeros_like(time)
    for number in range(4):
        rate = uniform(keys, key, 71, number, low=slow, high=fast)
        start = uniform(keys, key, 72, number, high=2 * math.pi)
        total = total + torch.sin(2 * math.pi * rate * time + start) / math.sqrt(2)
    return total


def pose(seeds: Tensor, modes: Tensor, seconds: Tensor, frame: Tensor | None = None) -> Pose:
    """The camera of B frames, by their scenes' seeds (B,), modes (B,) and times (B,).

    Args:
        frame: (B,) times of the frames that these are moments of: no frame is of two shots.
    """
    _, hand, pan, walk, cut = ((modes == number).float() for number in range(len(CAMERAS)))
    shot = torch.floor((seconds if frame is None else frame) / _SCENE + 1e-4) * cut
    keys = mixed(seeds, shot, 70)
    moving = hand + 0.7 * walk
    yaw = uniform(keys, 73, low=-0.14, high=0.14) + cut * uniform(keys, 74, low=-0.2, high=0.2)
    rate = uniform(keys, 75, low=0.05, high=0.12)
    start = uniform(keys, 76, high=2 * math.pi)
    yaw = yaw + pan * 0.32 * torch.sin(2 * math.pi * rate * seconds + start)
    yaw = yaw + moving * 0.012 * wobble(keys, 77, seconds, 0.3, 2.2)
    pitch = uniform(keys, 78, low=-0.13, high=-0.03)
    pitch = pitch + moving * 0.009 * wobble(keys, 79, seconds, 0.3, 2.6)
    roll = 0.015 * (uniform(keys, 80) - 0.5) + moving * 0.007 * wobble(keys, 81, seconds, 0.3, 1.5)
    step = 2 * math.pi * 1.7 * seconds
    x = uniform(keys, 82, low=-0.8, high=0.8) + cut * uniform(keys, 83, low=-2.5, high=2.5)
    x = x + walk * 0.03 * torch.sin(step / 2) + moving * 0.02 * wobble(keys, 84, seconds, 0.2, 1.0)
    y = uniform(keys, 85, low=1.3, high=2.5) + walk * 0.025 * torch.sin(step)
    pace = uniform(keys, 86, low=0.5, high=1.0) / _FAR  # forward for ten seconds, then back
    z = walk * (_FAR * (1 - torch.cos(pace * seconds)) - 4.0) - cut * uniform(keys, 87, high=1.5)
    focal = uniform(keys, 88, low=0.75, high=1.0)
    place = torch.stack([x, y, z], dim=1)
    return Pose(place, torch.stack([yaw, pitch, roll], dim=1), focal)
