"""The settings that are compared: configs by name, and frame skipping as a baseline."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eventful.bench.video.configs import parse_config
from eventful.config import PRESETS, Config
from eventful.errors import ConfigError
from eventful.policies import FollowScene, Threshold, TopFraction, TopR

DEFAULT, SKIPPING = "default", "frame skipping"
GLOBAL, PER_GATE = "threshold, global", "threshold, per gate"
LEVELS = (0.3, 0.6, 1.2, 2.4)  # of FollowScene; 0.6 is the default
FRACTIONS = (0.03, 0.06, 0.12, 0.25)  # of TopFraction
EVERY = (2, 4, 8, 16)  # frame skipping: dense on every k-th frame


@dataclass(frozen=True)
class Setting:
    """One way to run the model.

    Attributes:
        config: what the model is converted with; None for frame skipping.
        every: frame skipping computes every so many frames; 0 for others.
    """

    name: str
    config: Config | None = None
    every: int = 0

    @property
    def family(self) -> str:
        """Settings of one family differ in one number."""
        if self.config is None:
            return SKIPPING
        policy = self.config.policy
        if isinstance(policy, Threshold):
            return PER_GATE if isinstance(policy.h, Mapping) else GLOBAL
        return type(policy).__name__

    @property
    def label(self) -> str:
        """That number, as short as possible."""
        if self.config is None:
            return f"every {self.every}"
        policy = self.config.policy
        if self.name == DEFAULT:
            return DEFAULT
        if isinstance(policy, FollowScene):
            return f"{policy.level:g}"
        if isinstance(policy, TopFraction):
            return f"{100 * policy.fraction:g} %"
        if isinstance(policy, TopR):
            return f"{policy.r}"
        return self.name.rpartition(", ")[2]


def usual_settings(preset: str) -> list[Setting]:
    """What is measured where the user names nothing else, without the baseline."""
    if preset not in PRESETS:
        raise ConfigError(f"Unknown preset {preset!r}; the presets are {', '.join(PRESETS)}.")
    own = Config.preset(preset)
    made = [] if own.policy is None else [Setting(DEFAULT, own)]
    if isinstance(own.policy, FollowScene):
        levels = (FollowScene(level) for level in LEVELS)
        made += [
            Setting(f"FollowScene({policy.level:g})", replace(own, policy=policy))
            for policy in levels
            if policy != own.policy
        ]
    made += [
        Setting(f"TopFraction({share:g})", Config.preset(preset, TopFraction(share)))
        for share in FRACTIONS
    ]
    return made


def baseline(frames: int) -> list[Setting]:
    """Frame skipping that computes at least two frames after the first."""
    return [skipping(every) for every in EVERY if 2 * every < frames]


def skipping(every: int) -> Setting:
    """Dense on every k-th frame; its output is held in between."""
    return Setting(f"skip:{every}", every=every)


def parse_setting(text: str, preset: str) -> Setting:
    """A setting by a short text.

    Args:
        text: `default`, `skip:8`, `TopFraction(0.12)` under the preset, or what `parse_config`
            takes; `NAME=` before it gives it a name.
        preset: of a policy without one.
    """
    given = text.strip()
    if given == DEFAULT:
        return Setting(DEFAULT, Config.preset(preset))
    if skipped := re.fullmatch(r"skip:(\d+)", given):
        every = int(skipped[1])
        if every < 2:
            raise ConfigError(f"--setting {text}: frame skipping computes every 2nd frame or less.")
        return skipping(every)
    if bare := re.fullmatch(r"((?:[\w-]+=)?)([A-Za-z]+\(.*)", given):
        name = bare[1] or f"{bare[2]}="
        config = parse_config(f"{preset}:{bare[2]}")[1]
        return Setting(name[:-1], config)
    name, config = parse_config(given)
    if config.policy is None:
        raise ConfigError(
            f"--setting {text} has no policy. Write one behind it: {text}:TopFraction(0.12)."
        )
    return Setting(name, config)


def chosen_settings(texts: Sequence[str], preset: str, frames: int) -> list[Setting]:
    """The settings a user named, or the usual ones; frame skipping comes last."""
    named = [parse_setting(text, preset) for text in texts] or usual_settings(preset)
    configs = [setting for setting in named if setting.config is not None]
    skips = [setting for setting in named if setting.config is None] or baseline(frames)
    return distinct([*configs, *skips])


def distinct(settings: Sequence[Setting]) -> list[Setting]:
    """The same settings, if no two have one name."""
    names = [setting.name for setting in settings]
    for name in names:
        if names.count(name) > 1 or name == "dense":
            raise ConfigError(f"Two settings are called {name!r}: write NAME=SPEC in --setting.")
    return list(settings)
