"""Every backend of every operation against the reference: dtypes, odd shapes, poisoned memory.

On a machine without a GPU, test_interpreter.py runs the Triton kernels in Triton's interpreter.
"""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import pytest
import torch

import eventful
import test_context_ops  # noqa: F401 - what it compares counts here too
import test_map_ops  # noqa: F401
import test_score_ops  # noqa: F401
from backends import (  # noqa: F401
    COMPARED,
    DEVICE,
    MOTION,
    OWN,
    also,
    backends,
    close,
    compared,
    kinds,
    make,
    plain_products,
    poison,
    tokens_of,
    triton,
)
from eventful import ops
from eventful.errors import BackendError
from eventful.ops import (
    eager,
    eager_attention,
    eager_boxes,
    eager_maps,
    eager_motion,
    reference,
)
from eventful.tokens.layout import TokenLayout

OF_EAGER = tuple(
    file.__name__ for file in (eager, eager_attention, eager_boxes, eager_maps, eager_motion)
)


def test_everything_eager_computes_itself_is_compared():
    assert compared(*eager.__all__)
    assert compared(*eager.__all__) - MOTION == COMPARED - MOTION
    own = {name for name in eager.__all__ if getattr(eager, name).__module__ in OF_EAGER}
    assert own == OWN


@backends("error_norm")
@pytest.mark.parametrize(("batch", "tokens", "width"), [(1, 129, 7), (3, 300, 48)])
def test_error_norm_of_many_tokens(backend, batch, tokens, width, poison):
    """More than eager takes at once on a CPU."""
    current, memory = (make(batch, tokens, width, seed=s) for s in (0, 1))
    expected = reference.error_norm(current, memory, 2.0)
    with eventful.use_backend(backend):
        close(ops.error_norm(current, memory, 2.0), expected, torch.float32)


@pytest.mark.parametrize("backend", [triton])  # of few tokens eager leaves to the reference
@kinds
@pytest.mark.parametrize(("batch", "tokens", "width"), [(1, 5, 7), (3, 33, 48), (2, 64, 130)])
@pytest.mark.parametrize("slotted", [False, True])
def test_error_norm(backend, kind, batch, tokens, width, slotted, poison):
    current = make(batch, tokens, width, kind=kind)
    memory = make(batch + 2, tokens, width, kind=kind, seed=1)
    slots = torch.arange(batch, device=DEVICE).flip(0) + 2 if slotted else None
    memory = memory if slotted else memory[:batch]
    expected = reference.error_norm(current, memory, 2.0, slots)
    with eventful.use_backend(backend):
        close(ops.error_norm(current, memory, 2.0, slots), expected, torch.float32)


