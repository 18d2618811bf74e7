"""Motion between frames: what is found in pictures, how memory is carried, on every backend."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import eventful
from backends import (  # noqa: F401
    COMPARED,
    INTERPRETED,
    MOTION,
    also,
    compared,
    poison,
)
from eventful import ops
from eventful.ops import eager, reference
from eventful.ops.reference.motion import CELL

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
COMPARED.update(MOTION)

# A backend on a device; on a device eager calls the reference.
EAGER = ("eager", "cpu")
ON_DEVICE = [
    pytest.param(backend, "cuda", marks=[pytest.mark.gpu, on_cuda])
    for backend in ("eager", "triton")
]


def interpreted(*more: pytest.MarkDecorator) -> object:
    return pytest.param("triton", "cpu", marks=[in_interpreter, pytest.mark.triton, *more])


# The interpreter needs 0.1 s to match one token: the default run takes the comparisons only.
OTHERS = [EAGER, interpreted(), *ON_DEVICE]
ALL = [("reference", "cpu"), *OTHERS]
MATCHING = [("reference", "cpu"), EAGER, interpreted(pytest.mark.slow), *ON_DEVICE]
on_others, on_all, matching_on_all = (
    pytest.mark.parametrize(("backend", "device"), cases) for cases in (OTHERS, ALL, MATCHING)
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scene(batch: int, grid: tuple[int, int], seed: int = 0) -> Tensor:
    """A smooth picture of unit variance, CELL * 4 pixels larger than `grid` on each side."""
    high, wide = (CELL * (side + 8) for side in grid)
    picture = F.interpolate(
        noise(batch, 1, high // 4, wide // 4, seed=seed), (high, wide), mode="bilinear"
    )
    return (picture / picture.std())[:, 0]


def view(picture: Tensor, grid: tuple[int, int], down: int = 0, across: int = 0) -> Tensor:
    """What a camera sees that has moved by so many fine pixels."""
    high, wide = (CELL * side for side in grid)
    top, left = 4 * CELL + down, 4 * CELL + across
    return picture[:, top : top + high, left : left + wide].contiguous()


def match(backend: str, device: str, *args: Tensor | None) -> Tensor:
    moved = [None if part is None else part.to(device) for part in args]
    with eventful.use_backend(backend):
        return ops.match_blocks(*moved).cpu()


def carried(backend: str, device: str, memory: Tensor, motion: Tensor, prefix: int = 0, slots=None):
    slots = None if slots is None else slots.to(device)
    with eventful.use_backend(backend):
        return ops.carry(memory.to(device), motion.to(device), prefix, slots).cpu()


def test_everything_eager_computes_itself_is_compared_here():
    own = {"carry", "match_blocks"}
    assert {name for name in eager.__all__ if name in own} == MOTION
    assert compared(*MOTION) <= COMPARED


# Grey pictures.


@pytest.mark.parametrize("size", [(24, 40), (48, 80), (48, 40), (42, 70), (20, 33)])
@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
def test_a_grey_picture_is_the_mean_of_areas(size, kind):
    image = noise(2, 3, *size).to(kind)
    picture = ops.grey_picture(image, (3, 5))
    expected = F.interpolate(image.float().mean(1, keepdim=True), (24, 40), mode="area")[:, 0]
    assert picture.dtype == torch.float32
    torch.testing.assert_close(picture, expected)


# Matching, against what is true of the pictures.


@matching_on_all
@pytest.mark.parametrize("shift", [(0, 3), (-5, 8), (12, -11), (4, 4)])
def test_a_shift_by_whole_pixels_is_found(backend, device, shift):
    grid = (5, 6)
    picture = scene(1, grid)
    found = match(backend, device, view(picture, grid, *shift), view(picture, grid), None)
    expected = torch.tensor(shift) / CELL
    inner = found[:, 2:-2, 2:-2]
    assert torch.equal(inner, expected.expand_as(inner))


@matching_on_all
def test_still_noisy_pictures_do_not_move(backend, device):
    picture = view(scene(1, (3, 4)), (3, 4))
    for level in (0.0, 0.02, 0.3):
        now, before = (picture + level * noise(*picture.shape, seed=s) for s in (1, 2))
        assert not match(backend, device, now, before, None).any()


@pytest.mark.parametrize("backend", [reference, eager])
@pytest.mark.parametrize("level", [0.02, 0.05, 0.1])
def test_noise_on_a_wall_does_not_move(backend, level):
    """Some offset fits noise a little better than none: not by enough."""
    now, before = (level * noise(1, 96, 96, seed=s) for s in (1, 2))
    assert not backend.match_blocks(now, before, None).any()


@matching_on_all
def test_a_picture_that_got_brighter_does_not_move(backend, device):
    """A wall without structure: all offsets are as good."""
    picture = torch.zeros(1, 24, 32)
    assert not match(backend, device, picture + 0.5, picture, None).any()


@matching_on_all
def test_only_what_moves_moves(backend, device):
    grid = (4, 9)
    picture = scene(1, grid)
    now, before = view(picture, grid, 3, -6), view(picture, grid)
    now[:, :, 4 * CELL :] = before[:, :, 4 * CELL :]
    found = match(backend, device, now, before, None)
    assert torch.equal(found[0, 1:-1, 1:3], torch.tensor([3, -6]).expand(2, 2, 2) / CELL)
    assert not found[0, :, 5:].any()


@matching_on_all
@pytest.mark.parametrize("where", ["now", "before"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_stream_with_a_bad_pixel_does_not_move(backend, device, where, value):
    grid = (3, 4)
    picture = scene(2, grid)
    now, before = view(picture, grid, 0, 5), view(picture, grid)
    good = match(backend, device, now, before, None)
    {"now": now, "before": before}[where][1, 0, 0] = value
    found = match(backend, device, now, before, None)
    assert good[1].any()
    assert not found[1].any()
    assert torch.equal(found[0], good[0])


@matching_on_all
def test_a_hint_reaches_further_than_the_search(backend, device):
    grid = (3, 10)
    picture = scene(1, grid)
    now, before = view(picture, grid, 0, 21), view(picture, grid)
    true = torch.tensor([0, 21]) / CELL
    hint = true.expand(1, *grid, 2).clone()
    hint[..., 1] += 0.1  # less than a fine pixel from the truth: corrected
    hint[0, 1, 2] = float("nan")
    hint[0, 1, 3, 0] = float("inf")
    plain = match(backend, device, now, before, None)
    found = match(backend, device, now, before, None, hint)
    assert torch.equal(found[0, 1, 4:6], true.expand(2, 2))
    assert torch.equal(found[0, 1, 2:4], plain[0, 1, 2:4])  # no hint: as without
    assert not torch.equal(plain[0, 1, 2], true)


@matching_on_all
def test_a_hint_that_the_picture_contradicts_is_refused(backend, device):
    grid = (3, 4)
    picture = scene(1, grid)
    now = view(picture, grid)
    hint = torch.full((1, *grid, 2), 9.0)  # beyond the limit too
    assert not match(backend, device, now + 0.02, now, None, hint).any()
    moved = match(backend, device, view(picture, grid, 0, 5), now, None, hint)
    assert not moved[0, 1, 1:3].any()  # no better than standing still


def stairs(grid: tuple[int, int]) -> Tensor:
    """Darker to the right: an offset to the left gains as much as its length costs."""
    step = torch.arange(CELL * grid[1]) // 4 / 256
    return -step.expand(1, CELL * grid[0], -1).contiguous()


@on_all
def test_of_equal_offsets_no_motion_wins(backend, device):
    """In the coarse pictures, which do not see the checks, all offsets to the left are as good."""
    grid = (1, 5)
    plain = stairs(grid)
    checks = (torch.arange(CELL)[:, None] + torch.arange(CELL * grid[1])) % 2 * 2.0 - 1
    found = match(backend, device, plain + 0.5 - checks, plain + checks, None)
    assert torch.equal(found[0, 0, 2:4], torch.tensor([0, -1]).expand(2, 2) / CELL)


@on_all
def test_of_equal_offsets_the_hint_wins(backend, device):
    grid = (1, 7)
    before = stairs(grid)
    now = before.new_full(before.shape, 0.5)
    before[..., 40:] = 3.0
    hint = torch.zeros(1, *grid, 2)
    hint[..., 1] = -2.0
    found = match(backend, device, now, before, None, hint)
    assert torch.equal(found[0, 0, 5], torch.tensor([0.0, -2.0]))


def test_hints_are_clamped():
    grid = (1, 12)
    picture = scene(1, grid)
    now, before = view(picture, grid, 0, 32), view(picture, grid)
    hint = torch.zeros(1, *grid, 2)
    hint[..., 1] = 50.0
    found = reference.match_blocks(now, before, None, hint)
    assert (found[0, 0, 1:7, 1] == 4.0).all()


# Matching, backend against backend.


def pictures(kind: str, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Three streams, and five rows of pictures before."""
    before = view(scene(5, grid), grid)
    now = view(scene(5, grid), grid, 3, -7)[:3]
    high, wide = before.shape[1:]
    if kind == "random":
        return noise(3, high, wide), noise(5, high, wide, seed=1)
    if kind == "noisy":
        now = now + 0.1 * noise(*now.shape)
        before[1, -1, -1] = float("nan")
    if kind == "partly":  # one stream still, one all moving, one with little that moves
        now[0] = before[4]
        now[2, :, CELL + 4 :] = before[1, :, CELL + 4 :]
        now[0, :, :4] += 1e-3
    return now, before


