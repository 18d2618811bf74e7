"""One pool of tokens for several streams: how many of them each stream gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 1e-12  # contrasts count as this much at least
FLAT = 1e-3  # of the largest contrast: a picture with less shows nothing but rounding


@dataclass(frozen=True, eq=False)
class Pool:
    """What the streams of a step put into a pool, and what each gets in any case.

    Attributes:
        shared: (B,) above 0 for streams that take part.
        share: (B,) tokens that a stream puts in; the cap of a stream that takes no part.
        floor: (B,) tokens that a stream gets in any case, at most its share.
    """

    shared: Tensor
    share: Tensor
    floor: Tensor


def share_out(
    error: Tensor,
    contrast: Tensor,
    pool: Pool,
    forced: Tensor | None,
    sound: Tensor | None = None,
) -> Tensor:
    """How many tokens of each stream pass by their error.

    The best `floor` tokens of each stream in the pool come first, then the largest errors relative
    to the contrast of their stream, until as many tokens pass as were put in. Of equal ones those
    go first that have fewer of their own stream ahead of them, then those of the first stream. A
    stream with an error that is not finite puts in nothing, and one without contrast, or with far
    less than another, takes no part. The sizes are fixed and nothing is asked of the host, so that
    it can be recorded.

    Args:
        error: (B, N).
        contrast: (B,) its unit.
        forced: (B, N) tokens that pass on top; None for none.
        sound: (B,) streams whose frame is good; None for all whose errors are finite.

    Returns:
        (B,) caps; the share of streams that take no part.
    """
    batch, tokens = error.shape
    able = (pool.shared > 0) & torch.isfinite(error).all(dim=-1)
    able = able & torch.isfinite(contrast) & (contrast > LEAST)
    able = able if sound is None else able & sound
    able = able & (contrast > FLAT * torch.where(able, contrast, 0.0).max())
    counts = able[:, None] if forced is None else able[:, None] & ~forced
    score = torch.where(counts, error / contrast.clamp_min(LEAST)[:, None], -torch.inf)
    score = score.sort(dim=-1, descending=True).values
    rank = torch.arange(tokens, device=error.device)
    kept = (rank < pool.floor[:, None]) & (score > -torch.inf)
    score = torch.where(kept, torch.inf, score)
    # By rank, then by stream: a stable sort then spreads equal scores over the streams.
    ranked, order = score.T.flatten().sort(descending=True, stable=True)
    total = torch.where(able, pool.share, 0).sum()
    place = torch.arange(batch * tokens, device=error.device)
    passes = (place < total) & (ranked > -torch.inf)
    caps = torch.zeros_like(pool.share).scatter_add_(0, order % batch, passes.to(pool.share.dtype))
    return torch.where(able, caps, pool.share)
