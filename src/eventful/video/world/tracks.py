"""Where everybody is at a time: paths in closed form, so that any frame can be asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from eventful.video.world import figures
from eventful.video.world.chance import choice, constant, mixed, uniform

OBJECTS, STANDING = 8, 3  # places for objects, and for things that only stand there
SLOTS = OBJECTS + STANDING
CROSS, STROLL, COME, STAY = range(4)  # how an object moves
_NEAR, _FAR = 3.6, 13.0  # metres from the camera's first place


@dataclass(frozen=True)
class Actors:
    """Everybody in B frames, (B, n) each.

    Attributes:
        kind: which of `figures.EVERY`.
        x, y, z: where its feet are, in metres.
        metres: side of its square.
        turn: 1 where it looks to the right, -1 to the left, less where it turns.
        angle: it is tilted by, about its middle.
        phase: of its gait.
        key: of its colours and its pattern.
        track: a number of its own.
        there: whether it is part of the scene.
    """

    kind: Tensor
    x: Tensor
    y: Tensor
    z: Tensor
    metres: Tensor
    turn: Tensor
    angle: Tensor
    phase: Tensor
    key: Tensor
    track: Tensor
    there: Tensor

    def ordered(self, order: Tensor) -> Actors:
        """The same in another order (B, n)."""
        return Actors(**{f.name: getattr(self, f.name).gather(1, order) for f in fields(self)})

    def columns(self, kept: Tensor) -> Actors:
        """Only some of them, by their columns."""
        return Actors(**{name: value[:, kept] for name, value in vars(self).items()})

    def every(self, step: int) -> Actors:
        """Only in every so many frames."""
        return Actors(**{name: value[::step] for name, value in vars(self).items()})

    @property
    def points(self) -> Tensor:
        """Places (B, n, 3)."""
        return torch.stack([self.x, self.y, self.z], dim=-1)

    def palette(self) -> Tensor:
        """Colours (B, n, 5, 3) of the figures; those of plants are green."""
        key = self.key[..., None]
        colour = torch.arange(3, device=key.device)
        drawn = [_muted(key, 90 + number, colour) for number in range(2)]
        drawn[1] = _apart(drawn[1], drawn[0])
        dark = 0.06 + 0.28 * _muted(key, 93, colour)
        skin = uniform(key, 94, low=0.35, high=1.0)
        pale = skin * constant((0.95, 0.82, 0.7), key.device)
        glass = 0.12 + 0.35 * _muted(key, 95, colour) + 0.08
        both = torch.stack([*drawn, dark, pale, glass], dim=-2)
        green = constant((0.5, 0.85, 0.35), key.device)
        leaves = green * (0.25 + 0.5 * uniform(key, 96))
        wood = constant((0.36, 0.27, 0.19), key.device) * (0.6 + 0.5 * skin)
        lush = torch.stack([leaves, leaves * 0.6, wood, pale, glass], dim=-2)
        plant = (self.kind >= len(figures.KINDS)) & (self.kind != len(figures.KINDS) + 1)
        return torch.where(plant[..., None, None], lush, both)


def _muted(key: Tensor, number: int, colour: Tensor) -> Tensor:
    """Colours (..., 3), some grey, some strong."""
    base = uniform(key, number, colour, low=0.06, high=0.94)
    share = uniform(key, number, 7, low=0.15, high=0.8)
    return share * base + (1 - share) * base.mean(dim=-1, keepdim=True)


def _apart(colour: Tensor, other: Tensor) -> Tensor:
    """A colour that can be told from another one, so that patterns are seen."""
    near = (colour - other).abs().amax(dim=-1, keepdim=True) < 0.3
    bright = other.mean(dim=-1, keepdim=True) > 0.5
    return torch.where(near, torch.where(bright, colour * 0.4, 0.55 + 0.45 * colour), colour)


def actors(seeds: Tensor, seconds: Tensor) -> Actors:
    """Everybody in the frames of scenes by their seeds (B,) at times (B,)."""
    slot = torch.arange(SLOTS, device=seeds.device)[None]
    scene, now = seeds[:, None], seconds[:, None]
    stands = slot >= OBJECTS
    way = _way(scene, slot)
    life = uniform(scene, slot, 101, low=5.0, high=11.0)
    since = now + uniform(scene, slot, 102) * life
    turn_of = torch.where(way == CROSS, torch.floor(since / life), torch.zeros_like(since))
    age = torch.where(way == CROSS, since - turn_of * life, now + 20.0 * uniform(scene, slot, 102))
    key = mixed(scene, slot, turn_of, 103)
    figure = choice(len(figures.KINDS), key, 104)
    prop = len(figures.KINDS) + choice(len(figures.PROPS), key, 105)
    kind = torch.where(stands, prop, figure)
    facts = figures.table(seeds.device).facts[kind]
    metres = facts[..., 1] + (facts[..., 2] - facts[..., 1]) * uniform(key, 106)
    pace = facts[..., 3] + (facts[..., 4] - facts[..., 3]) * uniform(key, 107)
    depth = uniform(key, 108)
    z = _NEAR + (_FAR - _NEAR) * depth.square() + (metres - 1.5).clamp_min(0) * 0.8
    z = z + stands * 2.0
    half = 0.75 * (z + 1.0) + metres * 0.6
    x, z, speed, sideways = _path(way, key, age, life, pace, half, z)
    flies = facts[..., 6] > 0
    lift = torch.where(flies, uniform(key, 109, low=0.3, high=2.4), torch.zeros_like(z))
    lift = lift + flies * 0.2 * torch.sin(age * 2.0 + uniform(key, 110, high=6.3))
    ball = kind == figures.CLASSES.index("ball")
    bounce = ball & (way != STAY)
    lift = lift + bounce * 0.8 * torch.sin(age * 4.2).abs() * uniform(key, 111)
    travelled = speed / (facts[..., 5] * metres) * 2 * math.pi
    phase = travelled + uniform(key, 112, high=2 * math.pi) + flies * age * 14.0 + stands * age
    rolls = bounce * -speed / (0.42 * metres)
    turn = torch.where(sideways.abs() < 0.35, torch.where(sideways < 0, -0.35, 0.35), sideways)
    turn = torch.where(ball, turn.sign(), turn)  # it looks the same from all sides
    there = uniform(scene, slot, 113) < torch.where(stands, 0.75, 0.85)
    track = slot + SLOTS * turn_of.to(slot.dtype)
    return Actors(kind, x, lift, z, metres, turn, rolls, phase, key, track, there)


def _way(scene: Tensor, slot: Tensor) -> Tensor:
    drawn = uniform(scene, slot, 114)
    way = torch.where(drawn < 0.45, CROSS, torch.where(drawn < 0.75, STROLL, STAY))
    way = torch.where((drawn >= 0.75) & (drawn < 0.87), COME, way)
    return torch.where(slot >= OBJECTS, STAY, way)


def _path(
    way: Tensor, key: Tensor, age: Tensor, life: Tensor, pace: Tensor, half: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Places x and z, metres travelled, and the part of the motion across the view."""
    side = torch.where(uniform(key, 115) < 0.5, -1.0, 1.0)
    uneven, beat = uniform(key, 116, high=0.6), uniform(key, 117, low=0.3, high=0.9)
    # Crosses the view within its life, faster and slower on the way.
    gone = age / life
    wave = 2 * math.pi * beat
    share = gone + uneven * (torch.sin(wave * gone * 2) - torch.sin(wave * 2) * gone) / (wave * 2)
    cross_x, drift = side * half * (2 * share - 1), uniform(key, 118, low=-1.2, high=1.2)
    # Goes to and fro, and turns.
    middle = half * uniform(key, 119, low=-0.75, high=0.75)
    width = uniform(key, 120, low=0.4, high=1.6)
    swing = (pace / width).clamp(0.3, 1.6) * age + uniform(key, 121, high=6.3)
    stroll_x = middle + width * torch.sin(swing)
    # Comes near and goes away.
    far = uniform(key, 122, low=1.0, high=2.5)
    sweep = (pace / far).clamp(0.25, 0.9) * age + uniform(key, 123, high=6.3)
    come_z = z + far * (1 + torch.sin(sweep))
    come_x = middle * 0.8 + 0.3 * torch.cos(sweep)
    x = torch.where(way == CROSS, cross_x, torch.where(way == STROLL, stroll_x, middle))
    x = torch.where(way == COME, come_x, x)
    z = torch.where(way == CROSS, z + drift * share, torch.where(way == COME, come_z, z))
    speed = torch.where(way == CROSS, half * 2 * share, torch.where(way == STROLL, width * swing,
                        torch.where(way == COME, far * sweep, torch.zeros_like(x))))  # fmt: skip
    facing = torch.cos(swing)
    across = torch.where(way == STROLL, facing / (facing.square() + 0.06).sqrt(), side)
    across = torch.where(way == COME, side * (0.45 + 0.1 * torch.sin(sweep)), across)
    return x, z, speed, across
