"""Attention on a CPU by products: equal to the reference, at every size that is cut or filled."""

from __future__ import annotations

import math

import pytest
import torch

import eventful
import zoo_timm
from clips import moving_square
from eventful import Config, Stream, TopR, ops
from eventful.ops import eager, products, reference
from tolerances import assert_near

HEADS, WIDTH, SCALE = 3, 16, 0.3
pytestmark = pytest.mark.skipif(
    not products.onednn_offers("_linear_pointwise"), reason="this torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def by_products(monkeypatch):
    """On any CPU, for any size, and in pieces that a test can have several of."""
    monkeypatch.setenv(products.VARIABLE, "products")
    monkeypatch.setattr(products, "LEAST", 0)
    monkeypatch.setattr(products, "PIECE", 1000)


@pytest.fixture
def shapes(monkeypatch):
    """Shapes of the products, which must have no gaps in memory: oneDNN is very slow with them."""
    seen, product = set(), products._product

    def spy(rows, weight):
        assert rows.is_contiguous()
        assert weight.is_contiguous() or weight.T.is_contiguous()
        seen.add((*rows.shape, len(weight), weight.dtype))
        return product(rows, weight)

    monkeypatch.setattr(products, "_product", spy)
    return seen


def made(*shape, kind=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)


def heads_of(batch, tokens, kind=torch.float32, seed=0):
    """(B, H, N, d) as layers give them: parts of rows of tokens."""
    rows = made(batch, tokens, 2 * HEADS * WIDTH, kind=kind, seed=seed)[..., : HEADS * WIDTH]
    return ops.split_heads(rows, HEADS)


def inputs(batch, count, keys, kind=torch.float32):
    sizes = (count, keys, keys)
    return [heads_of(batch, size, kind, seed) for seed, size in enumerate(sizes)]


SIZES = [(1, 1), (7, 5), (64, 64), (65, 49), (129, 100), (300, 36), (31, 1300)]
no_bf16 = pytest.mark.skipif(not products._multiplies_bf16(), reason="no product in bf16 here")
KINDS = [torch.float32, pytest.param(torch.bfloat16, marks=no_bf16)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("count", "keys"), SIZES)
@torch.inference_mode()
def test_it_is_attention(count, keys, kind, shapes):
    q, k, v = inputs(2, count, keys, kind)
    want, sums = reference.attend_lse(q.float(), k.float(), v.float(), SCALE)
    for out, lse in (
        eager.attend_lse(q, k, v, SCALE),
        (eager.attend(q, k, v, SCALE), sums),
        eager.attend_partial(q, k, v, SCALE),
    ):
        assert out.shape == want.shape
        assert_near(out.float(), want, "operation", dtype=out.dtype)
        assert_near(lse, sums, "operation")
    assert eager.attend(q, k, v, SCALE).dtype == kind
    assert eager.attend_partial(q, k, v, SCALE)[0].dtype == torch.float32
    assert shapes


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("count", "grid"), [(5, (3, 4)), (64, (8, 8)), (99, (7, 13))])
@torch.inference_mode()
def test_biases_are_added(count, grid, kind):
    q, k, v = inputs(2, count, math.prod(grid), kind)
    full = [x.float() for x in (q, k, v)]
    relative = tuple(made(2, count, HEADS, n, kind=kind, seed=8 + n) for n in grid)
    bias = made(2, HEADS, count, math.prod(grid), seed=4)
    shared = made(1, 1, count, math.prod(grid), seed=5)
    for given in ({"relative": relative}, {"bias": bias}, {"bias": shared}):
        wide = {"relative": tuple(x.float() for x in relative)} if "relative" in given else given
        want, sums = reference.attend_lse(*full, SCALE, **wide)
        out, lse = eager.attend_lse(q, k, v, SCALE, **given)
        assert_near(out.float(), want, "operation", dtype=kind)
        assert_near(lse, sums, "operation")
        assert_near(eager.attend(q, k, v, SCALE, **given).float(), want, "operation", dtype=kind)
    want, sums = reference.attend_partial(*full, SCALE, bias)
    out, lse = eager.attend_partial(q, k, v, SCALE, bias)
    assert_near(out, want, "operation")
    assert_near(lse, sums, "operation")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("taken", [1, 5, 17, 33])
@torch.inference_mode()
def test_changed_keys_of_a_grid(taken, kind, shapes):
    """As selection by context asks for them: at any places of the grid, new and old."""
    tall, wide = 6, 9
    tokens, width = tall * wide, HEADS * WIDTH
    relative = tuple(made(2, tokens, HEADS, n, kind=kind, seed=n) for n in (tall, wide))
    index = torch.stack([torch.randperm(tokens)[:taken] for _ in range(2)])
    new, old = ([made(2, taken, width, kind=kind, seed=s + i) for i in (1, 2)] for s in (10, 20))
    changes = []
    for add in (reference.add_context_, eager.add_context_):
        memory = ops.ContextMemory(
            made(3, tokens, width, kind=kind, seed=1),
            made(3, tokens, HEADS, seed=2) + math.log(tokens),
            made(3, tokens, width, kind=kind, seed=3),
        )
        counts = torch.tensor([taken, max(1, taken - 3)])
        add(memory, new, old, counts, SCALE, torch.tensor([2, 0]), relative, index)
        changes.append(memory.change.float())
    assert_near(changes[1], changes[0], "operation", dtype=kind)
    assert torch.equal(changes[1][1], changes[0][1])  # the stream that took no part
    assert {shape[1] for shape in shapes} >= {WIDTH + tall + wide + 1}


