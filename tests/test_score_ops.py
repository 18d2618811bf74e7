"""Scores and estimates of a frame gate: operations on every backend, against oracles in Python."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import math

import pytest
import torch

import eventful
from backends import (  # noqa: F401
    DEVICE,
    KINDS,
    TRITON,
    also,
    backends,
    close,
    make,
    plain_products,
    poison,
    tokens_of,
)
from eventful import ops

SLOTS = torch.tensor([4, 0, 2], device=DEVICE)
half = pytest.mark.parametrize("kind", [*KINDS, torch.float16], ids=str)
on_triton = pytest.mark.skipif(not TRITON, reason="needs CUDA or TRITON_INTERPRET=1")
on_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")


@pytest.fixture
def small_tiles(monkeypatch):
    """Kernels that sum over tokens need several tiles."""
    if TRITON:
        from eventful.ops.triton import scores

        monkeypatch.setattr(scores, "_TILE", 8)


class TestContrast:
    @backends("contrast", independent=True)
    @half
    @pytest.mark.parametrize("patches", [1, 5, 512, 513, 1025])
    def test_is_the_root_mean_square_distance_from_the_mean(self, backend, kind, patches):
        tokens = make(3, patches + 3, 2 * 12, kind=kind)[..., :12] + 3
        every = math.ceil(patches / 512)
        few = tokens[:, 1 : 1 + patches : every].double()
        assert few.shape[1] <= 512
        expected = (few - few.mean(dim=1, keepdim=True)).square().sum(dim=2).mean(dim=1).sqrt()
        with eventful.use_backend(backend):
            found = ops.contrast(tokens[:, 1 : 1 + patches])
        assert (found.shape, found.dtype) == ((3,), torch.float32)
        close(found + 1, expected + 1, torch.float32)

    @backends("contrast", independent=True)
    def test_equal_patches_have_none(self, backend):
        with eventful.use_backend(backend):
            assert ops.contrast(make(2, 1, 12).expand(2, 40, 12)).tolist() == [0, 0]


GRID, PREFIX, SUFFIX = (4, 5), 2, 1
TOKENS = GRID[0] * GRID[1] + PREFIX + SUFFIX


def moves() -> torch.Tensor:
    """Motion of three streams: some out of the picture, by half a token, NaN and without end."""
    motion = 1.5 * make(3, *GRID, 2)
    motion[1] = 0
    motion[1, 0, 0] = torch.tensor([-0.5, 0.0])  # half a token: still in the picture
    motion[1, 0, 1] = torch.tensor([-0.625, 0.0])
    motion[1, 3, 4] = torch.tensor([0.0, 0.5])
    motion[1, 2, 4] = torch.tensor([0.0, 0.625])
    motion[1, 1, 2] = math.nan
    motion[1, 2, 2] = torch.tensor([math.inf, 0.0])
    motion[1, 3, 1] = torch.tensor([0.0, math.nan])
    return motion


def is_lost(motion, token: int) -> bool:
    place = token - PREFIX
    if motion is None or not 0 <= place < GRID[0] * GRID[1]:
        return False
    row, column = divmod(place, GRID[1])
    y, x = row + float(motion[row, column, 0]), column + float(motion[row, column, 1])
    return y < -0.5 or y > GRID[0] - 0.5 or x < -0.5 or x > GRID[1] - 0.5


def score_oracle(error, contrast, changes, sizes, weight, motion, rows):
    """`frame_score`, one token after another."""
    found = torch.empty(error.shape, dtype=torch.float64)
    for stream, row in enumerate(rows):
        for token in range(error.shape[1]):
            own = float(error[stream, token])
            if is_lost(None if motion is None else motion[stream], token):
                own += float(contrast[stream])
            caused = 0.0
            for change, size in zip(changes, sizes, strict=True):
                norm = float(change[row, token].double().norm())
                caused += norm / max(float(size[row]), 1e-12) / len(changes)
            caused = 0.0 if weight * caused < 0.02 else weight * caused
            found[stream, token] = math.hypot(own, float(contrast[stream]) * caused)
    return found.to(DEVICE)


class TestFrameScore:
    @backends("frame_score", independent=True)
    @half
    @pytest.mark.parametrize(("layers", "width"), [(0, 8), (1, 48), (3, 7), (8, 16)])
    @pytest.mark.parametrize("moving", [True, False])
    @pytest.mark.parametrize("slotted", [True, False])
    def test_of_every_token(self, backend, kind, layers, width, moving, slotted, poison):
        error, motion = make(3, TOKENS).abs(), moves() if moving else None
        contrast = torch.tensor([2.0, 0.7, 0.0], device=DEVICE)
        count = 5 if slotted else 3
        changes = tuple(make(count, TOKENS, width, kind=kind, seed=s) for s in range(layers))
        sizes = tuple(make(count, seed=s).abs() + 0.5 for s in range(layers))
        slots, rows = (SLOTS, SLOTS.tolist()) if slotted else (None, range(3))
        expected = score_oracle(error, contrast, changes, sizes, 3.0, motion, rows)
        before = error.clone()
        with eventful.use_backend(backend):
            found = ops.frame_score(error, contrast, changes, sizes, 3.0, motion, PREFIX, slots)
        assert found.dtype == torch.float32
        for stream in range(3):  # one by one: they differ in size
            close(found[stream], expected[stream], torch.float32)
        assert torch.equal(error, before)
        if moving:
            assert (found - error > 1).any()
        assert (found is error) == (not moving and not layers)

    @backends("frame_score", independent=True)
    @pytest.mark.parametrize(("slots", "tokens"), [(5, 300), (6, 129)])
    def test_many_tokens(self, backend, slots, tokens):
        """More than eager takes at once on a CPU."""
        change = make(slots, tokens, 12, kind=torch.float16)
        error, contrast, size = make(3, tokens).abs(), make(3).abs(), make(slots).abs()
        expected = score_oracle(error, contrast, (change,), (size,), 1.0, None, SLOTS.tolist())
        with eventful.use_backend(backend):
            found = ops.frame_score(error, contrast, (change,), (size,), 1.0, None, 0, SLOTS)
        close(found, expected, torch.float32)

    @backends("frame_score", independent=True)
    @pytest.mark.parametrize("changing", [True, False])
    def test_what_is_not_finite_stays_so_in_its_place(self, backend, changing):
        error = make(3, TOKENS).abs()
        error[0, 3], error[1, 0], error[2, TOKENS - 1] = math.nan, math.inf, math.nan
        change, size = make(3, TOKENS, 16), torch.ones(3, device=DEVICE)
        if not changing:
            change.zero_()
        with eventful.use_backend(backend):
            one = torch.ones(3, device=DEVICE)
            found = ops.frame_score(error, one, (change,), (size,), 1.0, moves(), PREFIX, None)
        assert torch.equal(found.isfinite(), error.isfinite())

    @backends("frame_score", independent=True)
    def test_large_and_small_numbers(self, backend):
        error = torch.tensor([[1e30, 1e-30, 0.0, 3e-25]], device=DEVICE)
        change = torch.tensor([[[1e18], [0.0], [1e-18], [0.0]]], device=DEVICE)
        one, size = torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE)  # counts as 1e-12
        with eventful.use_backend(backend):
            found = ops.frame_score(error, one, (change,), (size,), 1.0, None, 0, None)
        expected = torch.tensor([[math.hypot(1e30, 1e30), 1e-30, 0.0, 3e-25]], device=DEVICE)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)

    @pytest.mark.gpu
    @on_cuda
    def test_is_recorded_in_a_graph(self):
        error, contrast, motion = make(3, TOKENS).abs(), make(3).abs(), moves()
        changes = tuple(make(5, TOKENS, 64, seed=s) for s in range(3))
        sizes = tuple(make(5, seed=s).abs() + 0.5 for s in range(3))
        args = (error, contrast, changes, sizes, 3.0, motion, PREFIX, SLOTS)
        with eventful.use_backend("triton"):
            ops.frame_score(*args)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = ops.frame_score(*args)
        error.mul_(2)
        motion.neg_()
        graph.replay()
        close(found, score_oracle(*args[:6], SLOTS.tolist()), torch.float32)


def estimate_oracle(score, contrast, updated, moved):
    """Of one stream."""
    unit = max(contrast, 1e-12)
    left = [0.0 if n in updated else value / unit for n, value in enumerate(score)]
    rest = math.sqrt(sum(x * x for x in left) / len(left))
    waiting = max(rest, 1e-4)
    change = max(waiting if math.isnan(moved) else moved, 1e-4)
    return 0.0 if rest == 0 else 0.41 * waiting**0.05 * change**0.55


def picked_of(tokens: int, counts: list[int], known: bool) -> ops.Picked:
    """Some tokens of each stream, the first of them repeated where a stream has fewer."""
    taken = max(counts)
    index = tokens_of(len(counts), taken, tokens, seed=1)
    places = torch.full((len(counts), tokens), -1, dtype=torch.int32, device=DEVICE)
    for stream, count in enumerate(counts):
        places[stream, index[stream, :count]] = torch.arange(count, device=DEVICE).int()
        index[stream, count:] = index[stream, 0] if count else 0
    return ops.Picked(index, torch.tensor(counts, device=DEVICE), places if known else None)


def near(found: int, estimate: float) -> bool:
    return abs(found - estimate * 1e6) <= 2 + 1e-5 * estimate * 1e6


class TestEstimateError:
    @backends("estimate_error_", independent=True)
    @pytest.mark.parametrize("tokens", [5, 33])
    @pytest.mark.parametrize("slotted", [True, False])
    @pytest.mark.parametrize("known", [True, False])
    def test_of_every_stream(self, backend, tokens, slotted, known, small_tiles):
        if backend == "triton" and not known:
            pytest.skip("needs the places of the tokens")
        score, contrast = make(3, tokens).abs(), torch.tensor([2.0, 0.5, 1.0], device=DEVICE)
        moved = torch.tensor([0.1, 0.6, math.nan, 0.02, 0.3], device=DEVICE)
        moved = moved if slotted else moved[:3]
        counts = [3, 0, 1]
        picked = picked_of(tokens, counts, known)
        rows = SLOTS.tolist() if slotted else range(3)
        expected = [
            estimate_oracle(
                score[b].tolist(), float(contrast[b]),
                set(picked.index[b, : counts[b]].tolist()), float(moved[row]),
            )
            for b, row in enumerate(rows)
        ]  # fmt: skip
        turn = torch.tensor([3, 4, 5], device=DEVICE)
        edges = (1.01, 0.99, 0.99)  # times what the estimate comes to: below it, the stream goes on
        renewal = torch.tensor(
            [min(e, 1 / 32) * t * f for e, t, f in zip(expected, (3, 4, 5), edges, strict=True)],
            device=DEVICE,
        )
        report = torch.arange(3 * ops.REPORT, dtype=torch.int32, device=DEVICE).view(3, -1) + 50
        report[:, 2] = 0
        before = report.clone()
        with eventful.use_backend(backend):
            args = (moved, turn, renewal, SLOTS if slotted else None, report)
            ops.estimate_error_(score, contrast, picked, *args)
        assert all(near(report[b, 5].item(), expected[b]) for b in range(3))
        assert report[:, 2].tolist() == [0, 1, 1]
        assert torch.equal(report[:, [0, 1, 3, 4]], before[:, [0, 1, 3, 4]])

    @backends("estimate_error_", independent=True)
    def test_streams_that_start_over(self, backend):
        """Not with a bad frame; a scene cut stays; an endless renewal never comes."""
        score, one = torch.ones(4, 6, device=DEVICE), torch.ones(4, device=DEVICE)
        report = torch.zeros(4, ops.REPORT, dtype=torch.int32, device=DEVICE)
        report[:, 1] = torch.tensor([1, 0, 1, 1])
        report[:, 2] = torch.tensor([0, 0, 1, 0])
        renewal = torch.tensor([0.0, 0.0, 9.0, math.inf], device=DEVICE)
        turn = torch.tensor([1, 1, 1, 2**30], device=DEVICE)
        with eventful.use_backend(backend):
            picked = picked_of(6, [0, 0, 0, 0], True)
            ops.estimate_error_(score, one, picked, one, turn, renewal, None, report)
        assert report[:, 2].tolist() == [1, 0, 1, 0]
        assert all(near(value, 0.41) for value in report[:, 5].tolist())

    @backends("estimate_error_", independent=True)
    def test_numbers_at_the_edges(self, backend):
        """All updated; no contrast; NaN; a change of zero."""
        score, contrast = torch.ones(4, 6, device=DEVICE), torch.ones(4, device=DEVICE)
        score[2, 5] = math.nan
        contrast[1] = 0
        picked = picked_of(6, [6, 0, 0, 0], True)
        moved = torch.tensor([1.0, 1.0, 1.0, 0.0], device=DEVICE)
        report = torch.zeros(4, ops.REPORT, dtype=torch.int32, device=DEVICE)
        turn = torch.ones(4, dtype=torch.int64, device=DEVICE)
        renewal = torch.full((4,), 1e9, device=DEVICE)
        with eventful.use_backend(backend):
            ops.estimate_error_(score, contrast, picked, moved, turn, renewal, None, report)
        expected = (0.0, 0.41 * 1e12**0.05, 0.0, 0.41 * 1e-4**0.55)
        assert all(near(report[b, 5].item(), value) for b, value in enumerate(expected))
        assert report[:, 2].tolist() == [0, 0, 0, 0]


def change_oracle(rows, memory, index, valid: int) -> float:
    """Of one stream, in double."""
    size = rows.shape[-1:]
    norm = torch.nn.functional.layer_norm
    apart = [
        norm(rows[m].double(), size) - norm(memory[int(index[m])].double(), size)
        for m in range(valid)
    ]
    return math.sqrt(float(torch.stack(apart).square().mean()))


class TestFollowChange:
    @backends("follow_change_", independent=True)
    @half
    @pytest.mark.parametrize(("taken", "width"), [(1, 16), (11, 48), (20, 7), also(33, 130)])
    @pytest.mark.parametrize("slotted", [True, False])
    @pytest.mark.parametrize("counted", [True, False])
    def test_of_every_stream(
        self, backend, kind, taken, width, slotted, counted, poison, small_tiles
    ):
        tokens, count = 40, 5 if slotted else 3
        memory = make(count, tokens, width, kind=kind)
        rows = make(3, taken, 2 * width, kind=kind, seed=1)[..., width:]  # part of wider rows
        index = tokens_of(3, taken, tokens)
        counts = [taken, 0, (taken + 1) // 2] if counted else [taken] * 3
        moved = make(count).abs()
        owned = SLOTS.tolist() if slotted else [0, 1, 2]
        moved[owned[2]] = math.nan
        expected = moved.double()
        for b, row in enumerate(owned):
            if counts[b]:
                now = change_oracle(rows[b], memory[row], index[b], counts[b])
                old = float(moved[row])
                expected[row] = now if math.isnan(old) else (now + old) / 2
        for b in range(3):  # padding holds anything
            rows[b, counts[b] :] = math.nan
        kept, before = memory.clone(), moved.clone()
        with eventful.use_backend(backend):
            number = torch.tensor(counts, device=DEVICE) if counted else None
            ops.follow_change_(moved, rows, memory, index, number, SLOTS if slotted else None)
        close(moved, expected, kind)
        untouched = [n for n in range(count) if n not in owned or not counts[owned.index(n)]]
        assert torch.equal(moved[untouched], before[untouched])
        assert torch.equal(memory, kept)

    @backends("follow_change_", independent=True)
    def test_all_tokens_by_one_index(self, backend, poison):
        """An index that all streams share."""
        rows, memory = make(2, 9, 12), make(2, 9, 12, seed=1)
        index, moved = torch.arange(9, device=DEVICE).expand(2, 9), make(2) * math.nan
        with eventful.use_backend(backend):
            ops.follow_change_(moved, rows, memory, index, None, None)
        expected = [change_oracle(rows[b], memory[b], index[b], 9) for b in range(2)]
        close(moved, torch.tensor(expected, device=DEVICE), torch.float32)

    @backends("follow_change_", independent=True)
    def test_scale_and_shift_of_a_row_are_no_change(self, backend):
        memory, index = make(1, 9, 64), torch.arange(9, device=DEVICE)[None]
        moved = torch.zeros(1, device=DEVICE)
        with eventful.use_backend(backend):
            ops.follow_change_(moved, 3 * memory + 2, memory, index, None, None)
        assert float(moved) <= 1e-3

    @backends("follow_change_", independent=True)
    def test_no_rows(self, backend):
        moved, before = make(3), make(3)
        index = torch.zeros(3, 0, dtype=torch.int64, device=DEVICE)
        with eventful.use_backend(backend):
            ops.follow_change_(moved, make(3, 0, 8), make(3, 5, 8), index, None, None)
        assert torch.equal(moved, before)

    @pytest.mark.gpu
    @on_cuda
    def test_a_captured_call_reads_the_counts_of_each_replay(self):
        memory, rows, index = make(5, 400, 64), make(3, 300, 64, seed=1), tokens_of(3, 300, 400)
        count, moved = torch.full((3,), 300, device=DEVICE), torch.zeros(5, device=DEVICE)
        with eventful.use_backend("triton"):
            ops.follow_change_(moved, rows, memory, index, count, SLOTS)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ops.follow_change_(moved, rows, memory, index, count, SLOTS)
        for counts in ([300, 17, 0], [1, 0, 299]):
            moved.fill_(math.nan)
            count.copy_(torch.tensor(counts))
            graph.replay()
            for b, row in enumerate(SLOTS.tolist()):
                if counts[b]:
                    now = change_oracle(rows[b], memory[row], index[b], counts[b])
                    assert float(moved[row]) == pytest.approx(now, rel=1e-5)
                else:
                    assert moved[row].isnan()


@on_triton
@pytest.mark.triton
def test_why_triton_refuses():
    error, one = make(1, 5).abs(), torch.ones(1, device=DEVICE)
    many = (make(1, 5, 4),) * 9, (one,) * 9
    call = ("triton", "frame_score", error, one)
    assert ops.why_not(*call, many[0][:8], many[1][:8], 1.0, None, 0, None) is None
    assert "8 layers" in str(ops.why_not(*call, *many, 1.0, None, 0, None))
    odd = (make(1, 5, 4), make(1, 5, 6))
    assert "shape" in str(ops.why_not(*call, odd, (one, one), 1.0, None, 0, None))
    wide = make(1, 5, 8)[..., :4]
    assert "contiguous" in str(ops.why_not(*call, (wide,), (one,), 1.0, None, 0, None))
    picked = picked_of(5, [2], False)
    report = torch.zeros(1, ops.REPORT, dtype=torch.int32, device=DEVICE)
    rest = (one, torch.ones_like(picked.count), one, None, report)
    assert "places" in str(ops.why_not("triton", "estimate_error_", error, one, picked, *rest))


@backends("differs", independent=True)
@pytest.mark.parametrize("kind", [torch.int16, torch.int32])
def test_differs(backend, kind):
    """Elements anywhere in memory, one of which is then written to."""
    held = torch.arange(4000, device=DEVICE).to(kind)
    starts = (0, 700, 1999, 3000)
    pieces = tuple(held[at : at + 600 : 2] for at in starts)
    size = held.element_size()
    places = [held.data_ptr() + (at + 2 * i) * size for at in starts for i in range(300)]
    addresses, before = torch.tensor(places, device=DEVICE), torch.cat(pieces)
    with eventful.use_backend(backend):
        assert not ops.differs(pieces, before, addresses)
        held[3001] += 1  # between two of them
        assert not ops.differs(pieces, before, addresses)
        held[3598] += 1  # the last one
        assert ops.differs(pieces, before, addresses)
