"""Every operation with a fast twin gives what the reference gives, over shapes and dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eventful.ops import eager, reference
from tolerances import limit

DTYPES = [torch.float32, torch.bfloat16]

shapes = st.tuples(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 9),
    st.integers(1, 9),
    st.sampled_from([4, 8]),
)


def draw(shape, dtype, seed):
    batch, heads, queries, keys, width = shape
    make = torch.Generator().manual_seed(seed)

    def normal(*size):
        return (2 * torch.randn(*size, generator=make)).to(dtype)

    q = normal(batch, heads, queries, width)
    k, v = (normal(batch, heads, keys, width) for _ in range(2))
    return q, k, v, normal(batch, heads, queries, keys)


def close(got, expected, dtype):
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(got), finite)
    assert torch.equal(got[~finite], expected[~finite])
    largest = expected[finite].abs().max() if finite.any() else torch.tensor(0.0)
    error = (got[finite].float() - expected[finite].float()).abs()
    assert not error.numel() or error.max() <= limit("operation", dtype) * max(float(largest), 1.0)


@given(shapes, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99))
def test_attention(shape, dtype, biased, seed):
    q, k, v, bias = draw(shape, dtype, seed)
    bias = bias if biased else None
    expected = reference.attend(
        *(x.float() for x in (q, k, v)), 0.3, None if bias is None else bias.float()
    )
    close(eager.attend(q, k, v, 0.3, bias), expected, dtype)


@given(shapes, st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(0, 99))
def test_partial_attention(shape, dtype, biased, ragged, seed):
    q, k, v, bias = draw(shape, dtype, seed)
    bias = bias if biased else None
    valid = None
    if ragged:
        valid = torch.rand(shape[0], shape[3], generator=torch.Generator().manual_seed(seed)) < 0.5
    expected = reference.attend_partial(q, k, v, 0.3, bias, valid)
    got = eager.attend_partial(q, k, v, 0.3, bias, valid)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        close(a, b, torch.float32)


@given(shapes, st.integers(0, 99))
def test_exchanging_some_keys_is_attention_over_the_new_ones(shape, seed):
    q, k, v, _ = draw(shape, torch.float32, seed)
    new_k, new_v = k.clone(), v.clone()
    changed = slice(0, max(shape[3] // 2, 1))
    new_k[:, :, changed] += 1
    new_v[:, :, changed] -= 1
    out, lse = reference.attend_partial(q, k, v, 0.3)
    new = reference.attend_partial(q, new_k[:, :, changed], new_v[:, :, changed], 0.3)
    old = reference.attend_partial(q, k[:, :, changed], v[:, :, changed], 0.3)
    merged, merged_lse, condition = reference.merge_partial((out, lse, 1 + lse.abs()), new, old)
    expected, expected_lse = reference.attend_partial(q, new_k, new_v, 0.3)
    good = condition < 100  # which multiplies the rounding of one operation
    for a, b in ((merged, expected), (merged_lse, expected_lse)):
        assert not good.any() or (a - b)[good].abs().max() < 100 * limit("operation")


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_scatter_puts_back_what_gather_took(dim):
    source = torch.randn(2, 5, 5, 5)
    index = torch.stack([torch.randperm(5)[:3] for _ in range(2)])
    target = torch.full_like(source, float("nan"))
    reference.scatter_(target, index, reference.gather(source, index, dim), dim)
    written = ~target.isnan()
    assert int(written.sum()) == 2 * 3 * 25
    assert torch.equal(target[written], source[written])
