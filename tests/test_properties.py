"""Laws over a wide space: odd grids, ragged windows, any r, any batch, empty selections."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import eventful
from eventful import Config, Selection, Threshold, TopR, ops
from eventful.tokens.layout import TokenLayout
from small import drifting_tokens, random_trunk
from tolerances import assert_near

RULES = {
    "fast": lambda p, **o: Config.fast(p, **o),
    "block": lambda p, **o: Config(p, gating="block", **o),
    "exact": lambda p, **o: Config.exact(p, **o),
    "query": lambda p, **o: Config(p, gating="operator", **o),
    "paper": lambda p, **o: Config.paper(p, **o),
    "once": lambda p, **o: Config.paper(p, overlap="once", **o),
    "delta-qk": lambda p, **o: Config.paper(p, attention="delta-qk", **o),
    "delta-av": lambda p, **o: Config.paper(p, attention="delta-av", **o),
    "tokenwise": lambda p, **o: Config.tokenwise(p, **o),
    "touched": lambda p, **o: Config.tokenwise(p, windows="touched", **o),
    "stgt": lambda p, **o: Config.stgt(p, **o),
}

shapes = st.fixed_dictionaries(
    {
        "grid": st.tuples(st.integers(1, 6), st.integers(1, 6)),
        "window": st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4)),
        "relative": st.booleans(),
        "special": st.integers(0, 2),
    }
).filter(lambda s: not (s["special"] and (s["relative"] or s["window"])))
rules = st.sampled_from(sorted(RULES))
policies = st.builds(TopR, st.integers(0, 45)) | st.builds(Threshold, st.floats(0.5, 12))


def step_all(model, clip, config):
    stream = eventful.Stream(eventful.convert(model, config))
    return stream, [stream(frame) for frame in clip]


@settings(max_examples=60)
@given(shapes, rules, st.integers(1, 5), st.sampled_from([1, 2, 3]), st.integers(0, 99))
def test_all_tokens_is_a_flush(shape, rule, batch, pool, seed):
    model = random_trunk(**shape, seed=seed)
    clip = drifting_tokens(4, batch, model.layout.tokens, 16, share=0.4, seed=seed)
    config = RULES[rule](TopR(50), pool=pool)
    _, outputs = step_all(model, clip, config)
    for frame, got in zip(clip, outputs, strict=True):
        expected = eventful.Stream(eventful.convert(model, config))(frame)
        assert_near(got, expected)


@settings(max_examples=60)
@given(shapes, rules, policies, st.integers(1, 5), st.sampled_from([1, 2]), st.integers(0, 99))
def test_a_batch_is_its_rows(shape, rule, policy, batch, pool, seed):
    model = random_trunk(**shape, seed=seed)
    # Over a single key every token attends alike, and top-r would choose among equals.
    assume(model.layout.pooled(pool).tokens > 1)
    # Every token moves, by its own amount: errors that tie, or are rounding alone, decide nothing.
    clip = drifting_tokens(4, batch, model.layout.tokens, 16, share=1.0, seed=seed)
    config = RULES[rule](policy, pool=pool)
    stream, together = step_all(model, clip, config)
    macs = 0
    for row in range(batch):
        single, alone = step_all(model, [frame[row : row + 1] for frame in clip], config)
        macs += single.last.macs
        for a, b in zip(together, alone, strict=True):
            assert_near(a[row : row + 1], b)
    assert stream.last.macs == macs


@settings(max_examples=40)
@given(shapes, rules, st.integers(1, 3), st.integers(0, 99))
def test_r_zero_updates_what_comes_on_top_alone(shape, rule, batch, seed):
    model = random_trunk(**shape, seed=seed)
    clip = drifting_tokens(3, batch, model.layout.tokens, 16, share=0.5, seed=seed)
    stream, outputs = step_all(
        model, clip, RULES[rule](TopR(0), scene_cut=None, max_age=None, protect=False)
    )
    assert set(stream.last.updated.values()) == {0.0}
    if stream.config.gating != "operator":  # operator gating still adds the new residual stream
        assert torch.equal(outputs[2], outputs[0])


@settings(max_examples=40)
@given(shapes, rules, policies, st.integers(1, 3), st.integers(0, 99), st.integers(0, 6))
def test_a_failed_step_leaves_the_stream_as_it_was(shape, rule, policy, batch, seed, place):
    """An exception anywhere in the model, and the step before it never happened."""
    model = random_trunk(**shape, seed=seed)
    clip = drifting_tokens(4, batch, model.layout.tokens, 16, share=0.3, seed=seed)
    converted = eventful.convert(model, RULES[rule](policy))
    parts = [part for part in converted.modules() if isinstance(part, torch.nn.Linear)]
    struck, straight = eventful.Stream(converted), eventful.Stream(converted)
    for frame in clip[:2]:
        struck(frame)
        straight(frame)
    held = {name: tensor.clone() for name, tensor in struck._state.tensors.items()}

    def strike(*_):
        raise RuntimeError("struck")

    hook = parts[place % len(parts)].register_forward_hook(strike)
    with pytest.raises(RuntimeError, match="struck"):
        struck(clip[2])
    hook.remove()
    assert struck._state.tensors.keys() == held.keys()
    for name, before in held.items():  # a change of outputs that is not known yet is NaN
        assert_close(struck._state[name], before, rtol=0, atol=0, equal_nan=True, msg=name)
    for frame in clip[3:]:
        assert torch.equal(struck(frame), straight(frame))


@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 10**6))
def test_selections_round_trip(batch, tokens, seed):
    make = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, tokens, generator=make) < torch.rand(batch, 1, generator=make)
    selection = Selection.from_mask(mask)
    assert torch.equal(selection.mask(), mask)
    assert torch.equal(selection.complement().mask(), ~mask)
    assert selection.counts.tolist() == mask.sum(1).tolist()
    source, target = torch.randn(batch, tokens, 3), torch.zeros(batch, tokens, 3)
    selection.scatter_(target, selection.gather(source))
    assert torch.equal(target, source * mask[..., None])


@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 25), st.integers(0, 10**6))
def test_top_selects_the_largest(batch, tokens, r, seed):
    score = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed))
    selection = Selection.top(score, r)
    count = min(r, tokens)
    assert selection.width == count
    if 0 < count < tokens:
        inside = score.masked_fill(~selection.mask(), 2.0).min(1).values
        outside = score.masked_fill(selection.mask(), -1.0).max(1).values
        assert (inside >= outside).all()
    by_row = Selection.top(score, torch.full((batch,), r))
    assert torch.equal(by_row.mask(), selection.mask())


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)), st.tuples(st.integers(1, 5), st.integers(1, 5))
)
def test_window_maps_place_every_token_once(grid, window):
    windows = ops.WindowGrid(grid, window)
    places = ops.window_map(windows, torch.device("cpu"))
    count = grid[0] * grid[1]
    real = places.members[places.members < count]
    assert sorted(real.tolist()) == list(range(count))
    assert torch.equal(places.members[places.window_of, places.place_of], torch.arange(count))
    assert windows.padded == bool(grid[0] % window[0] or grid[1] % window[1])


@given(
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_pooling_touches_the_cells_of_changed_tokens(grid, prefix, suffix, size):
    layout = TokenLayout(grid, prefix, suffix)
    tokens = torch.randn(2, layout.tokens, 3)
    changed = torch.rand(2, layout.tokens) < 0.2
    moved = torch.where(changed[..., None], tokens + 1, tokens)
    before, after = layout.pool(tokens, size), layout.pool(moved, size)
    assert before.shape[1] == layout.pooled(size).tokens
    touched = layout.pool_mask(changed, size)
    assert torch.equal(touched, (before != after).any(-1))
