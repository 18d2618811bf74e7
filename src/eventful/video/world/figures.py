"""Who is in the scene: figures made of rounded boxes that move with the phase of their gait.

A part's place and angle depend on the sine and cosine of the phase, and of wheels on the phase
itself, by fixed factors. So the parts of all figures of a batch come from one table at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

GEOMETRY = ("cx", "cy", "hx", "hy", "angle", "round", "ring")
MAIN, SECOND, DARK, PALE, GLASS = range(5)  # colours of a figure
PLAIN, BANDS, STRIPES, PATCHES, CHECKS, PLANKS, SECTORS = range(7)  # what is painted on its skin


@dataclass(frozen=True)
class Part:
    """A rounded box in a square one metre wide and high, its ground at 0 and its middle at x = 0.

    Attributes:
        round: 1 for round ends, 0 for corners.
        ring: half of the width of a ring; 0 for a full shape.
        skin: whether the figure's pattern is painted on it.
        sine, cosine, spin: by which its geometry changes with the phase.
    """

    cx: float
    cy: float
    hx: float
    hy: float
    angle: float = 0.0
    round: float = 1.0
    ring: float = 0.0
    colour: int = MAIN
    skin: bool = False
    sine: Mapping[str, float] = field(default_factory=dict)
    cosine: Mapping[str, float] = field(default_factory=dict)
    spin: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A class of object, or something that only stands there.

    Attributes:
        metres: from the smallest to the largest, of the side of its square.
        speed: metres a second, from the slowest to the fastest.
        stride: metres of a full turn of the phase, for a figure of one metre.
        flies: it may be above the ground.
    """

    name: str
    parts: tuple[Part, ...]
    pattern: int
    metres: tuple[float, float]
    speed: tuple[float, float] = (0.0, 0.0)
    stride: float = 0.8
    flies: bool = False

    @property
    def middle(self) -> float:
        """Height of its middle, about which it turns."""
        return max(part.cy + min(part.hx, part.hy) for part in self.parts) / 2


def _limb(
    x: float, y: float, length: float, half: float, swing: float, colour: int, lag: float = 0.0,
    lean: float = 0.0,
) -> Part:  # fmt: skip
    """Hangs from (x, y) and swings by `swing` radians, `lag` behind the phase."""
    by = {"angle": swing, "cx": swing * length / 2}
    return Part(
        x + lean * length / 2, y - length / 2, half, length / 2, lean, colour=colour,
        sine={key: math.cos(lag) * value for key, value in by.items()},
        cosine={key: -math.sin(lag) * value for key, value in by.items()},
    )  # fmt: skip


def _leg(x: float, hip: float, half: float, swing: float, colour: int) -> tuple[Part, Part]:
    """A thigh and a shin that bends behind it."""
    thigh, shin = hip * 0.52, hip * 0.5
    upper = _limb(x, hip, thigh, half, swing, colour)
    lower = _limb(x, hip - thigh * 0.94, shin, half * 0.8, swing * 0.8, colour, lag=0.7)
    knee = {"cx": swing * thigh * 0.94}
    bent = {**lower.sine, "cx": lower.sine["cx"] + knee["cx"]}
    return upper, Part(**{**vars(lower), "sine": bent})


def _biped() -> tuple[Part, ...]:
    return (
        _limb(0.0, 0.8, 0.32, 0.03, 0.55, SECOND),
        *_leg(0.0, 0.48, 0.045, -0.5, DARK),
        Part(0.0, 0.64, 0.085, 0.19, round=0.7, skin=True, sine={"angle": 0.03}),
        *_leg(0.0, 0.48, 0.05, 0.5, DARK),
        Part(0.015, 0.92, 0.06, 0.072, colour=PALE, cosine={"cy": 0.006}),
        Part(-0.005, 0.965, 0.062, 0.035, colour=DARK, cosine={"cy": 0.006}),
        _limb(0.0, 0.8, 0.32, 0.033, -0.55, SECOND),
    )


def _quadruped() -> tuple[Part, ...]:
    far = [_limb(x, 0.34, 0.34, 0.028, s, SECOND, lag) for x, s, lag in
           ((-0.24, 0.4, 1.2), (0.2, 0.4, 2.8))]  # fmt: skip
    near = [_limb(x, 0.36, 0.36, 0.034, s, MAIN, lag) for x, s, lag in
            ((-0.28, 0.4, 4.3), (0.24, 0.4, 5.9))]  # fmt: skip
    return (
        *far,
        _limb(-0.36, 0.52, 0.24, 0.016, 0.3, SECOND, lean=-0.5),
        Part(-0.02, 0.44, 0.36, 0.13, round=0.9, skin=True, cosine={"cy": 0.008}),
        Part(0.34, 0.56, 0.06, 0.15, -0.6, skin=True, cosine={"cy": 0.012}),
        Part(0.44, 0.66, 0.09, 0.055, -0.25, cosine={"cy": 0.016}),
        Part(0.5, 0.635, 0.05, 0.036, -0.25, colour=SECOND, cosine={"cy": 0.016}),
        Part(0.38, 0.73, 0.016, 0.045, 0.4, colour=DARK, cosine={"cy": 0.016}),
        *near,
    )


