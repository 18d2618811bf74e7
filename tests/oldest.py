"""A plugin for `make test-oldest`: what the installed libraries do not have yet is skipped.

A test is skipped where making a model fails in the library itself: there the family, or an option
of it, is not there. A failure in code of eventful's own stays a failure. Tests of what libraries do
in another way since are listed by name.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = ("unexpected keyword argument", "Unknown model", "has no attribute", "multiple values")

NEWER = {
    "test_vit_b_at_1024_px_in_bf16": "timm's constructors read numbers from tensors",
    "test_variants[no position]": "timm left the class token out",
    "test_some_hidden_states": "transformers took no list of layers",
    "test_masks_are_refused": "transformers' ViTs took no mask",
    "test_some_tokens_come_close[depth_anything": "the random weights give a depth of zero",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that are listed."""
    for item in items:
        for name, reason in NEWER.items():
            if item.name.startswith(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Make a test's fixtures; skip it where they need what an older library lacks."""
    return (yield from _skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test; skip it where it needs what an older library lacks."""
    return (yield from _skipping())


def _skipping() -> Iterator[None]:
    try:
        return (yield)
    except (TypeError, RuntimeError, AttributeError) as error:
        if _lacks(error):
            pytest.skip(f"not in this version: {str(error).splitlines()[0][:120]}")
        raise


def _lacks(error: BaseException) -> bool:
    """Whether a library refused to make a model, without code of eventful's in between."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    own = any("src" in file.parts and "eventful" in file.parts for file in files)
    return not own and any(text in str(error) for text in MISSING)
