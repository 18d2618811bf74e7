"""Models of timm by name."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from eventful.errors import EventfulError, UnsupportedError
from eventful.modelspec.names import first_line, nearest
from eventful.modelspec.place import made_on
from eventful.modelspec.size import Size, both_sides, in_words
from eventful.surgery import libraries


def knows(name: str) -> bool:
    """Whether timm is installed and has such a model."""
    try:
        return bool(libraries.load("timm").is_model(name))
    except ImportError:  # a missing library is an ImportError, too
        return False


def near(name: str) -> str:
    """A sentence with timm's names nearest to one; empty if timm is not installed."""
    try:
        return nearest(name, libraries.load("timm").list_models()).replace("Names", "timm's names")
    except ImportError:
        return ""


def build(
    name: str,
    size: Size | None = None,
    *,
    weightless: bool = False,
    pretrained: bool = False,
    **options: Any,
) -> nn.Module:
    """A model of timm, in eval mode.

    A model that can be set to another size later keeps its own, for which its weights are.
    """
    timm = libraries.load("timm")
    if not timm.is_model(name):
        raise UnsupportedError(f"timm has no model {name!r}.{nearest(name, timm.list_models())}")

    def make(**given: Any) -> nn.Module:
        made = timm.create_model(name, pretrained=pretrained, **options, **given)
        return cast(nn.Module, made)

    try:
        made = made_on(weightless, make)
        if size is not None and not hasattr(made, "set_input_size"):
            both_sides(size)  # the shape of the picture is not known here
            made = _sized(make, made, name, size, weightless)
    except EventfulError:
        raise
    except (TypeError, ValueError, AssertionError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(f"timm cannot make {name!r}: {first_line(error)}") from None
    return made.eval()


def _sized(make: Any, plain: nn.Module, name: str, size: Size, weightless: bool) -> nn.Module:
    """The model for frames of this size. Families without `img_size`, such as ResNet, take any."""
    try:
        return made_on(weightless, lambda: make(img_size=size))
    except TypeError:
        return plain
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UnsupportedError(
            f"timm:{name} cannot be made for frames of {in_words(size)} px ({first_line(error)})."
        ) from None
