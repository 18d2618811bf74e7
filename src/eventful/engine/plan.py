"""What the steps of a stream have in common while its frames, call and policies stay alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from eventful import ops
from eventful.config import Config
from eventful.cost.fallback import Fallback
from eventful.policies import Policy, SelectionParams, params_of, refresh_period
from eventful.rules.kernels import missing_kernels
from eventful.tokens.layout import TokenLayout

DEVICES = {"cuda"}  # where steps run without waiting for the host


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Worked out once, used for every frame.

    Attributes:
        policies: one per stream.
        layouts: token layout by trunk.
        fallback: decides between dense and eventful steps; None where it never falls back.
        maps: keep error maps and masks in the record.
        precision: see `precision`.
        dense: why every frame runs dense, with `engine.dense.dense_form` as its config; None where
            steps are eventful.
    """

    config: Config
    policies: list[Policy]
    layouts: dict[str, TokenLayout]
    fallback: Fallback | None
    maps: bool
    precision: Hashable
    dense: str | None = None

    def of_rows(self, rows: Sequence[int]) -> StepPlan:
        """The same for some of the streams."""
        return replace(self, policies=[self.policies[row] for row in rows])


@dataclass(frozen=True, eq=False)
class ResidentPlan:
    """The part of a plan that steps without the host need.

    Attributes:
        params: of the policies.
        tokens: N.
        forced: most tokens that pass a gate whatever their error.
        needs: whether some policy follows the noise, whether some is relative to contrast, and
            whether some shares a pool.
    """

    params: list[SelectionParams]
    tokens: int
    forced: int
    needs: tuple[bool, bool, bool]

    @classmethod
    def of(cls, plan: StepPlan, depth: int) -> ResidentPlan:
        """Of a plan whose policies all have parameters, for a model of one trunk."""
        (layout,) = plan.layouts.values()
        found = [params_of(policy, layout.tokens) for policy in plan.policies]
        params = [one for one in found if one is not None]
        needs = (
            any(one.noise is not None for one in params),
            any(one.relative for one in params),
            any(one.shared for one in params),
        )
        return cls(params, layout.tokens, _forced(plan.config, layout, depth), needs)


def _forced(config: Config, layout: TokenLayout, depth: int) -> int:
    special = layout.prefix + layout.suffix if config.protect else 0
    if config.max_age is None:
        return special
    return special + -(-layout.tokens // refresh_period(config.max_age, depth))


def precision(device: torch.device) -> Hashable:
    """What a user may switch between frames: autocast, and products in TF32."""
    name = device.type
    on = name != "meta" and torch.is_autocast_enabled(name)
    cast = torch.get_autocast_dtype(name) if on else None
    # What torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32 read.
    return cast, torch._C._get_cublas_allow_tf32(), torch._C._get_cudnn_allow_tf32()


def needs_host(
    config: Config,
    policies: Sequence[Policy],
    device: torch.device,
    *,
    global_only: Callable[[], bool],
) -> str | None:
    """Why steps must run on the host; None if they need not.

    Args:
        global_only: whether all attention is global, without relative position.
    """
    if device.type not in DEVICES:
        return f"steps on {device.type} run on the host"
    missing = missing_kernels(config, global_only=global_only)
    if missing is not None:
        return f"there are no kernels for {missing}"
    if config.pool != 1:
        return "keys are pooled"
    if any(policy.order != 2 or params_of(policy, 1) is None for policy in policies):
        return "a policy cannot be put into numbers"
    forced = ops.forced_backend()
    if device.type == "cuda" and forced not in (None, "triton"):
        return f"backend {forced!r} is forced"
    if device.type == "cuda":
        return ops.why_not(
            "triton", "attend_windows", *[torch.empty(1, 1, 1, 1, device=device)] * 3
        )
    return None
