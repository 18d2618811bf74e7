"""Motion between two frames on the CPU: only tokens that may have moved are looked at."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.ops import reference
from eventful.ops.reference import motion as rules
from eventful.ops.reference.motion import CELL, MARGIN, PULL, REACH_COARSE
from eventful.ops.scratch import scratch

_CHUNK = 512  # tokens whose windows stay in a core's cache
_HALF = CELL // 4  # coarse pixels of half a token
assert MARGIN == _HALF  # a window is four half tokens along each axis


def match_blocks(
    now: Tensor, before: Tensor, slots: Tensor | None, hint: Tensor | None = None
) -> Tensor:
    """See `reference.match_blocks`; on a CPU without the tokens that no offset can improve."""
    if now.device.type != "cpu" or 0 in now.shape:
        return reference.match_blocks(now, before, slots, hint)
    before = reference.held(before, slots)
    fine = [rules.rounded(picture) for picture in (now, before)]
    rest = _window_sums((fine[0] - fine[1]).abs_())
    if not bool(rest.isfinite().all()):
        good = torch.isfinite(now).flatten(1).all(dim=1) & torch.isfinite(before).flatten(1).all(1)
        rest = torch.where(good[:, None, None], rest, 0.0)
    count = rules.window_count(now, *rest.shape[1:])
    limit = rules.bar(rest, count)
    motion = torch.zeros(*rest.shape, 2)
    for stream in range(len(now)):
        token = (limit[stream].flatten() > 0).nonzero()[:, 0]
        if len(token) == 0:
            continue
        pair = (fine[0][stream], fine[1][stream])
        centre = _centres(pair, token, count, None if hint is None else hint[stream])
        winner, cost = _search(pair, token, centre, count, 1)
        moves = cost < limit[stream].flatten()[token]
        motion[stream].view(-1, 2)[token[moves]] = winner[moves].float() / CELL
    return motion


def _window_sums(difference: Tensor) -> Tensor:
    """(B, h, w) sums over the window of each token, of a picture (B, CELL * h, CELL * w)."""
    halves = F.avg_pool2d(difference, CELL // 2, divisor_override=1)
    return F.avg_pool2d(halves, 4, stride=2, padding=1, divisor_override=1)


def _centres(
    pair: tuple[Tensor, Tensor], token: Tensor, count: Tensor, hint: Tensor | None
) -> Tensor:
    """(K, 2) int64 fine pixels: where the fine search of the tokens (K,) starts.

    Args:
        pair: now and before, (CELL * h, CELL * w).
        count: (h, w) pixels of each window.
        hint: (h, w, 2).
    """
    centre = torch.zeros(len(token), 2, dtype=torch.int64)
    known = torch.zeros(len(token), dtype=torch.bool)
    if hint is not None:
        given = hint.reshape(-1, 2)[token]
        known, centre = rules.known_hints(given)[:, 0], rules.hint_pixels(given)
    if bool(known.all()):
        return centre
    smaller = (_halved(pair[0]), _halved(pair[1]))
    fewer = count / 4  # a coarse pixel is four fine ones
    rest = token[~known]
    if 2 * len(rest) >= count.numel():
        winner = _search_everywhere(smaller, fewer).view(-1, 2)[rest]
    else:
        winner, _ = _search(smaller, rest, torch.zeros_like(centre[~known]), fewer, REACH_COARSE)
    centre[~known] = 2 * winner
    return centre


def _halved(picture: Tensor) -> Tensor:
    return F.avg_pool2d(picture[None], 2)[0]


def _search_everywhere(pair: tuple[Tensor, Tensor], count: Tensor) -> Tensor:
    """(h, w, 2) int64: the coarse search of every token.

    Pixels are laid out by their place in the cell, (cell, cell, h, w): the pixels at one place of
    all cells lie together. Half a cell is then a sum of few such planes, and a window is 4 x 4
    half cells, some of them of the next token.
    """
    (high, wide), cell, reach = count.shape, CELL // 2, REACH_COARSE
    side, span = 2 * reach + 1, cell + 2 * reach
    now = pair[0].view(high, cell, wide, cell).permute(1, 3, 0, 2).contiguous()
    padded = F.pad(pair[1][None, None], (reach,) * 4, mode="replicate")[0, 0]
    before = padded.unfold(0, span, cell).unfold(1, span, cell).permute(2, 3, 0, 1).contiguous()
    steps = (torch.arange(side) - reach).abs().float() * (PULL * 2)
    pull = steps[:, None, None] * count
    whole, halves, rows, cost = (
        _room(name, shape, now)
        for name, shape in (
            ("pixels", (side, 2, _HALF, 2, _HALF, high, wide)),
            ("halves", (side, 2, 2, high, wide)),
            ("rows", (side, 2, high, wide)),
            ("cost", (side, high, wide)),
        )
    )
    difference = whole.view(side, cell, cell, high, wide)
    best, place = torch.empty(side, high, wide), torch.empty(side, high, wide, dtype=torch.int64)
    rest = torch.empty(0)
    for down in range(side):
        moved = before[down : down + cell].unfold(1, cell, 1).permute(1, 0, 4, 2, 3)
        torch.sub(now, moved, out=difference).abs_()
        torch.add(whole[:, :, 0, :, 0], whole[:, :, 0, :, 1], out=halves)
        halves += whole[:, :, 1, :, 0]
        halves += whole[:, :, 1, :, 1]
        torch.add(halves[:, 0], halves[:, 1], out=rows)
        rows[:, :, 1:] += halves[:, 1, :, :-1]
        rows[:, :, :-1] += halves[:, 0, :, 1:]
        torch.add(rows[:, 0], rows[:, 1], out=cost)
        cost[:, :, 1:] += rows[:, 1, :, :-1]
        cost[:, :, :-1] += rows[:, 0, :, 1:]
        cost += pull
        cost += pull[down]
        torch.min(cost, dim=0, out=(best[down], place[down]))
        if down == reach:
            rest = cost[reach].clone()
    least, row = best.min(dim=0)
    column = place.gather(0, row[None])[0]
    winner = torch.stack((row - reach, column - reach), dim=-1)
    return winner * (least < rest)[..., None]


def _search(
    pair: tuple[Tensor, Tensor], token: Tensor, centre: Tensor, count: Tensor, reach: int
) -> tuple[Tensor, Tensor]:
    """The best offset of the tokens (K,) within `reach` pixels of `centre` (K, 2).

    Args:
        pair: now and before, (H, W).
        count: (h, w) pixels of each window.

    Returns:
        (K, 2) the offset, and (K,) its cost times the pixels of the window.
    """
    high, wide = count.shape
    row, column = token // wide, token % wide
    edge = (row == 0) | (row == high - 1) | (column == 0) | (column == wide - 1)
    winner, cost = torch.empty_like(centre), torch.empty(len(token))
    for at_edge in (False, True):
        for some in (edge == at_edge).nonzero()[:, 0].split(_CHUNK):  # type: ignore[no-untyped-call]
            found = _search_few(pair, token[some], centre[some], count, reach, at_edge)
            winner[some], cost[some] = found
    return winner, cost


def _search_few(
    pair: tuple[Tensor, Tensor],
    token: Tensor,
    centre: Tensor,
    count: Tensor,
    reach: int,
    at_edge: bool,
) -> tuple[Tensor, Tensor]:
    """See `_search`. Tokens lie on the last axis, so that sums run over many of them at once.

    Args:
        at_edge: windows may have pixels outside the picture.
    """
    wide, side = count.shape[1], 2 * reach + 1
    cell = pair[0].shape[1] // wide
    top, left = token // wide * cell - cell // 2, token % wide * cell - cell // 2
    size = 2 * cell
    now = _windows(pair[0], top, left, size)
    down, across = centre.unbind(dim=1)
    before = _windows(pair[1], top + down - reach, left + across - reach, size + 2 * reach)
    mask = _inside(pair[0], top, left, size) if at_edge else None
    cost = torch.empty(side, side, len(token))
    difference = _room("pixels", (side, size, size, len(token)), now)
    for row in range(side):
        moved = before[row : row + size].unfold(1, size, 1).permute(1, 0, 3, 2)
        torch.sub(now, moved, out=difference).abs_()
        if mask is not None:
            difference *= mask
        torch.sum(difference, (1, 2), out=cost[row])
    steps = torch.arange(side)[:, None] - reach
    length = (steps + down).abs()[:, None] + (steps + across).abs()[None]
    cost += PULL * (CELL // cell) * length * count.flatten()[token]
    best, place = cost.flatten(0, 1).min(dim=0)
    place = torch.where(best < cost[reach, reach], place, side * reach + reach)
    return centre + torch.stack((place // side - reach, place % side - reach), dim=-1), best


def _room(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory to write to, that of the call before where there is one."""
    kept = scratch(f"motion {name}", shape, like)
    return torch.empty(shape) if kept is None else kept


