"""How a model is made eventful: the update rule and its options, as one frozen value."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from eventful import extras
from eventful.errors import ConfigError, MissingFileError
from eventful.policies import FollowScene, NoiseThreshold, Policy, policy_from_dict, policy_to_dict

Gating = Literal["operator", "block", "frame"]
Attention = Literal["delta", "delta-qk", "delta-av", "dense", "exact", "query"]
Reference = Literal["update", "previous"]
GatePosition = Literal["before-norm", "after-norm"]
Overlap = Literal["twice", "once"]
Windows = Literal["all", "touched"]
Accumulate = Literal["float32", "half"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "gating": get_args(Gating),
    "attention": get_args(Attention),
    "reference": get_args(Reference),
    "gate": get_args(GatePosition),
    "overlap": get_args(Overlap),
    "windows": get_args(Windows),
    "accumulate": get_args(Accumulate),
}


@dataclass(frozen=True)
class SceneCut:
    """When to flush by itself: most tokens' error far above its running level.

    Attributes:
        fraction: share of the tokens that must exceed the level.
        factor: by how many times.
        momentum: share of the old level kept at each frame.
        least: errors below this multiple of the contrast of the tokens do not speak for a cut, so
            that the first small change after a still scene is none.
    """

    fraction: float = 0.7
    factor: float = 4.0
    momentum: float = 0.9
    least: float = 0.5

    def __post_init__(self) -> None:
        numbers = (self.fraction, self.factor, self.momentum, self.least)
        sound = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers) and (
            0.0 < self.fraction <= 1.0
            and self.factor > 0
            and 0.0 <= self.momentum < 1.0
            and self.least >= 0
        )
        if not sound:
            raise ConfigError(
                "SceneCut needs 0 < fraction <= 1, factor > 0, 0 <= momentum < 1 and least >= 0, "
                f"got {self.fraction!r}, {self.factor!r}, {self.momentum!r}, {self.least!r}."
            )


@dataclass(frozen=True)
class Context:
    """Selection by context: tokens count as changed where what they attend to has changed.

    At a few layers the change of each token's attention output that the updates of other tokens
    cause is added up since its own last update. It counts beside the token's own error.

    Attributes:
        weight: of this change, relative to the size of attention outputs, beside the error,
            relative to the contrast of the tokens.
        layers: how many global attentions it is followed at; they are spread over the depth.
    """

    weight: float = 2.0
    layers: int = 3

    def __post_init__(self) -> None:
        number = isinstance(self.weight, int | float) and not isinstance(self.weight, bool)
        if not number or not self.weight > 0 or not _is_count(self.layers):
            raise ConfigError(
                "Context needs a weight > 0 and at least one layer, got "
                f"{self.weight!r}, {self.layers!r}. To select without it, set context=None."
            )

    def spread(self, able: Sequence[int]) -> list[int]:
        """Which of the blocks with global attention are followed: evenly spread, the last too."""
        count = min(self.layers, len(able))
        return [able[(k + 1) * len(able) // count - 1] for k in range(count)]


@dataclass(frozen=True)
class Config:
    """The update rule. The presets below are the ones with a name; see docs/update-rules.md.

    Attributes:
        policy: which tokens pass a gate; None must be set on the stream before its first frame.
        gating: where selection happens: a gate around every operator (the paper, Section
            4.2), one per block, or one per frame on the embedded tokens.
        attention: how attention outputs are brought up to date.
        reference: what a token is compared with: its value at its last update (the paper)
            or at the previous frame (STGT).
        gate: gates look at tokens before or after layer norm (the paper's ablation).
        overlap: in the query-key update, compute the overlap of changed rows and columns
            twice (the paper) or once.
        windows: compute every window (the paper) or only those holding a selected token.
        accumulate: precision of the attention-value product of global blocks under
            `delta` and `delta-av`: fp32, or half (fp16 on CUDA, bf16 elsewhere; the paper).
        pool: side of the cells over which K and V of global attention are averaged.
        protect: always select class, register, distillation and detection tokens.
        max_age: refresh tokens in turn so that none is older than this many frames.
        scene_cut: flush by itself on a cut; None never does.
        context: count a token as changed where what it attends to has changed; None looks at its
            own error alone. With gating `frame`.
        motion: carry outputs and references along the motion of the picture, so that what moves
            as a whole need not be recomputed. With gating `frame`.
        fallback: run dense, which refreshes everything, where more tokens want to pass the first
            gate than an eventful step is worth on this machine (see `cost.fallback`). What is
            computed then depends on measured times. On a GPU, run every frame dense if there are
            no kernels for the rule (see `rules.kernels`).
        deterministic: compute the same bits in every run on the same machine: no fallback by
            measured times, and on a GPU as many slots for the selected tokens as the policy can
            ever need.
        rebase: condition number beyond which `exact` recomputes a row, or twice a fresh row's
            if that is more.
    """

    policy: Policy | None = None
    gating: Gating = "frame"
    attention: Attention = "query"
    reference: Reference = "update"
    gate: GatePosition = "before-norm"
    overlap: Overlap = "twice"
    windows: Windows = "touched"
    accumulate: Accumulate = "float32"
    pool: int = 1
    protect: bool = True
    max_age: int | None = None
    scene_cut: SceneCut | None = field(default=None)
    context: Context | None = field(default=None)
    motion: bool = False
    fallback: bool = False
    deterministic: bool = False
    rebase: float = 100.0

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
        if self.gating != "operator" and self.attention != "query":
            raise ConfigError(
                f"gating={self.gating!r} runs selected tokens through whole blocks, so only "
                f"attention='query' makes sense; for {self.attention!r} use gating='operator'."
            )
        if self.policy is not None:
            checked_policy(self.policy)
        for name in ("protect", "motion", "fallback", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is True or False; got {getattr(self, name)!r}.")
        if not _is_count(self.pool):
            raise ConfigError(f"pool is the side of a cell, 1 for none; got {self.pool!r}.")
        if self.max_age is not None and not _is_count(self.max_age):
            raise ConfigError(f"max_age counts frames, at least 1; got {self.max_age!r}.")
        if self.scene_cut is not None and not isinstance(self.scene_cut, SceneCut):
            raise ConfigError(f"scene_cut is a SceneCut or None; got {self.scene_cut!r}.")
        if self.context is not None and not isinstance(self.context, Context):
            raise ConfigError(f"context is a Context or None; got {self.context!r}.")
        for name in ("context", "motion"):
            if getattr(self, name) and self.gating != "frame":
                raise ConfigError(
                    f"{name} needs gating='frame', one selection per frame; got {self.gating!r}."
                )
        if self.overlap == "once" and self.attention not in ("delta", "delta-qk"):
            raise ConfigError("overlap='once' concerns the query-key update: delta or delta-qk.")
        if self.accumulate == "half" and self.attention not in ("delta", "delta-av"):
            raise ConfigError("accumulate='half' concerns the A·v update: delta or delta-av.")
        if not isinstance(self.rebase, int | float) or not self.rebase > 1:
            raise ConfigError(
                f"rebase is a condition number > 1, 100 in fp32; got {self.rebase!r}."
            )

    @classmethod
    def fast(cls, policy: Policy | None = None, **options: Any) -> Config:
        """One selection per frame, the default: cheapest to run, about as accurate as any."""
        defaults: dict[str, Any] = {
            "max_age": 128,
            "scene_cut": SceneCut(),
            "context": Context(),
            "motion": True,
            "fallback": True,
        }
        if options.get("gating", "frame") != "frame":  # they look at the frame's tokens alone
            defaults |= {"context": None, "motion": False}
        chosen = FollowScene() if policy is None else policy
        return cls._made("fast", chosen, defaults, options)

    @classmethod
    def exact(cls, policy: Policy | None = None, **options: Any) -> Config:
        """Gates around every operator; attention equals dense attention on the buffers."""
        defaults: dict[str, Any] = {
            "gating": "operator",
            "attention": "exact",
            "gate": "after-norm",
            "scene_cut": SceneCut(),
            "fallback": True,
        }
        chosen = NoiseThreshold() if policy is None else policy
        return cls._made("exact", chosen, defaults, options)

    @classmethod
    def paper(cls, policy: Policy | None = None, **options: Any) -> Config:
        """The published method: delta updates of the query-key and attention-value products."""
        return cls._published("paper", policy, {"attention": "delta"}, options)

    @classmethod
    def tokenwise(cls, policy: Policy | None = None, **options: Any) -> Config:
        """The paper's ablation: gates around token-wise operators, dense attention."""
        return cls._published("tokenwise", policy, {"attention": "dense"}, options)

    @classmethod
    def stgt(cls, policy: Policy | None = None, **options: Any) -> Config:
        """The paper's baseline: as `tokenwise`, against the previous frame, which loses changes."""
        rule = {"attention": "dense", "reference": "previous"}
        return cls._published("stgt", policy, rule, options)

    @classmethod
    def _published(
        cls, name: str, policy: Policy | None, rule: dict[str, Any], options: dict[str, Any]
    ) -> Config:
        plain = {
            "gating": "operator",
            "gate": "after-norm",
            "overlap": "twice",
            "windows": "all",
            "protect": False,
        }
        return cls._made(name, policy, {**plain, **rule}, options)

    @classmethod
    def _made(
        cls, name: str, policy: Policy | None, rule: dict[str, Any], options: dict[str, Any]
    ) -> Config:
        known = [f.name for f in dataclasses.fields(cls) if f.name != "policy"]
        for option, value in options.items():
            if option in known:
                continue
            close = difflib.get_close_matches(option, known, 1)
            if option in _POLICY_OF:
                advice = f"Pass a policy: Config.{name}({_POLICY_OF[option]}({value!r}))."
            elif close:
                advice = f"Did you mean {close[0]!r}?"
            else:
                advice = f"Its options are {', '.join(known)}."
            raise ConfigError(f"Config.{name} has no option {option!r}. {advice}")
        # False is how a file, which cannot say None, switches a part off.
        off = {part: None for part in _PARTS if options.get(part) is False}
        return cls(policy, **{**rule, **options, **off})

    @classmethod
    def preset(cls, name: str, policy: Policy | None = None, **options: Any) -> Config:
        """A preset by name."""
        if name not in PRESETS:
            raise ConfigError(f"Unknown preset {name!r}; the presets are {', '.join(PRESETS)}.")
        made: Config = getattr(cls, name)(policy, **options)
        return made

    def __repr__(self) -> str:
        """The preset it is nearest to, with what differs; Python reads it back."""
        name, changes = _nearest(self)
        shown = [f"{key}={value!r}" for key, value in changes.items()]
        default = None if name is None else Config.preset(name).policy
        if self.policy != default:
            shown.insert(0, repr(self.policy))
        return f"Config{'' if name is None else '.' + name}({', '.join(shown)})"

    @property
    def rule(self) -> str:
        """The update rule in a few words: the nearest preset's name, with what differs."""
        name, changes = _nearest(self)
        shown = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        return f"{name or 'Config'}({shown})" if shown or name is None else name

    def to_dict(self) -> dict[str, Any]:
        """Plain data; entries that are None are left out."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.policy is not None:
            values["policy"] = policy_to_dict(self.policy)
        for name in _PARTS:
            if getattr(self, name) is not None:
                values[name] = dataclasses.asdict(getattr(self, name))
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        """The inverse of `to_dict`; `preset` names one to start from."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"A config is a mapping of settings to values, got {data!r}.")
        values = dict(data)
        if "policy" in values:
            if not isinstance(values["policy"], Mapping):
                raise ConfigError(
                    f"policy is a mapping like {{'policy': 'TopR', 'r': 256}}, got "
                    f"{values['policy']!r}."
                )
            values["policy"] = policy_from_dict(values["policy"])
        for name, part in _PARTS.items():
            if values.get(name) is False:
                values[name] = None
            elif name in values:
                try:
                    values[name] = part(**values[name])
                except TypeError as error:
                    raise ConfigError(f"{name}: {error}.") from None
        preset = values.pop("preset", None)
        unknown = values.keys() - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"Unknown settings: {', '.join(sorted(unknown))}.")
        return cls(**values) if preset is None else cls.preset(preset, **values)

    @classmethod
    def from_toml(cls, text: str) -> Config:
        """A config from TOML text: fields at top level, `[policy]` and `[scene_cut]` as tables.

        `context = false` or `scene_cut = false` switches that part of a preset off.

        A table `[calibration]` says how the settings were found (`eventful calibrate`). It is not
        part of them.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"Not valid TOML: {error}.") from None
        data.pop("calibration", None)
        return cls.from_dict(data)

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """A config from a TOML file, e.g. the policy file of `eventful calibrate`.

        Raises:
            MissingFileError: there is no such file.
        """
        try:
            return cls.from_toml(Path(path).read_text(encoding="utf-8"))
        except (FileNotFoundError, IsADirectoryError):
            raise MissingFileError(f"{path} is not there; give a TOML file of a config.") from None
        except (ConfigError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as a config: {error}") from None

    def to_toml(self) -> str:
        """TOML text that `from_toml` reads back.

        Raises:
            MissingDependencyError: tomli-w is not installed.
        """
        text: str = extras.require("tomli_w").dumps(self.to_dict())
        return text


_PARTS: dict[str, type[Any]] = {"scene_cut": SceneCut, "context": Context}  # tables in TOML

PRESETS = ("fast", "exact", "paper", "tokenwise", "stgt")

# What people pass to a preset that belongs to a policy.
_POLICY_OF = {
    "r": "TopR",
    "top_r": "TopR",
    "k": "NoiseThreshold",
    "fraction": "TopFraction",
    "h": "Threshold",
    "threshold": "Threshold",
}
_EXAMPLES = {
    "TopR": "TopR(256)",
    "TopFraction": "TopFraction(0.1)",
    "Shared": "Shared(0.1)",
    "Threshold": "Threshold(0.5)",
}


def checked_policy(policy: Any) -> Policy:
    """The policy, if it is one."""
    if isinstance(policy, Policy) and not isinstance(policy, type):
        return policy
    if isinstance(policy, type):
        example = _EXAMPLES.get(policy.__name__, f"{policy.__name__}()")
        raise ConfigError(f"{policy.__name__} is a class; pass a policy made of it: {example}.")
    if isinstance(policy, Config):
        raise ConfigError(
            "A Config is no policy: it belongs to convert(model, config). Pass config.policy, or "
            "e.g. TopR(256)."
        )
    if isinstance(policy, float) and 0.0 <= policy <= 1.0:
        example = f"TopFraction({policy!r})"
    else:
        example = f"TopR({policy!r})" if _is_count(policy) else "TopR(256)"
    raise ConfigError(f"A policy has an `order` and a `select`; got {policy!r}. Write {example}.")


def policies_set(policies: Sequence[Policy | None]) -> list[Policy]:
    """The policies, if every stream has one."""
    ready = [policy for policy in policies if policy is not None]
    if len(ready) < len(policies):
        raise ConfigError(
            "No policy is set. Pass one to the preset, e.g. Config.paper(TopR(256)), or assign "
            "stream.policy = TopR(256) before the first frame."
        )
    return ready


def _nearest(config: Config) -> tuple[str | None, dict[str, Any]]:
    """The preset with the fewest other settings, and those; None for the class's own defaults."""

    def changes(base: Config) -> dict[str, Any]:
        names = [f.name for f in dataclasses.fields(Config) if f.name != "policy"]
        mine = {name: getattr(config, name) for name in names}
        return {name: value for name, value in mine.items() if value != getattr(base, name)}

    found: dict[str | None, dict[str, Any]] = {n: changes(Config.preset(n)) for n in PRESETS}
    found[None] = changes(Config())
    return min(found.items(), key=lambda item: len(item[1]))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
