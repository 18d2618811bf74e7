"""`eventful.read`: motion vectors of the file."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eventful
import videos
from reading import pan  # noqa: F401

av = pytest.importorskip("av")
pytest.importorskip("PIL")


@pytest.mark.parametrize(("size", "grid"), [(None, (6, 8)), ((48, 64), (6, 8)), (64, (8, 8))])
def test_motion_vectors_of_a_pan(pan, size, grid):
    frames = list(eventful.read(pan, size, motion=True))
    assert frames[0].motion is None
    for frame in frames[1:]:
        assert frame.motion.shape == (1, 2, *grid)
        scale = frame.region.height / 96
        down, across = frame.motion[0].flatten(1).nanmedian(1).values
        assert down.item() * frame.shape[2] == pytest.approx(2 * scale, abs=0.1)
        assert across.item() * frame.shape[3] == pytest.approx(4 * scale, abs=0.1)
    unknown = frames[1].motion.isnan().all(3).all(1)[0].tolist()
    assert unknown == (
        [True, False, False, False, False, False, False, True] if size == 64 else [False] * 6
    )


def test_motion_points_to_where_the_content_was(pan):
    frames = list(eventful.read(pan, motion=True, normalize="none"))
    now, before = frames[5], frames[4]
    down, across = (now.motion[0, :, 3, 4] * torch.tensor([96, 128])).round().int().tolist()
    here = now[..., 48:64, 64:80]
    there = before[..., 48 + down : 64 + down, 64 + across : 80 + across]
    assert (here - there).abs().mean() < (here - before[..., 48:64, 64:80]).abs().mean() / 4


def test_motion_is_not_given_after_a_b_frame(tmp_path):
    path = videos.pan(tmp_path / "b.mp4", 24, step=(2, 4), between=2)
    with av.open(str(path)) as container:
        kinds = [frame.pict_type.name for frame in map(named, container.decode(video=0))]
    assert "B" in kinds
    frames = list(eventful.read(path, motion=True))
    given = [frame.motion is not None for frame in frames]
    follows = [False, *(b == "P" and a != "B" for a, b in itertools.pairwise(kinds))]
    assert given == follows


def named(frame):
    return SimpleNamespace(pict_type=av.video.frame.PictureType(frame.pict_type))


def test_motion_is_off_unless_asked(pan):
    assert all(frame.motion is None for frame in eventful.read(pan))


def test_vectors_from_later_pictures_are_refused():
    from eventful.video.motion import vector_grid

    names = ["source", "w", "h", "dst_x", "dst_y", "motion_x", "motion_y", "motion_scale"]
    kind = np.dtype([(name, "i4") for name in names])
    past = (-1, 16, 16, 8, 8, 4, 8, 4)
    grid = vector_grid(np.array([past, (-1, 8, 8, 20, 4, 0, 4, 4)], kind), 32, 40)
    assert grid.shape == (2, 2, 3)
    assert grid[:, 0, 0].tolist() == [2.0, 1.0]
    assert grid[:, 0, 1].tolist() == [1.0, 0.0]
    assert np.isnan(grid[:, 1]).all()
    assert vector_grid(np.array([past, (1, 16, 16, 8, 8, 4, 8, 4)], kind), 32, 40) is None
    mixed = [(-1, 16, 8, 8, 4, 0, 0, 4), (-1, 8, 8, 4, 12, 12, 0, 4)]
    assert vector_grid(np.array(mixed, kind), 32, 40)[1, 0, 0] == 1.0  # by area: 2 to 1
