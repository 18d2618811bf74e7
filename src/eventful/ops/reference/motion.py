"""Motion between two frames in plain PyTorch: find it, and move the memory of tokens along.

Motion is (B, h, w, 2), in tokens, down and across: the content of a token was at its own position
plus its motion in the frame before. It is a multiple of 1 / CELL.

Pictures are rounded to multiples of 1 / LEVELS before they are compared. Sums of their differences
are then exact in fp32, in any order of the summands, so all backends find the same motion.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.ops.reference.rows import held

CELL = 8  # fine pixels of a token, along each axis
LEVELS = 256  # steps between two values that are 1 apart
REACH_COARSE = 6  # furthest offset of the coarse search, in coarse pixels: 1.5 tokens
MARGIN = 2  # coarse pixels around a token's cell that are compared too
PULL = 1 / 1024  # cost of a fine pixel of displacement; a power of two keeps costs exact
GAIN = 0.1  # share of its cost at rest by which a token's match must be better
LEAST = 0.01  # and by how much, as a mean difference of pixels
FURTHEST = 4.0  # hints are clamped to so many tokens


def grey_picture(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """A grey picture with CELL x CELL pixels for each token.

    Args:
        image: (B, C, H, W), any floating dtype. Channels and pixels are averaged.
        grid: tokens down and across.

    Returns:
        (B, CELL * h, CELL * w) fp32.
    """
    grey = image.mean(dim=1, dtype=torch.float32)
    high, wide = CELL * grid[0], CELL * grid[1]
    down, across = grey.shape[1] // high, grey.shape[2] // wide
    if grey.shape[1:] == (down * high, across * wide):  # the same means, made faster
        return grey if down == across == 1 else F.avg_pool2d(grey, (down, across))
    return F.adaptive_avg_pool2d(grey, (high, wide))


def match_blocks(
    now: Tensor, before: Tensor, slots: Tensor | None, hint: Tensor | None = None
) -> Tensor:
    """Where the content of each token was in the picture before.

    The cost of an offset is the mean absolute difference over the token's window, plus PULL for
    each fine pixel of displacement. The window is the token's cell and a margin of half a cell
    around it. Pixels of the window outside the picture `now` are left out of the mean. Offset
    pixels outside the picture `before` take the value of its border.

    1. Coarse: both pictures averaged over 2 x 2 pixels; every offset within REACH_COARSE.
    2. Fine: the 3 x 3 pixels around the coarse winner, or around the hint. The winner counts if
       its cost is below (1 - GAIN) * the cost of no motion - LEAST. All other tokens have motion
       zero.

    Of equal costs the offset in the middle of a search wins, then the first one, row by row.

    Args:
        now: (B, CELL * h, CELL * w), see `grey_picture`; normalised to about unit variance.
        before: (S, CELL * h, CELL * w).
        slots: (B,) row of `before` that belongs to each stream; None if row b does.
        hint: (B, h, w, 2) expected motion, in tokens. Where both numbers are finite it takes the
            place of the coarse winner. None for no hints.

    Returns:
        (B, h, w, 2) fp32. All zero for a stream with a pixel that is not finite.
    """
    before = held(before, slots)
    finite = torch.isfinite(now).flatten(1).all(dim=1) & torch.isfinite(before).flatten(1).all(1)
    now, before = rounded(now), rounded(before)
    smaller = [F.avg_pool2d(picture, 2) for picture in (now, before)]
    high, wide = (side // CELL for side in now.shape[1:])
    still = torch.zeros(len(now), high, wide, 2, dtype=torch.int64, device=now.device)
    centre = 2 * _search(smaller[0], smaller[1], still, REACH_COARSE)[0]
    if hint is not None:
        centre = torch.where(known_hints(hint), hint_pixels(hint), centre)
    winner, cost = _search(now, before, centre, 1)
    limit = bar(_window_sum(now, before, still), window_count(now, high, wide))
    moves = (cost < limit) & finite[:, None, None]
    return torch.where(moves[..., None], winner, still).float() / CELL


def rounded(picture: Tensor) -> Tensor:
    """A picture in multiples of 1 / LEVELS, fp32."""
    return torch.floor(picture.float() * LEVELS + 0.5) / LEVELS


def known_hints(hint: Tensor) -> Tensor:
    """(..., 1) whether a hint (..., 2) is one."""
    return torch.isfinite(hint).all(dim=-1, keepdim=True)


def hint_pixels(hint: Tensor) -> Tensor:
    """A hint (..., 2) in whole fine pixels, int64, no further than FURTHEST; any number if NaN."""
    near = hint.float().nan_to_num(0.0).clamp(-FURTHEST, FURTHEST)
    return torch.floor(near * CELL + 0.5).long()


def bar(rest: Tensor, count: Tensor) -> Tensor:
    """The sum of differences a match must stay below, if `rest` is the sum without motion."""
    return (1 - GAIN) * rest - LEAST * count


def _search(now: Tensor, before: Tensor, centre: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """The best offset of each token within `reach` pixels of `centre` (B, h, w, 2).

    Returns:
        (B, h, w, 2) int64 the offset, and (B, h, w) its cost times the pixels of the window.
    """
    _, high, wide, _ = centre.shape
    count = window_count(now, high, wide)
    size = CELL * high // now.shape[1]  # fine pixels of a pixel of these pictures

    def cost(shift: Tensor) -> Tensor:
        pull = PULL * size * shift.abs().sum(dim=-1).float()
        return _window_sum(now, before, shift) + pull * count

    winner, best = centre, cost(centre)
    for down in range(-reach, reach + 1):
        for across in range(-reach, reach + 1):
            shift = torch.stack((centre[..., 0] + down, centre[..., 1] + across), dim=-1)
            found = cost(shift)
            winner = torch.where((found < best)[..., None], shift, winner)
            best = torch.minimum(found, best)
    return winner, best


def window_places(tokens: int, cell: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Along one axis: (tokens, 2 * cell) pixels of each window, and whether they exist."""
    start = torch.arange(tokens, device=device) * cell - cell // 2
    place = start[:, None] + torch.arange(2 * cell, device=device)
    return place, (place >= 0) & (place < tokens * cell)


