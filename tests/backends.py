"""Which backends a test of operations runs on, and the tensors it runs with."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from eventful.ops import eager, reference
from tolerances import limit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = DEVICE == "cuda" or INTERPRETED
KINDS = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]

# What `eager` computes itself; the rest it takes from the reference unchanged, and comparing a
# function with itself shows nothing.
OWN = {name for name in eager.__all__ if getattr(eager, name) is not getattr(reference, name)}
# On other devices eager calls the reference.
ONLY_ON_CPU = {
    "add_context_",
    "attend_partial",
    "carry",
    "error_norm",
    "frame_score",
    "lift_tokens_",
    "match_blocks",
    "suppress",
    "update_maps_",
}
MOTION = {"carry", "match_blocks"}  # compared in test_motion_ops.py
COMPARED: set[str] = set()  # operations of eager that a test of this process compares

if INTERPRETED:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        """Loops over a number given at run time: numpy 2.4 makes no int of an array (1,)."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor

needs_triton = pytest.mark.skipif(not TRITON, reason="needs CUDA or TRITON_INTERPRET=1")
triton = pytest.param("triton", marks=[needs_triton, pytest.mark.triton])
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def backends(*operations: str, independent: bool = False) -> pytest.MarkDecorator:
    """Run a test on every backend that has something of its own to show for `operations`.

    Args:
        independent: the expected values do not come from the reference, which is then tested too.
    """
    assert set(operations) <= set(eager.__all__)
    names = ["reference"] if independent else []
    if own := compared(*operations):
        names.append("eager")
        COMPARED.update(own)
    return pytest.mark.parametrize("backend", [*names, triton])


def compared(*operations: str) -> set[str]:
    """Those of `operations` which eager computes in its own way on this device."""
    return OWN & set(operations) - (ONLY_ON_CPU if DEVICE != "cpu" else set())


def also(*values: object) -> object:
    """A case beyond the one that every run covers: slow where kernels are interpreted."""
    return pytest.param(*values, marks=[pytest.mark.slow] if INTERPRETED else [])


@pytest.fixture(autouse=True)
def plain_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def poison(monkeypatch):
    """New memory is full of NaN: what a kernel does not write shows."""

    def empty(*size, **options):
        made = original(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-(2**30))

    original = torch.empty
    monkeypatch.setattr(torch, "empty", empty)


def make(*shape: int, kind: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=draw).to(DEVICE, kind)


def close(found: Tensor, expected: Tensor, kind: torch.dtype) -> None:
    """The norm of the error is small against the norm of what is expected."""
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)
    assert float(error) <= limit("operation", kind, DEVICE)


def tokens_of(batch: int, count: int, tokens: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(tokens, generator=draw)[:count].sort().values for _ in range(batch)]
    return torch.stack(rows).to(DEVICE)
