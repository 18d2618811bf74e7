"""Frames with NaN or Inf are found by their sum, and large finite ones are not taken for such."""

from __future__ import annotations

import pytest
import torch

from eventful.engine.frames import rows_not_finite


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_finds_the_frames(dtype):
    frames = torch.zeros(4, 3, 8, 8, dtype=dtype)
    assert rows_not_finite(frames) == ()
    frames[1, 2, 3, 4] = torch.nan
    frames[3, 0, 0, 0], frames[3, 0, 0, 1] = torch.inf, -torch.inf
    assert rows_not_finite(frames) == (1, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_that_overflows_is_no_fault(dtype):
    frames = torch.full((2, 3, 8, 8), torch.finfo(dtype).max, dtype=dtype)
    assert rows_not_finite(frames) == ()


def test_whole_numbers_are_finite():
    assert rows_not_finite(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)) == ()