def window_count(now: Tensor, high: int, wide: int) -> Tensor:
    """(h, w) fp32: pixels of each token's window inside the picture (B, H, W)."""
    cell = now.shape[1] // high
    down, across = (
        window_places(side, cell, now.device)[1].sum(dim=1).float() for side in (high, wide)
    )
    return down[:, None] * across


def _window_sum(now: Tensor, before: Tensor, shift: Tensor) -> Tensor:
    """(B, h, w) sum of absolute differences over the window of each token.

    Args:
        now, before: (B, H, W).
        shift: (B, h, w, 2) int64 pixels: where in `before` the token's window lies.
    """
    batch, high, wide = now.shape
    cell = high // shift.shape[1]
    y, y_inside = window_places(shift.shape[1], cell, now.device)
    x, x_inside = window_places(shift.shape[2], cell, now.device)
    y, x = y[:, None, :, None], x[None, :, None, :]  # h, w, window rows, window columns
    inside = y_inside[:, None, :, None] & x_inside[None, :, None, :]
    mine = now[:, y.clamp(0, high - 1), x.clamp(0, wide - 1)]
    down, across = shift[..., 0, None, None], shift[..., 1, None, None]
    stream = torch.arange(batch, device=now.device)[:, None, None, None, None]
    theirs = before[stream, (y + down).clamp(0, high - 1), (x + across).clamp(0, wide - 1)]
    return ((mine - theirs).abs() * inside).sum(dim=(-2, -1))


def carry(memory: Tensor, motion: Tensor, prefix: int, slots: Tensor | None) -> Tensor:
    """A memory of tokens moved along with the content of the picture.

    Each token of the picture gets the row at its own position plus its motion, interpolated
    between the four tokens around it, in fp32. Positions outside the grid are moved to its
    border. A token without motion, or with motion NaN, keeps its row bit for bit.

    Args:
        memory: (S, N, D). Special tokens, before and after the h * w of the picture, stay.
        motion: (B, h, w, 2), see `match_blocks`; any number is allowed.
        prefix: special tokens before those of the picture.
        slots: (B,) row of `memory` that belongs to each stream; None if row b does.

    Returns:
        (B, N, D), new, in the memory's dtype.
    """
    batch, high, wide, _ = motion.shape
    memory = held(memory, slots)
    stream = torch.arange(batch, device=memory.device)[:, None, None]

    def rows(place: Tensor) -> Tensor:
        return memory[stream, prefix + place].float()

    corners, down, across = corners_of(motion)
    moved = interpolated([rows(corner) for corner in corners], down, across).to(memory.dtype)
    own = memory[:, prefix : prefix + high * wide]
    result = memory.clone()
    result[:, prefix : prefix + high * wide] = torch.where(
        moving_tokens(motion).flatten(1)[..., None], moved.flatten(1, 2), own
    )
    return result


def moving_tokens(motion: Tensor) -> Tensor:
    """(B, h, w) whether a token has motion: not zero and not NaN."""
    return (motion != 0).any(dim=-1) & ~motion.isnan().any(dim=-1)


def corners_of(motion: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """The tokens around the position that motion (B, h, w, 2) leads to.

    Returns:
        Four tensors (B, h, w) int64: token above left, above right, below left, below right. And
        how far the position is below and right of the first, (B, h, w) each, in [0, 1).
    """
    _, high, wide, _ = motion.shape
    y = torch.arange(high, device=motion.device)[:, None] + motion[..., 0].float()
    x = torch.arange(wide, device=motion.device) + motion[..., 1].float()
    y, x = (
        place.nan_to_num(0.0, torch.inf, -torch.inf).clamp(0, side - 1)
        for place, side in ((y, high), (x, wide))
    )
    top, left = y.floor(), x.floor()
    rows = [top.long(), (top.long() + 1).clamp_max(high - 1)]
    columns = [left.long(), (left.long() + 1).clamp_max(wide - 1)]
    return [row * wide + column for row in rows for column in columns], y - top, x - left


def interpolated(corners: list[Tensor], down: Tensor, across: Tensor) -> Tensor:
    """Rows between four rows (..., D) fp32, see `corners_of`."""
    down, across = down[..., None], across[..., None]
    above = corners[0] * (1 - across) + corners[1] * across
    below = corners[2] * (1 - across) + corners[3] * across
    return above * (1 - down) + below * down


def lost_tokens(motion: Tensor) -> Tensor:
    """Tokens whose content was not in the picture before.

    Args:
        motion: (B, h, w, 2), in tokens.

    Returns:
        (B, h * w) bool: their content was more than half a token outside the grid.
    """
    _, high, wide, _ = motion.shape
    y = torch.arange(high, device=motion.device)[:, None] + motion[..., 0]
    x = torch.arange(wide, device=motion.device) + motion[..., 1]
    outside = (y < -0.5) | (y > high - 0.5) | (x < -0.5) | (x > wide - 0.5)
    return outside.flatten(1)