def _wheel(x: float, radius: float) -> tuple[Part, ...]:
    return (
        Part(x, radius, radius, radius, colour=DARK),
        Part(x, radius, radius * 0.5, radius * 0.5, colour=PALE),
        Part(x, radius, radius * 0.55, radius * 0.12, round=0.2, colour=DARK, spin={"angle": -1.0}),
    )


def _car() -> tuple[Part, ...]:
    return (
        Part(-0.04, 0.31, 0.25, 0.1, round=0.7, colour=SECOND),
        Part(0.07, 0.31, 0.1, 0.07, -0.15, round=0.4, colour=GLASS),
        Part(-0.15, 0.31, 0.09, 0.07, 0.1, round=0.4, colour=GLASS),
        Part(0.0, 0.19, 0.49, 0.1, round=0.75, skin=True),
        Part(0.45, 0.22, 0.03, 0.02, colour=PALE),
        *_wheel(-0.28, 0.09), *_wheel(0.29, 0.09),
    )  # fmt: skip


def _van() -> tuple[Part, ...]:
    return (
        Part(-0.02, 0.34, 0.47, 0.25, round=0.25, skin=True),
        Part(0.36, 0.42, 0.08, 0.09, round=0.3, colour=GLASS),
        Part(0.06, 0.44, 0.13, 0.07, round=0.2, colour=GLASS),
        Part(0.0, 0.11, 0.49, 0.03, round=0.5, colour=SECOND),
        *_wheel(-0.28, 0.1), *_wheel(0.29, 0.1),
    )  # fmt: skip


def _bicycle() -> tuple[Part, ...]:
    def bar(x1: float, y1: float, x2: float, y2: float, colour: int = MAIN) -> Part:
        length = math.hypot(x2 - x1, y2 - y1) / 2
        angle = math.atan2(y2 - y1, x2 - x1)
        return Part((x1 + x2) / 2, (y1 + y2) / 2, length, 0.012, angle, colour=colour)

    def rim(x: float) -> tuple[Part, ...]:
        spoke = Part(x, 0.19, 0.17, 0.006, colour=DARK, spin={"angle": -1.0})
        return Part(x, 0.19, 0.19, 0.19, ring=0.012, colour=DARK), spoke

    pedal = {"angle": 0.45, "cx": 0.05}
    return (
        *rim(-0.28), *rim(0.28),
        bar(-0.28, 0.19, -0.02, 0.2), bar(-0.02, 0.2, 0.2, 0.42), bar(-0.1, 0.44, 0.2, 0.42),
        bar(0.2, 0.46, 0.28, 0.19),
        Part(-0.03, 0.36, 0.04, 0.15, 0.3, colour=DARK, sine=pedal),
        Part(0.0, 0.64, 0.075, 0.19, -0.45, round=0.8, colour=SECOND),
        Part(0.12, 0.87, 0.062, 0.07, colour=PALE),
        Part(0.14, 0.6, 0.025, 0.15, 0.75, colour=SECOND),
        Part(-0.03, 0.36, 0.045, 0.15, 0.3, colour=DARK, sine={k: -v for k, v in pedal.items()}),
    )  # fmt: skip


def _bird() -> tuple[Part, ...]:
    flap = {"angle": 1.0, "cy": 0.13}
    return (
        Part(-0.04, 0.55, 0.2, 0.045, 0.35, colour=SECOND, sine={"angle": -1.0, "cy": 0.13}),
        Part(-0.3, 0.5, 0.12, 0.03, 0.1, colour=DARK),
        Part(0.0, 0.5, 0.22, 0.085, 0.08, skin=True),
        Part(0.22, 0.56, 0.075, 0.07, skin=False),
        Part(0.32, 0.55, 0.05, 0.016, colour=PALE),
        Part(-0.02, 0.56, 0.24, 0.05, 0.35, colour=SECOND, sine=flap),
    )


def _box() -> tuple[Part, ...]:
    return (
        Part(0.0, 0.4, 0.4, 0.4, round=0.06, skin=True),
        Part(0.0, 0.4, 0.4, 0.4, round=0.06, ring=0.03, colour=SECOND),
    )


def _ball() -> tuple[Part, ...]:
    return (
        Part(0.0, 0.42, 0.42, 0.42, skin=True),
        Part(-0.14, 0.6, 0.07, 0.05, 0.5, colour=PALE),
    )


