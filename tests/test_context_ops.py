"""Selection by context: its operations on every backend, against oracles written out here."""

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
from eventful.ops import eager, reference

SCALE = 0.3
SLOTS = torch.tensor([4, 0, 2], device=DEVICE)
half = pytest.mark.parametrize("kind", [*KINDS, torch.float16], ids=str)


def memory_of(
    tokens: int, heads: int, head: int, kind: torch.dtype = torch.float32, slots: int = 5
) -> ops.ContextMemory:
    """A log-sum-exp near that of `tokens` keys, and a change that is not zero."""
    query, change = (make(slots, tokens, heads * head, kind=kind, seed=s) for s in (1, 2))
    return ops.ContextMemory(query, make(slots, tokens, heads) + math.log(tokens), change)


def keys_of(
    batch: int, taken: int, width: int, kind: torch.dtype = torch.float32
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """New and old keys and values; the new ones are parts of wider rows, as projections are."""
    packed = make(batch, taken, 2 * width, kind=kind, seed=3)
    old = tuple(make(batch, taken, width, kind=kind, seed=s) for s in (4, 5))
    return [(packed[..., :width], packed[..., width:]), old]


def copy_of(memory: ops.ContextMemory) -> ops.ContextMemory:
    return ops.ContextMemory(memory.query, memory.lse, memory.change.clone())


def part_of(query, lse, keys, values, bias):
    """The part of some keys in the outputs (N, d) of one head; the weights sum to one at most."""
    weights = (SCALE * query @ keys.T + bias - lse[:, None]).exp()
    return weights @ values / weights.sum(dim=1, keepdim=True).clamp_min(1)


def oracle(memory, new, old, counts, rows, bias=None):
    """The change after `add_context_`, in double, one stream and one head after another."""
    heads, change = memory.heads, memory.change.double()
    head = change.shape[-1] // heads
    for stream, (row, count) in enumerate(zip(rows, counts, strict=True)):
        for h in range(heads):
            part = slice(h * head, (h + 1) * head)
            query, lse = memory.query[row, :, part].double(), memory.lse[row, :, h].double()
            shift = 0 if bias is None else bias[stream, h, :, :count].double()
            parts = [
                part_of(query, lse, *(x[stream, :count, part].double() for x in pair), shift)
                for pair in (new, old)
            ]
            change[row, :, part] += parts[0] - parts[1]
    return change


class TestAddContext:
    @backends("add_context_", independent=True)
    @half
    @pytest.mark.parametrize(
        ("tokens", "taken", "heads", "head"),
        [(70, 11, 2, 16), (33, 70, 3, 24), also(5, 1, 1, 8), also(130, 129, 2, 64)],
    )
    @pytest.mark.parametrize("slotted", [True, False])
    @pytest.mark.parametrize("counted", [True, False])
    def test_is_the_change_of_the_output(
        self, backend, kind, tokens, taken, heads, head, slotted, counted
    ):
        memory = memory_of(tokens, heads, head, kind, 5 if slotted else 3)
        new, old = keys_of(3, taken, heads * head, kind)
        counts, rows = [taken, taken // 2, 0] if counted else [taken] * 3, [0, 1, 2]
        rows = SLOTS.tolist() if slotted else rows
        expected, before = oracle(memory, new, old, counts, rows), memory.change.clone()
        count = torch.tensor(counts, device=DEVICE) if counted else None
        with eventful.use_backend(backend):
            ops.add_context_(memory, new, old, count, SCALE, SLOTS if slotted else None)
        close(memory.change, expected, kind)
        close(memory.change - before, expected - before.double(), kind)
        if slotted:
            assert torch.equal(memory.change[[1, 3]], before[[1, 3]])

    @backends("add_context_", independent=True)
    def test_is_what_attention_with_a_frozen_sum_changes_by(self, backend):
        """Some keys of an attention change a little; the softmax keeps its old denominator."""
        tokens, heads, head = 60, 2, 16
        q, k, v = (make(1, tokens, heads * head, seed=s) for s in (1, 2, 3))
        index = tokens_of(1, 9, tokens)
        old = tuple(ops.gather(x, index) for x in (k, v))
        new = tuple(x + 0.1 * make(*x.shape, seed=7) for x in old)
        after = [x.clone() for x in (k, v)]
        for x, rows in zip(after, new, strict=True):
            ops.scatter_(x, index, rows)
        qh, kh, vh, kn, vn = (ops.split_heads(x, heads).double() for x in (q, k, v, *after))
        scores = SCALE * qh @ kh.transpose(-2, -1)
        lse = scores.logsumexp(dim=-1)
        frozen = (SCALE * qh @ kn.transpose(-2, -1) - lse[..., None]).exp() @ vn
        expected = ops.join_heads(frozen - scores.softmax(dim=-1) @ vh)
        memory = ops.ContextMemory(q, lse.transpose(1, 2).float().contiguous(), torch.zeros_like(q))
        with eventful.use_backend(backend):
            ops.add_context_(memory, new, old, None, SCALE, None)
        close(memory.change, expected, torch.float32)

    @backends("add_context_", independent=True)
    @half
    @pytest.mark.parametrize("grid", [(5, 7), also((3, 33))])
    def test_relative_position_is_a_bias_in_two_parts(self, backend, kind, grid):
        tokens, taken, heads, head = 35, 11, 2, 16
        memory = memory_of(tokens, heads, head, kind)
        new, old = keys_of(3, taken, heads * head, kind)
        down, across = (make(3, tokens, heads, side, kind=kind, seed=side) for side in grid)
        index = tokens_of(3, taken, grid[0] * grid[1])
        counts = [taken, 4, 0]
        bias = torch.empty(3, heads, tokens, taken, device=DEVICE)
        for stream in range(3):
            for slot, place in enumerate(index[stream].tolist()):
                row, column = divmod(place, grid[1])
                total = down[stream, ..., row].float() + across[stream, ..., column].float()
                bias[stream, :, :, slot] = total.T
        expected = oracle(memory, new, old, counts, SLOTS.tolist(), bias)
        dense, count = copy_of(memory), torch.tensor(counts, device=DEVICE)
        with eventful.use_backend(backend):
            ops.add_context_(memory, new, old, count, SCALE, SLOTS, (down, across), index)
        close(memory.change, expected, kind)
        if backend != "triton":
            with eventful.use_backend(backend):
                ops.add_context_(dense, new, old, count, SCALE, SLOTS, bias=bias)
            close(dense.change, expected, kind)

    @backends("add_context_", independent=True)
    def test_a_stream_without_changed_keys_stays_bit_for_bit(self, backend):
        memory = memory_of(40, 2, 16)
        memory.change[2].zero_().neg_()  # -0.0 + 0.0 would be 0.0
        memory.lse[2] = torch.inf
        new, old = keys_of(3, 8, 32)
        for part in (*new, *old):
            part[2] = torch.nan
        before = memory.change.clone()
        count = torch.tensor([8, 3, 0], device=DEVICE)
        with eventful.use_backend(backend):
            ops.add_context_(memory, new, old, count, SCALE, SLOTS)
            ops.add_context_(memory, new, old, torch.zeros_like(count), SCALE, SLOTS)
        assert torch.equal(memory.change[2].view(torch.int32), before[2].view(torch.int32))
        assert torch.equal(memory.change[[1, 3]], before[[1, 3]])
        assert memory.change.isfinite().all()
        assert not torch.equal(memory.change[[0, 4]], before[[0, 4]])

    @backends("add_context_", independent=True)
    @pytest.mark.parametrize("filler", [torch.nan, 100.0])
    def test_padding_adds_nothing(self, backend, filler):
        memory = memory_of(40, 2, 16)
        new, old = keys_of(3, 20, 32)
        counts = [20, 17, 1]
        expected = oracle(memory, new, old, counts, SLOTS.tolist())
        for part in new:  # what is put there differs from what was, and would show
            for stream, count in enumerate(counts):
                part[stream, count:] = filler
        with eventful.use_backend(backend):
            count = torch.tensor(counts, device=DEVICE)
            ops.add_context_(memory, new, old, count, SCALE, SLOTS)
        close(memory.change, expected, torch.float32)

    @backends("add_context_", independent=True)
    def test_no_changed_keys_at_all(self, backend):
        memory, (new, old) = memory_of(40, 2, 16), keys_of(3, 0, 32)
        before = memory.change.clone()
        with eventful.use_backend(backend):
            ops.add_context_(memory, new, old, None, SCALE, SLOTS)
        assert torch.equal(memory.change, before)

    @backends("add_context_", independent=True)
    def test_accumulates_and_the_way_back_takes_it_off(self, backend):
        memory, (new, old) = memory_of(40, 2, 16), keys_of(3, 8, 32)
        before, rows = memory.change.clone(), SLOTS.tolist()
        once = oracle(memory, new, old, [8] * 3, rows)
        with eventful.use_backend(backend):
            for _ in range(3):
                ops.add_context_(memory, new, old, None, SCALE, SLOTS)
            close(memory.change, before + 3 * (once - before), torch.float32)
            for _ in range(3):
                ops.add_context_(memory, old, new, None, SCALE, SLOTS)
        close(memory.change, before, torch.float32)

    @backends("add_context_", independent=True)
    @half
    def test_nothing_changed_adds_nothing(self, backend, kind):
        memory, (new, _) = memory_of(40, 2, 16, kind), keys_of(3, 8, 32, kind)
        before = memory.change.clone()
        with eventful.use_backend(backend):
            ops.add_context_(memory, new, new, None, SCALE, SLOTS)
        # A GPU may fuse one of the two products with the difference, which leaves its rounding.
        assert (memory.change - before).abs().max() <= (1e-6 if DEVICE == "cuda" else 0)

    @backends("add_context_", independent=True)
    @half
    def test_large_logits_do_not_overflow(self, backend, kind):
        """Keys with logits far above the remembered sum have a share of one, not more."""
        memory, (new, old) = memory_of(40, 2, 16, kind), keys_of(3, 8, 32, kind)
        memory.change.zero_()
        new = (200 * new[0], new[1])
        memory.lse.sub_(1000)
        with eventful.use_backend(backend):
            ops.add_context_(memory, new, old, None, SCALE, SLOTS)
        assert memory.change.isfinite().all()
        assert memory.change.abs().max() <= (new[1].abs().max() + old[1].abs().max()) * 1.01
        best = (memory.query[4, 0, :16].double() @ new[0][0, :, :16].double().T).argmax()
        memory.change.zero_()
        nothing = (old[0], torch.zeros_like(old[1]))
        with eventful.use_backend(backend):
            ops.add_context_(memory, new, nothing, None, SCALE, SLOTS)
        close(memory.change[4, 0, :16], new[1][0, best, :16], kind)

    @backends("add_context_", independent=True)
    @half
    @pytest.mark.parametrize("nats", [8, 15])
    def test_one_query_whose_keys_are_far_above_all_it_knew(self, backend, kind, nats):
        """Shares of up to exp(10) are summed as they are; beyond that, relative to the largest."""
        memory, (new, old) = memory_of(40, 2, 16, kind), keys_of(3, 8, 32, kind)
        memory.change.zero_()
        for row, at in ((4, 7), (2, 39)):
            memory.lse[row, at, 1] -= nats
        expected = oracle(memory, new, old, [8] * 3, SLOTS.tolist())
        with eventful.use_backend(backend):
            ops.add_context_(memory, new, old, None, SCALE, SLOTS)
        close(memory.change, expected, kind)

    @backends("add_context_", independent=True)
    def test_change_may_be_wider_than_the_queries(self, backend):
        kind = torch.float16
        memory, (new, old) = memory_of(40, 2, 16, kind), keys_of(3, 8, 32, kind)
        memory = ops.ContextMemory(memory.query, memory.lse, memory.change.float())
        expected = oracle(memory, new, old, [8] * 3, SLOTS.tolist())
        with eventful.use_backend(backend):
            ops.add_context_(memory, new, old, None, SCALE, SLOTS)
        close(memory.change, expected, kind)

    @pytest.mark.gpu
    @pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
    def test_a_captured_call_reads_the_counts_of_each_replay(self):
        memory, (new, old) = memory_of(200, 2, 16), keys_of(3, 90, 32)
        count, start = torch.full((3,), 90, device=DEVICE), memory.change.clone()
        with eventful.use_backend("triton"):
            ops.add_context_(memory, new, old, count, SCALE, SLOTS)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ops.add_context_(memory, new, old, count, SCALE, SLOTS)
        for counts in ([90, 64, 0], [1, 65, 17]):
            memory.change.copy_(start)
            expected = oracle(memory, new, old, counts, SLOTS.tolist())
            count.copy_(torch.tensor(counts))
            graph.replay()
            close(memory.change, expected, torch.float32)


class TestAttendLse:
    SHAPES = ((1, 2, 5, 40, 16), (2, 3, 70, 130, 32), (2, 2, 17, 64, 24), (1, 1, 20, 321, 16))

    @backends("attend_lse", independent=True)
    @half
    @pytest.mark.parametrize(
        ("batch", "heads", "queries", "keys", "head"), [SHAPES[1], *(also(*s) for s in SHAPES)]
    )
    @pytest.mark.parametrize("slotted", [True, False])
    def test_output_and_log_sum_exp(
        self, backend, kind, batch, heads, queries, keys, head, slotted, poison
    ):
        q = ops.split_heads(make(batch, queries, heads * head, kind=kind), heads)
        k, v = (
            ops.split_heads(make(batch + 3 * slotted, keys, heads * head, kind=kind, seed=s), heads)
            for s in (1, 2)
        )
        slots = torch.arange(batch, device=DEVICE) * 2 + 1 if slotted else None
        own = [x.double() if slots is None else x[slots].double() for x in (k, v)]
        scores = SCALE * q.double() @ own[0].transpose(-2, -1)
        with eventful.use_backend(backend):
            out, lse = ops.attend_lse(q, k, v, SCALE, slots=slots)
        assert (out.dtype, lse.dtype, out.shape) == (kind, torch.float32, q.shape)
        close(out, scores.softmax(dim=-1) @ own[1], kind)
        close(lse, scores.logsumexp(dim=-1), kind)

    @backends("attend_lse")
    @half
    @pytest.mark.parametrize("grid", [(5, 7), also((3, 33)), also((4, 4))])
    def test_is_attention_with_relative_position(self, backend, kind, grid, poison):
        batch, heads, head, queries, keys = 2, 3, 16, 9, grid[0] * grid[1]
        q, k, v = (
            ops.split_heads(make(batch, n, heads * head, kind=kind, seed=s), heads)
            for s, n in enumerate((queries, keys, keys))
        )
        parts = tuple(make(batch, queries, heads, side, kind=kind, seed=side) for side in grid)
        bias = reference.whole_bias(None, tuple(part.double() for part in parts))
        scores = SCALE * q.double() @ k.double().transpose(-2, -1) + bias
        with eventful.use_backend(backend):
            out, lse = ops.attend_lse(q, k, v, SCALE, relative=parts)
            close(out, ops.attend(q, k, v, SCALE, relative=parts), kind)
        close(out, scores.softmax(dim=-1) @ v.double(), kind)
        close(lse, scores.logsumexp(dim=-1), kind)
        if backend != "triton":
            with eventful.use_backend(backend):
                again = ops.attend_lse(q, k, v, SCALE, bias.to(kind))
            close(again[0], out, kind)
            close(again[1], lse, kind)

    @pytest.mark.parametrize("backend", [reference, eager])
    @pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
    def test_nothing_to_attend(self, backend, queries, keys):
        q, k = (make(2, 3, n, 8) for n in (queries, keys))
        out, lse = backend.attend_lse(q, k, k, SCALE)
        assert out.shape == q.shape
        assert torch.equal(out, torch.zeros_like(q))
        assert torch.equal(lse, torch.full((2, 3, queries), -torch.inf, device=DEVICE))

    def test_double_stays_double(self):
        q, k = make(1, 2, 5, 8).double(), make(1, 2, 9, 8).double()
        expected = (SCALE * q @ k.transpose(-2, -1)).softmax(dim=-1) @ k
        for backend in (reference, eager):
            out, lse = backend.attend_lse(q, k, k, SCALE)
            close(out, expected, torch.float64)
            assert lse.dtype == torch.float32

    @pytest.mark.gpu
    @pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
    @half
    @pytest.mark.parametrize(("queries", "keys", "head"), [(70, 130, 32), (33, 64, 24), (9, 7, 12)])
    @pytest.mark.parametrize("biased", [True, False])
    def test_stock_kernels_of_the_device(self, kind, queries, keys, head, biased):
        q, k, v = (make(2, 3, n, head, kind=kind, seed=n) for n in (queries, keys, keys + 1))
        v, bias = v[:, :, :keys], make(2, 3, queries, keys, kind=kind) if biased else None
        scores = reference.logits(q.double(), k.double(), SCALE, bias)
        out, lse = eager.attend_lse(q, k, v, SCALE, bias)
        close(out, scores.softmax(dim=-1) @ v.double(), kind)
        close(lse, scores.logsumexp(dim=-1), kind)


@backends("write_rows_", independent=True)
@half
def test_rows_of_different_widths_are_written_in_place_alone(backend, kind):
    """As the parts of a context are: what lies around and between the written rows stays."""
    tokens, taken, guard = 9, 4, 256
    index, slots = tokens_of(3, taken, tokens), torch.tensor([2, 0, 3], device=DEVICE)
    count = torch.tensor([taken, 0, 2], device=DEVICE)
    around, buffers, rows = [], [], []
    for seed, width in enumerate((64, 2, 64)):
        size = 4 * tokens * width
        around.append(torch.full((size + 2 * guard,), 7.0, dtype=kind, device=DEVICE))
        buffers.append(around[-1][guard : guard + size].view(4, tokens, width))
        rows.append(make(3, taken, width, kind=kind, seed=seed))
    expected = [whole.clone() for whole in around]
    for whole, values in zip(expected, rows, strict=True):
        width = values.shape[-1]
        for stream, valid in enumerate(count.tolist()):
            for row in range(valid):
                place = int(slots[stream]) * tokens + int(index[stream, row])
                start = guard + place * width
                whole[start : start + width] = values[stream, row]
    with eventful.use_backend(backend):
        ops.write_rows_(tuple(buffers), tuple(rows), index, count, slots)
    for found, whole in zip(around, expected, strict=True):
        assert torch.equal(found, whole)


@pytest.mark.skipif(not TRITON, reason="needs CUDA or TRITON_INTERPRET=1")
@pytest.mark.triton
def test_why_triton_refuses():
    memory, (new, old) = memory_of(5, 1, 16), keys_of(3, 2, 16)
    bias = torch.zeros(3, 1, 5, 2, device=DEVICE)
    call = ("triton", "add_context_", memory, new, old, None, SCALE, None)
    assert ops.why_not(*call) is None
    assert "bias" in str(ops.why_not(*call, bias=bias))
    halves = tuple(x.half() for x in new)
    assert "dtype" in str(ops.why_not(*call[:3], halves, *call[4:]))
