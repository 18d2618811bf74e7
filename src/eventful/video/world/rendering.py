"""Frames of scenes with their ground truth, by rays: ground, walls, sky, then figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.video.world import camera, figures, sensor, sprites
from eventful.video.world.camera import RATE, Pose
from eventful.video.world.chance import constant, uniform
from eventful.video.world.surfaces import GROUND_SIDE, WALL_SIDE, Surfaces
from eventful.video.world.tracks import Actors

_HAZE = 140.0  # metres after which less than half of a colour is left
_CLOSE = 0.4  # nearer than this nothing is seen
Cast = Callable[[Tensor, Tensor], Actors]  # seeds and seconds (B,) to everybody


@dataclass(frozen=True)
class Shot:
    """B frames and what is in them.

    Attributes:
        pixels: (B, 3, H, W) in [0, 1].
        owner: (B, H, W) whose each pixel is: a column of `actors`, or -1.
        depth: (B, H, W) metres along the view.
        actors: everybody; a column is one of them.
        area: (B, n) about how many pixels each would cover if nothing hid it.
    """

    pixels: Tensor
    owner: Tensor
    depth: Tensor
    actors: Actors
    area: Tensor

    def every(self, step: int) -> Shot:
        """Only every so many frames."""
        fewer = {name: value[::step] for name, value in vars(self).items() if name != "actors"}
        return Shot(**fewer, actors=self.actors.every(step))


@dataclass(frozen=True)
class _Light:
    """Of B frames: direction to the sun (B, 3), its share and the sky's (B, 3) each."""

    towards: Tensor
    sun: Tensor
    sky: Tensor
    haze: Tensor


def render(
    seeds: Tensor, modes: Tensor, seconds: Tensor, size: tuple[int, int], cast: Cast,
    *, surfaces: tuple[Surfaces, Tensor] | None = None, exposures: int = 3,
    detail: int = sprites.SIDE,
) -> Shot:  # fmt: skip
    """Frames of scenes by seeds, modes of the camera and times, (B,) each.

    Args:
        surfaces: pictures, and whose of them each frame has (B,); made here if there are none.
        exposures: an odd number of moments that a frame is the mean of.
        detail: side in pixels at which figures are drawn first.
    """
    pictures, which = surfaces or (Surfaces.make(seeds), _count(seeds))
    light = _light(seeds, seconds)
    everybody = cast(seeds, seconds)
    view = camera.pose(seeds, modes, seconds)
    kept = _columns(everybody, view)
    some = everybody.columns(kept)
    drawn = _sprites(some, view, light, size, detail)
    open_for = uniform(seeds, 141, high=0.7) / RATE
    total, middle = None, None
    for number in range(exposures):
        then = seconds + open_for * ((number + 0.5) / exposures - 0.5)
        there = some if exposures == 1 else cast(seeds, then).columns(kept)
        pose = view if exposures == 1 else camera.pose(seeds, modes, then, seconds)
        found = _moment(pictures, which, seeds, pose, there, drawn, light, size, then)
        total = found[0] if total is None else total + found[0]
        if number == exposures // 2:
            middle = found
    assert total is not None
    assert middle is not None
    pixels = sensor.develop(total / exposures, seeds, seconds)
    owner = torch.where(middle[1] >= 0, kept[middle[1].clamp_min(0)], -1)
    area = torch.zeros_like(everybody.x)
    area[:, kept] = _area(some, view, drawn, size)
    return Shot(pixels, owner, middle[2], everybody, area)


def _columns(everybody: Actors, view: Pose) -> Tensor:
    """Who has to be drawn, by columns: on a CPU only those who may be seen in some frame."""
    every = torch.arange(everybody.x.shape[1], device=everybody.x.device)
    if every.device.type != "cpu":  # their number must not depend on values
        return every
    kept = every[_seen(everybody, view).any(dim=0)]
    return kept if len(kept) else every[:1]  # an empty frame has somebody outside it


def _seen(everybody: Actors, view: Pose) -> Tensor:
    """Whose picture or shadow may be in the frame, (B, n)."""
    depth = view.depth_of(everybody.points)
    reach = 2.5 * everybody.metres
    near = view.focal[:, None] * (view.across(everybody.points).abs() - reach)
    return everybody.there & (depth > -reach) & (near < 0.5 * depth.clamp_min(_CLOSE) + reach)


