"""How far two ways to compute the same thing may be apart: one table for every test.

A tolerance depends on the kind of comparison, the device and the dtype. It is the largest
difference divided by the largest expected value. Comparisons element by element of one formula
(box codes, losses) use `torch.testing.assert_close` with torch's own limits by dtype instead.

A bound that is itself the claim of a test (an error after so many frames, a learned accuracy)
stays in that test, with its reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# Kinds of comparison:
#   step       the same operations on the same tokens, through another path of the engine
#   operation  one operation in another order of additions
#   model      through a whole model, computed in another order
#   library    through a whole model, against another implementation or its stored outputs
TABLE: dict[str, dict[str, dict[torch.dtype, float]]] = {
    "step": {"cpu": {F32: 1e-6}, "cuda": {F32: 2e-5}},
    "operation": {
        "cpu": {F64: 1e-12, F32: 1e-5, F16: 2e-3, BF16: 1.6e-2},
        "cuda": {F64: 1e-12, F32: 2e-5, F16: 2e-3, BF16: 1.6e-2},
    },
    "model": {"cpu": {F32: 1e-5, BF16: 3e-2}, "cuda": {F32: 1e-5, BF16: 3e-2}},
    "library": {"cpu": {F32: 1e-4, BF16: 2e-2}, "cuda": {F32: 1e-4, BF16: 2e-2}},
}
# Element by element, for `torch.testing.assert_close`, where small values count as much as large
# ones: corners in pixels, scores and mask values, and features or weights in fp32.
BOXES = {"atol": 1e-3, "rtol": 1e-4}
SCORES = {"atol": 1e-4, "rtol": 1e-4}
VALUES = {"atol": 1e-5, "rtol": 1e-4}


def limit(kind: str, dtype: torch.dtype = F32, device: str = "cpu") -> float:
    """The tolerance of a kind of comparison."""
    return TABLE[kind][device][dtype]


def apart(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value; 0 for empty tensors."""
    assert got.shape == expected.shape
    if not expected.numel():
        return 0.0
    got, expected = got.detach().double(), expected.detach().double()
    largest = expected.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((got - expected).abs().max() / largest)


def assert_near(
    got: Tensor,
    expected: Tensor,
    kind: str = "model",
    note: object = "",
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Both are the same up to rounding.

    Args:
        kind: a row of `TABLE`.
        note: what to name in the message, such as the frame.
        dtype: the precision of the computation, where it is not that of `got`.
    """
    bound = limit(kind, dtype or got.dtype, got.device.type)
    error = apart(got, expected.to(got.device))
    assert error <= bound, f"{note}: {error:.2e} apart, {kind} allows {bound:.0e}"
