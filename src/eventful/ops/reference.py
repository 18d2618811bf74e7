"""The tensor operations of an eventful step in plain PyTorch: readable, any device, the oracle.

Tokens are (B, N, D); heads are split as (B, H, N, d) only inside attention. A trailing
underscore means the first argument is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def take_slots(memory: Tensor, slots: Tensor) -> Tensor:
    """A copy (B, ...) of the rows `slots` (B,) of a memory (S, ...)."""
    return memory.index_select(0, slots)


def held(memory: Tensor, slots: Tensor | None) -> Tensor:
    """The rows of a memory (S, ...) that B streams own: row `slots[b]`, or row b without slots."""
    return memory if slots is None else take_slots(memory, slots)


def error_norm(
    current: Tensor, reference: Tensor, order: float, slots: Tensor | None = None
) -> Tensor:
    """Norm of each token's error e = current - reference (Section 4.1), in fp32.

    Args:
        current: (B, N, D).
        reference: (S, N, D).
        order: order of the vector norm; 2 is the paper's.
        slots: (B,) row of `reference` that belongs to each stream; None if row b does.

    Returns:
        (B, N).
    """
    error = current.float() - held(reference, slots).float()
    norm: Tensor = torch.linalg.vector_norm(error, ord=order, dim=-1)
    return norm


def _expand(index: Tensor, like: Tensor, dim: int) -> Tensor:
    """Index (B, M) broadcast to the shape of `like` with M along `dim`."""
    shape = [1] * like.dim()
    shape[0], shape[dim] = index.shape
    target = list(like.shape)
    target[dim] = index.shape[1]
    return index.reshape(shape).expand(target)


@dataclass(frozen=True, eq=False)
class PickRule:
    """What decides which tokens pass a gate, as numbers that lie where the errors lie.

    Attributes:
        level: (B,) errors above it pass.
        cap: (B,) most tokens to pass; 0 lets nothing through.
        prefix, suffix: special tokens at either end, always to pass.
        period, turn: token n passes in any case where n and `turn` (B,) are equal modulo `period`.
        leading: the first gate of the step: it starts the report, later ones add to it.
        scene: (S,) running level of the error for scene cuts, updated; None without.
        cut: factor, fraction and momentum of the scene cut.
        slots: (B,) row of `scene` that belongs to each stream; None if row b does.
    """

    level: Tensor
    cap: Tensor
    prefix: int = 0
    suffix: int = 0
    period: int | None = None
    turn: Tensor | None = None
    leading: bool = True
    scene: Tensor | None = None
    cut: tuple[float, float, float] | None = None
    slots: Tensor | None = None

    def forced(self, tokens: int) -> Tensor:
        """(B, N) tokens that pass whatever their error."""
        token = torch.arange(tokens, device=self.level.device)
        forced = ((token < self.prefix) | (token >= tokens - self.suffix)).expand(
            len(self.level), -1
        )
        if self.period is not None and self.turn is not None:
            forced = forced | (token % self.period == (self.turn % self.period)[:, None])
        return forced


@dataclass(frozen=True, eq=False)
class Picked:
    """Tokens that pass a gate.

    Attributes:
        index: (B, M) tokens, forced ones first, then by falling error; padded with the first.
        count: (B,) slots that count.
        places: (B, N) slot of each token, -1 for those that do not pass.
    """

    index: Tensor
    count: Tensor
    places: Tensor


def wanted_tokens(error: Tensor, level: Tensor, cap: Tensor, forced: Tensor | None) -> Tensor:
    """How many tokens (B,) should pass: those forced or above the level, at most `cap`."""
    above = error > level[:, None]
    if forced is None:
        return torch.minimum(cap, above.sum(dim=-1))
    count = torch.minimum(cap, (above | forced).sum(dim=-1))
    return torch.where(cap > 0, torch.maximum(count, forced.sum(dim=-1)), 0)


def pick(error: Tensor, rule: PickRule, width: int, report: Tensor) -> Picked:
    """Choose tokens by their error, forced ones first, without asking the host.

    Where more than `width` want to pass, those with the largest errors do and the others
    wait for the next frame. A stream with an error that is not finite lets nothing through,
    so that its memory stays as it was.

    Args:
        error: (B, N).
        width: M.
        report: (B, 3) int32, written: tokens that wanted to pass, whether all errors were
            finite, whether the scene was cut.
    """
    batch, tokens = error.shape
    forced = rule.forced(tokens)
    finite = torch.isfinite(error).all(dim=-1)
    wanted = torch.where(finite, wanted_tokens(error, rule.level, rule.cap, forced), 0)
    count = wanted.clamp_max(width)
    order = error.masked_fill(forced, torch.inf).argsort(dim=-1, descending=True, stable=True)
    valid = torch.arange(width, device=error.device) < count[:, None]
    first = torch.where(count > 0, order[:, 0], 0)
    index = torch.where(valid, order[:, :width], first[:, None])
    rank = order.argsort(dim=-1)
    places = torch.where(rank < count[:, None], rank, -1).to(torch.int32)
    if not rule.leading:
        report[:, 0] = torch.maximum(report[:, 0], wanted.to(report.dtype))
        return Picked(index, count, places)
    jumped = torch.zeros_like(finite)
    if rule.scene is not None and rule.cut is not None:
        factor, fraction, momentum = rule.cut
        before = held(rule.scene, rule.slots)
        known = ~before.isnan()
        jumped = known & ((error > factor * before[:, None]).float().mean(dim=-1) > fraction)
        now = error.median(dim=-1).values
        after = torch.where(known, now + momentum * (before - now), now)
        after = torch.where(finite, after, before)
        rows = torch.arange(batch, device=error.device) if rule.slots is None else rule.slots
        rule.scene.index_copy_(0, rows, after)
    report[:, 0], report[:, 1], report[:, 2] = wanted, finite, jumped
    return Picked(index, count, places)


def write_rows_(
    buffers: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    index: Tensor | None,
    count: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Write rows (B, M, D) to the tokens `index` (B, M) of each buffer (S, N, D).

    Args:
        index: None for all tokens in order.
        count: (B,) rows that count; the others are padding. None if all do. With no
            index, a stream of count 0 is left as it was.
        slots: (B,) row of the buffers that belongs to each stream; None if row b does.
    """
    for buffer, values in zip(buffers, rows, strict=True):
        batch, taken, _ = values.shape
        at = torch.arange(taken, device=values.device).expand(batch, taken)
        token = at if index is None else index
        own = torch.arange(batch, device=values.device) if slots is None else slots
        own = own[:, None].expand_as(token)
        if count is None:
            buffer[own, token] = values.to(buffer.dtype)
        else:
            valid = at < count[:, None]
            buffer[own[valid], token[valid]] = values.to(buffer.dtype)[valid]