@pytest.mark.parametrize("shape", ["whole", "one head", "one query"])
@pytest.mark.parametrize("size", [None, 0.0, 75.0, 80.0, 90.0])
@torch.inference_mode()
def test_changed_keys_of_any_place(size, shape, monkeypatch):
    """With a bias or without; also where weights, or their products with values, leave fp32."""
    tokens, taken, width = 40, 9, HEADS * WIDTH
    heads, rows = {"whole": (HEADS, tokens), "one head": (1, tokens), "one query": (HEADS, 1)}[
        shape
    ]
    bias = None if size is None else size + made(1, heads, rows, taken, seed=7)
    new, old = ([30 * made(1, taken, width, seed=s + i) for i in (1, 2)] for s in (10, 20))
    new[0], old[0] = new[0] / 30, old[0] / 30
    direct, context_change = [], products.context_change

    def spy(*given):
        result = context_change(*given)
        direct.append(result is not None)
        return result

    monkeypatch.setattr(products, "context_change", spy)
    changes = []
    for add in (reference.add_context_, eager.add_context_):
        memory = ops.ContextMemory(
            made(1, tokens, width, seed=1),
            made(1, tokens, HEADS, seed=2),
            torch.zeros(1, tokens, width),
        )
        add(memory, new, old, None, SCALE, None, bias=bias)
        changes.append(memory.change)
    assert changes[0].isfinite().all()
    assert_near(changes[1], changes[0], "operation")
    assert direct == [(size or 0.0) < 1]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.inference_mode()
def test_rows_without_a_key_are_zero(kind):
    """As the fused kernel has them, and without a weight in sums over parts of the keys."""
    q, k, v = inputs(2, 37, 50, kind)
    bias = made(2, HEADS, 37, 50, seed=3)
    bias[0, 1, 4:9], bias[1, :, :, 7] = -torch.inf, -torch.inf
    want, sums = reference.attend_partial(q.float(), k.float(), v.float(), SCALE, bias)
    assert not want[0, 1, 4:9].any()
    out, lse = eager.attend_partial(q, k, v, SCALE, bias)
    assert_near(out, want, "operation")
    assert torch.equal(lse.isinf(), sums.isinf())
    assert_near(lse.nan_to_num(neginf=0), sums.nan_to_num(neginf=0), "operation")
    out, lse = eager.attend_lse(q, k, v, SCALE, bias)
    assert_near(out.float(), want, "operation", dtype=kind)
    assert torch.equal(lse.isinf(), sums.isinf())
    assert_near(eager.attend(q, k, v, SCALE, bias).float(), want, "operation", dtype=kind)


@torch.inference_mode()
def test_defaults_of_the_process_do_not_count():
    q, k, v = inputs(1, 37, 50)
    want, sums = reference.attend_lse(q, k, v, SCALE)
    torch.set_default_dtype(torch.bfloat16)
    try:
        out, lse = eager.attend_lse(q, k, v, SCALE)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_near(out, want, "operation")
    assert_near(lse, sums, "operation")


@torch.inference_mode()
def test_keys_that_streams_share():
    q, k, v = heads_of(3, 37), *inputs(1, 37, 50)[1:]
    both = made(3, 37, HEADS, 5, seed=5), made(1, 37, HEADS, 10, seed=6)
    want = reference.attend(q, k, v, SCALE, None, both)
    assert_near(eager.attend(q, k, v, SCALE, None, both), want, "operation")
    # Beside a relative position a bias does not count, as in every backend.
    bias = made(3, HEADS, 37, 50)
    assert_near(eager.attend(q, k, v, SCALE, bias, both), want, "operation")


@torch.inference_mode()
def test_what_is_left_in_the_memory_does_not_count():
    """The rows that are filled up lie in memory that earlier calls wrote, here with NaN."""
    for name in ("queries", "keys", "values"):
        products._room(name, (HEADS, 400, 64)).fill_(torch.nan)
    q, k, v = inputs(1, 37, 41)
    want = reference.attend(q, k, v, SCALE)
    assert_near(eager.attend(q, k, v, SCALE), want, "operation")


@torch.inference_mode()
def test_oneDNN_makes_little_code(shapes, monkeypatch):
    """Code is kept for every shape, so numbers of tokens that change give few of them."""
    monkeypatch.setattr(products, "PIECE", 1 << 19)
    counts = range(96, 700, 7)
    for count in counts:
        eager.attend(*inputs(1, count, 50), SCALE)
        eager.attend_partial(*inputs(1, 50, count), SCALE)
    rows, keys = ({shape[place] for shape in shapes} for place in (0, 2))
    assert 20 <= len(rows | keys) <= 32  # eight of each octave, the 50 and the width of a head
    assert len(shapes) <= 4 * 32


