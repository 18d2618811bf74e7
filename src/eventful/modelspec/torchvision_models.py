"""Models of torchvision by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from eventful.errors import UnsupportedError
from eventful.modelspec.names import first_line, nearest
from eventful.modelspec.place import made_on
from eventful.modelspec.size import Size, both_sides, in_words
from eventful.surgery import libraries


def build(
    name: str, size: Size | None = None, *, weightless: bool = False, weights: str | None = None
) -> nn.Module:
    """A model of torchvision, in eval mode.

    A vision transformer is made for one size of squares, a MaxViT for one size. Others take any.
    """
    models = libraries.load("torchvision.models")
    known = models.list_models()
    name = name.lower()  # as torchvision itself reads it
    if name not in known:
        raise UnsupportedError(f"torchvision has no model {name!r}.{nearest(name, known)}")
    options: dict[str, Any] = {}
    if size is not None and name.startswith("maxvit"):
        options = {"input_size": both_sides(size)}
    if size is not None and name.startswith("vit_"):
        height, width = both_sides(size)
        if height != width:
            raise UnsupportedError(
                f"torchvision:{name} takes square frames alone, not {in_words(size)}: give one "
                f"side, --size {max(height, width)}, or take a model of timm."
            )
        options = {"image_size": height}
    try:
        made = made_on(weightless, lambda: models.get_model(name, weights=weights, **options))
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        raise UnsupportedError(f"torchvision cannot make {name!r}: {first_line(error)}") from None
    return made.eval()
