"""Gates in plain PyTorch (Section 4.1): error norms, and the choice of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eventful.ops.reference.rows import held

SAMPLE = 512  # tokens that stand for all where a level is measured
REPORT = 6  # columns of a report, see `pick`


def sample(tokens: Tensor) -> Tensor:
    """Every k-th token of (B, N, ...), evenly spread, at most SAMPLE of them."""
    count = tokens.shape[1]
    if count <= SAMPLE:
        return tokens
    return tokens[:, torch.arange(SAMPLE, device=tokens.device) * count // SAMPLE]


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


def row_norm(memory: Tensor, slots: Tensor | None = None) -> Tensor:
    """L2 norm of each token of a memory, in fp32.

    Args:
        memory: (S, N, D).
        slots: (B,) row of `memory` that belongs to each stream; None if row b does.

    Returns:
        (B, N).
    """
    norm: Tensor = torch.linalg.vector_norm(held(memory, slots).float(), dim=-1)
    return norm


@dataclass(frozen=True, eq=False)
class PickRule:
    """What decides which tokens pass a gate, as numbers that lie where the errors lie.

    Attributes:
        level: (B,) errors above it pass.
        cap: (B,) most tokens to pass by their error.
        prefix, suffix: special tokens at either end; they pass whatever their error, on top of
            the cap.
        period, turn: token n passes, on top of the cap, where n, or its phase, and `turn` (B,) are
            equal modulo `period`.
        phase: (N,) int32 of each token, see `TokenLayout.phases`; None for n itself.
        leading: the first gate of the step: it starts the report, later ones add to it.
        scene: (S,) running median of the error, for scene cuts, updated; None without.
        cut: factor, fraction and momentum of the scene cut.
        scene_error: (B, N) errors that show a cut; None for those that tokens are picked by.
        cut_least: (B,) errors below it do not speak for a cut; None for none.
        slots: (B,) row of `scene` that belongs to each stream; None if row b does.
        hold: (B,) streams whose frame says nothing about the scene; None for none.
        counts: for each stream how many tokens pass, where that does not depend on the errors and
            the host knows it; None elsewhere.
        low, floor: (B,) each, both or neither. Where fewer than `floor` tokens are above the
            level, those above `low` pass too, the largest errors first, until `floor` tokens pass
            by their error. The cap holds for them as well.
    """

    level: Tensor
    cap: Tensor
    prefix: int = 0
    suffix: int = 0
    period: int | None = None
    turn: Tensor | None = None
    phase: Tensor | None = None
    leading: bool = True
    scene: Tensor | None = None
    cut: tuple[float, float, float] | None = None
    scene_error: Tensor | None = None
    cut_least: Tensor | None = None
    slots: Tensor | None = None
    hold: Tensor | None = None
    counts: tuple[int, ...] | None = None
    low: Tensor | None = None
    floor: Tensor | None = None

    @property
    def forces(self) -> bool:
        """Whether any token passes whatever its error."""
        return bool(self.prefix or self.suffix or self.period is not None)

    def forced(self, tokens: int) -> Tensor:
        """(B, N) tokens that pass whatever their error."""
        token = torch.arange(tokens, device=self.level.device)
        forced = ((token < self.prefix) | (token >= tokens - self.suffix)).expand(
            len(self.level), -1
        )
        if self.period is not None and self.turn is not None:
            phase = token if self.phase is None else self.phase
            forced = forced | (phase % self.period == (self.turn % self.period)[:, None])
        return forced


@dataclass(frozen=True, eq=False)
class Picked:
    """Tokens that pass a gate.

    Attributes:
        index: (B, M) tokens, padded with the first.
        count: (B,) slots that count.
        places: (B, N) slot of each token, -1 for those that do not pass; None without a fixed
            number of slots.
        full: every slot of every stream is known to count.
    """

    index: Tensor
    count: Tensor
    places: Tensor | None
    full: bool = False


def wanted_tokens(
    error: Tensor,
    level: Tensor,
    cap: Tensor,
    forced: Tensor | None,
    low: Tensor | None = None,
    floor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """How many tokens want to pass, and how many may.

    Args:
        error: (B, N).
        level: (B,).
        cap: (B,) most tokens to pass by their error; forced ones come on top.
        forced: (B, N) tokens that pass whatever their error; None for none.
        low, floor: (B,) each; tokens above `low` fill up to `floor` tokens. See `PickRule`.

    Returns:
        (B,) tokens that are forced, above the level or fill up to the floor, and (B,) those left
        by the cap. Without a level (-inf) no more tokens want to pass than the cap says.
    """

    def above(level: Tensor) -> Tensor:
        over = error > level[:, None]
        return (over if forced is None else over & ~forced).sum(dim=-1)

    least = torch.zeros_like(cap) if forced is None else forced.sum(dim=-1)
    by_error = above(level)
    if low is not None and floor is not None:
        by_error = torch.maximum(by_error, torch.minimum(above(low), floor))
    allowed = least + torch.minimum(cap, by_error)
    return torch.where(level == -torch.inf, allowed, least + by_error), allowed


def pick(error: Tensor, rule: PickRule, width: int | None, report: Tensor) -> Picked:
    """Choose tokens by their error, forced ones first.

    Where more than `width` may pass, those with the largest errors do and the others wait
    for the next frame. Of equal errors the first token wins. A stream with an error that is not
    finite lets nothing through, so that its memory stays as it was.

    Args:
        error: (B, N).
        width: M; the tokens come forced ones first, then by falling error. None for as many as
            pass, in ascending order: the host must then know how many they are.
        report: (B, REPORT) int32, written. Column 0: tokens that wanted to pass the leading gate,
            before the cap. 1: whether all errors were finite. 2: whether the scene was cut.
            3: tokens that the cap let pass, the most at any gate of the step. 4 and 5 are not
            `pick`'s: whether the weights were written to, and the estimated error.
    """
    forced = rule.forced(error.shape[1])
    finite = torch.isfinite(error).all(dim=-1)
    if not rule.leading:  # a frame that was bad at the first gate changes nothing later on
        finite = finite & (report[:, 1] > 0)
    wanted, allowed = (
        torch.where(finite, number, 0)
        for number in wanted_tokens(error, rule.level, rule.cap, forced, rule.low, rule.floor)
    )
    order = error.masked_fill(forced, torch.inf).argsort(dim=-1, descending=True, stable=True)
    picked = _fitting(order, allowed) if width is None else _padded(order, allowed, width)
    if not rule.leading:
        report[:, 3] = torch.maximum(report[:, 3], allowed.to(report.dtype))
        return picked
    jumped = torch.zeros_like(finite) if rule.scene is None else follow_scene(error, rule, finite)
    report[:, 0], report[:, 1], report[:, 2], report[:, 3] = wanted, finite, jumped, allowed
    return picked


def _padded(order: Tensor, allowed: Tensor, width: int) -> Picked:
    """The first of `order` (B, N) in a fixed number of slots."""
    count = allowed.clamp_max(width)
    valid = torch.arange(width, device=order.device) < count[:, None]
    first = torch.where(count > 0, order[:, 0], 0)
    index = torch.where(valid, order[:, :width], first[:, None])
    # A padded slot repeats the first token, which is in slot 0.
    slot = torch.where(valid, torch.arange(width, device=order.device), 0).to(torch.int32)
    slot = torch.where(count[:, None] > 0, slot, -1)
    places = torch.full(order.shape, -1, dtype=torch.int32, device=order.device)
    return Picked(index, count, places.scatter(1, index, slot))


def _fitting(order: Tensor, allowed: Tensor) -> Picked:
    """The first of `order` (B, N) in as many slots as the longest row needs, ascending."""
    longest = int(allowed.max()) if len(allowed) else 0
    valid = torch.arange(longest, device=order.device) < allowed[:, None]
    index = torch.where(valid, order[:, :longest], order.shape[1]).sort(dim=-1).values
    first = torch.where(allowed > 0, index[:, :1].sum(dim=-1), 0)
    return Picked(torch.where(valid, index, first[:, None]), allowed, None)


def fit_rows(picked: Picked, rows: int) -> Picked:
    """Leave as many tokens as fit into a number of rows of all streams together.

    The streams with the most tokens lose some, the last ones they picked, down to the largest
    common number that fits. Nothing changes where all fit.

    Args:
        picked: with a fixed number of slots.
        rows: P.
    """
    assert picked.places is not None
    width = picked.index.shape[1]
    slot = torch.arange(width + 1, device=picked.count.device)
    most = (torch.minimum(picked.count[:, None], slot).sum(dim=0) <= rows).sum() - 1
    count = torch.minimum(picked.count, most)
    index = torch.where(slot[:width] < count[:, None], picked.index, picked.index[:, :1])
    places = torch.where(picked.places < count[:, None], picked.places, -1)
    return Picked(index, count, places, picked.full)


def follow_scene(error: Tensor, rule: PickRule, finite: Tensor) -> Tensor:
    """(B,) whether the scene was cut; the running level moves toward the median of a sample."""
    assert rule.scene is not None
    assert rule.cut is not None
    factor, fraction, momentum = rule.cut
    error = error if rule.scene_error is None else rule.scene_error
    before = held(rule.scene, rule.slots)
    known, moves = ~before.isnan(), finite
    if rule.hold is not None:
        known, moves = known & ~rule.hold, moves & ~rule.hold
    far = factor * before
    if rule.cut_least is not None:
        far = torch.maximum(far, rule.cut_least)
    jumped = known & ((error > far[:, None]).float().mean(dim=-1) > fraction)
    now = sample(error).median(dim=-1).values
    after = torch.where(before.isnan(), now, now + momentum * (before - now))
    rows = torch.arange(len(error), device=error.device) if rule.slots is None else rule.slots
    rule.scene.index_copy_(0, rows, torch.where(moves, after, before))
    return jumped


def follow_level(before: Tensor, now: Tensor, rising: Tensor, falling: Tensor) -> Tensor:
    """An exponential average (B,) that rises and falls at different speeds.

    Args:
        before: NaN where there is none yet: it starts with `now`.
        rising, falling: share of the old value that is kept, below and above the new one.
    """
    kept = torch.where(now > before, rising, falling)
    return torch.where(before.isnan(), now, now + kept * (before - now))