@torch.inference_mode()
def test_a_stream_of_a_batch_has_the_bits_of_its_own():
    q, k, v = inputs(3, 77, 130)
    together = eager.attend(q, k, v, SCALE)
    for stream in range(3):
        own = slice(stream, stream + 1)
        assert torch.equal(together[own], eager.attend(q[own], k[own], v[own], SCALE))


@pytest.mark.parametrize("entry", ["vit", "sam"])
def test_streams_follow_their_rule(entry, shapes):
    """All tokens are dense; and each step is that of the fused kernel."""
    entry = zoo_timm.ZOO[entry]
    clip = moving_square(4, entry.size)
    torch.manual_seed(5)
    model = entry.make()
    whole = eventful.convert(model, Config.fast(TopR(10**6)))
    few = eventful.convert(model, Config.fast(TopR(7)))
    with torch.no_grad():
        stream = Stream(whole)
        for frame in clip:
            want = entry.output(model(frame))
            assert_near(entry.output(entry.call(stream, frame)), want, "model")
        assert shapes
        outputs = []
        for kind in ("products", "fused"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(products.VARIABLE, kind)
                stream = Stream(few)
                outputs.append([entry.output(entry.call(stream, frame)) for frame in clip])
    for own, fused in zip(*outputs, strict=True):
        assert_near(own, fused, "model")


class TestWhereItServes:
    """The rule that chooses."""

    @pytest.fixture
    def amd(self, monkeypatch):
        monkeypatch.delenv(products.VARIABLE)
        monkeypatch.setattr(products, "_vendor", lambda: "AuthenticAMD")
        monkeypatch.setattr(products, "LEAST", 100_000)

    @torch.inference_mode()
    def test_by_size_and_type(self, amd, monkeypatch):
        monkeypatch.setattr(products, "_multiplies_bf16", lambda: True)
        assert products.serves(*inputs(1, 500, 200)[:2])
        assert not products.serves(*inputs(1, 500, 199)[:2])
        assert products.serves(*inputs(1, 500, 200, torch.bfloat16)[:2])
        assert not products.serves(*inputs(1, 500, 200, torch.float64)[:2])

    @torch.inference_mode()
    def test_not_in_bf16_where_the_processor_has_no_such_product(self, amd, monkeypatch):
        monkeypatch.setattr(products, "_multiplies_bf16", lambda: False)
        assert products.serves(*inputs(1, 500, 200)[:2])
        assert not products.serves(*inputs(1, 500, 200, torch.bfloat16)[:2])

    @torch.inference_mode()
    def test_not_for_masks_of_booleans(self, amd):
        q, k, _ = inputs(1, 500, 200)
        mask = made(1, HEADS, 500, 200) > 0
        assert not products.serves(q, k, mask)
        assert products.serves(q, k, mask.float())

    def test_not_where_gradients_or_casts_are_asked_for(self, amd):
        q, k, v = inputs(1, 500, 200)
        assert not products.serves(q, k)
        with torch.no_grad():
            assert products.serves(q, k)
            with torch.autocast("cpu", torch.bfloat16):
                assert not products.serves(q, k)
        q.requires_grad_(True)
        assert eager.attend(q, k, v, SCALE).requires_grad

    @torch.inference_mode()
    def test_by_the_maker_of_the_processor(self, amd, monkeypatch):
        q, k, _ = inputs(1, 500, 200)
        for name, serves in (("GenuineIntel", False), ("", False), ("HygonGenuine", True)):
            monkeypatch.setattr(products, "_vendor", lambda name=name: name)
            assert products.serves(q, k) == serves
            monkeypatch.setenv(products.VARIABLE, "products")
            assert products.serves(q, k)
            monkeypatch.setenv(products.VARIABLE, "fused")
            assert not products.serves(q, k)
            monkeypatch.delenv(products.VARIABLE)

    def test_the_maker_is_read(self, monkeypatch):
        read = products._vendor.__wrapped__
        for text, name in (
            ("processor\t: 0\nvendor_id\t: AuthenticAMD\nvendor_id\t: x\n", "AuthenticAMD"),
            ("vendor_id\t:\n", ""),
            ("Features\t: fp asimd\n", ""),
        ):
            monkeypatch.setattr(products.Path, "read_text", lambda *_, text=text, **__: text)
            assert read() == name

        def missing(*_, **__):
            raise FileNotFoundError

        monkeypatch.setattr(products.Path, "read_text", missing)
        monkeypatch.setattr(products.platform, "processor", lambda: "AMD64, AuthenticAMD")
        assert read() == "AuthenticAMD"
        monkeypatch.setattr(products.platform, "processor", lambda: "")
        assert read() == ""

    @torch.inference_mode()
    def test_many_threads_share_out_one_head_badly(self, amd, monkeypatch):
        monkeypatch.setattr(torch, "get_num_threads", lambda: products.MOST_THREADS + 1)
        assert not products.serves(*inputs(1, 500, 200)[:2])
