"""Operations on maps of which few pixels change, in every backend against the reference."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import pytest
import torch

import eventful
from backends import DEVICE, also, backends, make, poison, triton  # noqa: F401
from eventful import ops
from eventful.models.vitdet.updated import SCALES, pyramid_levels
from eventful.ops import Lift, MapLayer, MapLevels, packed, reference

CLOSE = {"rtol": 1e-5, "atol": 1e-5}

LEVELS = MapLevels(((12, 7), (5, 3), (1, 1), (2, 9)))


def map_layer(taps: int, entries: int, **options) -> MapLayer:
    weight = make(entries, taps, 16, 5, seed=1) / 4
    norm = (make(entries, 5, seed=3), make(entries, 5, seed=4), 1e-6)
    return MapLayer(weight, make(entries, 5, seed=2), norm if options.get("norm") else None,
                    options.get("relu", False))  # fmt: skip


@backends("update_maps_")
@pytest.mark.parametrize("taps", [9, 1])
@pytest.mark.parametrize("options", [{"norm": True}, {"relu": True}], ids=str)
@pytest.mark.parametrize(("share", "slotted"), [(0.2, False), (0.2, True), (0.9, True), (0, False)])
def test_update_maps(backend, taps, options, share, slotted, poison):
    entries = 3 if "norm" in options else 1  # the last entry serves the last two levels
    layer = map_layer(taps, entries, **options)
    x, before = (make(4, LEVELS.pixels, width, seed=7) for width in (16, 5))
    slots = torch.tensor([3, 1], device=DEVICE) if slotted else None
    x, before = (x, before) if slotted else (x[:2], before[:2])
    changed = make(2, LEVELS.pixels, seed=8).sigmoid() < share
    expected, found = before.clone(), before.clone()
    listed = reference.list_changed(changed, LEVELS.sizes)
    reference.update_maps_(expected, x, layer, listed, LEVELS, slots)
    with eventful.use_backend(backend):
        ops.update_maps_(found, x, layer, ops.list_changed(changed, LEVELS.sizes), LEVELS, slots)
    torch.testing.assert_close(found, expected, **CLOSE)
    kept = torch.ones(before.shape[:2], dtype=torch.bool, device=DEVICE)
    kept[slice(None) if slots is None else slots] = ~changed
    assert torch.equal(found[kept], before[kept])


@backends("update_maps_")
def test_the_first_levels_of_maps(backend, poison):
    """A list for some levels: the maps have more, which stay as they are."""
    layer, some = map_layer(9, 1), MapLevels(LEVELS.sizes[:2])
    x, before = (make(2, LEVELS.pixels, width, seed=7) for width in (16, 5))
    changed = make(2, LEVELS.pixels, seed=8).sigmoid() < 0.4
    expected, found = before.clone(), before.clone()
    reference.update_maps_(
        expected, x, layer, reference.list_changed(changed, LEVELS.sizes), LEVELS
    )
    with eventful.use_backend(backend):
        ops.update_maps_(found, x, layer, ops.list_changed(changed, some.sizes), some)
    torch.testing.assert_close(found[:, : some.pixels], expected[:, : some.pixels], **CLOSE)
    assert torch.equal(found[:, some.pixels :], before[:, some.pixels :])


@pytest.mark.parametrize("backend", ["reference", triton])
@pytest.mark.parametrize("levels", [4, 2])
def test_pixels_are_counted_by_stream(backend, levels):
    sizes = LEVELS.sizes[:levels]
    used = sum(h * w for h, w in sizes)
    changed = make(3, LEVELS.pixels, seed=8).sigmoid() < 0.4
    changed[1] = False
    with eventful.use_backend(backend):
        found = ops.list_changed(changed, sizes)
    assert found.count.tolist() == [int(row[:used].sum()) for row in changed]
    assert found.mask is changed
    assert found.sizes == sizes


@backends("lift_tokens_")
@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("slotted", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_lift_tokens(backend, scale, slotted, full, poison):
    grid, place = (3, 5), 4
    tokens, weight = make(2, 15, 16, seed=1), make(16, scale * scale * 7, seed=2)
    bias = make(7, seed=3) if full else None
    norm = (make(7, seed=4), make(7, seed=5), 1e-6) if full else None
    before = make(4 if slotted else 2, place + 15 * scale**2 + 3, 7, seed=6)
    slots = torch.tensor([3, 1], device=DEVICE) if slotted else None
    changed = make(2, 15, seed=8) > 0
    expected, found = before.clone(), before.clone()
    listed = reference.list_changed(changed, (grid,))
    call = (tokens, Lift(weight, bias, norm, full, scale), listed, grid, place, slots)
    reference.lift_tokens_(expected, *call)
    with eventful.use_backend(backend):
        ops.lift_tokens_(found, *call)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert torch.equal(found == before, expected == before)
    assert (found != before).any(dim=-1).sum() == changed.sum() * scale**2


@pytest.mark.parametrize("backend", [triton])
@pytest.mark.parametrize("reach", [0, also(1), 3])
@pytest.mark.parametrize(("grid", "share"), [((7, 9), 0.03), ((8, 5), 0.2), ((3, 2), 1.0)])
def test_changed_pixels_by_a_kernel(backend, reach, grid, share):
    levels, changed = pyramid_levels(grid), make(2, *grid, seed=3).sigmoid() < share
    expected = reference.changed_pixels(changed, levels, SCALES, reach)
    with eventful.use_backend(backend):
        assert torch.equal(ops.changed_pixels(changed, levels, SCALES, reach), expected)


@pytest.mark.skipif(not packed.packing_available(), reason="needs oneDNN")
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_rearranged_weights_on_a_cpu(share, monkeypatch):
    """Layers as large as in a real pyramid: three levels with weights of their own, and a lift."""
    levels = MapLevels(((70, 70), (9, 20), (5, 3)))  # more pixels than are gathered at once
    inside, outside, scale = 96, 160, 2
    layer = MapLayer(torch.randn(3, 9, inside, outside) / 30, torch.randn(3, outside))
    lift = Lift(torch.randn(inside, scale**2 * outside) / 10, torch.randn(outside), scale=scale)
    assert layer.weight[0].numel() >= packed.LEAST
    served = []
    whole = packed.packed_product
    monkeypatch.setattr(packed, "LEAST", lift.weight.numel())
    monkeypatch.setattr(
        packed, "packed_product", lambda *args: served.append(args[-1]) or whole(*args)
    )
    mask = torch.rand(2, levels.pixels) < share
    x, before = torch.randn(2, levels.pixels, inside), torch.randn(2, levels.pixels, outside)
    lifted = torch.randn(2, 20 * 25, inside), torch.rand(2, 20 * 25) < share
    expected, found = [], []
    with torch.no_grad():
        for results, backend in ((expected, "reference"), (found, "eager")):
            maps, pixels = before.clone(), torch.zeros(2, 500 * scale**2, outside)
            with eventful.use_backend(backend):
                ops.update_maps_(maps, x, layer, ops.list_changed(mask, levels.sizes), levels)
                listed = ops.list_changed(lifted[1], ((20, 25),))
                ops.lift_tokens_(pixels, lifted[0], lift, listed, (20, 25), 0)
            results += [maps, pixels]
            assert bool(served) == (backend == "eager")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert torch.equal(found[0][~mask], before[~mask])
    assert set(served) <= set(map(packed.served_rows, range(1, 2049)))
