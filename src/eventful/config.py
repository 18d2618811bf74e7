"""How a model is made eventful: the update rule and its options, as one frozen value."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from eventful.errors import ConfigError
from eventful.policies import NoiseThreshold, Policy, policy_from_dict, policy_to_dict

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
    """

    fraction: float = 0.7
    factor: float = 4.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not (0.0 < self.fraction <= 1.0 and self.factor > 0 and 0.0 <= self.momentum < 1.0):
            raise ConfigError(
                "SceneCut needs 0 < fraction <= 1, factor > 0 and 0 <= momentum < 1, got "
                f"{self.fraction}, {self.factor}, {self.momentum}."
            )


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
        fallback: run dense, which refreshes everything, where more tokens want to pass the first
            gate than an eventful step is worth on this machine (see `eventful.fallback`). What is
            computed then depends on measured times.
        deterministic: compute the same bits in every run on the same machine: no fallback, and on
            a GPU as many slots for the selected tokens as the policy can ever need.
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
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise ConfigError(
                f"policy must have an `order` and a `select`, got {self.policy!r}; for a fixed "
                "number of tokens write eventful.TopR(r)."
            )
        if not _is_count(self.pool):
            raise ConfigError(f"pool is the side of a cell, 1 for none; got {self.pool!r}.")
        if self.max_age is not None and not _is_count(self.max_age):
            raise ConfigError(f"max_age counts frames, at least 1; got {self.max_age!r}.")
        if self.scene_cut is not None and not isinstance(self.scene_cut, SceneCut):
            raise ConfigError(f"scene_cut is a SceneCut or None; got {self.scene_cut!r}.")
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
        defaults: dict[str, Any] = {"max_age": 64, "scene_cut": SceneCut(), "fallback": True}
        return cls(policy or NoiseThreshold(), **{**defaults, **options})

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
        return cls(policy or NoiseThreshold(), **{**defaults, **options})

    @classmethod
    def paper(cls, policy: Policy | None = None, **options: Any) -> Config:
        """The published method: delta updates of the query-key and attention-value products."""
        return cls._published(policy, {"attention": "delta"}, options)

    @classmethod
    def tokenwise(cls, policy: Policy | None = None, **options: Any) -> Config:
        """The paper's ablation: gates around token-wise operators, dense attention."""
        return cls._published(policy, {"attention": "dense"}, options)

    @classmethod
    def stgt(cls, policy: Policy | None = None, **options: Any) -> Config:
        """The paper's baseline: as `tokenwise`, against the previous frame, which loses changes."""
        return cls._published(policy, {"attention": "dense", "reference": "previous"}, options)

    @classmethod
    def _published(
        cls, policy: Policy | None, rule: dict[str, Any], options: dict[str, Any]
    ) -> Config:
        plain = {
            "gating": "operator",
            "gate": "after-norm",
            "overlap": "twice",
            "windows": "all",
            "protect": False,
        }
        return cls(policy, **{**plain, **rule, **options})

    @classmethod
    def preset(cls, name: str, policy: Policy | None = None, **options: Any) -> Config:
        """A preset by name."""
        if name not in PRESETS:
            raise ConfigError(f"Unknown preset {name!r}; the presets are {', '.join(PRESETS)}.")
        made: Config = getattr(cls, name)(policy, **options)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Plain data; entries that are None are left out."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.policy is not None:
            values["policy"] = policy_to_dict(self.policy)
        if self.scene_cut is not None:
            values["scene_cut"] = dataclasses.asdict(self.scene_cut)
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        """The inverse of `to_dict`; `preset` names one to start from."""
        values = dict(data)
        if "policy" in values:
            values["policy"] = policy_from_dict(values["policy"])
        if "scene_cut" in values:
            try:
                values["scene_cut"] = SceneCut(**values["scene_cut"])
            except TypeError as error:
                raise ConfigError(f"scene_cut: {error}.") from None
        preset = values.pop("preset", None)
        unknown = values.keys() - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"Unknown settings: {', '.join(sorted(unknown))}.")
        return cls(**values) if preset is None else cls.preset(preset, **values)

    @classmethod
    def from_toml(cls, text: str) -> Config:
        """A config from TOML text: fields at top level, `[policy]` and `[scene_cut]` as tables."""
        try:
            return cls.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"Not valid TOML: {error}.") from None

    def to_toml(self) -> str:
        """TOML text that `from_toml` reads back."""
        values = self.to_dict()
        tables = {name: values.pop(name) for name in ("policy", "scene_cut") if name in values}
        lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
        for table, entries in tables.items():
            lines += ["", f"[{table}]"]
            lines += [f"{name} = {_toml(value)}" for name, value in entries.items()]
        return "\n".join(lines) + "\n"


PRESETS = ("fast", "exact", "paper", "tokenwise", "stgt")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        inner = ", ".join(f'"{name}" = {_toml(entry)}' for name, entry in value.items())
        return "{ " + inner + " }"
    return f'"{value}"' if isinstance(value, str) else repr(value)
