"""Layers of dense heads on rectangles, compared with torch's, and the tiles of maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful import errors
from eventful.rules import map_graph
from eventful.rules.map_graph import Map, tile_sides
from eventful.rules.map_layers import (
    Convolution,
    Lift,
    Pointwise,
    Region,
    ResidualUnit,
    Resize,
)
from tolerances import limit


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Maps of these small models have several tiles, and tiles of one map overlap."""
    monkeypatch.setattr(map_graph, "tile_sides", lambda: (7, 11))


def assert_near(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert (one - other).abs().max() <= limit("model") * other.abs().max()


def conv(before: int, after: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel, stride, kernel // 2)


def layer_and_its_original(kind: str, size: tuple[int, int]):
    """A layer of rules.map_layers, and the same as torch has it."""
    torch.manual_seed(2)
    if kind == "resize":
        after = (2 * size[0] - 1, size[1] + 2)
        return Resize(size, after, align_corners=False), lambda x: F.interpolate(
            x, after, mode="bilinear", align_corners=False
        )
    if kind == "resize by corners":
        after = (2 * size[0], 3)
        return Resize(size, after, align_corners=True), lambda x: F.interpolate(
            x, after, mode="bilinear", align_corners=True
        )
    if kind == "lift":
        lift = nn.ConvTranspose2d(4, 6, 2, 2)
        return Lift(lift), lift
    if kind == "residual":
        one, two = conv(4, 4, 3), conv(4, 4, 3)
        return ResidualUnit(
            Convolution(one), Convolution(two)
        ), lambda x: x + two(one(x.relu()).relu())
    if kind == "normed":
        one, norm = conv(4, 6, 3), nn.BatchNorm2d(6).eval()
        norm.running_mean.uniform_()
        norm.running_var.uniform_(0.5, 2)
        return Convolution(one, norm), lambda x: norm(one(x))
    if kind == "pointwise":
        return Pointwise(torch.sigmoid), torch.sigmoid
    one = conv(4, 6, *map(int, kind.split()))
    return Convolution(one), one


LAYERS = [
    "1 1",
    "3 1",
    "3 2",
    "normed",
    "lift",
    "residual",
    "resize",
    "resize by corners",
    "pointwise",
]


@torch.no_grad()
@pytest.mark.parametrize("size", [(5, 7), (6, 4), (1, 3)], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_on_rectangles_is_the_layer(kind, size):
    layer, original = layer_and_its_original(kind, size)
    x = torch.randn(1, 4, *size)
    expected = original(x)
    high, wide = layer.sizes(size)
    assert expected.shape[1:] == (layer.channels(4), high, wide)
    regions = [
        Region.whole((high, wide)),
        Region(0, 1, 0, wide),
        Region(high // 2, high, wide // 2, wide),
    ]
    for region in regions:
        at = layer.needed(region).within(size)
        made = layer.run(at.of(x, Region.whole(size)), at, region, size)
        assert_near(made, region.of(expected, Region.whole((high, wide))))


@torch.no_grad()
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_knows_what_a_change_reaches(kind):
    size = (5, 7)
    layer, original = layer_and_its_original(kind, size)
    x = torch.randn(1, 4, *size)
    found = 0
    for y, place in torch.cartesian_prod(*map(torch.arange, size)).tolist():
        changed = torch.zeros(1, *size, dtype=torch.bool)
        changed[:, y, place] = True
        other = x + 3 * changed[:, None]
        # Resizing has a weight of zero, up to rounding, where an output lies on an input.
        differ = ((original(other) - original(x)).abs() > 1e-5).any(dim=1)
        reached = layer.reached(changed)
        assert not (differ & ~reached).any()
        found += int((reached & ~differ).sum())
    assert found <= 3  # an activation may hide a change


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 5, padding=2),
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.ConvTranspose2d(4, 4, 4, 2, 1),
    ],
    ids=str,
)
def test_other_layers_are_refused(layer):
    with pytest.raises(errors.UnsupportedError):
        (Convolution if isinstance(layer, nn.Conv2d) else Lift)(layer)


def test_tiles_cover_what_changed_and_no_tile_without_a_change():
    changed = torch.zeros(23, 31, dtype=torch.bool)
    changed[22, 3] = changed[6:10, 17] = True
    one = Map((23, 31), 1)
    tiles = list(one.tiles(changed))
    covered = torch.zeros_like(changed)
    for tile in tiles:
        assert tile.size == one.tile
        assert changed[tile.top : tile.bottom, tile.left : tile.right].any()
        covered[tile.top : tile.bottom, tile.left : tile.right] = True
    assert covered[changed].all()
    assert len(tiles) == 3
    assert not list(one.tiles(torch.zeros_like(changed)))
    every = sum(tile.pixels for tile in one.tiles(torch.ones_like(changed)))
    assert 23 * 31 <= every < 1.2 * 23 * 31


def test_threads_share_a_tile(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    least, most = tile_sides()
    assert (least, most) == (2 * map_graph.LEAST, 2 * map_graph.MOST)
    monkeypatch.setattr(map_graph, "tile_sides", lambda: (least, most))
    assert Map((148, 518), 8).tile == (74, 130)
    assert Map((19, 1), 8).tile == (19, 1)
