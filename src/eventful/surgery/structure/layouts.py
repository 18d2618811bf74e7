"""Where in the frame each token comes from: parts of a frame are exchanged, and tokens compared.

Rows and columns of patches are numbered in Gray code. For each bit, two frames are made: one with
other content in the patches whose number has the bit, and one with it in all the others. A token
has the bit if the first frame changes it more. A patch embedding that looks beyond its patch is
found out, too: in Gray code no patch stands between two of the other kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Grid = tuple[int, int]

_MIXED = 6  # most special tokens that depend on the frame, and one
_AT_ONCE = 8  # frames in one run


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


def start_of(span: Span, size: tuple[int, int], run: Callable[[Tensor], Tensor]) -> int | None:
    """Where the first token of a grid is, if they lie row by row; None if they do not.

    Args:
        run: makes tokens (F, N, D) of pixels (F, H, W) between 0 and 1: of which frame of two,
            the first or the second, each pixel is.
    """
    height, width = span.grid
    rows, columns = torch.arange(height), torch.arange(width)
    expected = (rows.repeat_interleave(width), columns.repeat(height))
    for places in (_by_bits, _by_lines):
        found = tuple(
            places(lines, _painter(size, len(lines), axis), run)
            for axis, lines in enumerate((rows, columns))
        )
        for start in span.starts:
            part = slice(start, start + height * width)
            if all(torch.equal(f[part], e) for f, e in zip(found, expected, strict=True)):
                return start
    return None


Paint = Callable[[Tensor], Tensor]


def _painter(size: tuple[int, int], count: int, axis: int) -> Paint:
    """Makes pixels (H, W) of a choice of rows, or of columns, of patches."""
    patch = (torch.arange(size[axis]) * count // size[axis]).clamp_max(count - 1)

    def paint(chosen: Tensor) -> Tensor:
        line = chosen[patch].float()
        return (line[:, None] if axis == 0 else line[None, :]).expand(size)

    return paint


def _by_bits(lines: Tensor, paint: Paint, run: Callable[[Tensor], Tensor]) -> Tensor:
    """The row, or the column, of each token, by two frames for each bit."""
    codes = lines ^ (lines >> 1)
    bits = max(1, int(codes.max()).bit_length())
    chosen = [(codes >> bit & 1).bool() for bit in range(bits)]
    changes = _changes([paint(c) for one in chosen for c in (one, ~one)], run)
    has = changes[0::2] > changes[1::2]  # (bits, N)
    found = torch.zeros(has.shape[1], dtype=torch.long)
    for bit in range(bits):
        found |= has[bit].long() << bit
    return _decoded(found, codes)


def _decoded(found: Tensor, codes: Tensor) -> Tensor:
    """The place of each code in a list; -1 where it is not in it."""
    equal = found[:, None] == codes[None]
    return torch.where(equal.any(1), equal.long().argmax(1), -1)


def _by_lines(lines: Tensor, paint: Paint, run: Callable[[Tensor], Tensor]) -> Tensor:
    """The row, or the column, of each token, by one frame for each row or column."""
    return _changes([paint(lines == line) for line in lines], run).argmax(0)


def _changes(pictures: Sequence[Tensor], run: Callable[[Tensor], Tensor]) -> Tensor:
    """How much each token changes (F, N) against that of the first frame alone."""
    found = []
    for begin in range(0, len(pictures), _AT_ONCE):
        part = list(pictures[begin : begin + _AT_ONCE])
        tokens = run(torch.stack([torch.zeros_like(part[0]), *part])).double()
        found.append((tokens[1:] - tokens[:1]).square().sum(-1).cpu())
    return torch.cat(found)
