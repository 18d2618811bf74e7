"""Models by a function of the user's own: `module.path:function`."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from eventful.errors import EventfulError, UnsupportedError
from eventful.modelspec.names import first_line, nearest
from eventful.modelspec.size import Longest, Size, both_sides

FORM = re.compile(r"(\w+(?:\.\w+)*):(\w+)")


def build(module: str, function: str, size: Size | None) -> nn.Module:
    """What the function returns, in eval mode; modules in the current folder are found.

    A function with a parameter `size` gets the size of the frames, if one was given: one number,
    or (height, width). Other functions are called without arguments.
    """
    name = f"{module}:{function}"
    try:
        make = _found(module, function)
        made = make(**_arguments(name, make, size))
    except EventfulError:
        raise
    except Exception as error:  # code of the user's may fail in any way
        raise UnsupportedError(
            f"{name} does not give a model ({type(error).__name__}: {first_line(error)}). Name a "
            "function that returns a torch.nn.Module, and takes no arguments or `size` alone."
        ) from error
    if not isinstance(made, nn.Module):
        raise UnsupportedError(f"{name} returned a {type(made).__name__}, not a torch.nn.Module.")
    return made.eval()


def _found(module: str, function: str) -> Callable[..., Any]:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise UnsupportedError(
                f"There is no module {module!r} (for {module}:{function}). Run the command in the "
                "folder of the module, or put that folder on PYTHONPATH."
            ) from None
        raise
    make = getattr(imported, function, None)
    if not callable(make):
        what = "no" if make is None else "no function"
        known = [key for key, value in vars(imported).items() if callable(value)]
        raise UnsupportedError(f"{module} has {what} {function!r}.{nearest(function, known)}")
    return make


def _arguments(name: str, make: Callable[..., Any], size: Size | None) -> dict[str, Any]:
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return {}
    if "size" not in parameters:
        return {}
    if size is not None:
        return {"size": both_sides(size) if isinstance(size, Longest) else size}
    if parameters["size"].default is inspect.Parameter.empty:
        raise UnsupportedError(f"{name} needs the size of the frames: give --size.")
    return {}
