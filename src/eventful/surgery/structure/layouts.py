"""Where in the frame each token comes from: parts of a frame are exchanged, and tokens compared.

Rows and columns of patches are numbered in Gray code. For each bit, a frame is made with other
content in the patches whose number has the bit. A token has the bit if it changes by more than half
of what it changes by with other content everywhere. Where patches overlap, that may not tell: then
one row or column at a time has other content.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Grid = tuple[int, int]

_MIXED = 6  # most special tokens that depend on the frame, and one
_AT_ONCE = 15  # frames in one run, and one


@dataclass(frozen=True)
class Span:
    """Tokens that may be those of a grid.

    Attributes:
        grid: their rows and columns.
        starts: where the first of them may be.
    """

    grid: Grid
    starts: range


def spans(begin: int, count: int, size: tuple[int, int]) -> Iterator[Span]:
    """What `count` tokens that depend on the frame may be: a grid, and some special tokens.

    Args:
        begin: the first of them.
        size: of the frame in pixels.
    """
    # A special token that has seen the patches, e.g. in a block before, changes as they do.
    for special in range(_MIXED):
        height = round(math.sqrt(max(0, count - special) * size[0] / size[1]))
        if height and (count - special) % height == 0:
            width = (count - special) // height
            if abs(width - height * size[1] / size[0]) < 1:
                yield Span((height, width), range(begin + special, begin - 1, -1))


# How much each token changes (F, N) with parts (F, H, W) of a frame replaced by another frame's.
Changes = Callable[[Tensor], Tensor]


def start_of(span: Span, size: tuple[int, int], run: Changes) -> int | None:
    """Where the first token of a grid is, if they lie row by row; None if they do not.

    Args:
        size: of the frame in pixels.
        run: tries pictures with 1 where content is exchanged, and 0 elsewhere.
    """
    for places, agree in ((_by_bits, _equal), (_by_lines, _rising)):
        found = places(span.grid, size, run)
        for start in span.starts:
            part = slice(start, start + span.grid[0] * span.grid[1])
            rows, columns = (one[part].unflatten(0, span.grid) for one in found)
            if agree(rows) and agree(columns.T):
                return start
    return None


def squared_change(tokens: Tensor) -> Tensor:
    """How much the tokens (1 + F, N, D) of F pictures differ from those of the first (F, N)."""
    return (tokens[1:] - tokens[:1]).double().square().sum(-1).cpu()


def _equal(places: Tensor) -> bool:
    """Whether the tokens (h, w) of each row are in that row."""
    return bool((places == torch.arange(len(places))[:, None]).all())


def _rising(places: Tensor) -> bool:
    """Whether each token (h, w) is below the one of the row above it."""
    return bool((places.diff(dim=0) > 0).all())


def _pixels(chosen: Tensor, size: tuple[int, int], axis: int) -> Tensor:
    """A picture (H, W) of a choice of rows, or of columns, of patches."""
    count = len(chosen)
    line = chosen[torch.arange(size[axis]) * count // size[axis]].float()
    return (line[:, None] if axis == 0 else line[None, :]).expand(size)


def _by_bits(grid: Grid, size: tuple[int, int], run: Changes) -> list[Tensor]:
    """The row and the column of each token; -1 where there is none of that code."""
    codes = [lines ^ (lines >> 1) for lines in map(torch.arange, grid)]
    bits = [max(1, int(code.max()).bit_length()) for code in codes]
    pictures = [
        _pixels((codes[axis] >> bit & 1).bool(), size, axis)
        for axis in (0, 1)
        for bit in range(bits[axis])
    ]
    whole, *parts = _tried([torch.ones(size), *pictures], run)
    found = []
    for code, count in zip(codes, bits, strict=True):
        has = torch.stack(parts[:count]) > whole / 2  # (bits, N)
        parts = parts[count:]
        number = (has.long() << torch.arange(count)[:, None]).sum(0)
        equal = number[:, None] == code[None]
        found.append(torch.where(equal.any(1), equal.long().argmax(1), -1))
    return found


def _by_lines(grid: Grid, size: tuple[int, int], run: Changes) -> list[Tensor]:
    """The row and the column of the middle of what each token sees.

    A token may see as much of two rows. What changes with every row alike is left out.
    """
    found = []
    for axis, count in enumerate(grid):
        lines = torch.arange(count)
        pictures = [_pixels(lines == line, size, axis) for line in lines]
        changes = torch.stack(_tried(pictures, run))  # (rows, N)
        local = (changes - changes.median(dim=0).values).clamp_min(0)
        found.append((lines[:, None] * local).sum(0) / local.sum(0).clamp_min(1e-300))
    return found


def _tried(pictures: Sequence[Tensor], run: Changes) -> list[Tensor]:
    parts = range(0, len(pictures), _AT_ONCE)
    return [row for at in parts for row in run(torch.stack([*pictures[at : at + _AT_ONCE]]))]
