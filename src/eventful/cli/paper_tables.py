"""Published costs, as data: every row of the paper's tables that states one, and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SPATIAL_1024 = "Table 1"
KINETICS = "Table A"
THRESHOLD = "Table B"
VITDET = "Table C"
EPIC = "Table D"
SPATIAL_672 = "Table E"

TITLES = {
    SPATIAL_1024: "ViTDet with spatial redundancy, size 1024",
    VITDET: "ViTDet on VID",
    SPATIAL_672: "ViTDet with spatial redundancy, size 672",
    THRESHOLD: "ViTDet with a threshold policy, size 1024",
    EPIC: "ViViT on EPIC-Kitchens 100",
    KINETICS: "ViViT on Kinetics-400",
}

BASE = "Base model"
SPATIAL = "Spatial"
SPATIOTEMPORAL = "Spatiotemporal"
OURS = "Our method"
TOKENWISE = "Token-wise only"
STGT = "STGT"
TEMPORAL = "Temporal"


@dataclass(frozen=True)
class PublishedCost:
    """One row: a mean per frame in GFlops (ViTDet) or a sum per video in TFlops (ViViT).

    Attributes:
        table: number of the table, a key of `TITLES`.
        variant: name of the row as printed.
        size: side of the input in pixels.
        unit: GFlops or TFlops.
        value: the cost as printed.
        decimals: decimals printed.
        r: tokens the top-r policy selects.
        tuned_r: r for which the temporal model was tuned (ViViT).
        h: threshold of the threshold policy.
    """

    table: str
    variant: str
    size: int
    unit: str
    value: float
    decimals: int
    r: int | None = None
    tuned_r: int | None = None
    h: float | None = None


@dataclass(frozen=True)
class PublishedMemory:
    """One figure of Section 6, in 10^6 bytes.

    Attributes:
        figure: what is stored; a buffer takes as much as a gate.
        size: side of the input in pixels.
        tokens: N of the model.
        value: megabytes at full and at half precision.
        decimals: decimals printed.
        printed_tokens: N in the paper, where it is a misprint.
    """

    figure: str
    size: int
    tokens: int
    value: tuple[float, float]
    decimals: int
    printed_tokens: int | None = None


def _dense(table: str, variant: str, size: int, value: float) -> PublishedCost:
    return PublishedCost(table, variant, size, "GFlops", value, 1)


def _vitdet(table: str, variant: str, size: int, costs: Mapping[int, float]) -> list[PublishedCost]:
    return [
        PublishedCost(table, variant, size, "GFlops", value, 1, r) for r, value in costs.items()
    ]


def _epic(tuned: int, costs: Mapping[int, float]) -> list[PublishedCost]:
    return [
        PublishedCost(EPIC, TEMPORAL, 320, "TFlops", value, 2, r, tuned_r=tuned)
        for r, value in costs.items()
    ]


_TOKENWISE_1024 = {2048: 294.1, 1536: 250.7, 1024: 207.3, 768: 185.7, 512: 164.0, 256: 142.3}
_TOKENWISE_672 = {1024: 111.9, 768: 90.2, 512: 68.5, 384: 57.7, 256: 46.8, 128: 36.0}

COSTS: tuple[PublishedCost, ...] = (
    _dense(SPATIAL_1024, BASE, 1024, 467.4),
    _dense(SPATIAL_1024, SPATIAL, 1024, 388.1),
    *_vitdet(
        SPATIAL_1024,
        SPATIOTEMPORAL,
        1024,
        {2048: 217.0, 1536: 169.3, 1024: 121.0, 768: 96.3, 512: 70.9, 256: 44.5},
    ),
    _dense(VITDET, BASE, 1024, 467.4),
    *_vitdet(
        VITDET,
        OURS,
        1024,
        {2048: 294.9, 1536: 225.9, 1024: 156.8, 768: 122.3, 512: 87.8, 256: 53.3},
    ),
    *_vitdet(VITDET, TOKENWISE, 1024, _TOKENWISE_1024),
    *_vitdet(VITDET, STGT, 1024, _TOKENWISE_1024),
    _dense(VITDET, BASE, 672, 174.5),
    *_vitdet(
        VITDET, OURS, 672, {1024: 115.1, 768: 87.9, 512: 60.7, 384: 47.1, 256: 33.5, 128: 19.9}
    ),
    *_vitdet(VITDET, TOKENWISE, 672, _TOKENWISE_672),
    *_vitdet(VITDET, STGT, 672, _TOKENWISE_672),
    _dense(SPATIAL_672, BASE, 672, 174.5),
    _dense(SPATIAL_672, SPATIAL, 672, 159.7),
    *_vitdet(
        SPATIAL_672,
        SPATIOTEMPORAL,
        672,
        {1024: 98.2, 768: 75.5, 512: 52.8, 384: 41.4, 256: 29.8, 128: 18.0},
    ),
    _dense(THRESHOLD, BASE, 1024, 467.4),
    PublishedCost(THRESHOLD, TEMPORAL, 1024, "GFlops", 431.8, 1, h=0.2),
    PublishedCost(THRESHOLD, TEMPORAL, 1024, "GFlops", 294.1, 1, h=1.0),
    PublishedCost(THRESHOLD, TEMPORAL, 1024, "GFlops", 133.5, 1, h=5.0),
    PublishedCost(EPIC, BASE, 320, "TFlops", 7.12, 2),
    *_epic(200, {280: 5.49, 240: 4.77, 200: 4.05, 160: 3.33, 120: 2.62}),
    *_epic(100, {140: 2.98, 120: 2.62, 100: 2.26, 80: 1.90, 60: 1.54}),
    *_epic(50, {70: 1.72, 60: 1.54, 50: 1.36, 40: 1.18, 30: 1.00}),
    PublishedCost(KINETICS, BASE, 224, "TFlops", 3.360, 3),
    PublishedCost(KINETICS, TEMPORAL, 224, "TFlops", 1.814, 3, 96),
    PublishedCost(KINETICS, TEMPORAL, 224, "TFlops", 1.016, 3, 48),
    PublishedCost(KINETICS, TEMPORAL, 224, "TFlops", 0.618, 3, 24),
)

TOKEN_STATE = "ViTDet token gate"
ATTENTION_VITDET = "ViTDet A matrix"
ATTENTION_VIVIT = "ViViT A matrix"

MEMORY: tuple[PublishedMemory, ...] = (
    PublishedMemory(TOKEN_STATE, 1024, 4096, (12.6, 6.3), 1),
    PublishedMemory(ATTENTION_VITDET, 1024, 4096, (805, 403), 0),
    PublishedMemory(ATTENTION_VITDET, 672, 1764, (149, 75), 0),
    PublishedMemory(ATTENTION_VIVIT, 320, 401, (4.3, 2.2), 1, printed_tokens=301),
)
