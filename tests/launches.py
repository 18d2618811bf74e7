"""A pytest plugin (`-p launches`): writes which Triton functions the interpreter ran.

Their names go to the file that the environment variable LAUNCHES names.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from triton.runtime.interpreter import InterpretedFunction

_seen: set[str] = set()


def _noted(method):
    def run(self, *args, **kwargs):
        _seen.add(self.fn.__name__)
        return method(self, *args, **kwargs)

    return run


def pytest_configure(config: pytest.Config) -> None:
    InterpretedFunction.run = _noted(InterpretedFunction.run)  # kernels
    InterpretedFunction.__call__ = _noted(InterpretedFunction.__call__)  # what kernels call


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(os.environ["LAUNCHES"]).write_text("\n".join(sorted(_seen)))
