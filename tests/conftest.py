"""Set-up shared by every test."""

from __future__ import annotations

import os

# Before torch is imported: the suite runs as two processes on two cores, and a thread pool in each
# would make them fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What falls back on dense steps depends on measured times; tests of the rules must not.
os.environ["EVENTFUL_FALLBACK"] = "0"

import pytest
import torch
from hypothesis import settings

# The first example of a property pays for torch's warm-up, which is no fault of the property.
settings.register_profile("eventful", deadline=None)
settings.load_profile("eventful")


@pytest.fixture
def full_precision():
    """Convolutions in TF32, the default of a GPU, would drown the differences under test."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
