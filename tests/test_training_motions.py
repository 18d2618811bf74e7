"""Clips of motions to train on: kept, shifted, mirrored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eventful.paper.train import world
from eventful.paper.train.motions import Clips, Pool, motion_clips
from eventful.video.world import ACTIONS

SIDE, FRAMES, TUBELET = 64, 4, 2


@pytest.fixture(scope="module")
def clips() -> Clips:
    bank, world._BANK = world._BANK, 2
    world._bank.cache_clear()
    shot, labels = motion_clips(torch.arange(48, 52, dtype=torch.int32), FRAMES, SIDE)
    world._BANK = bank
    world._bank.cache_clear()
    return Clips.of(shot, labels, TUBELET)


def moved(clips: Clips, down: int, right: int, mirrored: bool = False) -> Clips:
    count = len(clips.labels)
    return clips.moved(torch.tensor([[down, right]] * count), torch.tensor([mirrored] * count))


def assert_equal(a: Clips, b: Clips) -> None:
    for name, part in vars(a).items():
        assert torch.equal(part, vars(b)[name]), name


def test_what_is_not_moved_is_the_same(clips):
    assert_equal(moved(clips, 0, 0), clips)


def test_mirrored_twice_is_the_same(clips):
    once = moved(clips, 0, 0, True)
    assert torch.equal(once.pixels, clips.pixels.flip(4))
    assert torch.equal(once.owner, clips.owner.flip(3))
    assert_equal(moved(once, 0, 0, True), clips)


def test_left_and_right_are_exchanged_in_a_mirror_and_nothing_else(clips):
    every = replace(clips, labels=torch.arange(4))
    names = [ACTIONS[label] for label in moved(every, 0, 0, True).labels]
    assert names == ["go right", "go left", *ACTIONS[2:4]]
    assert torch.equal(moved(every, 1, 1).labels, every.labels)


@pytest.mark.parametrize("mirrored", [False, True])
def test_pixels_cells_and_boxes_move_together(clips, mirrored):
    down, right = 2, -3
    then = moved(clips, down, right, mirrored)
    before = clips.pixels.flip(4) if mirrored else clips.pixels
    owner = clips.owner.flip(3) if mirrored else clips.owner
    right = -right if mirrored else right  # shifted first
    assert right in (-3, 3)
    cut = slice(None, right) if right < 0 else slice(right, None)
    was = slice(-right, None) if right < 0 else slice(None, -right)
    inner = then.owner[:, :, down:, cut]
    assert torch.equal(inner, owner[:, :, :-down, was])
    assert (then.owner[:, :, :down] == -1).all()
    pixels = then.pixels[:, :, :, 4 * down :, _times_four(cut)]
    assert torch.equal(pixels, before[:, :, :, : -4 * down, _times_four(was)])
    for row in range(len(then.sight.owner)):
        _inside(then, row)


def _times_four(part: slice) -> slice:
    start, stop = part.start, part.stop
    return slice(start and 4 * start, stop and 4 * stop)


def _inside(clips: Clips, row: int) -> None:
    """The centre of a cell that belongs to somebody lies in that one's box."""
    sight = clips.sight
    for y, x in (sight.owner[row] >= 0).nonzero().tolist():
        left, top, right, bottom = sight.boxes[row, int(sight.owner[row, y, x])].tolist()
        assert left - 0.5 <= 4 * x + 2 <= right + 0.5
        assert top - 0.5 <= 4 * y + 2 <= bottom + 0.5


def test_what_leaves_the_frame_is_not_seen(clips):
    away = moved(clips, 0, SIDE // 4)
    assert not away.seen.any()
    assert (away.owner == -1).all()


def test_a_clip_of_a_pool_does_not_depend_on_the_others_of_a_step(clips):
    asked = []

    def make(seeds: torch.Tensor) -> Clips:
        asked.append(seeds.tolist())
        return Clips(**{name: part[seeds.long() - 48] for name, part in vars(clips).items()})

    pool = Pool(make, range(48, 52))
    some = pool(torch.tensor([51, 48], dtype=torch.int32))
    assert_equal(some, make(torch.tensor([51, 48])))
    pool(torch.tensor([49], dtype=torch.int32))
    assert asked == [[48, 49, 50, 51], [51, 48]]  # rendered once