def _light(seeds: Tensor, seconds: Tensor) -> _Light:
    """The sun wanders and clouds pass; evenings are warmer."""
    wander = camera.wobble(seeds, 142, seconds, 0.01, 0.05)
    azimuth = uniform(seeds, 143, low=0.35, high=1.0) + 0.05 * wander
    azimuth = azimuth * torch.where(uniform(seeds, 144) < 0.5, -1.0, 1.0)
    height = uniform(seeds, 145, low=0.55, high=1.1) + 0.03 * wander
    ahead = torch.where(uniform(seeds, 146) < 0.5, -1.0, 1.0)
    towards = torch.stack(
        [azimuth.sin() * height.cos(), height.sin(), ahead * azimuth.cos() * height.cos()], dim=1
    )
    cloud = uniform(seeds, 147, high=0.9) + 0.12 * camera.wobble(seeds, 148, seconds, 0.02, 0.15)
    bright = (1 - cloud.clamp(0, 1))[:, None]
    warm = uniform(seeds, 149)[:, None]
    tint = constant((1.06, 1.0, 0.86), seeds.device) * warm + (1 - warm)
    sky = constant((0.92, 0.98, 1.06), seeds.device) * (0.72 + 0.16 * (1 - bright))
    level = uniform(seeds, 150, low=0.82, high=1.15)[:, None]
    haze = constant((0.7, 0.76, 0.83), seeds.device) * (0.75 + 0.25 * bright)
    return _Light(towards, tint * 0.75 * bright * level, sky * level, haze * level)


def _sprites(
    everybody: Actors, view: Pose, light: _Light, size: tuple[int, int], detail: int
) -> Tensor:
    """Pictures (B, n, 4, S, S) of everybody."""
    batch, count = everybody.x.shape
    depth = view.depth_of(everybody.points).clamp_min(_CLOSE)
    footprint = depth / (view.focal[:, None] * size[1] * everybody.metres)
    side = light.towards[:, :1].expand(-1, count) * everybody.turn.sign()
    drawn = sprites.draw(
        everybody.kind.flatten().long(), everybody.phase.flatten(),
        everybody.palette().flatten(0, 1), everybody.key.flatten(), footprint.flatten(),
        side.flatten(), detail,
    )  # fmt: skip
    return drawn.unflatten(0, (batch, count))


def _area(everybody: Actors, view: Pose, drawn: Tensor, size: tuple[int, int]) -> Tensor:
    """About how many pixels of the frame each figure would cover, in front of the camera.

    From the area of the figure in its plane, and the slant of that plane at the figure's middle.
    """
    middle = figures.table(everybody.x.device).facts[everybody.kind.long(), 7] * everybody.metres
    points = torch.stack([everybody.x, everybody.y + middle, everybody.z], dim=-1)
    depth = view.depth_of(points)
    texel = everybody.metres * sprites.REACH / drawn.shape[-1]
    metres = (drawn[:, :, 3] > 0.5).sum(dim=(-1, -2)) * texel.square() * everybody.turn.abs()
    away = (everybody.z - view.place[:, 2:]).abs()
    scale = (view.focal[:, None] * size[1]).square() * away / depth.clamp_min(_CLOSE) ** 3
    return metres * scale * ((depth > _CLOSE) & everybody.there)