def rule_of(batch: int, *, seed: int = 0, **changes) -> ops.PickRule:
    level = make(batch, seed=seed).abs()
    cap = torch.randint(0, 40, (batch,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    turn = torch.arange(batch, device=DEVICE) * 3
    values = {"level": level, "cap": cap, "turn": turn, **changes}
    return ops.PickRule(**values)


@backends("pick")
@pytest.mark.parametrize(
    ("tokens", "width"), [(7, 7), (50, 12), also(197, 64), also(196, 1), also(300, 299)]
)
@pytest.mark.parametrize(
    "forced",
    [
        {},
        {"prefix": 3, "suffix": 2, "period": 9},
        also({"prefix": 1, "suffix": 2}),
        also({"prefix": 3, "period": 9}),
        {"prefix": 2, "period": 5, "phase": True},
    ],
)
@pytest.mark.parametrize("seed", [0, also(1), also(2)])
def test_pick(backend, tokens, width, forced, seed, poison):
    if "phase" in forced:
        phase = TokenLayout((1, tokens - 2), prefix=2).phases(5)
        forced = {**forced, "phase": phase.flip(0).contiguous().to(DEVICE)}
    error = make(4, tokens).abs()
    error[1] = error[1].round(decimals=1)  # ties
    error[2, tokens // 2] = torch.nan
    scene = [make(6, seed=seed).abs() for _ in range(2)]
    scene[0][2] = scene[1][2] = torch.nan
    report = [torch.zeros(4, ops.REPORT, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    slots = torch.tensor([4, 2, 0, 5], device=DEVICE)
    found = []
    for name, level, told in zip(("reference", backend), scene, report, strict=True):
        rule = rule_of(4, seed=seed, scene=level, cut=(1.1, 0.3, 0.9), slots=slots, **forced)
        with eventful.use_backend(name):
            found.append(ops.pick(error, rule, width, told))
    assert found[0].count.tolist() == found[1].count.tolist()
    assert found[0].index.tolist() == found[1].index.tolist()
    assert found[0].places.tolist() == found[1].places.tolist()
    assert report[0].tolist() == report[1].tolist()
    torch.testing.assert_close(*scene, equal_nan=True)


@backends("pick", independent=True)
def test_pick_takes_the_largest_and_counts_what_waits(backend):
    error = torch.tensor([[5.0, 1.0, 4.0, 3.0, 2.0, 0.5]], device=DEVICE)
    rule = ops.PickRule(torch.tensor([1.5], device=DEVICE), torch.tensor([6], device=DEVICE))
    report = torch.zeros(1, ops.REPORT, dtype=torch.int32, device=DEVICE)
    with eventful.use_backend(backend):
        picked = ops.pick(error, rule, 2, report)
    assert picked.index.tolist() == [[0, 2]]
    assert picked.places.tolist() == [[0, -1, 1, -1, -1, -1]]
    assert report.tolist() == [[4, 1, 0, 4, 0, 0]]


@backends("pick", independent=True)
def test_special_and_due_tokens_come_on_top_of_the_cap(backend):
    """One special token, one due (5 of period 5), and the two largest of the others above 1.5."""
    error = torch.tensor([[0.1, 2.0, 4.0, 3.0, 2.5, 0.2, 0.5]], device=DEVICE)
    cap, turn = torch.tensor([2], device=DEVICE), torch.tensor([10], device=DEVICE)
    rule = ops.PickRule(
        torch.tensor([1.5], device=DEVICE), cap, prefix=1, period=5, turn=turn
    )  # 0 is both special and due
    report = torch.zeros(1, ops.REPORT, dtype=torch.int32, device=DEVICE)
    with eventful.use_backend(backend):
        picked = ops.pick(error, rule, 6, report)
    assert picked.count.tolist() == [4]
    assert picked.index[0, :4].tolist() == [0, 5, 2, 3]
    assert report.tolist() == [[6, 1, 0, 4, 0, 0]]  # two more wanted to pass than the cap let


@backends("pick", independent=True)
def test_a_later_gate_lets_nothing_through_after_a_bad_frame(backend):
    error = torch.tensor([[5.0, 1.0, 4.0], [5.0, 1.0, 4.0]], device=DEVICE)
    level, cap = torch.zeros(2, device=DEVICE), torch.full((2,), 2, device=DEVICE)
    rule = ops.PickRule(level, cap, prefix=1, leading=False)
    report = torch.tensor(
        [[3, 1, 0, 1, 0, 0], [3, 0, 0, 1, 0, 0]], dtype=torch.int32, device=DEVICE
    )
    with eventful.use_backend(backend):
        picked = ops.pick(error, rule, 3, report)
    assert picked.count.tolist() == [3, 0]
    assert report.tolist() == [[3, 1, 0, 3, 0, 0], [3, 0, 0, 1, 0, 0]]


@backends("pick", independent=True)
def test_without_a_level_no_more_want_to_pass_than_may(backend):
    error = torch.tensor([[0.1, 2.0, 4.0, 3.0, 2.5, 0.2, 0.5]], device=DEVICE)
    rule = ops.PickRule(
        torch.tensor([-torch.inf], device=DEVICE), torch.tensor([3], device=DEVICE), prefix=1
    )
    report = torch.zeros(1, ops.REPORT, dtype=torch.int32, device=DEVICE)
    with eventful.use_backend(backend):
        picked = ops.pick(error, rule, 6, report)
    assert picked.index[0, :4].tolist() == [0, 2, 3, 4]
    assert report.tolist() == [[4, 1, 0, 4, 0, 0]]


@backends("write_rows_")
@kinds
@pytest.mark.parametrize("counted", [False, True])
def test_write_rows(backend, kind, counted):
    batch, tokens, taken, width = 3, 20, 6, 24
    index = tokens_of(batch, taken, tokens)
    packed = make(batch, taken, 3 * width, kind=kind)
    rows = (packed[..., :width], packed[..., width : 2 * width], packed[..., 2 * width :])
    slots = torch.tensor([3, 0, 2], device=DEVICE)
    count = torch.tensor([0, taken, 2], device=DEVICE) if counted else None
    memories = [
        tuple(make(5, tokens, width, kind=kind, seed=i) for i in range(3)) for _ in range(2)
    ]
    for name, memory in zip(("reference", backend), memories, strict=True):
        with eventful.use_backend(name):
            ops.write_rows_(memory, rows, index, count, slots)
            ops.write_rows_(memory[:1], (make(3, tokens, width, kind=kind),), None, count, slots)
    for a, b in zip(*memories, strict=True):
        assert torch.equal(a, b)


@backends("take_slots")
@kinds
@pytest.mark.parametrize("shape", [(5, 7), (3, 40, 129), (4,)])
def test_take_slots(backend, kind, shape, poison):
    memory = make(6, *shape, kind=kind)
    slots = torch.tensor([4, 0, 5], device=DEVICE)
    with eventful.use_backend(backend):
        assert torch.equal(ops.take_slots(memory, slots), memory[slots])


@pytest.mark.parametrize("backend", ["reference", triton])
@kinds
@pytest.mark.parametrize("shape", [(5, 7), (3, 40, 129), ()])
@pytest.mark.parametrize("good", [None, [True, False, True]])
def test_fill_slots(backend, kind, shape, good):
    memory, values = make(6, *shape, kind=kind), make(3, *shape, kind=kind, seed=2)
    slots, expected = torch.tensor([4, 0, 5], device=DEVICE), memory.clone()
    for stream, slot in enumerate((4, 0, 5)):
        if good is None or good[stream]:
            expected[slot] = values[stream]
    mask = None if good is None else torch.tensor(good, device=DEVICE)
    with eventful.use_backend(backend):
        ops.fill_slots_(memory, values, slots, mask)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("backend", ["reference", triton])
@kinds
@pytest.mark.parametrize("width", [1, 129])
@pytest.mark.parametrize("good", [None, [True, False, True]])
def test_renew_rows(backend, kind, width, good):
    """Bits are compared: the zero of another sign differs, the same NaN does not."""
    memory, slots = make(6, 70, width, kind=kind), torch.tensor([4, 0, 5], device=DEVICE)
    memory[4, 3], memory[4, 4], memory[5, 69] = 0.0, torch.nan, torch.inf
    rows = memory[slots]
    rows[0, 3], rows[1, 8, -1], rows[2, [0, 68]] = -0.0, 9.0, 7.0
    before = memory.clone()
    mask = None if good is None else torch.tensor(good, device=DEVICE)
    with eventful.use_backend(backend):
        found = ops.renew_rows_(memory, rows, slots, mask)
    expected = [(0, 3), (1, 8), (2, 0), (2, 68)]
    expected = [at for at in expected if good is None or good[at[0]]]
    assert [tuple(at) for at in found.nonzero().tolist()] == expected
    for stream, slot in enumerate((4, 0, 5)):
        if good is None or good[stream]:
            before[slot] = rows[stream]
    bits = {2: torch.int16, 4: torch.int32}[memory.dtype.itemsize]
    assert torch.equal(memory.view(bits), before.view(bits))


@pytest.mark.parametrize("backend", [triton])
@kinds
@pytest.mark.parametrize("shape", [(1, 256), (33, 7), (9, 1000)])
def test_norm_relu(backend, kind, shape):
    rows, weight, bias = make(*shape, kind=kind), make(shape[1], seed=1), make(shape[1], seed=2)
    rows[0, 0] = torch.nan
    weight, bias = weight.to(kind), bias.to(kind)
    expected = reference.norm_relu(rows.double(), weight.double(), bias.double(), 1e-6)
    with eventful.use_backend(backend):
        found = ops.norm_relu(rows, weight, bias, 1e-6)
    assert found[0].isnan().all()
    close(found[1:], expected[1:], kind)


@pytest.mark.parametrize("backend", [triton])
@kinds
@pytest.mark.parametrize(("grid", "heads", "head"), [((3, 5), 3, 16), ((16, 11), 12, 20)])
@pytest.mark.parametrize("slotted", [True, False])
def test_relative_logits_of_all(backend, kind, grid, heads, head, slotted):
    """Keys may be fewer than queries along an axis: they are pooled."""
    (height, width), tokens = grid, grid[0] * grid[1]
    memory = make(4, tokens, heads * head, kind=kind)
    slots = torch.tensor([3, 1], device=DEVICE) if slotted else None
    rows = make(height, (height + 1) // 2, head, kind=kind, seed=1)
    columns = make(width, width, head, kind=kind, seed=2)
    q = ops.split_heads(memory if slots is None else memory[slots], heads)
    every = torch.arange(tokens, device=DEVICE)[None]
    parts = [part.double() for part in (q, rows, columns)]
    expected = reference.relative_logits(*parts, every)
    with eventful.use_backend(backend):
        found = ops.relative_logits_all(memory, heads, rows, columns, slots)
    whole = reference.relative_logits_all(memory, heads, rows, columns, slots)
    for a, b, c in zip(found, whole, expected, strict=True):
        close(a, c, kind)
        close(b, c, kind)


@backends("add_norm")
@kinds
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_add_norm(backend, kind, affine, scaled, poison):
    tokens, update = (make(2, 9, 50, kind=kind, seed=s) for s in (0, 1))
    weight, bias = (make(50, kind=kind, seed=s) for s in (2, 3)) if affine else (None, None)
    scale = make(50, kind=kind, seed=4) if scaled else None
    expected = reference.add_norm(tokens, update, scale, weight, bias, 1e-6)
    with eventful.use_backend(backend):
        found = ops.add_norm(tokens, update, scale, weight, bias, 1e-6)
    close(found[0], expected[0], kind)
    close(found[1], expected[1], kind)


SHAPES = [(1, 2, 5, 40, 16), (2, 3, 70, 130, 32), (1, 1, 1, 1, 8), (2, 2, 17, 64, 24),
          (1, 1, 20, 321, 16)]  # fmt: skip


@backends("attend")
@kinds
@pytest.mark.parametrize(("batch", "heads", "queries", "keys", "head"), SHAPES)
def test_attend(backend, kind, batch, heads, queries, keys, head, poison):
    q = make(batch, queries, heads * head, kind=kind)
    memory = [make(batch + 3, keys, heads * head, kind=kind, seed=s) for s in (1, 2)]
    slots = torch.arange(batch, device=DEVICE) * 2 + 1
    parts = [ops.split_heads(part, heads) for part in (q, *memory)]
    expected = reference.attend(*[p.double() for p in parts], 0.3, slots=slots)
    with eventful.use_backend(backend):
        close(ops.attend(*parts, 0.3, slots=slots), expected, kind)


@backends("attend_partial")
@kinds
@pytest.mark.parametrize(("batch", "heads", "queries", "keys", "head"), SHAPES)
def test_attend_partial(backend, kind, batch, heads, queries, keys, head, poison):
    q, k, v = (
        ops.split_heads(make(batch, n, heads * head, kind=kind, seed=s), heads)
        for s, n in enumerate((queries, keys, keys))
    )
    expected = reference.attend_partial(q, k, v, 0.3)
    with eventful.use_backend(backend):
        out, lse = ops.attend_partial(q, k, v, 0.3)
    assert out.dtype == lse.dtype == torch.float32
    close(out, expected[0], kind)
    close(lse, expected[1], torch.float32)


GRIDS = [((4, 4), (4, 4)), ((5, 7), (5, 7)), ((6, 20), (3, 10)), ((3, 33), (3, 33))]


@backends("attend")
@kinds
@pytest.mark.parametrize(("grid", "key_grid"), GRIDS)
def test_relative_position(backend, kind, grid, key_grid, poison):
    batch, heads, head = 2, 3, 16
    tokens, keys = grid[0] * grid[1], key_grid[0] * key_grid[1]
    index = tokens_of(batch, 9, tokens)
    q = ops.split_heads(make(batch, 9, heads * head, kind=kind), heads)
    k, v = (
        ops.split_heads(make(batch, keys, heads * head, kind=kind, seed=s), heads) for s in (1, 2)
    )
    rows, columns = make(grid[0], key_grid[0], head), make(grid[1], key_grid[1], head, seed=3)
    rows, columns = rows.to(kind), columns.to(kind)
    parts = reference.relative_logits(q, rows, columns, index)
    precise = [part.double() for part in (q, k, v)]
    expected = reference.attend(*precise, 0.25, relative=tuple(p.double() for p in parts))
    with eventful.use_backend(backend):
        if backend == "triton":  # eager takes these from the reference
            found = ops.relative_logits(q, rows, columns, index)
            for a, b in zip(found, parts, strict=True):
                close(a, b, kind)
        close(ops.attend(q, k, v, 0.25, relative=parts), expected, kind)


@backends("attend_windows")
@kinds
@pytest.mark.parametrize("grid", [(4, 4), (5, 7), (8, 3)])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_windows(backend, kind, grid, relative, known, poison):
    batch, heads, head, count = 2, 2, 16, 7
    windows = ops.WindowGrid(grid, (4, 4))
    index = tokens_of(batch, count, grid[0] * grid[1])
    index[1, 4:] = index[1, 0]  # padded
    q = make(batch, count, heads * head, kind=kind)
    q[1, 4:] = q[1, 0]
    memory = [make(4, grid[0] * grid[1], heads * head, kind=kind, seed=s) for s in (1, 2)]
    pad = tuple(make(heads * head, kind=kind, seed=s) for s in (5, 6)) if windows.padded else None
    q, k, v = (ops.split_heads(part, heads) for part in (q, *memory))
    table = make(4, 4, head, kind=kind, seed=8)
    place = ops.window_map(windows, torch.device(DEVICE)).place_of[index]
    parts = reference.relative_logits(q, table, table.flip(0), place) if relative else None
    slots = torch.tensor([3, 1], device=DEVICE)
    expected = reference.attend_windows(
        *[part.double() for part in (q, k, v)], 0.3, windows, index,
        parts and tuple(p.double() for p in parts), pad, slots,
    )  # fmt: skip
    places = None
    if known:
        places = torch.full((batch, grid[0] * grid[1]), -1, dtype=torch.int32, device=DEVICE)
        for stream, valid in enumerate((count, 4)):
            places[stream, index[stream, :valid]] = torch.arange(
                valid, dtype=torch.int32, device=DEVICE
            )
    with eventful.use_backend(backend):
        found = ops.attend_windows(q, k, v, 0.3, windows, index, parts, pad, slots, places)
    if known:
        found, expected = (torch.cat([x[0], x[1][:, :4]], dim=1) for x in (found, expected))
    close(found, expected, kind)


@backends("attend_windows")
@pytest.mark.parametrize("side", [8, also(20)])
def test_crowded_windows(backend, side, poison):
    """More queries of a window than a tile has rows, and more places than are read at once."""
    grid, heads, head = (side, side + 3), 2, 16
    windows = ops.WindowGrid(grid, (side, side))
    tokens = grid[0] * grid[1]
    index = tokens_of(2, tokens - 5, tokens)
    q = make(2, tokens - 5, heads * head)
    memory = [make(2, tokens, heads * head, seed=s) for s in (1, 2)]
    pad = tuple(make(heads * head, seed=s) for s in (5, 6))
    q, k, v = (ops.split_heads(part, heads) for part in (q, *memory))
    expected = reference.attend_windows(
        *[part.double() for part in (q, k, v)], 0.3, windows, index, None, pad
    )
    with eventful.use_backend(backend):
        found = ops.attend_windows(q, k, v, 0.3, windows, index, None, pad)
    close(found, expected, torch.float32)


@backends("attend_windows", independent=True)
@pytest.mark.parametrize("relative", [True, False])
def test_windows_that_end_at_the_border(backend, relative):
    """Each query meets the tokens of its window that are in the grid, and nothing else."""
    grid, heads, head, count = (5, 7), 2, 16, 9
    windows = ops.WindowGrid(grid, (4, 4))
    index = tokens_of(1, count, grid[0] * grid[1])
    index[0, -1] = grid[0] * grid[1] - 1  # in the window of 1 x 3 tokens at the corner
    q = ops.split_heads(make(1, count, heads * head), heads)
    k, v = (ops.split_heads(make(1, 35, heads * head, seed=s), heads) for s in (1, 2))
    table, found = make(4, 4, head, seed=8), ops.window_map(windows, torch.device(DEVICE))
    place = found.place_of[index]
    parts = reference.relative_logits(q, table, table.flip(0), place) if relative else None
    with eventful.use_backend(backend):
        result = ops.attend_windows(q, k, v, 0.3, windows, index, parts)
    for i, token in enumerate(index[0].tolist()):
        keys = (found.window_of == found.window_of[token]).nonzero().flatten()
        logits = torch.einsum("hd,hnd->hn", q[0, :, i], k[0, :, keys]) * 0.3
        if parts is not None:
            down, across = (part[0, i] for part in parts)
            at = found.place_of[keys]
            logits = logits + down[:, at // 4] + across[:, at % 4]
        expected = torch.einsum("hn,hnd->hd", logits.softmax(dim=-1), v[0, :, keys])
        close(result[0, :, i], expected, torch.float32)
    assert len(keys) == 3


class TestExact:
    """The parts of a resident step with gates around every operator."""

    TOKENS, HEADS, HEAD, TAKEN = 70, 2, 16, 11

    def selection(self, batch: int) -> ops.Picked:
        index = tokens_of(batch, self.TAKEN, self.TOKENS, seed=3)
        count = torch.tensor([self.TAKEN, 4, 0][:batch], device=DEVICE)
        for stream in range(batch):
            index[stream, int(count[stream]) :] = index[stream, 0]
        places = torch.full((batch, self.TOKENS), -1, dtype=torch.int32, device=DEVICE)
        for stream in range(batch):
            valid = int(count[stream])
            places[stream, index[stream, :valid]] = torch.arange(valid, device=DEVICE).int()
        return ops.Picked(index, count, places)

    def memory(self, kind: torch.dtype) -> ops.ExactMemory:
        width = self.HEADS * self.HEAD
        q, k, v = (make(5, self.TOKENS, width, kind=kind, seed=s) for s in (1, 2, 3))
        qh, kh, vh = (ops.split_heads(x, self.HEADS) for x in (q, k, v))
        out, lse = reference.attend_partial(qh, kh, vh, 0.25)
        lse = lse.transpose(1, 2).contiguous()
        return ops.ExactMemory(q, k, v, ops.join_heads(out).contiguous(), lse, 1 + lse.abs())

    @backends("gate_error", "gate_rows")
    @kinds
    @pytest.mark.parametrize("normed", [True, False])
    @pytest.mark.parametrize("form", ["plain", "update", "stored"])
    def test_gates(self, backend, kind, normed, form, poison):
        picked = self.selection(3)
        slots = torch.tensor([4, 0, 2], device=DEVICE)
        stored = form == "stored"
        shape = (5 if stored else 3, 70, 48)
        current = make(*shape, kind=torch.float32 if stored else kind)
        update = make(5, 70, 48, kind=kind, seed=2) if form == "update" else None
        norm = (
            ops.LayerNorm(make(48, kind=kind), make(48, kind=kind, seed=1), 1e-6)
            if normed
            else None
        )
        found = []
        for name in ("reference", backend):
            memory = make(5, 70, 48, kind=kind, seed=9)
            with eventful.use_backend(name):
                total, error = ops.gate_error(current, memory, slots, norm, update, stored)
                seen = current if stored else total
                rows = ops.gate_rows(seen, memory, picked.index, picked.count, slots, norm, stored)
            total = reference.held(current, slots) if stored else total
            found.append((total, error, rows, memory))
        for a, b in zip(*found, strict=True):
            close(b, a, kind)

    @backends("add_held")
    @kinds
    def test_add_held(self, backend, kind, poison):
        tokens, memory = make(2, 33, 50, kind=kind), make(4, 33, 50, kind=kind, seed=1)
        slots = torch.tensor([3, 1], device=DEVICE)
        with eventful.use_backend(backend):
            close(ops.add_held(tokens, memory, slots), tokens + memory[slots], kind)

    @backends("exchange_", "recompute_", "swap_rows_", independent=True)
    @kinds
    def test_exchange_and_recompute_keep_attention_dense(self, backend, kind, poison):
        """After both, the memory is that of ordinary attention over the new keys and values."""
        memory, picked = self.memory(kind), self.selection(3)
        slots = torch.tensor([4, 0, 2], device=DEVICE)
        before = [part.clone() for part in vars(memory).values()]
        packed = make(3, self.TAKEN, 3 * self.HEADS * self.HEAD, kind=kind, seed=7)
        q, k, v = packed.chunk(3, dim=-1)
        lost = torch.tensor([[5, 6], [1, 1], [0, 0]], device=DEVICE)
        with eventful.use_backend(backend):
            old = ops.swap_rows_(
                (memory.key, memory.value), (k, v), picked.index, picked.count, slots
            )
            ops.write_rows_((memory.query,), (q,), picked.index, picked.count, slots)
            _, many = ops.exchange_(memory, (k, v), old, picked, 0.25, 100.0, slots, 8)
            assert many.tolist() == [0, 0, 0]
            rows = ((picked.index, picked.count), (lost, torch.tensor([2, 1, 0], device=DEVICE)))
            ops.recompute_(memory, rows, 0.25, slots)
        heads = [ops.split_heads(x, self.HEADS) for x in (memory.query, memory.key, memory.value)]
        out, lse = reference.attend_partial(*[h.double() for h in heads], 0.25)
        touched = slots[:2]
        close(memory.out[touched], ops.join_heads(out)[touched], kind)
        close(memory.lse[touched], lse.transpose(1, 2)[touched], torch.float32)
        for now, then in zip(vars(memory).values(), before, strict=True):
            assert torch.equal(now[[1, 2, 3]], then[[1, 2, 3]])

    @backends("exchange_", "swap_rows_", independent=True)
    def test_a_row_that_cancels_is_reported(self, backend):
        """A query whose weight lay on the changed keys alone cannot be corrected."""
        memory, picked = self.memory(torch.float32), self.selection(1)
        row = next(n for n in range(self.TOKENS) if picked.places[0, n] < 0)
        changed = picked.index[0, 0]
        memory.query[4, row] = 40 * memory.key[4, changed]
        heads = [ops.split_heads(x, self.HEADS) for x in (memory.query, memory.key, memory.value)]
        out, lse = reference.attend_partial(*heads, 0.25)
        memory.out.copy_(ops.join_heads(out))
        memory.lse.copy_(lse.transpose(1, 2))
        memory.condition.copy_(1 + memory.lse.abs())
        k, v = (make(1, self.TAKEN, 32, seed=s) for s in (5, 6))
        slots = torch.tensor([4], device=DEVICE)
        with eventful.use_backend(backend):
            old = ops.swap_rows_(
                (memory.key, memory.value), (-k.abs(), v), picked.index, picked.count, slots
            )
            lost, many = ops.exchange_(memory, (-k.abs(), v), old, picked, 0.25, 100.0, slots, 8)
        assert row in lost[0, : int(many[0])].tolist()


class TestForcing:
    def test_unknown(self):
        with pytest.raises(BackendError, match="reference, eager, triton"):
            eventful.use_backend("cuda")

    def test_reason_is_given(self):
        with (
            eventful.use_backend("triton"),
            pytest.raises(BackendError, match=r"triton.*error_norm.*(L2|CUDA|import)"),
        ):
            ops.error_norm(make(1, 3, 4), make(1, 3, 4, seed=1), 1.0)

    def test_ends_with_the_block(self):
        before = ops.forced_backend()
        with eventful.use_backend("reference"):
            assert ops.forced_backend() == "reference"
        assert ops.forced_backend() == before

    def test_environment(self, monkeypatch):
        monkeypatch.setenv("EVENTFUL_BACKEND", "reference")
        assert ops.forced_backend() == "reference"
        monkeypatch.setenv("EVENTFUL_BACKEND", "fastest")
        with pytest.raises(BackendError, match="EVENTFUL_BACKEND"):
            ops.forced_backend()

    def test_a_forced_backend_serves(self, monkeypatch):
        calls = []
        original = reference.add_norm
        monkeypatch.setattr(reference, "add_norm", lambda *a: calls.append(1) or original(*a))
        with eventful.use_backend("reference"):
            ops.add_norm(make(1, 2, 4), make(1, 2, 4), None, None, None, 1e-5)
        assert calls == [1]
