"""The attention rules against dense attention on their own buffers, over long runs."""

from __future__ import annotations

import pytest
import torch

import eventful
from eventful import Config, Stream, Threshold, TopFraction, TopR, ops
from small import drifting_tokens, random_trunk
from tolerances import apart, assert_near, limit

# What the rule promises over any number of frames, at the largest condition number it lets stand:
# many times the rounding of one operation, and what running without rebasing exceeds.
DRIFT = 1e-4


def dense_on_buffers(stream, heads, scale):
    """fp64 attention over the buffered q, k, v of block 0, and the largest logit."""
    q, k, v = (
        ops.split_heads(stream._state[f"blocks.0/{name}"].double(), heads)
        for name in ("query", "key", "value")
    )
    scores = ops.logits(q, k, scale)
    return ops.join_heads(scores.softmax(-1) @ v), float(scores.abs().max())


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("gain", "least"), [(1.0, 0.3), (17.0, 120)], ids=["mild", "one-hot"])
@pytest.mark.parametrize("policy", [TopFraction(0.2), Threshold(1.0)], ids=["top", "threshold"])
def test_exact_equals_dense_attention_over_1000_frames(gain, least, policy):
    model = random_trunk((4, 5), depth=1, gain=gain, seed=3)
    stream = eventful.Stream(eventful.convert(model, Config.exact(policy, scene_cut=None)))
    largest, rebased = 0.0, 0
    for t, frame in enumerate(drifting_tokens(1000, 2, 20, 16, share=0.1)):
        # A stationary stream: drifting without bound would leave float32's useful range.
        stream(torch.tanh(frame / 3) * 3)
        rebased += int(stream.last.blocks["blocks.0"].work.get("rebased", torch.zeros(2)).sum())
        expected, logit = dense_on_buffers(stream, 2, 8**-0.5)
        largest = max(largest, logit)
        got = stream._state["blocks.0/attended"].double()
        assert apart(got, expected) <= DRIFT, f"frame {t}"
    assert least < largest < 200
    # Rows are saved by exchanging shares, not by being recomputed one and all.
    assert rebased < 0.2 * 1000 * 2 * 16
    if gain > 1:
        assert rebased > 0


def test_without_rebasing_exact_would_drift():
    """The condition number is what holds the line; with the limit out of reach it is crossed."""
    model = random_trunk((4, 5), depth=1, gain=17.0, seed=3)
    stream = eventful.Stream(
        eventful.convert(model, Config.exact(TopFraction(0.2), scene_cut=None, rebase=1e30))
    )
    worst = 0.0
    for frame in drifting_tokens(300, 2, 20, 16, share=0.1):
        stream(torch.tanh(frame / 3) * 3)
        expected, _ = dense_on_buffers(stream, 2, 8**-0.5)
        got = stream._state["blocks.0/attended"].double()
        worst = max(worst, apart(got, expected))
    assert worst > DRIFT


@pytest.mark.parametrize("preset", ["fast", "exact", "paper", "tokenwise", "stgt"])
def test_bf16_stays_within_its_own_tolerance(preset):
    model = random_trunk((4, 5), window=(2, 3), relative=True).to(torch.bfloat16)
    stream = eventful.Stream(eventful.convert(model, Config.preset(preset, TopR(20))))
    dense = random_trunk((4, 5), window=(2, 3), relative=True).to(torch.bfloat16).float()
    whole = eventful.convert(dense, Config.fast(TopR(20)))
    for frame in drifting_tokens(20, 1, 20, 16, share=0.3):
        got = stream(frame.to(torch.bfloat16))
        assert got.dtype == torch.bfloat16
        expected = eventful.Stream(whole)(frame.to(torch.bfloat16).float())
        assert_near(got, expected)


@pytest.mark.parametrize("attention", ["delta", "delta-av"])
def test_half_precision_products_stay_within_bf16_tolerance(attention):
    model = random_trunk((4, 5), seed=2)
    outputs = {}
    for accumulate in ("float32", "half"):
        config = Config.paper(TopR(20), attention=attention, accumulate=accumulate)
        stream = eventful.Stream(eventful.convert(model, config))
        outputs[accumulate] = [stream(f) for f in drifting_tokens(20, 1, 20, 16, share=0.3)]
        kinds = {
            str(t.dtype)
            for n, t in stream._state.tensors.items()
            if n.endswith(("/sum", "/weights"))
        }
        assert kinds == {"torch.bfloat16" if accumulate == "half" else "torch.float32"}
    for half, full in zip(outputs["half"], outputs["float32"], strict=True):
        assert_near(half, full, dtype=torch.bfloat16)


def test_windows_nothing_touched_keep_their_outputs_bit_for_bit():
    model = random_trunk((6, 6), depth=2, window=(3, 3), relative=True)
    for config in (
        Config.exact(Threshold(0.1), scene_cut=None),
        Config.paper(Threshold(0.1), windows="touched"),
    ):
        stream = eventful.Stream(eventful.convert(model, config))
        frame = torch.randn(1, 36, 16)
        stream(frame)
        before = stream._state["blocks.0/attended"].clone()
        moved = frame.clone()
        moved[:, 0] += torch.randn(16)  # token 0 lies in window 0: rows and columns 0-2
        stream(moved)
        after = stream._state["blocks.0/attended"]
        inside = torch.zeros(6, 6, dtype=torch.bool)
        inside[:3, :3] = True
        same = (before == after).all(-1)[0]
        assert same[~inside.flatten()].all()
        assert not same[inside.flatten()].any()
        assert stream.last.blocks["blocks.0"].work["windows"].tolist() == [1]


