"""Patch embeddings as a matrix product: the convolution's result, for patches and tubelets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eventful import Config, Stream, TopR, convert
from eventful.models.vivit.model import SpatialModel, ViViTConfig
from eventful.surgery import patches
from tolerances import assert_near


@pytest.mark.parametrize("size", [(20, 12), (23, 13)], ids=["whole patches", "a rest"])
@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(3, 8, 4, stride=4),
        nn.Conv2d(3, 8, (5, 3), stride=(5, 3), bias=False),
        nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)),
        nn.Conv3d(1, 8, (2, 5, 3), stride=(2, 5, 3), padding="valid"),
    ],
    ids=repr,
)
def test_the_product_is_the_convolution(module, size):
    assert patches.embeds_patches(module)
    time = (4,) if isinstance(module, nn.Conv3d) else ()
    image = torch.randn(2, module.in_channels, *time, *size)
    with torch.no_grad():
        forward, expected = patches.PatchForward(None, "", module), module(image)
        got = forward._product(_Keeps(), image)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("side", [3, 14, 16])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_patches_are_copied_as_they_are(kind, side, start):
    """As wide numbers where memory allows it: rows of odd length and odd starts do not."""
    image = torch.randn(2, 3, 2 * side, 3 * side + 4).to(kind)[..., start : start + 3 * side]
    cells = image.reshape(2, 3, 2, side, 3, side).permute(0, 2, 4, 1, 3, 5)
    room = torch.full((2, 2, 3, 3 * side * side + 5), torch.nan, dtype=kind)
    to = room[..., : 3 * side * side].unflatten(-1, (3, side, side))
    patches._copy(to, cells)
    assert torch.equal(to, cells)
    assert room[..., 3 * side * side :].isnan().all()


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(3, 8, 4, stride=2),
        nn.Conv2d(3, 8, 4, stride=4, padding=1),
        nn.Conv3d(3, 8, (2, 4, 4), stride=(1, 4, 4)),
        nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), dilation=(1, 2, 2)),
        nn.Conv3d(8, 8, (2, 4, 4), stride=(2, 4, 4)),
        nn.Linear(3, 8),
    ],
    ids=repr,
)
def test_other_convolutions_stay(module):
    assert not patches.embeds_patches(module)


def test_a_step_on_a_device_embeds_tubelets_by_a_product(monkeypatch):
    torch.manual_seed(0)
    model = SpatialModel(ViViTConfig(size=32, patch=8, dim=32, depth=2, heads=2)).eval()
    clips = torch.randn(3, 1, 3, 2, 32, 32)
    config = Config.fast(TopR(4), fallback=False)
    made, calls = {}, []
    product = patches.PatchForward._product

    def counted(self, step, image):
        calls.append(image.shape)
        return product(self, step, image)

    monkeypatch.setattr(patches.PatchForward, "_product", counted)
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr("eventful.engine.plan.DEVICES", devices)
        with torch.no_grad():
            stream = Stream(convert(model, config))
            made[len(devices)] = [stream(clip) for clip in clips]
        assert len(calls) == len(clips) * len(devices)
    for one, other in zip(made[0], made[1], strict=True):
        assert_near(one, other, "step", "tubelets")


class _Keeps:
    """A step without a memory for constants."""

    def constant(self, key, make):
        return make()