def _moment(
    pictures: Surfaces, which: Tensor, seeds: Tensor, pose: Pose, everybody: Actors,
    drawn: Tensor, light: _Light, size: tuple[int, int], seconds: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Light (B, 3, H, W), owners and depths (B, H, W) at one moment."""
    rays = pose.rays(size)
    colour, depth, on_ground = _surroundings(pictures, which, seeds, pose, rays, light, seconds)
    order = everybody.z.argsort(dim=1, descending=True)
    sorted_out = everybody.ordered(order)
    reach = depth.clamp_max(80.0)
    ground = (
        pose.place[:, 0, None, None] + reach * rays[:, 0],
        pose.place[:, 2, None, None] + reach * rays[:, 2],
    )
    shade = torch.zeros_like(depth)
    soft = F.avg_pool2d(drawn[:, :, 3], 4)
    for place in range(order.shape[1]):
        cover = soft[torch.arange(len(order), device=order.device), order[:, place]]
        shade = torch.maximum(shade, _shadow(sorted_out, place, cover, ground, light))
    lit = light.sky[:, :, None, None] + light.sun[:, :, None, None] * (
        1 - (shade * on_ground)[:, None]
    )
    lit = torch.where(torch.isinf(depth)[:, None], torch.ones_like(lit), lit)
    contact = 1 - 0.25 * (shade * on_ground)[:, None]
    colour = colour * lit * contact
    owner = torch.full_like(depth, -1, dtype=torch.long)
    whole = (light.sky + 0.85 * light.sun)[:, :, None, None]
    for place in range(order.shape[1]):
        column = order[:, place]
        sprite = drawn[torch.arange(len(column), device=column.device), column]
        layer, distance = _layer(sorted_out, place, sprite, pose, rays, depth)
        cover = layer[:, 3:]
        colour = colour * (1 - cover) + layer[:, :3] * whole
        hides = cover[:, 0] > 0.5
        named = torch.where(sorted_out.kind[:, place] < len(figures.KINDS), column, -1)
        owner = torch.where(hides, named[:, None, None], owner)
        depth = torch.where(hides, distance, depth)
    clear = torch.exp(-depth / _HAZE)[:, None]
    sky = torch.isinf(depth)[:, None]
    hazy = colour * clear + light.haze[:, :, None, None] * (1 - clear)
    return torch.where(sky, colour, hazy), owner, depth


def _surroundings(
    pictures: Surfaces, which: Tensor, seeds: Tensor, pose: Pose, rays: Tensor, light: _Light,
    seconds: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Colours without light (B, 3, H, W), depths, and where the ground is (B, H, W).

    The sky has depth infinity, and its colours are those of light.
    """
    origin = pose.place[:, :, None, None]
    dx, dy, dz = rays.unbind(dim=1)
    ox, oy, oz = origin.unbind(dim=1)
    street = (uniform(seeds, 151) < 0.45)[:, None, None]
    far = torch.where(street, 55.0, uniform(seeds, 152, low=17.0, high=28.0)[:, None, None])
    beside = torch.where(street, uniform(seeds, 153, low=9.0, high=13.0)[:, None, None], 300.0)
    high = torch.where(street, uniform(seeds, 154, low=6.0, high=14.0)[:, None, None],
                       uniform(seeds, 155, low=2.2, high=12.0)[:, None, None])  # fmt: skip
    never = torch.full_like(dx, torch.inf)
    ground = torch.where(dy < -1e-4, -oy / dy.clamp_max(-1e-4), never)
    back = torch.where(dz > 1e-3, (far - oz) / dz.clamp_min(1e-3), never)
    back = torch.where(back > 0, back, never)
    edge = torch.where(dx > 0, beside, -beside)
    side = torch.where(dx.abs() > 1e-3, (edge - ox) / torch.where(dx.abs() > 1e-3, dx, 1.0), never)
    side = torch.where(side > 0, side, never)
    wall = torch.minimum(back, side)
    up = oy + wall * dy
    wall = torch.where(up < high, wall, never)
    depth = torch.minimum(ground, wall)
    on_ground = (ground < wall).float()
    reach = depth.clamp_max(200.0)
    x, y, z = ox + reach * dx, oy + reach * dy, oz + reach * dz
    metre = reach / (pose.focal[:, None, None] * rays.shape[-1])  # of a pixel
    slope = metre * reach / oy.clamp_min(0.5)
    floor = _looked_up(
        pictures.ground, pictures.far_ground, which, x / GROUND_SIDE, z / GROUND_SIDE,
        (metre * slope).sqrt() * 256 / GROUND_SIDE,
    )  # fmt: skip
    along = torch.where(side < back, z, x)
    facade = _looked_up(
        pictures.wall, pictures.far_wall, which, along / WALL_SIDE[0], y / WALL_SIDE[1],
        metre * 512 / WALL_SIDE[0],
    )  # fmt: skip
    facade = facade * torch.where(side < back, 0.8, 1.0)[:, None]
    colour = torch.where((on_ground > 0)[:, None], floor, facade)
    sky = _sky(pictures, which, rays, light, seconds)
    return torch.where(torch.isinf(depth)[:, None], sky, colour), depth, on_ground


def _looked_up(
    near: Tensor, far: Tensor, which: Tensor, across: Tensor, up: Tensor, texels: Tensor
) -> Tensor:
    """Colours (B, 3, H, W) of pictures that go on mirrored; blurred where pixels are large."""
    grid = torch.stack([across * 2 - 1, up * 2 - 1], dim=-1)

    def sample(pictures: Tensor) -> Tensor:
        return F.grid_sample(
            pictures[which], grid, mode="bilinear", padding_mode="reflection", align_corners=False
        )

    share = (texels.clamp_min(1).log2() / 3).clamp(0, 1)[:, None]
    return sample(near) * (1 - share) + sample(far) * share


def _sky(pictures: Surfaces, which: Tensor, rays: Tensor, light: _Light, seconds: Tensor) -> Tensor:
    """A gradient with clouds that drift."""
    dx, dy, dz = rays.unbind(dim=1)
    up = (dy / dz.clamp_min(0.2)).clamp_min(0.02)
    moved = (seconds * 0.004)[:, None, None]
    grid = torch.stack([dx / (up + 0.3) * 0.4 + moved, 0.6 / (up + 0.3)], dim=-1)
    cloud = F.grid_sample(pictures.clouds[which], grid, mode="bilinear", padding_mode="reflection",
                          align_corners=False)  # fmt: skip
    blue = constant((0.42, 0.6, 0.86), rays.device)[None, :, None, None]
    height = (up * 1.6).clamp(0, 1)[:, None]
    clear = light.haze[:, :, None, None] * (1 - height) + blue * height
    return clear + (0.95 - clear) * cloud * 0.75


def _shadow(
    everybody: Actors, place: int, cover: Tensor, ground: tuple[Tensor, Tensor], light: _Light
) -> Tensor:
    """How much of the sun a figure takes from each point of the ground, (B, H, W)."""
    x, z = ground
    to_x, to_y, to_z = (value[:, None, None] for value in light.towards.unbind(dim=1))
    far = (everybody.z[:, place, None, None] - z) / to_z
    u, v = _local(everybody, place, x + far * to_x, far * to_y)
    found = _sampled(cover[:, None], u, v)[:, 0]
    return found * (far > 0) * everybody.there[:, place, None, None]


def _layer(
    everybody: Actors, place: int, sprite: Tensor, pose: Pose, rays: Tensor, depth: Tensor
) -> tuple[Tensor, Tensor]:
    """A figure in the frame (B, 4, H, W), and the depth of its plane (B, H, W)."""
    distance = (everybody.z[:, place] - pose.place[:, 2])[:, None, None] / rays[:, 2].clamp_min(0.1)
    x = pose.place[:, 0, None, None] + distance * rays[:, 0]
    y = pose.place[:, 1, None, None] + distance * rays[:, 1]
    u, v = _local(everybody, place, x, y)
    seen = (distance > _CLOSE) & (distance < depth + 0.3) & everybody.there[:, place, None, None]
    return _sampled(sprite, u, v) * seen[:, None], distance


def _local(everybody: Actors, place: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Points of a figure's plane in its own coordinates."""

    def of(values: Tensor) -> Tensor:
        return values[:, place, None, None]

    u = (x - of(everybody.x)) / of(everybody.metres)
    middle = of(figures.table(x.device).facts[everybody.kind.long(), 7])
    v = (y - of(everybody.y)) / of(everybody.metres) - middle
    cos, sin = of(everybody.angle).cos(), of(everybody.angle).sin()
    return (u * cos + v * sin) / of(everybody.turn), v * cos - u * sin + middle


def _sampled(pictures: Tensor, u: Tensor, v: Tensor) -> Tensor:
    across = (u - sprites.LEFT) / sprites.REACH * 2 - 1
    down = (sprites.LOW + sprites.REACH - v) / sprites.REACH * 2 - 1
    grid = torch.stack([across, down], dim=-1)
    return F.grid_sample(pictures, grid, mode="bilinear", align_corners=False)


def _count(seeds: Tensor) -> Tensor:
    return torch.arange(len(seeds), device=seeds.device)
