"""What to do about a frame that a model cannot take: said before the model fails, or after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from eventful.errors import FrameError

# Their models take pictures as they are: none converts or normalises pixels.
_LIBRARIES = ("timm", "transformers", "torchvision", "eventful")
_COLOURS = (1, 3, 4)
_NORMALISE = (
    "Convert it to float and normalise it as the model expects, e.g. "
    "(frame.float() / 255 - mean) / std."
)


def judge_frame(model: nn.Module, method: str, frame: Tensor) -> None:
    """Raise for a frame that a model of a known library cannot take.

    Other models are not judged: one made by the user may well take uint8, or channels last.
    """
    channels = picture_channels(model, method)
    if channels is None:
        return
    advice = _shape_advice(tuple(frame.shape), channels)
    if advice is None and not frame.is_floating_point():
        advice = f"Its values are {_kind(frame)}, the model computes with floats. {_NORMALISE}"
    if advice is not None:
        raise FrameError(
            f"{type(model).__name__} takes frames (B, {channels}, height, width) of floats, this "
            f"one is {tuple(frame.shape)} {_kind(frame)}. {advice}"
        )


def picture_channels(model: nn.Module, method: str = "forward") -> int | None:
    """Channels of the pictures that a model of a known library takes; None where that is open."""
    function = getattr(type(model), method, None)
    if getattr(function, "__module__", "").split(".")[0] not in _LIBRARIES:
        return None
    placed = vars(model).get(method)  # eventful's own call the class's; any other may do anything
    if placed is not None and not type(placed).__module__.startswith("eventful."):
        return None
    if model._forward_pre_hooks:
        return None
    if "pixel" not in str(getattr(model, "main_input_name", "pixel_values")):
        return None  # transformers' name for the frame; that of a spectrogram is `input_values`
    first = next(
        (m for m in model.modules() if isinstance(getattr(m, "weight", None), Tensor)), None
    )
    plain = isinstance(first, nn.Conv2d) and first.groups == 1
    return first.in_channels if plain and isinstance(first, nn.Conv2d) else None


def _shape_advice(shape: tuple[int, ...], channels: int) -> str | None:
    """What to do about a shape that is not (B, channels, height, width)."""
    if len(shape) == 3 and shape[0] == channels:
        return "Add a batch dimension: frame[None], or frame.unsqueeze(0)."
    if len(shape) == 3 and shape[-1] == channels:
        return "Bring the channels forward and add a batch dimension: frame.permute(2, 0, 1)[None]."
    if len(shape) == 5:
        return "Step the frames of a clip (B, T, C, height, width) in turn: stream(clip[:, t])."
    if len(shape) != 4:
        return f"Make it (1, {channels}, height, width)."
    if shape[1] == channels:
        return None
    if shape[-1] == channels:
        return "Bring the channels forward: frame.permute(0, 3, 1, 2)."
    if shape[1] == 1 and channels > 1:
        return f"Repeat the one channel of a grey picture: frame.expand(-1, {channels}, -1, -1)."
    if shape[1] == channels + 1:
        return f"Drop the last channel (alpha): frame[:, :{channels}]."
    return f"It has {shape[1]} channels where the model takes {channels}."


def advise_after(frame: Tensor, model: nn.Module) -> str:
    """What may be wrong with a frame that a model failed on; empty if nothing shows."""
    shape, hints = tuple(frame.shape), []
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if not frame.is_floating_point():
        hints.append(f"The frame is {_kind(frame)}. {_NORMALISE}")
    elif weight is not None and weight.dtype != frame.dtype:
        wanted = f"torch.{str(weight.dtype).removeprefix('torch.')}"
        hints.append(f"The model's weights are {wanted}: pass frame.to({wanted}).")
    if len(shape) == 3 and shape[0] in _COLOURS:
        hints.append("A frame without a batch dimension needs one: frame[None].")
    elif len(shape) == 4 and shape[-1] in _COLOURS and shape[1] not in _COLOURS:
        hints.append("Most models want channels ahead of the size: frame.permute(0, 3, 1, 2).")
    return " ".join(hints)


def advise_instead(values: Iterable[Any]) -> str:
    """What to pass in place of arguments among which there is no frame, with a space ahead."""
    for value in values:
        advice = _instead(value)
        if advice is not None:
            return f" {advice}"
    return ""


def _instead(value: Any) -> str | None:
    if isinstance(value, np.ndarray):
        turn = ".permute(2, 0, 1)[None]" if value.ndim == 3 and value.shape[-1] in _COLOURS else ""
        pixels = f" {_NORMALISE}" if value.dtype.kind in "ui" else ""
        return f"For a numpy array write torch.from_numpy(frame){turn}.{pixels}"
    if isinstance(value, Tensor):
        return f"A tensor {tuple(value.shape)} lacks dimensions: frame[None] adds one in front."
    if isinstance(value, Mapping):
        if "pixel_values" in value:
            return "Unpack what a processor returns: stream(**inputs)."
        return (
            "For frames by name write "
            "batch(torch.cat(list(frames.values())), streams=list(frames))."
        )
    if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor | np.ndarray):
        return (
            "Step the frames of one video in turn: for frame in frames: stream(frame). Frames of "
            "several videos at one moment are one tensor: torch.cat(frames), or torch.stack if "
            "they have no batch dimension."
        )
    if isinstance(value, str | Path):
        return "Read the frames first: for frame in eventful.read(path, size=...)."
    if type(value).__module__.startswith("PIL."):
        return (
            "Turn a PIL image into a tensor first: "
            "torch.from_numpy(numpy.array(image)).permute(2, 0, 1)[None]. " + _NORMALISE
        )
    return None


def _kind(frame: Tensor) -> str:
    return str(frame.dtype).removeprefix("torch.")
