"""Block shapes of the paper's two systems for counting, read from modules without weights."""

from __future__ import annotations

from functools import lru_cache

import torch

from eventful.config import Config
from eventful.cost.counting import BlockShape
from eventful.models.vitdet.model import ViTDet, vitdet_b
from eventful.models.vivit.model import ViViT, vivit_b
from eventful.surgery.adapters.own_vit import OwnViT
from eventful.surgery.conversion import block_shapes
from eventful.tokens.layout import TokenLayout


@lru_cache(maxsize=8)
def _vitdet(size: int) -> ViTDet:
    with torch.device("meta"):
        return vitdet_b(size=size)


@lru_cache(maxsize=8)
def _vivit(size: int) -> ViViT:
    with torch.device("meta"):
        return vivit_b(size=size)


def vitdet_shapes(size: int, *, pool: int = 1) -> tuple[BlockShape, ...]:
    """The blocks of ViTDet-B on `size` x `size` pixels; `pool` applies to the global ones."""
    return block_shapes(_vitdet(size), size, Config.paper(pool=pool))


def spatial_shapes(size: int) -> tuple[BlockShape, ...]:
    """The blocks of ViViT-B's spatial model, for one step."""
    return block_shapes(_vivit(size), size, Config.paper())


def temporal_shapes(size: int) -> tuple[BlockShape, ...]:
    """The blocks of ViViT-B's temporal model, which is never eventful."""
    return temporal_blocks(_vivit(size))


def temporal_blocks(model: ViViT) -> tuple[BlockShape, ...]:
    """The blocks of a ViViT's temporal model."""
    adapter = OwnViT()
    layout = TokenLayout((1, model.config.steps), prefix=1)
    return tuple(
        adapter.spec(model.temporal, block).shape(layout, Config.paper())
        for block in model.temporal.blocks
    )
