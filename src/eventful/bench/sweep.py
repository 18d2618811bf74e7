"""Sweeps: one quantity varies, the others stay fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eventful.bench.rows import Setting
from eventful.errors import ConfigError
from eventful.modelspec.size import both_sides

AXES = ("r", "tokens", "batch", "depth")

_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the tokens, for a sweep over r
_SIDES = (1 / 2, 3 / 4, 1, 5 / 4)  # of the frame, for a sweep over tokens
_BATCHES = {"cpu": (1, 2, 4), "cuda": (1, 2, 4, 8, 16)}
_DEPTHS = (1 / 4, 1 / 2, 1, 2)  # of the blocks


def usual_values(over: str, base: Setting) -> tuple[int, ...]:
    """Values that show how cost grows around the setting's own."""
    made = base.subject
    if over == "r":
        return tuple(round(share * made.patches) for share in _SHARES)
    if over == "tokens":
        side = both_sides(made.size)[0] // made.patch
        return tuple(round(share * side) ** 2 for share in _SIDES)
    if over == "batch":
        return _BATCHES["cuda" if base.device.startswith("cuda") else "cpu"]
    return tuple(max(1, round(share * made.depth)) for share in _DEPTHS)


def points(over: str, base: Setting, values: Sequence[int] = ()) -> list[Setting]:
    """The runs of a sweep, cheapest first. All values of r are measured in one run.

    Over tokens, r stays the same share of them. Tokens are rounded to a square grid of patches;
    class and register tokens come on top.
    """
    if over not in AXES:
        raise ConfigError(f"A sweep goes over one of {', '.join(AXES)}; got {over!r}.")
    if over in ("tokens", "depth") and not base.subject.returns_tokens:
        raise ConfigError(
            f"A sweep over {over} builds a model at several sizes: name a benchmark model "
            "(eventful bench --list), or give --over r or --over batch."
        )
    chosen = sorted(set(values or usual_values(over, base)))
    if over == "r":
        return [replace(base, r=tuple(chosen))]
    if min(chosen) < 1:
        raise ConfigError(f"A sweep over {over} needs values of at least 1; got {min(chosen)}.")
    if over == "batch":
        return [replace(base, batch=value) for value in chosen]
    if over == "depth":
        return [replace(base, depth=value) for value in chosen]
    return [_with_tokens(base, value) for value in chosen]


def _with_tokens(base: Setting, tokens: int) -> Setting:
    made = base.subject
    side = max(1, round(tokens**0.5))
    share = side**2 / made.patches
    return replace(
        base,
        size=side * made.patch,
        r=tuple(max(1, round(r * share)) for r in base.budgets),
    )
