"""Set-up shared by every test."""

from __future__ import annotations

import faulthandler
import os
import sys
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


# Seconds of one test after which the process ends with the tracebacks of all its threads. Without a
# limit a test that hangs would stop CI until CI's own limit, and say nothing.
LIMIT, SLOW_LIMIT = 900, 3600
_errors = pytest.StashKey[int]()


def pytest_configure(config):
    """Keep the real stderr: what tests print is caught."""
    config.stash[_errors] = os.dup(sys.__stderr__.fileno())


def pytest_unconfigure(config):
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_errors])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Limit the time of a test with its fixtures."""
    limit = SLOW_LIMIT if item.get_closest_marker("slow") else LIMIT
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[_errors])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


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


@pytest.fixture(scope="module")
def without_openvino():
    """As if OpenVINO were not installed: compiling each dense model for it takes seconds.

    tests/test_bench.py has the tests of this dense path.
    """
    import importlib.util

    def found(name, *rest):
        return None if name == "openvino" else find(name, *rest)

    find = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", found)
        yield
