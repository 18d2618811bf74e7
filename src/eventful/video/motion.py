"""Motion vectors of a decoder as a grid over the frame that is delivered.

They are a hint. An encoder chooses vectors that save bits, not those that follow objects, and
FFmpeg does not report which earlier frame a vector refers to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eventful.video.fitting import Layout

CELL = 16  # pixels; the blocks of MPEG-4 and H.264


def vector_grid(vectors: NDArray[Any], height: int, width: int) -> NDArray[np.float32] | None:
    """Vectors of one picture as displacements in pixels, for each cell of 16 x 16 pixels.

    Args:
        vectors: AVMotionVector of FFmpeg, one for each block, as a structured array.
        height: of the decoded picture, as `width`.

    Returns:
        (2, h, w): the way, down and across, from a cell to where its content was; the mean by area
        where a cell has several blocks, NaN where it has none. None if a vector comes from a later
        picture.
    """
    if len(vectors) == 0 or (vectors["source"] >= 0).any():
        return None
    rows, columns = -(-height // CELL), -(-width // CELL)
    row = vectors["dst_y"].astype(np.int64) // CELL
    column = vectors["dst_x"].astype(np.int64) // CELL
    scale = np.maximum(vectors["motion_scale"].astype(np.float64), 1)
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    cell = (row * columns + column)[inside]
    area = (vectors["w"].astype(np.float64) * vectors["h"])[inside]
    total = np.bincount(cell, area, rows * columns)
    grid = np.full((2, rows * columns), np.nan, np.float32)
    for axis, name in enumerate(("motion_y", "motion_x")):
        moved = np.bincount(cell, area * (vectors[name] / scale)[inside], rows * columns)
        np.divide(moved, total, out=grid[axis], where=total > 0, casting="same_kind")
    return grid.reshape(2, rows, columns)


def fitted_motion(grid: NDArray[np.float32], layout: Layout, height: int, width: int) -> Tensor:
    """A grid over the decoded picture as one over the delivered frame.

    Args:
        grid: (2, h, w) in pixels of the picture.
        layout: where the picture goes in the frame.
        height: of the decoded picture, as `width`.

    Returns:
        (1, 2, h', w') in fractions of the frame's height and width, with cells of about the same
        part of the picture; NaN outside the picture.
    """
    down, row_inside, rows = _centres(layout.frame[0], layout.top, layout.scaled[0], height)
    across, column_inside, columns = _centres(layout.frame[1], layout.left, layout.scaled[1], width)
    found = grid[:, rows[:, None], columns[None, :]]
    found[:, ~(row_inside[:, None] & column_inside[None, :])] = np.nan
    found *= np.array([down, across], np.float32)[:, None, None]
    return torch.from_numpy(found)[None]


def _centres(
    edge: int, start: int, scaled: int, original: int
) -> tuple[float, NDArray[np.bool_], NDArray[np.int64]]:
    """Along one edge: pixels as a fraction of the frame, and the cell below each new cell."""
    scale = scaled / original
    count = max(1, round(edge / (CELL * scale)))
    position = ((np.arange(count) + 0.5) * edge / count - start) / scale
    inside = (position >= 0) & (position < original)
    cells = np.clip(position, 0, original - 1).astype(np.int64) // CELL
    return scale / edge, inside, cells
