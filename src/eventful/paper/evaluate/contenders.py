"""Builds the contender that a variant describes, and counts dense steps."""

from __future__ import annotations

from torch import nn

from eventful.bench.contenders import Contender, Dense, Skipping, Streamed
from eventful.config import Config
from eventful.cost.counting import count_backbone
from eventful.errors import ConfigError
from eventful.models.blocks import at_size, pooled
from eventful.paper.evaluate.variants import DENSE, SKIP, Variant
from eventful.stream import Stream, StreamBatch
from eventful.surgery.conversion import block_shapes, convert


def contender(
    model: nn.Module, variant: Variant, size: int, *, views: int | None = None, maps: bool = False
) -> Contender:
    """The model under a variant.

    Args:
        size: side of its frames in pixels.
        views: number of videos in a call, each a stream of its own; None for a single stream.
        maps: keep error maps and masks in the records.
    """
    config = variant.config()
    if variant.preset == SKIP:
        if variant.share is None:
            raise ConfigError("Skipping needs the share of the frames to compute, or a variant.")
        return Skipping(_dense(model, size, views), variant.share)
    if config is None:
        return _dense(model, size, views)
    if variant.preset == DENSE:
        return _dense(model, size, views, config.pool)
    if views is None:
        return Streamed(Stream(convert(model, config), maps=maps))
    batch = StreamBatch(convert(model, config), maps=maps)
    for view in range(views):
        batch.join(str(view))
    return Streamed(batch)


def _dense(model: nn.Module, size: int, views: int | None, pool: int = 1) -> Dense:
    whole = pooled(at_size(model, (size, size)), pool) if pool > 1 else at_size(model, (size, size))
    return Dense(whole, (views or 1) * dense_macs(model, size, pool))


def dense_macs(model: nn.Module, size: int, pool: int = 1) -> int:
    """Operations of one dense step, with keys pooled where `pool` is above 1."""
    return count_backbone(block_shapes(model, size, Config.tokenwise(pool=pool))).total
