"""Selection policies (Section 4.3): from the error at a gate to the tokens that pass it."""

from __future__ import annotations

import warnings
from typing import Any

from eventful.policies.base import (
    GateContext,
    Policy,
    SelectionParams,
    params_of,
    refresh_period,
    select_above,
)
from eventful.policies.kinds import (
    Always,
    FollowScene,
    NoiseThreshold,
    Shared,
    Threshold,
    TopFraction,
    TopR,
)
from eventful.policies.registry import policy_from_dict, policy_to_dict, register_policy
from eventful.policies.streams import memory_scope, select_by_stream
from eventful.tokens.selection import Selection

__all__ = [
    "Always",
    "FollowScene",
    "GateContext",
    "NoiseThreshold",
    "Policy",
    "Selection",
    "SelectionParams",
    "Shared",
    "Threshold",
    "TopFraction",
    "TopR",
    "memory_scope",
    "params_of",
    "policy_from_dict",
    "policy_to_dict",
    "refresh_period",
    "register_policy",
    "select_above",
    "select_by_stream",
]


def __getattr__(name: str) -> Any:
    """Old names."""
    if name == "Dials":
        warnings.warn("Dials is now SelectionParams.", DeprecationWarning, stacklevel=2)
        return SelectionParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