@on_others
@pytest.mark.parametrize(
    ("kind", "grid", "slotted"),
    [
        ("shifted", (2, 3), True),
        ("partly", (2, 3), True),
        ("noisy", (1, 2), False),
        also("random", (1, 2), True),
        also("noisy", (3, 5), True),
        also("random", (3, 5), False),
        also("partly", (3, 5), True),
        also("shifted", (4, 3), False),
    ],
)
def test_backends_find_the_same_motion(backend, device, kind, grid, slotted, poison):
    now, before = pictures(kind, grid)
    slots = torch.tensor([4, 0, 1]) if slotted else None
    before = before if slotted else before[:3]
    hint = None
    if kind in ("shifted", "random"):
        hint = noise(3, *grid, 2, seed=3)
        hint[1] = float("nan")
        hint[2, 0, 0, 0] = float("nan")
    expected = reference.match_blocks(now, before, slots, hint)
    assert expected.any() or kind == "random"
    assert torch.equal(match(backend, device, now, before, slots, hint), expected)


@pytest.mark.parametrize("kind", ["random", "shifted", "noisy", "partly"])
def test_eager_finds_the_same_motion_in_a_large_picture(kind):
    """All of its ways to search: everywhere, a few tokens, tokens at the edge."""
    now, before = pictures(kind, (13, 17))
    slots = torch.tensor([4, 0, 1])
    expected = reference.match_blocks(now, before, slots)
    assert torch.equal(eager.match_blocks(now, before, slots), expected)


