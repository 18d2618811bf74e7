"""Frames: finding one among a call's arguments, and what all frames of a stream must share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eventful.engine.advice import advise_after, advise_instead
from eventful.errors import EventfulError, FrameError, NonFiniteError, UnsupportedError

# What frames must have in common: shape, dtype, device, and the dtype of autocast ('' without).
Signature = tuple[tuple[int, ...], torch.dtype, torch.device, str]


def signature_of(frame: Tensor) -> Signature:
    """What this frame is like."""
    kind = frame.device.type
    autocast = ""
    if kind != "meta" and torch.is_autocast_enabled(kind):
        autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return tuple(frame.shape), frame.dtype, frame.device, autocast


def batched(signature: Signature | None, batch: int | None) -> Signature | None:
    """The signature with another batch size; None for any."""
    if signature is None:
        return None
    return ((-1 if batch is None else batch, *signature[0][1:]), *signature[1:])


def describe(signature: Signature) -> str:
    """A signature in words."""
    shape, dtype, device, autocast = signature
    text = f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"
    return f"{text} under autocast to {autocast}" if autocast else text


def find_frame(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor passed by place, else the one under the name models use for frames."""
    if args and isinstance(args[0], Tensor) and args[0].dim() >= 3:
        return args[0]
    pixels = (key for key in kwargs if key.startswith("pixel_values"))  # _videos, _images
    names = (getattr(model, "main_input_name", ""), "pixel_values", *pixels)
    named = [kwargs[key] for key in names if key in kwargs]
    for value in (*args, *named, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() >= 3:
            return value
    raise FrameError(
        "No frame among the arguments: pass a tensor (B, C, height, width)."
        f"{advise_instead((*args, *kwargs.values()))}"
    )


def is_refusal(error: BaseException) -> bool:
    """Whether an error is the model's own way to refuse its input."""
    refusals = (RuntimeError, AssertionError, ValueError, TypeError)
    return isinstance(error, refusals) and not isinstance(error, EventfulError)


def cannot_take(model: nn.Module, frame: Tensor | None, error: BaseException) -> FrameError:
    """The model's own refusal of its first frame as an error that says what to do."""
    if frame is None or (isinstance(error, TypeError) and "argument" in str(error)):
        return FrameError(f"The model cannot take these arguments: {error}.")
    advice = advise_after(frame, model)
    return FrameError(
        f"The model cannot take this frame, {describe(signature_of(frame))}: {error}"
        f"{f'. {advice}' if advice else ''}"
    )


def refuse_attentions(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise where the caller, or the model's own config, wants attention maps."""
    config = vars(model).get("config")  # a plain attribute, where models have one
    wanted = kwargs.get("output_attentions", getattr(config, "output_attentions", None))
    if wanted:
        raise UnsupportedError(
            "output_attentions=True: inside a stream attention maps are never whole. Call the "
            "model outside the stream, or switch output_attentions off."
        )


def check_finite(frame: Tensor) -> None:
    """Raise for NaN or Inf."""
    rows = rows_not_finite(frame)
    if rows:
        which = f" (video {', '.join(map(str, rows))} of {len(frame)})" if len(frame) > 1 else ""
        raise NonFiniteError(
            f"The frame contains NaN or Inf{which}. It was not used and the stream is as it was; "
            "go on with the next good frame.",
            rows=rows,
        )


def rows_not_finite(frame: Tensor) -> tuple[int, ...]:
    """Which frames of a batch (B, ...) contain NaN or Inf."""
    if not (frame.is_floating_point() or frame.is_complex()):
        return ()
    wide = torch.promote_types(frame.dtype, torch.float32)
    # A sum is one pass, a test of every number several. It may overflow, then they are tested.
    if torch.isfinite(frame.sum(dtype=wide)):
        return ()
    sound = torch.isfinite(frame).flatten(1).all(dim=1)
    return tuple((~sound).nonzero().flatten().tolist())
