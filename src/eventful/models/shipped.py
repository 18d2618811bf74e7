"""Trained models by name: those that come with the package, and one from another package."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from torch import nn

from eventful.errors import CheckpointError, ConfigError
from eventful.models.focus import load_focus
from eventful.models.loading import load_model

_FOLDER = "weights"
SHIPPED = ("detector", "actions")  # those whose weights are files of the package


def weights_of(name: str) -> Path:
    """The file of a model that comes with the package."""
    path = Path(str(resources.files("eventful.models") / _FOLDER / f"{name}.safetensors"))
    if not path.is_file():
        raise CheckpointError(
            f"The weights of {name!r} are not in this installation ({path}): install the package "
            "again."
        )
    return path


def named_or_file(path: Path) -> Path:
    """A file of weights; the name of a model that comes with the package means its file."""
    return weights_of(str(path)) if str(path) in SHIPPED and not path.exists() else path


_LOADERS: dict[str, Callable[[], nn.Module]] = {
    "detector": lambda: load_model(weights_of("detector")),
    "actions": lambda: load_model(weights_of("actions")),
    "focus": load_focus,
}
NAMES = tuple(_LOADERS)


def load(name: str) -> nn.Module:
    """A trained model, in eval mode, on the CPU.

    - `detector`: a ViTDet of 4 million parameters for `eventful.video.world`.
    - `actions`: a factorised ViViT of 4 million parameters that names motions in clips of 32
      frames of the same world.
    - `focus`: a ViT-S/14 with a saliency head, trained on photographs; needs the extra `focus`.

    The first two have the names of its classes in `classes`.
    """
    if name not in _LOADERS:
        raise ConfigError(f"No model {name!r}; there are {', '.join(NAMES)}.")
    return _LOADERS[name]()