def test_large_values_find_nearly_the_same_motion():
    """Their sums are not exact: offsets that cost almost the same may change places."""
    now, before = (part * 300 for part in pictures("noisy", (6, 7)))
    before = before[:3]
    expected, found = (part.match_blocks(now, before, None) for part in (reference, eager))
    differs = (expected != found).any(dim=-1)
    assert differs.float().mean() < 0.02


@on_others
def test_pictures_may_be_kept_in_half_precision(backend, device):
    now, before = (part.half() for part in pictures("noisy", (1, 1)))
    expected = reference.match_blocks(now, before[:3], None)
    assert torch.equal(match(backend, device, now, before[:3], None), expected)


# Carrying.


@on_all
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_without_motion_memory_keeps_its_bits(backend, device, kind):
    if backend == "triton" and device == "cpu" and kind is torch.bfloat16:
        pytest.skip("the interpreter refuses bf16")
    memory = noise(2, 1 + 12 + 2, 17).to(kind)
    motion = torch.zeros(2, 3, 4, 2)
    motion[1, 1] = float("nan")
    motion[0, 0, 0, 1] = -0.0
    found = carried(backend, device, memory, motion, 1)
    assert found.dtype == kind
    assert torch.equal(found, memory)
    assert found.data_ptr() != memory.data_ptr()


