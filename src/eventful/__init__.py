"""Run any vision transformer on video and pay only for what changed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from eventful import _moved
from eventful.surgery import torchvision_repair

if TYPE_CHECKING:
    from eventful.budget import ErrorBudget as ErrorBudget
    from eventful.budget import LatencyBudget as LatencyBudget
    from eventful.budget import MemoryBudget as MemoryBudget
    from eventful.budget import OperationsBudget as OperationsBudget
    from eventful.budget import RateBudget as RateBudget
    from eventful.config import Config as Config
    from eventful.config import Context as Context
    from eventful.config import SceneCut as SceneCut
    from eventful.errors import EventfulError as EventfulError
    from eventful.models.saving import save_model as save_model
    from eventful.models.shipped import load as load
    from eventful.ops.registry import use_backend as use_backend
    from eventful.policies import Always as Always
    from eventful.policies import FollowScene as FollowScene
    from eventful.policies import GateContext as GateContext
    from eventful.policies import NoiseThreshold as NoiseThreshold
    from eventful.policies import Policy as Policy
    from eventful.policies import Shared as Shared
    from eventful.policies import Threshold as Threshold
    from eventful.policies import TopFraction as TopFraction
    from eventful.policies import TopR as TopR
    from eventful.policies import register_policy as register_policy
    from eventful.rules.record import StepRecord as StepRecord
    from eventful.stream import Stream as Stream
    from eventful.stream import StreamBatch as StreamBatch
    from eventful.surgery.adapters import Adapter as Adapter
    from eventful.surgery.adapters import register_adapter as register_adapter
    from eventful.surgery.conversion import convert as convert
    from eventful.surgery.conversion import restore as restore
    from eventful.surgery.inspection import inspect as inspect
    from eventful.surgery.torchvision_repair import repair_torchvision as repair_torchvision
    from eventful.tokens.changed import ImageTokens as ImageTokens
    from eventful.tokens.changed import TokenChange as TokenChange
    from eventful.tokens.changed import changed_tokens as changed_tokens
    from eventful.tokens.selection import Selection as Selection
    from eventful.video.frame import Frame as Frame
    from eventful.video.frame import stack as stack
    from eventful.video.read import read as read

__version__ = "0.2.0"

_HOMES = {
    "budget": (
        "ErrorBudget",
        "LatencyBudget",
        "MemoryBudget",
        "OperationsBudget",
        "RateBudget",
    ),
    "surgery.adapters": ("Adapter", "register_adapter"),
    "surgery.inspection": ("inspect",),
    "surgery.torchvision_repair": ("repair_torchvision",),
    "config": ("Config", "Context", "SceneCut"),
    "surgery.conversion": ("convert", "restore"),
    "errors": ("EventfulError",),
    "ops.registry": ("use_backend",),
    "policies": (
        "Always",
        "FollowScene",
        "GateContext",
        "NoiseThreshold",
        "Policy",
        "Shared",
        "Threshold",
        "TopFraction",
        "TopR",
        "register_policy",
    ),
    "tokens.changed": ("ImageTokens", "TokenChange", "changed_tokens"),
    "tokens.selection": ("Selection",),
    "rules.record": ("StepRecord",),
    "models.saving": ("save_model",),
    "models.shipped": ("load",),
    "stream": ("Stream", "StreamBatch"),
    "video.frame": ("Frame", "stack"),
    "video.read": ("read",),
}
_moved.install()
torchvision_repair.install()
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that `eventful --help` need not wait for torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'eventful' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"eventful.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