def add_norm(
    tokens: Tensor,
    update: Tensor,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """A residual sum and its layer norm, both (..., D).

    Args:
        scale: (D,) on the update, None without.
        weight, bias: (D,) of the norm, None without.
    """
    total = tokens + (update if scale is None else update * scale)
    return total, torch.nn.functional.layer_norm(total, total.shape[-1:], weight, bias, eps)


def gather(source: Tensor, index: Tensor, dim: int = 1) -> Tensor:
    """Entries `index` (B, M) of `source` along `dim`."""
    if source.dim() == 3 and dim == 1 and source.shape[0] == 1:
        return source[0].index_select(0, index[0])[None]
    return source.gather(dim, _expand(index, source, dim))


def scatter_(destination: Tensor, index: Tensor, values: Tensor, dim: int = 1) -> None:
    """Write `values` to the entries `index` (B, M) of `destination` along `dim`."""
    values = values.to(destination.dtype)
    if destination.dim() == 3 and dim == 1 and destination.shape[0] == 1:
        destination[0].index_copy_(0, index[0], values[0])
        return
    destination.scatter_(dim, _expand(index, destination, dim), values)


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """(B, N, H*d) to (B, H, N, d), a view."""
    batch, count, width = tokens.shape
    return tokens.view(batch, count, heads, width // heads).transpose(1, 2)


def join_heads(tokens: Tensor) -> Tensor:
    """(B, H, N, d) to (B, N, H*d)."""
    return tokens.transpose(1, 2).flatten(2)


def logits(q: Tensor, k: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Scaled query-key product with an additive bias, (B, H, M, K)."""
    product = (q * scale) @ k.transpose(-2, -1)
    return product if bias is None else product + bias


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    relative: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Ordinary attention (Eq. 4-5) of some queries, (B, H, M, d).

    Args:
        q: (B, H, M, d).
        k, v: (S, H, K, d).
        bias: added to the logits, (B, H, M, K).
        relative: the same in two parts, for each row and each column of the keys' grid
            (see `relative_logits`).
        slots: (B,) row of `k` and `v` that belongs to each stream; None if row b does.
    """
    k, v = held(k, slots), held(v, slots)
    return logits(q, k, scale, whole_bias(bias, relative)).softmax(dim=-1) @ v


def whole_bias(bias: Tensor | None, relative: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """An additive bias (B, H, M, K) from its parts (B, M, H, kh) and (B, M, H, kw)."""
    if relative is None:
        return bias
    down, across = (part.transpose(1, 2) for part in relative)
    return (down[..., :, None] + across[..., None, :]).flatten(-2)


def attend_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, with its log-sum-exp, both fp32.

    Args:
        bias: added to the logits, (B, H, M, J).
        valid: (B, J), false for keys that do not count. A row without any has weight zero:
            output 0, log-sum-exp -inf.

    Returns:
        (B, H, M, d) and (B, H, M).
    """
    with torch.autocast(q.device.type, enabled=False):
        scores = logits(q.float(), k.float(), scale, None if bias is None else bias.float())
        if valid is not None:
            scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
        return weights @ v.float(), lse


def merge_partial(
    state: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the share of some keys in an attention output.

    The exact rule (docs/update-rules.md): with weights relative to m = max(L, L_n), the
    old share is taken out and the new one put in. The condition number c grows with the
    cancellation that costs; rows where it is too large, or where nothing is left to
    divide by, must be recomputed by the caller.

    Args:
        state: output (B, H, N, d), log-sum-exp (B, H, N), condition (B, H, N).
        new: partial attention over the changed keys as they are.
        old: the same over the keys as they were.

    Returns:
        The three state tensors, with condition inf where the row is lost.
    """
    out, lse, condition = state
    top = torch.maximum(lse, new[1])
    keep, gain, loss = (torch.exp(part - top) for part in (lse, new[1], old[1]))
    total = keep + gain - loss
    lost = ~(total > 0)
    safe = total.masked_fill(lost, 1.0)
    share_keep, share_gain, share_loss = ((w / safe)[..., None] for w in (keep, gain, loss))
    merged = share_keep * out + share_gain * new[0] - share_loss * old[0]
    merged_lse = top + safe.log()
    grown = (keep * condition + (gain + loss) * (1 + merged_lse.abs())) / safe
    return merged, merged_lse, grown.masked_fill(lost, float("inf"))


def relative_logits(
    q: Tensor, rows: Tensor, columns: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Decomposed relative position of some queries, from the unscaled queries.

    Args:
        q: (B, H, M, d).
        rows: vectors between each row of queries and each row of keys, (h, kh, d).
        columns: the same for columns, (w, kw, d).
        index: places of the queries in their h x w grid, (B or 1, M).

    Returns:
        (B, M, H, kh) and (B, M, H, kw).
    """
    width = columns.shape[0]
    index = index.expand(q.shape[0], -1)
    return (
        torch.einsum("bhmd,bmkd->bmhk", q, rows.to(q.dtype)[index // width]),
        torch.einsum("bhmd,bmkd->bmhk", q, columns.to(q.dtype)[index % width]),
    )


@dataclass(frozen=True)
class WindowGrid:
    """A grid of tokens cut into windows, padded at the bottom right: (height, width) each."""

    grid: tuple[int, int]
    window: tuple[int, int]

    @property
    def across(self) -> int:
        """Windows in a row."""
        return -(-self.grid[1] // self.window[1])

    @property
    def count(self) -> int:
        """Windows of the grid."""
        return -(-self.grid[0] // self.window[0]) * self.across

    @property
    def padded(self) -> bool:
        """Whether some windows reach over the border."""
        return any(side % step for side, step in zip(self.grid, self.window, strict=True))


@dataclass(frozen=True, eq=False)
class WindowMap:
    """Where the tokens of a grid lie in its windows.

    Attributes:
        members: (W, S) token in each place of each window; N where there is none.
        window_of: (N,) window of each token.
        place_of: (N,) place of each token in its window.
    """

    members: Tensor
    window_of: Tensor
    place_of: Tensor


@lru_cache(maxsize=64)
def window_map(windows: WindowGrid, device: torch.device) -> WindowMap:
    """The map of one grid, computed once."""
    (height, width), (tall, wide) = windows.grid, windows.window
    y = torch.arange(height, device=device)[:, None].expand(height, width).flatten()
    x = torch.arange(width, device=device)[None, :].expand(height, width).flatten()
    window_of = (y // tall) * windows.across + x // wide
    place_of = (y % tall) * wide + x % wide
    members = torch.full((windows.count, tall * wide), height * width, device=device)
    members[window_of, place_of] = torch.arange(height * width, device=device)
    return WindowMap(members, window_of, place_of)


def attend_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    windows: WindowGrid,
    index: Tensor,
    relative: tuple[Tensor, Tensor] | None = None,
    pad: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Attention of some queries over the keys of their own windows, (B, H, M, d).

    Args:
        q: (B, H, M, d).
        k, v: (S, H, N, d).
        index: (B, M) tokens of the queries.
        relative: (B, M, H, window height) and (B, M, H, window width), see `relative_logits`.
        pad: key and value (H*d,) of a padding token; None where windows fit the grid.
        slots: (B,) row of `k` and `v` that belongs to each stream; None if row b does.
        places: (B, N) slot of each token in `index`, -1 for none, where the caller knows it;
            then what stands in padded slots of the result is undefined.
    """
    k, v = held(k, slots), held(v, slots)
    (height, width), (tall, wide) = windows.grid, windows.window
    place = torch.arange(tall * wide, device=q.device)
    y = (index // width // tall * tall)[..., None] + place // wide  # (B, M, S)
    x = (index % width // wide * wide)[..., None] + place % wide
    inside = (y < height) & (x < width)
    token = torch.where(inside, y * width + x, 0)
    stream = torch.arange(len(index), device=q.device)[:, None, None]

    def members(source: Tensor, filler: Tensor | None) -> Tensor:
        taken = source.transpose(1, 2)[stream, token]  # (B, M, S, H, d)
        if filler is not None:
            blank = filler.to(taken.dtype).view(taken.shape[-2:])
            taken = torch.where(inside[..., None, None], taken, blank)
        return taken

    keys, values = members(k, pad and pad[0]), members(v, pad and pad[1])
    scores = torch.einsum("bhmd,bmshd->bhms", q * scale, keys)
    bias = whole_bias(None, relative)
    weights = (scores if bias is None else scores + bias).softmax(dim=-1)
    return torch.einsum("bhms,bmshd->bhmd", weights, values)
