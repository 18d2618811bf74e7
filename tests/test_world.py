"""The procedural world: what a seed fixes, and whether the ground truth is that of the pixels."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import ConfigError
from eventful.video.world import (
    ACTIONS,
    CAMERAS,
    CLASSES,
    RATE,
    Shot,
    World,
    as_bytes,
    boxes_of,
    render,
    truth_of,
)
from eventful.video.world.camera import pose
from eventful.video.world.figures import KINDS
from eventful.video.world.tracks import Actors, actors

SMALL = (96, 160)


def world(seed: int, **options) -> World:
    return World(seed, **{"frames": 80, "camera": "hand", "size": SMALL, "exposures": 1, **options})


@pytest.fixture(scope="module")
def shots() -> list[Shot]:
    """Frames of scenes with objects in front of each other."""
    return [world(seed, camera="stand").shot([0, 12]) for seed in range(4)]


# --- Determinism


def test_a_seed_gives_the_same_frame_to_the_bit_and_another_seed_another() -> None:
    first = world(7, exposures=3).read([5])
    assert first.shape == (1, 3, *SMALL)
    assert first.dtype == torch.uint8
    assert torch.equal(first, world(7, exposures=3).read([5]))
    other = world(8, exposures=3).read([5])
    assert (first.int() - other.int()).abs().float().mean() > 10


def test_frames_do_not_depend_on_the_order_they_are_asked_for() -> None:
    forward = torch.stack(list(world(11, frames=5)))
    assert torch.equal(world(11).read([4, 1, 3, 1]), forward[[4, 1, 3, 1]])


@pytest.mark.parametrize("camera", ["hand", "cut"])
def test_a_frame_alone_is_the_one_of_a_batch(camera: str) -> None:
    several, alone = (world(3, camera=camera).shot(i) for i in ([9, 70, 2], [70]))
    assert torch.allclose(several.pixels[1], alone.pixels[0], atol=1e-5)
    levels = as_bytes(several.pixels[1]).int() - as_bytes(alone.pixels[0]).int()
    assert levels.abs().max() <= 1
    assert torch.equal(several.owner[1], alone.owner[0])


def test_scenes_rendered_together_are_those_rendered_alone() -> None:
    seeds = torch.tensor([3, 4], dtype=torch.int32)
    modes = torch.full((2,), CAMERAS.index("hand"))
    both = render(seeds, modes, torch.full((2,), 9 / RATE), SMALL, actors, exposures=1)
    for row, seed in enumerate((3, 4)):
        assert torch.allclose(both.pixels[row], world(seed).shot([9]).pixels[0], atol=1e-5)


def test_boxes_do_not_depend_on_the_blur() -> None:
    sharp, blurred = (world(5, exposures=count).boxes([6]) for count in (1, 3))
    for name, value in vars(sharp).items():
        assert torch.equal(value, getattr(blurred, name)), name


def test_a_camera_follows_from_the_seed_if_none_is_named() -> None:
    modes = {World(seed).mode for seed in range(40)}
    assert modes == set(CAMERAS)
    assert World(5).mode == World(5).mode


def test_a_world_is_pickled_without_its_pictures() -> None:
    made = world(2, frames=2)
    made.read([0])
    content = pickle.dumps(made)
    assert len(content) < 1000
    assert torch.equal(pickle.loads(content).read([1]), made.read([1]))


# --- Ground truth


def test_boxes_enclose_the_masks_exactly_and_masks_are_the_owned_pixels(shots) -> None:
    for shot in shots:
        for index in range(len(shot.pixels)):
            truth = truth_of(shot, index)
            assert torch.equal(truth.masks.sum(dim=0).bool(), shot.owner[index] >= 0)
            assert truth.masks.sum(dim=0).max() <= 1
            for box, mask in zip(truth.boxes, truth.masks, strict=True):
                rows, columns = mask.nonzero().unbind(dim=1)
                edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert box.tolist() == [int(edge) for edge in edges]


def test_labels_visibility_and_depth_have_their_ranges(shots) -> None:
    for shot in shots:
        found = boxes_of(shot)
        assert ((found.visibility >= 0) & (found.visibility <= 1)).all()
        assert (found.visibility[found.seen] > 0).all()
        assert ((found.labels[found.seen] >= 0) & (found.labels[found.seen] < len(CLASSES))).all()
        assert (found.ignore | (found.visibility >= 0.25))[found.seen].all()
        assert (shot.depth > 0).all()


def pair(front: bool) -> Shot:
    """A crate, and another ahead of it or none."""

    def cast(seeds: Tensor, seconds: Tensor) -> Actors:
        def row(*values: float) -> Tensor:
            return torch.tensor([values])

        zero, one = torch.zeros(1, 2), torch.ones(1, 2)
        kind = torch.full((1, 2), CLASSES.index("crate"))
        there = torch.tensor([[True, front]])
        number = torch.tensor([[0, 1]])
        x, z, metres = row(0.0, 0.3), row(7.0, 6.0), row(1.2, 1.2)
        return Actors(kind, x, zero, z, metres, one, zero, zero, number.int(), number, there)

    seeds, modes = torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.long)
    return render(seeds, modes, torch.zeros(1), SMALL, cast, exposures=1)


def test_what_is_hidden_is_less_visible_and_farther_away() -> None:
    free, hidden = truth_of(pair(front=False)), truth_of(pair(front=True))
    assert free.tracks.tolist() == [0]
    assert hidden.tracks.tolist() == [0, 1]
    assert free.visibility[0] > 0.9
    assert 0.1 < hidden.visibility[0] < free.visibility[0] - 0.1
    behind, front = (hidden.depth[mask].mean() for mask in hidden.masks)
    assert front < behind


def test_an_object_is_nearer_than_what_is_behind_it(shots) -> None:
    for seed, shot in enumerate(shots):
        seconds = torch.tensor([i / RATE for i in (0, 12)])
        seeds, modes = torch.full((2,), seed, dtype=torch.int32), torch.zeros(2, dtype=torch.long)

        def nobody(seeds: Tensor, seconds: Tensor) -> Actors:
            everybody = actors(seeds, seconds)
            return replace(everybody, there=torch.zeros_like(everybody.there))

        empty = render(seeds, modes, seconds, SMALL, nobody, exposures=1)
        assert (empty.owner == -1).all()
        mine = shot.owner >= 0
        assert (shot.depth <= empty.depth + 0.3)[mine].all()  # feet may be below the ground
        assert (shot.depth < empty.depth)[mine].float().mean() > 0.95


@pytest.mark.parametrize("camera", ["walk", "cut"])
def test_tracks_persist_and_are_unique_in_a_frame(camera: str) -> None:
    made = world(6, camera=camera)
    found = made.boxes(range(0, 80, 10))
    kinds: dict[int, int] = {}
    kept = 0
    before: set[int] = set()
    for row in range(len(found.seen)):
        seen = found.seen[row]
        tracks = found.tracks[row, seen].tolist()
        assert len(set(tracks)) == len(tracks)
        for track, label in zip(tracks, found.labels[row, seen].tolist(), strict=True):
            assert kinds.setdefault(track, label) == label
        kept += len(before & set(tracks))
        before = set(tracks)
    assert kept >= 16  # from one of the eight frames to the next


def test_a_track_moves_little_from_frame_to_frame() -> None:
    found = world(6, camera="stand").boxes(range(4))
    for row in range(3):
        for column in (found.seen[row] & found.seen[row + 1]).nonzero()[:, 0].tolist():
            if found.tracks[row, column] == found.tracks[row + 1, column]:
                moved = found.boxes[row, column] - found.boxes[row + 1, column]
                assert moved.abs().max() <= 0.1 * SMALL[1]


# --- Cameras


def changes(camera: str, seed: int, first: int, second: int) -> float:
    """Typical change of a pixel of the background."""
    shot = world(seed, camera=camera).shot([first, second])
    background = (shot.owner < 0).all(dim=0)
    return float((shot.pixels[0] - shot.pixels[1]).abs().mean(dim=0)[background].median())


@pytest.mark.parametrize("seed", range(2))
def test_the_background_stands_still_or_not(seed: int) -> None:
    still = changes("stand", seed, 0, 12)
    assert still < 0.015
    for camera in ("pan", "hand", "walk"):
        assert changes(camera, seed, 0, 12) > max(0.012, 1.5 * still), camera


@pytest.mark.parametrize("seed", range(2))
def test_a_cut_changes_everything_at_once(seed: int) -> None:
    assert changes("cut", seed, 57, 59) < 0.015
    assert changes("cut", seed, 59, 61) > 0.03


# --- What tells the classes apart


@pytest.fixture(scope="module")
def objects() -> tuple[Tensor, Tensor, Tensor]:
    """Colour histograms (N, 24), sizes (N, 2) and labels (N,) of objects of 60 scenes."""
    colours, sizes, labels = [], [], []
    for first in range(5000, 5060, 12):
        seeds = torch.arange(first, first + 12, dtype=torch.int32)
        modes, seconds = torch.zeros(12, dtype=torch.long), torch.ones(12)
        shot = render(seeds, modes, seconds, SMALL, actors, exposures=1, detail=64)
        found = boxes_of(shot)
        for index in range(12):
            truth = truth_of(shot, index, found)
            for row in (~truth.ignore).nonzero()[:, 0].tolist():
                pixels = shot.pixels[index][:, truth.masks[row]]
                counts = torch.cat([torch.histc(channel, 8, 0, 1) for channel in pixels])
                colours.append(counts / pixels.shape[1])
                sizes.append((truth.boxes[row, 2:] - truth.boxes[row, :2]).log())
                labels.append(truth.labels[row])
    return torch.stack(colours), torch.stack(sizes), torch.stack(labels)


def by_neighbours(labels: Tensor, *features: Tensor) -> float:
    """Accuracy of the vote of the five nearest other objects."""
    places = torch.cat([(part - part.mean(dim=0)) / part.std() for part in features], dim=1)
    far = torch.cdist(places, places).fill_diagonal_(math.inf)
    near = labels[far.topk(5, largest=False).indices]
    votes = F.one_hot(near, len(CLASSES)).sum(dim=1)
    return float((votes.argmax(dim=1) == labels).float().mean())


def test_colour_and_size_do_not_give_the_class_away(objects) -> None:
    colours, sizes, labels = objects
    assert len(labels) > 100
    assert len(labels.unique()) == len(CLASSES)
    assert by_neighbours(labels, colours, sizes) < 0.5
    # The measure notices a feature that does: which pattern the class has.
    patterns = torch.tensor([KINDS[label].pattern for label in labels.tolist()])
    shown = F.one_hot(patterns, 7).float()
    assert by_neighbours(labels, colours, sizes, 3 * shown) > 0.5


# --- Actions


def acting(action: str, seed: int, indices: list[int]) -> tuple[Tensor, Tensor]:
    """Boxes (T, 4) of the two figures, the second of zeros if it is not there."""
    made = world(seed, frames=32, camera="stand", size=(96, 96), action=action)
    found = made.boxes(indices)
    return found.boxes[:, 0] * found.seen[:, :1], found.boxes[:, 1] * found.seen[:, 1:2]


def centre(boxes: Tensor) -> Tensor:
    return (boxes[:, 0] + boxes[:, 2]) / 2


@pytest.mark.parametrize("seed", range(2))
def test_figures_move_as_the_label_says(seed: int) -> None:
    ends = [0, 16, 31]
    left, right = (centre(acting(name, seed, ends)[0]) for name in ("go left", "go right"))
    assert (left.diff() < -2).all()
    assert (right.diff() > 2).all()
    near, away = (acting(name, seed, [2, 28])[0] for name in ("come near", "go away"))
    height_near, height_away = (boxes[:, 3] - boxes[:, 1] for boxes in (near, away))
    assert height_near[1] > 1.15 * height_near[0]
    assert height_away[1] < 0.87 * height_away[0]
    jump = acting("jump", seed, [0, 5, 11, 16, 21])[0][:, 3]  # the lower edge
    assert jump[1] < jump[0] - 2
    assert jump[2] > jump[1] + 2
    assert jump[3] < jump[2] - 2
    assert jump[4] > jump[3] + 2
    rise, drop = (acting(name, seed, ends)[0][:, 3] for name in ("rise", "drop"))
    assert rise[2] < rise[0] - 3
    assert drop[2] > drop[0] + 3
    meet, part = (acting(name, seed, [0, 31]) for name in ("meet", "part"))
    gap_meet, gap_part = ((centre(a) - centre(b)).abs() for a, b in (meet, part))
    assert gap_meet[1] < gap_meet[0] - 3
    assert gap_part[1] > gap_part[0] + 3


@pytest.mark.parametrize("seed", range(2))
def test_figures_turn_as_the_label_says(seed: int) -> None:
    made = world(seed, frames=32, camera="stand", size=(96, 96), action="spin")
    angle = made.shot([0, 8, 16, 24]).actors.angle[:, 0]
    assert torch.allclose(angle.diff().abs(), torch.tensor(0.75 * math.pi), atol=1e-4)
    back = centre(acting("turn back", seed, [0, 16, 31])[0])
    assert (back[1] - back[0]).abs() > 3
    assert (back[1] - back[0]).sign() == -(back[2] - back[1]).sign()
    fallen = world(seed, frames=32, camera="stand", size=(96, 96), action="fall over")
    assert float(fallen.shot([31]).actors.angle[0, 0].abs()) == pytest.approx(math.pi / 2)


def test_only_pairs_have_a_second_figure() -> None:
    for action in ("meet", "part", "chase"):
        assert acting(action, 0, [4])[1].any()
    for action in ("jump", "stop", "sway"):
        assert not acting(action, 0, [4])[1].any()


def test_the_scene_does_not_tell_the_action() -> None:
    """At the beginning, those that start in the middle show the same picture."""
    start = [
        world(9, frames=32, camera="stand", size=(64, 64), action=name).read([0])
        for name in ("jump", "rise", "spin")
    ]
    assert torch.equal(start[0], start[1])
    assert torch.equal(start[0], start[2])
    assert len(set(ACTIONS)) == 16


# --- Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"camera": "fly"}, "camera is one of stand, hand"),
        ({"action": "swim"}, "action is one of go left"),
        ({"frames": 0}, "at least one frame"),
        ({"size": (8, 64)}, "16 x 16 pixels"),
        ({"exposures": 2}, "odd number, not 2"),
        ({"exposures": -1}, "odd number, not -1"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        world(0, **options)


def test_frames_outside_the_video() -> None:
    for index in (-1, 3):
        with pytest.raises(ConfigError, match=f"frame {index} of a video of 3"):
            world(0, frames=3).read([index])
    assert world(0, frames=3).read([]).shape == (0, 3, *SMALL)


def test_boxes_of_many_frames_have_one_shape():
    """Who is drawn differs from frame to frame; what is returned does not."""
    video = World(56, frames=100, camera="stand", size=(32, 48), exposures=1)
    found = video.boxes(range(0, 100, 6))
    assert found.boxes.shape == (17, 11, 4)
    assert torch.equal(found.boxes[9:10], video.boxes([54]).boxes)
    assert video.boxes([]).boxes.shape == (0, 11, 4)


def test_who_is_left_out_is_not_seen(monkeypatch):
    for seed in (3, 56, 60):
        video = world(seed, camera="pan")
        few = video.shot([0, 40])
        monkeypatch.setattr("eventful.video.world.rendering._seen", lambda e, v: e.there | True)
        every = video.shot([0, 40])
        monkeypatch.undo()
        assert torch.equal(few.pixels, every.pixels)
        assert torch.equal(few.owner, every.owner)


@pytest.mark.parametrize("camera", CAMERAS)
def test_late_frames_still_show_the_scene(camera):
    video = World(7, frames=5000, camera=camera, size=(48, 80), exposures=1)
    shot = video.shot([700, 1500, 4999])
    assert float(shot.depth.min()) > 0
    assert all(World(seed, 5000, camera, (48, 80), exposures=1).boxes([4000]).seen.any()
               for seed in (7, 8, 9))  # fmt: skip


def test_cameras_differ_whatever_the_seed():
    places = [
        pose(torch.tensor([first + n], dtype=torch.int32), torch.zeros(1), torch.zeros(1)).place
        for first in (0, 2_000_000_000)
        for n in range(8)
    ]
    assert len({tuple(place[0].tolist()) for place in places}) == 16


def test_visibility_of_lone_figures():
    """Wholly in view, nothing in front: about all of it, whatever the camera's turn."""
    seen = []
    for seed in range(40):
        video = world(seed, camera="cut", size=(144, 256))
        found = video.boxes([0])
        for row in found.seen[0].nonzero()[:, 0].tolist():
            box = found.boxes[0, row]
            others = [other for other in found.seen[0].nonzero()[:, 0].tolist() if other != row]
            apart = all(
                box[2] < found.boxes[0, o, 0] or box[0] > found.boxes[0, o, 2] for o in others
            )
            inside = box[0] > 2 and box[1] > 2 and box[2] < 254 and box[3] < 142
            if apart and inside and box[2] - box[0] > 16:
                seen.append(float(found.visibility[0, row]))
    assert len(seen) > 8
    assert sorted(seen)[len(seen) // 4] > 0.9  # trees and lamps may hide some


def test_an_action_takes_the_whole_clip():
    short = World(5, frames=8, action="rise", size=(64, 64), exposures=1, camera="stand")
    usual = World(5, frames=32, action="rise", size=(64, 64), exposures=1, camera="stand")
    assert torch.equal(short.boxes([7]).boxes, usual.boxes([28]).boxes)


@pytest.mark.parametrize("seed", [-1, 2**31, 1.5, True])
def test_seeds_that_are_none(seed):
    with pytest.raises(ConfigError, match="seed"):
        World(seed)
