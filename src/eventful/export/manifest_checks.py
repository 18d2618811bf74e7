"""Whether the values of a manifest can be: a forged one can have a checksum that fits."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from eventful.errors import ArtefactError
from eventful.export.outputs import Skeleton, leaf_names

if TYPE_CHECKING:
    from eventful.export.manifest import Manifest

# Dtypes of frames, outputs and state that onnxruntime and OpenVINO exchange with torch.
ARRAYS = (torch.float32, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8,
          torch.bool)  # fmt: skip
MOST_BYTES = 2**34  # of a frame, and of the state of a stream
MOST_SIDES, MOST_DEPTH = 6, 50


def check_manifest(made: Manifest) -> None:
    """Raise for values of other types, or out of their range.

    Raises:
        ArtefactError: the message names the entry.
    """
    _need(_texts(made.versions) and isinstance(made.model, str), "model or versions")
    _need(isinstance(made.options, dict), "options")
    _need(_identity(made.identity), "identity")
    _need(type(made.tokens) is int and 1 <= made.tokens <= MOST_BYTES, "tokens")
    _need(type(made.forced) is int and 0 <= made.forced <= made.tokens, "forced")
    frame = made.frame
    _need(isinstance(frame, dict) and frame.keys() == {"shape", "dtype"}, "frame")
    _need(len(frame["shape"]) == 4 and _bytes(frame["shape"], frame["dtype"]) > 0, "frame")
    _check_state(made)
    _check_steps(made)
    _check_skeleton(made.skeleton)
    _need(_texts(made.files), "files")
    _need(all(re.fullmatch("[0-9a-f]{64}", one) for one in made.files.values()), "files")
    _ = made.policy


def _need(good: bool, what: str) -> None:
    if not good:
        raise ArtefactError(f"The {what} in manifest.json cannot be; export again.")


def _texts(value: Any) -> bool:
    """Whether this is a mapping of texts to texts."""
    return isinstance(value, dict) and all(
        isinstance(text, str) for pair in value.items() for text in pair
    )


def _identity(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"fingerprint", "rule", "settings"}
        and isinstance(value["fingerprint"], str)
        and isinstance(value["rule"], dict)
        and _texts(value["settings"])
    )


def _bytes(shape: Any, dtype: Any) -> int:
    """Bytes of a tensor; 0 if there cannot be such a one."""
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if kind not in (*ARRAYS, torch.bfloat16) or not 1 <= len(shape) <= MOST_SIDES:
        return 0
    assert isinstance(kind, torch.dtype)
    if not all(type(side) is int and 1 <= side <= MOST_BYTES for side in shape):
        return 0
    size = math.prod(shape) * kind.itemsize
    return size if size <= MOST_BYTES else 0


def _check_state(made: Manifest) -> None:
    for one in made.state:
        texts = (one.name, one.input, one.output)
        _need(all(isinstance(text, str) and text for text in texts), "state")
        _need(isinstance(one.optional, bool), "state")
        _need(_bytes(one.shape, one.dtype) > 0, f"shape or dtype of {one.name}")
    for names in zip(*((one.name, one.input, one.output) for one in made.state), strict=True):
        _need(len(set(names)) == len(names), "state")
    _need(sum(_bytes(one.shape, one.dtype) for one in made.state) <= MOST_BYTES, "state")


def _check_steps(made: Manifest) -> None:
    files = [made.dense, *(one.file for one in made.steps)]
    _need(all(isinstance(file, str) and file for file in files), "steps")
    _need(len(set(files)) == len(files), "steps")
    widths = made.widths
    _need(all(type(one) is int and 1 <= one <= made.tokens for one in widths), "steps")
    _need(widths == sorted(set(widths)), "order of the steps")


def _check_skeleton(skeleton: Skeleton) -> None:
    found: list[Any] = []
    _need(_is_part(skeleton, found, MOST_DEPTH), "skeleton")
    _need(bool(found) and found == list(range(len(found))), "skeleton")
    names = leaf_names(skeleton)
    _need(len(set(names)) == len(names), "skeleton")


def _is_part(part: Any, found: list[Any], depth: int) -> bool:
    """Whether this is a part of a skeleton; the numbers of its leaves are added to `found`."""
    if not isinstance(part, dict) or not depth:
        return False
    if part.keys() == {"leaf", "name"}:
        found.append(part["leaf"] if type(part["leaf"]) is int else None)
        return isinstance(part["name"], str)
    if len(part) != 1:
        return False
    (kind, held), *_ = part.items()
    if kind == "value":
        return held is None or isinstance(held, bool | int | float | str)
    if kind == "dict" and isinstance(held, dict):
        return all(_is_part(one, found, depth - 1) for one in held.values())
    if kind in ("list", "tuple") and isinstance(held, list):
        return all(_is_part(one, found, depth - 1) for one in held)
    return False
