"""Keeps torch.compile out of the code of a stream."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that runs as it is where compiled code calls it.

    A stream's memory and checks would take minutes to trace, with nothing gained. Compiled parts of
    the model stay compiled.
    """
    made: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:  # importing it takes seconds, and nobody compiles
            return function(*args, **kwargs)
        if not made:
            made.append(torch.compiler.disable(function))
        result: Result = made[0](*args, **kwargs)
        return result

    return run