def _tree() -> tuple[Part, ...]:
    blobs = ((0.0, 0.72, 0.3), (-0.2, 0.62, 0.2), (0.2, 0.64, 0.2), (0.05, 0.9, 0.17))
    crown = [
        Part(x, y, r, r * 0.85, colour=MAIN, skin=True, sine={"cx": 0.006}) for x, y, r in blobs
    ]
    return Part(0.0, 0.25, 0.035, 0.27, colour=DARK), *crown


def _lamp() -> tuple[Part, ...]:
    return (
        Part(0.0, 0.5, 0.014, 0.5, colour=DARK),
        Part(0.06, 0.99, 0.07, 0.014, colour=DARK),
        Part(0.12, 0.975, 0.04, 0.016, colour=PALE),
    )


def _bush() -> tuple[Part, ...]:
    blobs = ((-0.22, 0.2, 0.22), (0.2, 0.22, 0.24), (0.0, 0.3, 0.26))
    return tuple(Part(x, y, r, r * 0.9, skin=True, sine={"cx": 0.004}) for x, y, r in blobs)


_WALKS, _RUNS = (0.7, 1.8), (0.6, 2.6)
KINDS = (
    Kind("walker", _biped(), PLAIN, (1.45, 2.1), _WALKS, 0.75),
    Kind("guard", _biped(), BANDS, (1.45, 2.1), _WALKS, 0.75),
    Kind("dog", _quadruped(), PLAIN, (0.9, 1.9), _RUNS, 0.8),
    Kind("cow", _quadruped(), PATCHES, (0.9, 1.9), _RUNS, 0.8),
    Kind("zebra", _quadruped(), STRIPES, (0.9, 1.9), _RUNS, 0.8),
    Kind("car", _car(), PLAIN, (2.4, 3.6), (1.2, 4.0), 0.55),
    Kind("taxi", _car(), CHECKS, (2.4, 3.6), (1.2, 4.0), 0.55),
    Kind("van", _van(), PLAIN, (2.4, 3.6), (1.2, 3.6), 0.6),
    Kind("ambulance", _van(), BANDS, (2.4, 3.6), (1.2, 3.6), 0.6),
    Kind("bicycle", _bicycle(), PLAIN, (1.5, 2.1), (1.2, 3.2), 1.2),
    Kind("bird", _bird(), PLAIN, (0.9, 1.7), (1.0, 2.8), 1.4, flies=True),
    Kind("crate", _box(), PLANKS, (0.7, 1.6), (0.3, 0.9), 1.0),
    Kind("parcel", _box(), STRIPES, (0.7, 1.6), (0.3, 0.9), 1.0),
    Kind("ball", _ball(), SECTORS, (0.6, 1.3), (0.8, 2.2), 1.0),
)
PROPS = (
    Kind("tree", _tree(), PATCHES, (3.0, 5.0), stride=4.0),
    Kind("lamp", _lamp(), PLAIN, (3.2, 4.5)),
    Kind("bush", _bush(), PATCHES, (0.9, 1.6), stride=4.0),
)
CLASSES = tuple(kind.name for kind in KINDS)
EVERY = (*KINDS, *PROPS)
MOST_PARTS = max(len(kind.parts) for kind in EVERY)


@dataclass(frozen=True)
class Table:
    """All kinds as tensors.

    Attributes:
        factors: (kinds, parts, 7, 4) geometry by 1, sine, cosine and phase.
        colours: (kinds, parts) which colour.
        skins: (kinds, parts) 1 where the pattern is painted.
        facts: (kinds, 8) pattern, least and most metres, least and most speed, stride, flies,
            and height of the middle.
    """

    factors: Tensor
    colours: Tensor
    skins: Tensor
    facts: Tensor

    def to(self, device: torch.device) -> Table:
        """The same on a device."""
        return Table(*(tensor.to(device) for tensor in vars(self).values()))


@lru_cache(maxsize=8)
def table(device: torch.device) -> Table:
    """The table on a device. A kind with fewer parts has some of no size."""
    factors = torch.zeros(len(EVERY), MOST_PARTS, len(GEOMETRY), 4)
    factors[:, :, 2:4, 0] = -1.0  # no size
    colours = torch.zeros(len(EVERY), MOST_PARTS, dtype=torch.long)
    skins = torch.zeros(len(EVERY), MOST_PARTS)
    for row, kind in enumerate(EVERY):
        for column, part in enumerate(kind.parts):
            for place, name in enumerate(GEOMETRY):
                values = (getattr(part, name), *(by.get(name, 0.0) for by in
                          (part.sine, part.cosine, part.spin)))  # fmt: skip
                factors[row, column, place] = torch.tensor(values)
            colours[row, column], skins[row, column] = part.colour, float(part.skin)
    facts = [
        (k.pattern, *k.metres, *k.speed, k.stride, float(k.flies), k.middle) for k in EVERY
    ]  # fmt: skip
    return Table(factors, colours, skins, torch.tensor(facts)).to(device)