def test_overlap_once_costs_what_the_design_says():
    model = random_trunk((4, 5), depth=1)
    matmul = {}
    for overlap in ("twice", "once"):
        config = Config.paper(TopR(6), attention="delta-qk", overlap=overlap)
        stream = eventful.Stream(eventful.convert(model, config))
        for frame in drifting_tokens(2, 1, 20, 16, share=0.5):
            stream(frame)
        matmul[overlap] = stream.last.operations()[0].matmul
    n, m, d = 20, 6, 16
    assert matmul["twice"] - matmul["once"] == 2 * n * m * d - n * m * d * (2 - m / n)


@pytest.mark.parametrize("mode", ["float32", "half", "autocast"])
@pytest.mark.parametrize("attention", ["delta", "delta-av"])
def test_the_delta_sum_is_the_product_of_what_its_gates_hold(attention, mode):
    """A_n v_n (Eq. 10) after many partial updates, against the two factors multiplied out."""
    accumulate = "half" if mode == "half" else "float32"
    config = Config.paper(TopFraction(0.2), attention=attention, accumulate=accumulate)
    stream = eventful.Stream(eventful.convert(random_trunk((4, 5), depth=1, gain=3.0), config))
    for frame in drifting_tokens(100, 2, 20, 16, share=0.3):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            stream(torch.tanh(frame / 3) * 3)
    weights, gated, total = (
        stream._state[f"blocks.0/{name}"].double() for name in ("weights", "gated", "sum")
    )
    expected = ops.join_heads(weights @ ops.split_heads(gated, 2))
    # Half-precision sums round at each of 100 updates, not once.
    bound = 2 * limit("model", torch.bfloat16) if mode == "half" else limit("model")
    assert apart(total, expected) < bound


def test_half_precision_sums_are_added_in_the_authors_order():
    """The sum takes Ã_n ṽ_Δ first and Ã_Δ (ṽ_n − ṽ_Δ) second, and is rounded after each."""
    config = Config.paper(TopR(6), accumulate="half")
    stream = eventful.Stream(eventful.convert(random_trunk((4, 5), depth=1, gain=3.0), config))

    def kept():
        return [stream._state[f"blocks.0/{name}"].clone() for name in ("weights", "gated", "sum")]

    theirs, other = [], []
    first, *later = drifting_tokens(30, 1, 20, 16, share=0.3)
    stream(first)
    for frame in later:
        a_old, v_old, total = kept()
        stream(frame)
        a_new, v_new, got = kept()
        columns = (a_new != a_old).any((0, 1, 2)).nonzero()[:, 0]
        a, a_delta = a_new[..., columns], (a_new - a_old)[..., columns]
        v, v_delta = (
            ops.split_heads(part[:, columns], 2).contiguous() for part in (v_new, v_new - v_old)
        )
        one, two = (ops.join_heads(part) for part in (a @ v_delta, a_delta @ (v - v_delta)))
        theirs.append(got == (total + one) + two)
        other.append(got == total + (one + two))
    # A machine may add the terms of a product in another order; that seldom changes a rounding.
    assert torch.stack(theirs).float().mean() > 0.98
    assert torch.stack(other).float().mean() < 0.9


@pytest.mark.parametrize("autocast", [False, True])
def test_exact_keeps_fp32_sums_over_bf16_tokens(autocast):
    model = random_trunk((4, 5), depth=1, gain=3.0)
    model = model if autocast else model.to(torch.bfloat16)
    config = Config.exact(TopFraction(0.2), scene_cut=None)
    stream = eventful.Stream(eventful.convert(model, config))
    for frame in drifting_tokens(100, 2, 20, 16, share=0.3):
        frame = torch.tanh(frame / 3) * 3
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            stream(frame if autocast else frame.to(torch.bfloat16))
    assert stream._state["blocks.0/key"].dtype == torch.bfloat16
    expected, _ = dense_on_buffers(stream, 2, 8**-0.5)
    got = stream._state["blocks.0/attended"].double()
    assert apart(got, expected) <= DRIFT


def test_exact_with_relative_position_where_one_stream_selects_nothing():
    """The bias is that of the rows that are corrected, and a stream without changes has none."""
    grid = (2, 3)
    trunk = random_trunk(grid, relative=True)
    first = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    second = first.clone()
    second[0, 2] *= -1  # the other stream stands still
    stream = Stream(eventful.convert(trunk, Config.exact(Threshold(1.0), scene_cut=None)))
    before = stream(first)
    got = stream(second)
    assert stream.last.gates["blocks.0.qkv"].counts.tolist() == [1, 0]
    assert torch.equal(got[1], before[1])
    assert not torch.equal(got[0], before[0])
    assert torch.isfinite(got).all()
