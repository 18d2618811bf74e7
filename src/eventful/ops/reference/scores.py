"""Scores at a frame gate in plain PyTorch, and the estimated error of the outputs.

A score is what tokens of a frame gate are ranked by: the error of a token, more where its content
was not in the picture before, together with the change of its context.

Two things are known about the error of the outputs without running the dense model: the errors of
the tokens that are left as they are, and how much the outputs of tokens change when they are
updated. The estimate is a product of powers of the two, fitted to the true error on several videos
(docs/default.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.ops.reference.gates import SAMPLE, Picked, row_norm
from eventful.ops.reference.motion import lost_tokens
from eventful.ops.reference.rows import held

LOST = 1.0  # times the contrast: added to the error of tokens whose content is new
FAINT = 0.02  # times the contrast: a context that adds less is rounding, and adds nothing
TINY = 1e-12  # contrasts and sizes below it count as this much
FACTOR, BY_ERROR, BY_CHANGE = 0.41, 0.05, 0.55
LEAST = 1e-4  # errors and changes below it count as this much in an estimate
UNIT = 1_000_000  # estimates are reported as whole numbers of millionths
HIGHEST = 2147.0  # and are clamped to it, to fit int32
LASTING = 1 / 32  # larger estimates do not make a stream start over sooner
KEPT = 0.5  # share of the old change kept at each frame
EPS = 1e-5  # of the layer norm of outputs


def spread_sample(patches: Tensor) -> Tensor:
    """Every k-th patch of (B, N, D), with the least k that leaves no more than SAMPLE; a view."""
    return patches[:, :: max(1, -(-patches.shape[1] // SAMPLE))]


def contrast(patches: Tensor) -> Tensor:
    """How far patches are from their mean: root of the sum over channels of the variance, in fp32.

    It is measured over a `spread_sample`.

    Args:
        patches: (B, N, D).

    Returns:
        (B,).
    """
    spread = spread_sample(patches).float().std(dim=1, correction=0)
    total: Tensor = torch.linalg.vector_norm(spread, dim=-1)
    return total


def frame_score(
    error: Tensor,
    contrast: Tensor,
    changes: tuple[Tensor, ...],
    sizes: tuple[Tensor, ...],
    weight: float,
    motion: Tensor | None,
    prefix: int,
    slots: Tensor | None,
) -> Tensor:
    """What tokens of a frame gate are ranked by: their errors with what motion and context add.

    LOST times the contrast is added to the error of a token whose content was outside the picture.
    The change of a token's context is the mean over the memories of |change| / size, times weight,
    or nothing where that is below FAINT; then times the contrast. The score is the root of the sum
    of the squares of the two. All is fp32.

    Args:
        error: (B, N) fp32.
        contrast: (B,) of the tokens: the error that counts as much as a change of attention
            outputs by 1 / weight of their size.
        changes: (S, N, W) each, see `ContextMemory`; none without context.
        sizes: (S,) each, how large the attention outputs of the same layers are.
        motion: (B, h, w, 2), see `match_blocks`; None where nothing moved.
        prefix: special tokens before the h * w of the picture.
        slots: (B,) row of `changes` and `sizes` that belongs to each stream; None if row b does.

    Returns:
        (B, N); `error` itself where nothing is added.
    """
    norms = [row_norm(change, slots) for change in changes]
    return score_of(
        error, contrast, norms, [held(size, slots) for size in sizes], weight, motion, prefix
    )


def score_of(
    error: Tensor,
    contrast: Tensor,
    norms: Sequence[Tensor],
    sizes: Sequence[Tensor],
    weight: float,
    motion: Tensor | None,
    prefix: int,
) -> Tensor:
    """`frame_score` of the norms (B, N) of the changes and of sizes (B,), without slots."""
    if motion is not None:
        lost = lost_tokens(motion)
        lost = F.pad(lost, (prefix, error.shape[1] - prefix - lost.shape[1]))
        error = torch.where(lost, error + LOST * contrast[:, None], error)
    if not norms:
        return error
    total = torch.zeros_like(error)
    for norm, size in zip(norms, sizes, strict=True):
        total = total + norm / size.float().clamp_min(TINY)[:, None]
    caused = total * (weight / len(norms))
    caused = torch.where(caused < FAINT, 0.0, caused)
    return torch.hypot(error, caused * contrast[:, None])


def estimate_error_(
    error: Tensor,
    contrast: Tensor,
    picked: Picked,
    moved: Tensor,
    turn: Tensor,
    renewal: Tensor,
    slots: Tensor | None,
    report: Tensor,
) -> None:
    """Report the estimated relative error of the outputs after this step.

    With the root mean square w of error / contrast over all tokens, those picked counted as 0, and
    the change c of outputs, it is FACTOR * w^BY_ERROR * c^BY_CHANGE, and 0 where w is. Where it,
    at most LASTING, times `turn` is above `renewal`, the stream starts over.

    Args:
        error: (B, N) of the tokens, without what motion and context add to it.
        contrast: (B,) its unit.
        picked: tokens that this step updates.
        moved: (S,) change of outputs, see `follow_change_`; NaN where it is not known: then it is
            taken to be w.
        turn: (B,) frames since the stream's last flush, this one included.
        renewal: (B,).
        slots: (B,) row of `moved` that belongs to each stream; None if row b does.
        report: (B, REPORT) int32, see `pick`. Column 5 is set to the estimate in units of
            1 / UNIT, clamped to HIGHEST; 0 where it is NaN. Column 2 is set to 1 where the stream
            starts over, unless its frame is bad.
    """
    left = error / contrast.clamp_min(TINY)[:, None]
    left = torch.where(updated_tokens(picked, error.shape[1]), 0.0, left)
    rest = left.square().mean(dim=-1).sqrt()
    waiting = rest.clamp_min(LEAST)
    change = held(moved, slots)
    change = torch.where(change.isnan(), waiting, change).clamp_min(LEAST)
    estimate = FACTOR * waiting**BY_ERROR * change**BY_CHANGE
    estimate = torch.where(rest == 0, 0.0, estimate)
    over = (estimate.clamp_max(LASTING) * turn > renewal) & (report[:, 1] > 0)
    report[:, 5] = (estimate.nan_to_num(0.0).clamp_max(HIGHEST) * UNIT).to(report.dtype)
    report[:, 2] = torch.maximum(report[:, 2], over.to(report.dtype))


def updated_tokens(picked: Picked, tokens: int) -> Tensor:
    """(B, N) tokens that were picked."""
    if picked.places is not None:
        return picked.places >= 0
    index = picked.index
    mask = torch.zeros(len(index), tokens, dtype=torch.bool, device=index.device)
    return mask.scatter_(1, index, True) & (picked.count > 0)[:, None]


def follow_change_(
    moved: Tensor,
    rows: Tensor,
    memory: Tensor,
    index: Tensor,
    count: Tensor | None,
    slots: Tensor | None,
) -> None:
    """Follow how much updates change the outputs of tokens, as a running average.

    The change of a frame is the root mean square, over the updated tokens and channels, of the
    difference of the layer norms of new and old rows, in fp32.

    Args:
        moved: (S,) fp32, the average, written; NaN where there is none yet. A stream without
            updated tokens is left as it was.
        rows: (B, M, D) new outputs.
        memory: (S, N, D) outputs; still the old ones at the updated tokens.
        index: (B, M) the updated tokens.
        count: (B,) rows that count; the others are padding. None if all do.
        slots: (B,) row of `moved` and `memory` that belongs to each stream; None if row b does.
    """
    batch, taken, width = rows.shape
    if taken == 0:
        return
    stream = torch.arange(batch, device=rows.device) if slots is None else slots
    old = memory[stream[:, None], index].float()
    apart = F.layer_norm(rows.float(), (width,), eps=EPS) - F.layer_norm(old, (width,), eps=EPS)
    square = apart.square().mean(dim=-1)
    before = held(moved, slots)
    if count is None:
        moved.index_copy_(0, stream, _followed(before, square.mean(dim=-1).sqrt()))
        return
    valid = torch.arange(taken, device=rows.device) < count[:, None]
    total = torch.where(valid, square, 0.0).sum(dim=-1)
    after = _followed(before, (total / count.clamp_min(1)).sqrt())
    moved.index_copy_(0, stream, torch.where(count > 0, after, before))


def _followed(before: Tensor, now: Tensor) -> Tensor:
    return torch.where(before.isnan(), now, now + KEPT * (before - now))