def _windows(picture: Tensor, top: Tensor, left: Tensor, size: int) -> Tensor:
    """Windows (size, size, K) of a picture at K places; outside it the value of its border."""
    (high, wide), step = picture.shape, torch.arange(size)[:, None]
    y = ((step + top).clamp(0, high - 1) * wide).int()
    x = (step + left).clamp(0, wide - 1).int()
    index = (y[:, None] + x[None]).flatten()
    return picture.reshape(-1).index_select(0, index).view(size, size, -1)


def _inside(picture: Tensor, top: Tensor, left: Tensor, size: int) -> Tensor:
    """(size, size, K) fp32: 1 for pixels of the windows that lie in the picture, 0 for others."""
    (high, wide), step = picture.shape, torch.arange(size)[:, None]
    y, x = step + top, step + left
    return (((y >= 0) & (y < high))[:, None] & ((x >= 0) & (x < wide))[None]).float()


def carry(memory: Tensor, motion: Tensor, prefix: int, slots: Tensor | None) -> Tensor:
    """See `reference.carry`; on a CPU only the tokens that moved are computed."""
    if memory.device.type != "cpu":
        return reference.carry(memory, motion, prefix, slots)
    result = memory.clone() if slots is None else memory.index_select(0, slots)
    corners, down, across = rules.corners_of(motion)
    for stream, moves in enumerate(rules.moving_tokens(motion)):
        source = memory[stream if slots is None else int(slots[stream])]
        for token in moves.flatten().nonzero()[:, 0].split(_CHUNK):
            rows = [
                source.index_select(0, corner[stream].flatten()[token] + prefix).float()
                for corner in corners
            ]
            parts = (part[stream].flatten()[token] for part in (down, across))
            moved = rules.interpolated(rows, *parts)
            result[stream].index_copy_(0, token + prefix, moved.to(memory.dtype))
    return result
