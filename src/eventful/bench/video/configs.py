"""Configs by a short text: `fast:TopFraction(0.12)`, `fast:NoiseThreshold(),max_age=32`, a file."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from eventful import policies
from eventful.config import PRESETS, Config
from eventful.errors import ConfigError
from eventful.policies import NoiseThreshold, Policy

FORMER = "former"  # the default of the first version, by name


def plain_config(policy: Policy | None, **options: Any) -> Config:
    """The plain frame rule: no selection by context, no motion, nothing refreshed by itself."""
    usual = {"context": None, "motion": False, "max_age": None, "scene_cut": None}
    return Config.fast(policy, **{**usual, "fallback": False, **options})


def former_default() -> Config:
    """The default before selection by context and motion came."""
    return Config.fast(NoiseThreshold(), context=None, motion=False, max_age=64)


def parse_config(text: str) -> tuple[str, Config]:
    """A config and its name.

    Args:
        text: `PRESET`, `PRESET:POLICY(...)`, either with `,option=value` behind it, a TOML file,
            or `former`; `NAME=` before it gives it a name, otherwise the text is its name.
    """
    named = re.fullmatch(r"([\w-]+)=(.+)", text.strip())
    name, spec = (named[1], named[2]) if named else (text.strip(), text.strip())
    if spec == FORMER:
        return name, former_default()
    if spec.endswith(".toml"):
        return (name if named else Path(spec).stem), Config.load(spec)
    preset, _, rest = spec.partition(":")
    if "," in preset:
        preset, _, rest = spec.partition(",")
    if preset not in PRESETS:
        raise ConfigError(
            f"--config {text!r}: {preset!r} is no preset; there are {', '.join(PRESETS)}. "
            "Write e.g. fast:TopFraction(0.12), or the name of a TOML file."
        )
    policy, options = _arguments(rest, text)
    return name, Config.preset(preset, policy, **options)


def _arguments(rest: str, text: str) -> tuple[Policy | None, dict[str, Any]]:
    """The policy and options of `TopR(64),max_age=32`. Nothing is evaluated but literals."""
    try:
        call = ast.parse(f"f({rest})", mode="eval").body
        assert isinstance(call, ast.Call)
        options = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
        (given,) = call.args or (None,)
        return (None if given is None else _policy(given)), options
    except (SyntaxError, ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"--config {text!r} cannot be read ({error}). Write a preset, a policy and options: "
            "fast:TopFraction(0.12),max_age=32."
        ) from None


def _policy(node: ast.expr) -> Policy:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("a policy is written like TopR(64)")
    cls = getattr(policies, node.func.id, None)
    if not isinstance(cls, type) or not hasattr(cls, "select"):
        raise ValueError(f"there is no policy {node.func.id}")
    values = [ast.literal_eval(value) for value in node.args]
    words = {word.arg or "": ast.literal_eval(word.value) for word in node.keywords}
    made: Policy = cls(*values, **words)
    return made
