"""Bytes of state per stream, from shapes alone: what `inspect` reports before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eventful.config import Config
from eventful.cost.counting import BlockShape
from eventful.ops import CELL, SAMPLE


def state_bytes(shapes: Sequence[BlockShape], config: Config, dtype: torch.dtype) -> int:
    """Bytes that one stream holds, without tapped layers.

    Args:
        shapes: the blocks of one trunk.
        dtype: of the model's tokens.
    """
    if not shapes:
        return 0
    blocks = sum(_block_bytes(shape, config, dtype) for shape in shapes)
    if config.gating != "frame":
        return blocks
    first = shapes[0]
    return (
        blocks
        + _gate_bytes(first, first.dim, config, dtype)
        + first.tokens * first.dim * dtype.itemsize
        + _context_bytes(shapes, config, dtype)
        + _motion_bytes(first, config)
    )


def _context_bytes(shapes: Sequence[BlockShape], config: Config, dtype: torch.dtype) -> int:
    """Queries, their log-sum-exp and the change of attention outputs, and the outputs' size."""
    if config.context is None:
        return 0
    able = [i for i, shape in enumerate(shapes) if shape.window is None]
    followed = [shapes[i] for i in config.context.spread(able)]
    return sum(
        shape.tokens * (2 * shape.width * dtype.itemsize + 4 * shape.heads) + 4
        for shape in followed
    )


def _motion_bytes(shape: BlockShape, config: Config) -> int:
    """The last picture in grey."""
    if not config.motion or shape.grid is None:
        return 0
    return shape.grid[0] * shape.grid[1] * CELL**2 * torch.float32.itemsize


def _gate_bytes(shape: BlockShape, dim: int, config: Config, dtype: torch.dtype) -> int:
    """Reference, ages, and the sample of the previous frame."""
    total = shape.tokens * dim * dtype.itemsize
    if config.max_age is not None:
        total += shape.tokens * torch.int32.itemsize
    if getattr(config.policy, "needs_change", False):
        total += min(shape.tokens, SAMPLE) * dim * dtype.itemsize
    return total


def _block_bytes(shape: BlockShape, config: Config, dtype: torch.dtype) -> int:
    tokens = shape.tokens * shape.dim * dtype.itemsize
    key_value = 2 * shape.tokens * shape.width * dtype.itemsize
    if config.gating == "frame":
        return key_value
    if config.gating == "block":
        return key_value + tokens + _gate_bytes(shape, shape.dim, config, dtype)
    gates = sum(
        _gate_bytes(shape, dim, config, dtype) for dim in (shape.dim, shape.width, shape.dim)
    )
    return gates + 2 * tokens + _attention_bytes(shape, config, dtype)


def _attention_bytes(shape: BlockShape, config: Config, dtype: torch.dtype) -> int:
    """Buffers of attention under operator gating."""
    one = shape.tokens * shape.width * dtype.itemsize
    if shape.window is not None:
        selective = config.windows == "touched"
        return 3 * one if not selective or config.attention == "query" else 4 * one
    matrix = shape.heads * shape.tokens * shape.keys
    half = config.accumulate == "half"
    single = 2 if half else 4
    weights = (matrix + shape.keys * shape.width) * (2 if half else dtype.itemsize)
    summed = shape.tokens * shape.width * single
    softmax = shape.tokens * (shape.width + 2 * shape.heads) * 4
    return (
        3 * one
        + {
            "dense": 0,
            "query": 0,
            "delta-qk": matrix * dtype.itemsize,
            "delta-av": weights + summed,
            "delta": matrix * dtype.itemsize + weights + summed,
            "exact": softmax,
        }[config.attention]
    )
