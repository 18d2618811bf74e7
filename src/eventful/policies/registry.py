"""Policies as plain data: what configs and snapshots hold of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eventful.errors import ConfigError
from eventful.policies.base import Policy
from eventful.policies.kinds import (
    Always,
    FollowScene,
    NoiseThreshold,
    Shared,
    Threshold,
    TopFraction,
    TopR,
)

_REGISTRY: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (TopR, TopFraction, Shared, Threshold, NoiseThreshold, FollowScene, Always)
}


def register_policy(cls: type[Any]) -> type[Any]:
    """Make a user's policy known by its class name, so that configs and snapshots can name it."""
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"{cls.__name__} must be a (frozen) dataclass to be written down.")
    _REGISTRY[cls.__name__] = cls
    return cls


def policy_to_dict(policy: Policy) -> dict[str, Any]:
    """A policy as plain data: its class name and its fields, but for those that are None."""
    name = type(policy).__name__
    if _REGISTRY.get(name) is not type(policy):
        raise ConfigError(f"Policy {name} is unknown; decorate it with @eventful.register_policy.")
    values = {f.name: getattr(policy, f.name) for f in dataclasses.fields(_REGISTRY[name])}
    plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    return {"policy": name, **{k: v for k, v in plain.items() if v is not None}}


def policy_from_dict(data: Mapping[str, Any]) -> Policy:
    """The inverse of `policy_to_dict`."""
    fields = dict(data)
    name = fields.pop("policy", None)
    if name not in _REGISTRY:
        raise ConfigError(f"Unknown policy {name!r}; known: {', '.join(sorted(_REGISTRY))}.")
    try:
        policy: Policy = _REGISTRY[name](**fields)
    except TypeError as error:
        raise ConfigError(f"Policy {name}: {error}.") from None
    return policy
