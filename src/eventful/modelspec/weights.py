"""Files of weights for models of libraries and of users; nothing in a file is ever run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from eventful.errors import CheckpointError
from eventful.models.checkpoints import read_checkpoint
from eventful.modelspec.names import first_line

PRETRAINED = "pretrained"  # in place of a file: the weights that the library publishes


def load_state(model: nn.Module, path: Path, name: str) -> None:
    """Load a file into a model; tensors that the model does not have are left out.

    Of a model on the meta device it is checked alone that the file fits.

    Args:
        path: a .safetensors file, or a file by torch.save or pickle that holds tensors alone.
        name: of the model, for messages.

    Raises:
        CheckpointError: the file is not there, would run code, or does not fit the model.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not there.")
    held = read_checkpoint(path)
    state = {
        key: value.float() if value.is_floating_point() else value for key, value in held.items()
    }
    _drop_head_without_weights(model, set(state))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*to a meta parameter")
            left = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        reason = lines[0] if lines else first_line(error)
        raise CheckpointError(
            f"{path} does not fit {name}: {reason} Give the weights of this model, and --size as "
            "it was trained."
        ) from None
    if left.missing_keys:
        raise CheckpointError(
            f"{path} lacks {len(left.missing_keys)} tensors of {name}, the first "
            f"{left.missing_keys[0]}; give the weights of this model."
        )


def _drop_head_without_weights(model: nn.Module, keys: set[str]) -> None:
    """Take the classifier off a model of timm whose file of weights has none."""
    settings = getattr(model, "pretrained_cfg", None)
    named = settings.get("classifier") if isinstance(settings, Mapping) else None
    heads = [named] if isinstance(named, str) else list(named or ())
    if heads and not any(key.startswith(f"{head}.") for key in keys for head in heads):
        model.reset_classifier(0)  # type: ignore[operator]
