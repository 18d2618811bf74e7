"""Which update rules have kernels for steps on a GPU, and what is said where they have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from eventful.config import Config
from eventful.ops import window_too_wide
from eventful.rules.spec import BlockSpec
from eventful.tokens.layout import TokenLayout


def wide_windows(blocks: Iterable[tuple[BlockSpec, TokenLayout]]) -> str | None:
    """Why some block's windows are too wide for the kernels; None if none are."""
    reasons = (window_too_wide(spec.window_on(layout.grid)) for spec, layout in blocks)
    return next((reason for reason in reasons if reason is not None), None)


def missing_kernels(config: Config, *, global_only: Callable[[], bool]) -> str | None:
    """What a rule has no GPU kernels for; None if it has all.

    Args:
        global_only: whether all attention is global, without relative position.
    """
    if config.reference != "update" or config.attention not in ("query", "exact"):
        return f"reference={config.reference!r}, attention={config.attention!r}"
    if config.gating == "operator" and not global_only():
        return "windows or relative position under gates around operators"
    return None


def dense_instead(config: Config, *, global_only: Callable[[], bool]) -> str | None:
    """Why every frame runs dense on a GPU; None where steps are eventful.

    A rule without kernels is slower than the dense model there. The published presets have
    fallback=False, so they run all the same.
    """
    missing = missing_kernels(config, global_only=global_only) if config.fallback else None
    if missing is None:
        return None
    return (
        f"{config.rule} has no GPU kernels for {missing}, so each frame runs dense. "
        "Config.fast() is faster. With fallback=False the rule runs on the host, slower than dense."
    )
