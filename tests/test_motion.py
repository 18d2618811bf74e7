"""Memory that moves with the picture, on the host and on the device path."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import eventful
from eventful import Config, Frame, Stream, StreamBatch, TopR, errors

PATCH, GRID = 16, (7, 9)
SIZE = (PATCH * GRID[0], PATCH * GRID[1])


@pytest.fixture(params=["host", "resident"], autouse=True)
def path(request, monkeypatch):
    devices = {"cpu"} if request.param == "resident" else set()
    monkeypatch.setattr("eventful.engine.plan.DEVICES", devices)
    return request.param


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=48, depth=3, num_heads=3, num_classes=0
    ).eval()


def carrying(vit, r=0, **options):
    """Moves memory along and updates almost nothing, so that what moved can be seen."""
    plain = {"context": None, "max_age": None, "scene_cut": None, "fallback": False}
    return eventful.convert(vit, Config.fast(TopR(r), **{**plain, **options}))


def window(offset: tuple[int, int], seed: int = 0) -> Tensor:
    """A frame of a large picture, `offset` pixels down and across."""
    make = torch.Generator().manual_seed(seed)
    picture = torch.randn(1, 3, 3 * SIZE[0], 3 * SIZE[1], generator=make)
    smooth = torch.nn.functional.avg_pool2d(picture, 5, 1, 2) * 4
    top, left = SIZE[0] + offset[0], SIZE[1] + offset[1]
    return smooth[..., top : top + SIZE[0], left : left + SIZE[1]].contiguous()


def tokens_of(output: Tensor) -> Tensor:
    """(B, h, w, D) without the class token."""
    return output[:, 1:].unflatten(1, GRID)


def step(stream, frame):
    return tokens_of(stream.call("forward_features", frame))


def test_outputs_move_with_a_whole_token(vit):
    """The camera moves right by one token: each output is where its content is now."""
    stream = Stream(carrying(vit))
    before = step(stream, window((0, 0)))
    after = step(stream, window((0, PATCH)))
    torch.testing.assert_close(after[:, :, :-1], before[:, :, 1:])
    assert not torch.equal(after, before)


def test_motion_is_that_since_the_last_frame(vit):
    stream = Stream(carrying(vit))
    before = step(stream, window((0, 0)))
    for t in (1, 2):
        after = step(stream, window((0, t * PATCH)))
    torch.testing.assert_close(after[:, :, :-2], before[:, :, 2:])


def test_outputs_stay_without_motion(vit):
    stream = Stream(carrying(vit, motion=False))
    before = step(stream, window((0, 0)))
    assert torch.equal(step(stream, window((0, PATCH))), before)


def test_half_a_token_is_the_mean_of_two(vit):
    stream = Stream(carrying(vit))
    raw = []
    vit.blocks[-1].register_forward_hook(lambda *a: raw.append(a[2]))
    with torch.no_grad():
        vit.forward_features(window((0, 0)))
    vit.blocks[-1]._forward_hooks.clear()
    stream.call("forward_features", window((0, 0)))
    after = step(stream, window((PATCH // 2, 0)))
    old = tokens_of(raw[0])
    expected = vit.norm((old[:, :-1] + old[:, 1:]) / 2)
    # Rows at the lower border come from outside the picture.
    torch.testing.assert_close(after[:, 1:-2, 1:-1], expected[:, 1:-1, 1:-1], rtol=1e-4, atol=1e-4)


def test_nothing_happens_where_nothing_moves(vit):
    """Sensor noise does not move a still picture: the same bits as without motion."""
    make = torch.Generator().manual_seed(1)
    still = window((0, 0))
    clip = [still + 0.02 * torch.randn(still.shape, generator=make) for _ in range(5)]
    outputs = []
    for motion in (True, False):
        stream = Stream(carrying(vit, r=4, motion=motion, protect=False))
        outputs.append([step(stream, frame) for frame in [still, *clip]])
        assert stream.last.updated == {"frame": 4.0}
    for on, off in zip(*outputs, strict=True):
        # Compared without positions, selections may differ in ties; held outputs must not.
        torch.testing.assert_close(on, off, rtol=1e-4, atol=1e-4)


def test_a_still_scene_costs_no_bits(vit):
    stream = Stream(carrying(vit))
    first = step(stream, window((3, 5)))
    for _ in range(3):
        assert torch.equal(step(stream, window((3, 5))), first)


def test_only_the_part_that_moves_is_carried(vit):
    left, right = window((0, 0)), window((0, PATCH))
    half = SIZE[1] // 2 // PATCH * PATCH
    mixed = torch.cat([left[..., :half], right[..., half:]], dim=-1)
    stream = Stream(carrying(vit))
    before = step(stream, left)
    after = step(stream, mixed)
    columns = half // PATCH
    assert torch.equal(after[:, :, : columns - 1], before[:, :, : columns - 1])
    torch.testing.assert_close(after[:, :, columns + 1 : -1], before[:, :, columns + 2 :])


def test_new_borders_are_selected_first(vit):
    stream = Stream(carrying(vit, r=GRID[0]), maps=True)
    stream.call("forward_features", window((0, 0)))
    stream.call("forward_features", window((0, PATCH)))
    mask = stream.last.mask[:, 1:].unflatten(1, GRID)
    assert mask[0, :, -1].all()
    assert int(mask.sum()) == GRID[0]


def test_content_that_moved_is_no_error(vit):
    """The reference moves too, so what moved as a whole need not be recomputed."""
    errors_of = {}
    for motion in (True, False):
        stream = Stream(carrying(vit, r=1, motion=motion), maps=True)
        stream.call("forward_features", window((0, 0)))
        stream.call("forward_features", window((0, PATCH)))
        errors_of[motion] = stream.last.error[:, 1:].unflatten(1, GRID)[0, :, :-1].mean()
    assert errors_of[True] < 0.05 * errors_of[False]


def test_streams_of_a_batch_move_on_their_own(vit):
    ways = {"right": (0, PATCH), "down": (PATCH, 0), "still": (0, 0)}
    batch = StreamBatch(carrying(vit, r=5))
    for name in ways:
        batch.join(name)
    for t in range(3):
        frames = torch.cat([window((t * dy, t * dx)) for dy, dx in ways.values()])
        together = batch.call("forward_features", frames)
    for row, (dy, dx) in enumerate(ways.values()):
        alone = Stream(carrying(vit, r=5))
        for t in range(3):
            single = alone.call("forward_features", window((t * dy, t * dx)))
        torch.testing.assert_close(together[row : row + 1], single, rtol=1e-4, atol=1e-4)


FAR = (0, 3 * PATCH)  # further than the search


def moved(offset: tuple[int, int]) -> Tensor:
    """(1, 2, 4, 5): the camera moved by so many pixels, as fractions of the frame."""
    down, across = offset[0] / SIZE[0], offset[1] / SIZE[1]
    return torch.tensor([down, across]).view(1, 2, 1, 1).expand(1, 2, 4, 5)


def test_motion_that_comes_with_the_frame_is_used(vit):
    found = {}
    for hint in (None, moved(FAR)):
        stream = Stream(carrying(vit))
        before = step(stream, window((0, 0)))
        after = step(stream, Frame(window(FAR), motion=hint))
        found[hint is not None] = torch.equal(after, before), after
    torch.testing.assert_close(found[True][1][:, :, :-3], before[:, :, 3:])
    assert not found[True][0]
    assert not torch.allclose(found[False][1][:, :, :-3], before[:, :, 3:], atol=1e-2)


def test_motion_that_the_picture_contradicts_is_not(vit):
    stream = Stream(carrying(vit))
    before = step(stream, window((0, 0)))
    after = step(stream, Frame(window((0, 0)), motion=moved(FAR)))
    assert torch.equal(after, before)


def test_motion_of_a_wrong_shape_is_refused(vit):
    stream = Stream(carrying(vit))
    frame = window((0, 0))
    frame.motion = torch.zeros(3, 2, 4, 5)
    with pytest.raises(errors.FrameError, match=r"\(1, 2, h, w\)"):
        stream.call("forward_features", frame)


def test_tapped_layers_move_too(vit):
    stream = Stream(carrying(vit))

    def layers(frame):
        return stream.call("forward_intermediates", frame, indices=[0, 2], norm=False)[1]

    before = layers(window((0, 0)))
    after = layers(window((0, PATCH)))
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new[..., :-1], old[..., 1:])


def test_a_frame_that_is_not_finite_moves_nothing(vit, path):
    stream = Stream(carrying(vit), check="sync")
    before = step(stream, window((0, 0)))
    bad = window((0, PATCH))
    bad[..., :4, :4] = torch.nan
    with pytest.raises(errors.NonFiniteError):
        stream.call("forward_features", bad)
    assert torch.equal(step(stream, window((0, 0))), before)


def test_a_snapshot_goes_on_moving(vit):
    model = carrying(vit, r=3)
    stream = Stream(model)
    for t in range(2):
        stream(window((0, t * PATCH)))
    other = Stream.load(model, stream.snapshot())
    frame = window((0, 2 * PATCH))
    torch.testing.assert_close(other(frame), stream(frame), rtol=1e-5, atol=1e-5)


def test_operations_of_motion_are_counted(vit):
    model = carrying(vit, r=3)
    stream = Stream(model)
    stream(window((0, 0)))
    assert stream.last.operations()[0].motion == 0
    stream(window((0, PATCH)))
    tokens, dim, carried = GRID[0] * GRID[1], 48, 2  # references and outputs
    compared = 169 * 64 + 10 * 256
    assert stream.last.operations()[0].motion == tokens * (compared + 4 * dim * carried)


def test_motion_needs_one_selection_per_frame():
    with pytest.raises(errors.ConfigError, match="gating='frame'"):
        Config.exact(motion=True)
