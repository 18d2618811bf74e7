"""Set-up shared by every test."""

from __future__ import annotations

import os
import tempfile

# Before torch is imported: the suite runs as two processes on two cores, and a thread pool in each
# would make them fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Times measured by other runs, or by the user's own, are not the tests'.
os.environ["EVENTFUL_CACHE"] = tempfile.mkdtemp(prefix="eventful-tests-")

import pytest
import torch
from hypothesis import settings

from eventful.cost.times import use_clock

# The first example of a property pays for torch's warm-up, which is no fault of the property. The
# examples are the same in every run, so that a failure belongs to a change; EVENTFUL_EXPLORE=1
# draws others.
settings.register_profile("eventful", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("explore" if os.environ.get("EVENTFUL_EXPLORE") else "eventful")


@pytest.hookimpl(tryfirst=True)  # ahead of the choice by marks
def pytest_collection_modifyitems(items):
    """Of large products some cases run by default, so that each value meets some of the others.

    The longest test is first: at the end, one of the two processes would wait for it.
    """
    for item in items:
        turn = item.get_closest_marker("in_turn")
        if turn and sum(item.callspec.indices.values()) % turn.args[0]:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: "test_interpreter.py" not in item.nodeid)


@pytest.fixture(autouse=True)
def still_clock(request):
    """A clock that stands still: streams may fall back, but see no reason to.

    Whether a step runs dense must not depend on how busy the machine is. Tests of the fallback
    bring a clock of their own; those marked `real_clock` measure.
    """
    if request.node.get_closest_marker("real_clock"):
        yield
    else:
        with use_clock(lambda: 0.0):
            yield


@pytest.fixture
def full_precision():
    """Convolutions in TF32, the default of a GPU, would drown the differences under test."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
