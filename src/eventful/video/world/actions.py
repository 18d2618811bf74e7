"""Clips of what happens: one or two figures do one of the motions, whoever they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from eventful.video.world import figures
from eventful.video.world.chance import choice, mixed, uniform
from eventful.video.world.tracks import OBJECTS, SLOTS, Actors, actors

ACTIONS = (
    "go left", "go right", "come near", "go away", "turn back", "jump", "fall over", "spin",
    "meet", "part", "chase", "stop", "start", "rise", "drop", "sway",
)  # fmt: skip
SECONDS = 1.28  # of a clip: 32 frames
_BEFORE = 100.0  # time at which clips begin, so that their scenes are those of others


def cast_for(labels: Tensor) -> Callable[[Tensor, Tensor], Actors]:
    """Who is there in clips of motions by label (B,); time 0 is the beginning of the clip."""
    return lambda seeds, seconds: performing(seeds, labels, seconds)


def performing(seeds: Tensor, labels: Tensor, seconds: Tensor) -> Actors:
    """A scene without other motion, in whose middle one or two figures act."""
    slot = torch.arange(2 + SLOTS - OBJECTS, device=seeds.device)[None]
    slot = torch.where(slot < 2, slot, slot + OBJECTS - 2)
    scene = actors(seeds, torch.full_like(seconds, _BEFORE)).ordered(slot.expand(len(seeds), -1))
    acts, second = slot < 2, slot == 1
    pair = _is(labels, "meet", "part", "chase")[:, None]
    there = torch.where(acts, ~second | pair, (slot >= OBJECTS) & scene.there)
    key = mixed(seeds[:, None], slot, 201)
    walkers = figures.CLASSES.index("bird")
    kind = torch.where(acts, choice(walkers, key, 202), scene.kind)
    facts = figures.table(seeds.device).facts[kind]
    metres = facts[..., 1] + (facts[..., 2] - facts[..., 1]) * uniform(key, 203)
    metres = torch.where(acts, metres.clamp_max(2.4), scene.metres)
    share = (seconds / SECONDS)[:, None]
    x, y, z, turn, angle, gone = _script(seeds[:, None], labels[:, None], share, second)
    phase = gone / (facts[..., 5] * metres) * 2 * math.pi + uniform(key, 204, high=6.3)
    behind = scene.z + 3.0
    return replace(
        scene, kind=kind, metres=metres, there=there, key=torch.where(acts, key, scene.key),
        x=torch.where(acts, x, scene.x), y=torch.where(acts, y, torch.zeros_like(y)),
        z=torch.where(acts, z, behind), turn=torch.where(acts, turn, scene.turn),
        angle=torch.where(acts, angle, torch.zeros_like(angle)),
        phase=torch.where(acts, phase, scene.phase), track=slot.expand_as(scene.track),
    )  # fmt: skip


def _is(labels: Tensor, *names: str) -> Tensor:
    found = torch.zeros_like(labels, dtype=torch.bool)
    for name in names:
        found = found | (labels == ACTIONS.index(name))
    return found


def _script(scene: Tensor, label: Tensor, share: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Place, turn, angle and metres gone (B, n), at a share of the clip."""
    side = torch.where(uniform(scene, 211) < 0.5, -1.0, 1.0)
    reach = uniform(scene, 212, low=1.4, high=2.6)
    x0 = uniform(scene, 213, low=-0.8, high=0.8)
    z0 = uniform(scene, 214, low=3.8, high=5.6)
    ease = share - uniform(scene, 215, high=0.5) * torch.sin(2 * math.pi * share) / (2 * math.pi)
    bend = uniform(scene, 216, low=0.35, high=0.6)
    out = torch.where(share < bend, share / bend, 1.0)
    late = ((share - bend) / (1 - bend)).clamp_min(0)
    back = torch.where(share < bend, share / bend, 1 - late)
    zero = torch.zeros_like(share + x0)

    def when(name: str, value: Tensor) -> Tensor:
        return torch.where(label == ACTIONS.index(name), value, zero)

    centred = reach * (ease - 0.5)
    across = when("go right", centred) - when("go left", centred)
    across = across + side * (
        when("turn back", reach * (back - 0.5))
        + when("chase", centred)
        + when("stop", reach * (out - 0.5))
        + when("start", reach * late)
    )
    apart = torch.where(second, 1.0, -1.0) * side
    gap = 0.55 + 0.5 * reach * (1 - ease)
    across = across + apart * (when("meet", gap) + when("part", 0.55 + 0.5 * reach * ease))
    across = across + when("chase", torch.where(second, -1.1 * side, zero))
    across = across + when("sway", 0.4 * torch.sin(2 * math.pi * 2.5 * share))
    deep = 0.85 * reach * (ease - 0.5) * 1.8
    z = z0 + when("go away", deep) - when("come near", deep) + torch.where(second, 0.35, 0.0)
    hop = torch.sin(math.pi * 3 * share).abs() * uniform(scene, 217, low=0.4, high=0.8)
    lift = uniform(scene, 218, low=1.2, high=2.0)
    y = when("jump", hop) + when("rise", lift * ease) + when("drop", lift * (1 - out.square()))
    tilt = (late * 1.5).clamp_max(1).square() * math.pi / 2 * side
    angle = when("fall over", tilt) + when("spin", 2 * math.pi * 1.5 * share * side)
    angle = angle + when("sway", 0.35 * torch.sin(2 * math.pi * 2.5 * share) * side)
    y = y - when("fall over", (late * 1.5).clamp_max(1).square() * 0.35)
    facing = torch.where((label == ACTIONS.index("go left")), -1.0, side)
    facing = torch.where((label == ACTIONS.index("go right")), 1.0, facing)
    returning = (share > bend) & (label == ACTIONS.index("turn back"))
    facing = torch.where(returning, -facing, facing)
    meets = torch.where(label == ACTIONS.index("meet"), -apart, facing)
    facing = torch.where(label == ACTIONS.index("part"), apart, meets)
    towards = (label == ACTIONS.index("come near")) | (label == ACTIONS.index("go away"))
    facing = torch.where(towards, 0.5 * facing, facing)
    gone = (across * facing.sign()) + when("come near", deep) + when("go away", deep)
    return x0 + across, y, z, facing, angle, gone
