"""What can be exported: a converted model of one trunk, under a rule that never asks the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from eventful.config import Config
from eventful.errors import ConfigError, UnsupportedError
from eventful.policies import Policy, SelectionParams, params_of, refresh_period
from eventful.surgery.conversion import convert, find_session
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout

DEFAULT_BUCKETS = (64, 128, 256)


def exportable(policy: Policy | None = None, **options: Any) -> Config:
    """`Config.fast` without what cannot be exported: motion, context, and the measured fallback."""
    left_out: dict[str, Any] = {"motion": False, "context": None, "fallback": False}
    return Config.fast(policy, **{**left_out, **options})


@dataclass(frozen=True, eq=False)
class Subject:
    """A converted model, and the frames it is exported for.

    Attributes:
        model: converted; its blocks are stepped.
        example: (1, C, height, width) one frame.
        policy: in force until another one is assigned to a stream of the runtime.
        params: of the policy.
        forced: most tokens that pass whatever their error.
    """

    model: nn.Module
    session: Session
    trunk: str
    layout: TokenLayout
    config: Config
    example: Tensor
    policy: Policy
    params: SelectionParams
    forced: int

    @classmethod
    def of(cls, model: nn.Module, example: Tensor, config: Config | None = None) -> Subject:
        """Convert a model for export, or take a converted one.

        Args:
            config: of a model that is not converted yet; `exportable()` if left out.

        Raises:
            UnsupportedError: the rule, the policy or the model cannot be exported; the message
                names the nearest that can.
        """
        session = find_session(model)
        if session is not None and config is not None and config != session.config:
            raise ConfigError(
                "This model is converted with another config; pass the original model, or no "
                "config."
            )
        if session is None:
            config = exportable() if config is None else config
            check_config(config)
            model = convert(model, config)
            session = find_session(model)
            assert session is not None
        config = session.config
        check_config(config)
        if example.dim() != 4 or len(example) != 1:
            raise UnsupportedError(
                f"A step is exported for one frame (1, C, height, width), not "
                f"{tuple(example.shape)}. For several videos open several streams of the runtime."
            )
        if len(session.trunks) != 1:
            raise UnsupportedError(
                f"The model has {len(session.trunks)} converted trunks: "
                f"{', '.join(map(repr, session.trunks))}. Export one of them: convert(model, "
                "config, where=NAME)."
            )
        (trunk, (module, adapter)), policy = next(iter(session.trunks.items())), config.policy
        layout = adapter.layout(module, (example.shape[2], example.shape[3]))
        assert policy is not None
        params = checked_params(policy, layout.tokens)
        forced = forced_tokens(config, layout, len(session.blocks[trunk]))
        if forced >= layout.tokens:
            raise ConfigError(
                f"With max_age={config.max_age} all {layout.tokens} tokens are due in every frame, "
                "so a step would save nothing. Use a larger max_age, e.g. 128, or None."
            )
        return cls(
            model.eval(), session, trunk, layout, config, example, policy, params, forced
        )  # fmt: skip

    def widths(self, r: Sequence[int]) -> list[int]:
        """Slots of the steps for these numbers of tokens that pass by their error."""
        wrong = [one for one in r if one < 1]
        if wrong or not r:
            raise ConfigError(f"r is one number of tokens or several, at least 1; got {list(r)}.")
        return sorted({min(self.layout.tokens, one + self.forced) for one in r})


def check_config(config: Config) -> None:
    """Raise for a rule that cannot be exported; the message names the nearest that can."""
    near = "Use eventful.export.exportable(policy), which is Config.fast without motion, context "
    near += "and fallback"
    if config.gating != "frame":
        raise UnsupportedError(
            f"gating={config.gating!r} cannot be exported: it selects again in every block, with "
            f"a number of tokens that the host must know. The nearest is gating='frame'. {near}."
        )
    if config.motion:
        raise UnsupportedError(
            "motion=True cannot be exported: matching blocks of the picture and carrying memory "
            f"along has no form in the runtimes that is worth its time. {near}."
        )
    if config.context is not None:
        raise UnsupportedError(
            "context cannot be exported: it keeps queries and log-sum-exps of all tokens, which "
            f"the fused attention of the runtimes does not return. {near}."
        )
    if config.fallback:
        raise UnsupportedError(
            "fallback=True cannot be exported: it decides by times that are measured in torch. "
            f"{near}."
        )
    if config.pool != 1 or config.reference != "update":
        raise UnsupportedError(
            "Pooled keys and reference='previous' are not exported. The nearest is pool=1 and "
            f"reference='update'. {near}."
        )
    if config.policy is None:
        raise ConfigError("The config has no policy. Pass one: exportable(TopR(128)).")


def checked_params(policy: Policy, tokens: int) -> SelectionParams:
    """A policy as numbers that a graph can read.

    Raises:
        UnsupportedError: it has none, or needs what the graph does not measure.
    """
    name = type(policy).__name__
    params = params_of(policy, tokens)
    if params is None:
        raise UnsupportedError(
            f"{name} cannot be exported: its `select` is Python code. The nearest are TopR, "
            "TopFraction, Threshold with one value, and FollowScene."
        )
    if policy.order != 2.0:
        raise UnsupportedError(
            f"{name} with order={policy.order} cannot be exported: the graph measures errors in "
            f"the L2 norm. The nearest is {name} with order=2."
        )
    if params.noise is not None:
        raise UnsupportedError(
            f"{name} cannot be exported: its level follows a noise that is learned from frame to "
            "frame. The nearest is FollowScene, whose level follows the contrast of the picture."
        )
    if params.shared:
        raise UnsupportedError(
            f"{name} cannot be exported: it deals out one pool to several streams, and a graph "
            "steps one. The nearest is TopFraction."
        )
    return params


def forced_tokens(config: Config, layout: TokenLayout, depth: int) -> int:
    """Most tokens of a step that pass whatever their error: special ones, and those due."""
    special = layout.prefix + layout.suffix if config.protect else 0
    if config.max_age is None:
        return special
    return special + math.ceil(layout.tokens / refresh_period(config.max_age, depth))