@on_all
@pytest.mark.parametrize("shift", [(1, 0), (0, -2), (2, 1)])
def test_whole_tokens_are_moved_unchanged(backend, device, shift):
    grid, special = (4, 5), (2, 1)
    memory = noise(1, special[0] + 20 + special[1], 9)
    motion = torch.tensor(shift).float().expand(1, *grid, 2).contiguous()
    found = carried(backend, device, memory, motion, special[0])
    assert torch.equal(found[:, :2], memory[:, :2])
    assert torch.equal(found[:, -1:], memory[:, -1:])
    table = memory[0, 2:-1].view(*grid, 9)
    y = (torch.arange(4) + shift[0]).clamp(0, 3)
    x = (torch.arange(5) + shift[1]).clamp(0, 4)
    assert torch.equal(found[0, 2:-1].view(*grid, 9), table[y][:, x])


@on_all
def test_half_a_token_is_the_mean_of_two(backend, device):
    memory = noise(1, 6, 4)
    motion = torch.zeros(1, 2, 3, 2)
    motion[0, 0, 0] = torch.tensor([0.0, 0.5])
    motion[0, 1, 2] = torch.tensor([-0.5, 0.0])
    motion[0, 0, 1] = torch.tensor([0.5, 0.5])
    found = carried(backend, device, memory, motion)[0]
    rows = memory[0]
    torch.testing.assert_close(found[0], (rows[0] + rows[1]) / 2)
    torch.testing.assert_close(found[5], (rows[5] + rows[2]) / 2)
    torch.testing.assert_close(found[1], (rows[1] + rows[2] + rows[4] + rows[5]) / 4)
    assert torch.equal(found[2:5], rows[2:5])


@on_others
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("grid", "width"), [((3, 5), 33), ((1, 2), 1025)])
def test_backends_carry_the_same_rows(backend, device, kind, grid, width, poison):
    if backend == "triton" and device == "cpu" and kind is torch.bfloat16:
        pytest.skip("the interpreter refuses bf16")
    memory = noise(4, 1 + grid[0] * grid[1] + 2, width).to(kind)
    motion = 2 * noise(2, *grid, 2, seed=1)
    motion[0, 0, 0] = 0
    motion[0, 0, 1, 0] = float("nan")
    motion[1, 0, 0] = torch.tensor([float("inf"), -float("inf")])
    slots = torch.tensor([3, 1])
    for choice, held in ((slots, memory), (None, memory[:2])):
        expected = reference.carry(held, motion, 1, choice)
        assert torch.equal(carried(backend, device, held, motion, 1, choice), expected)
    part = noise(4, 1 + grid[0] * grid[1] + 2, 2 * width).to(kind)[..., :width]
    expected = reference.carry(part, motion, 1, slots)
    assert torch.equal(carried(backend, device, part, motion, 1, slots), expected)


def test_lost_tokens_are_those_from_outside():
    motion = torch.zeros(1, 2, 3, 2)
    motion[0, 0, 0] = torch.tensor([-0.5, 0.0])  # half a token: still in the picture
    motion[0, 0, 1] = torch.tensor([-0.625, 0.0])
    motion[0, 0, 2] = torch.tensor([0.0, 0.625])
    motion[0, 1, 0] = torch.tensor([0.0, 0.625])
    motion[0, 1, 1] = torch.tensor([0.625, 0.0])
    motion[0, 1, 2] = float("nan")
    assert reference.lost_tokens(motion).tolist() == [[False, True, True, False, True, False]]


# On a device.


@pytest.mark.gpu
@on_cuda
def test_all_of_it_is_recorded_in_a_graph():
    grid = (6, 7)
    wide = scene(1, grid).cuda()
    images = [
        view(wide, grid, 0, step)[:, None].expand(1, 3, 48, 56).contiguous() for step in (0, 5)
    ]
    image, before = images[1].clone(), view(wide, grid)
    memory, slots = noise(3, 43, 64).cuda(), torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        motion = ops.match_blocks(ops.grey_picture(image, grid), before, slots)
        return motion, ops.carry(memory, motion, 1, slots)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for picture in images:
        image.copy_(picture)
        graph.replay()
        for got, expected in zip(recorded, step(), strict=True):
            assert torch.equal(got, expected)
    assert recorded[0].any()
