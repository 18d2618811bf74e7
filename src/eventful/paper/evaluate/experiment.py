"""Experiments: a title, the data they need, and variants. Those of the paper come with the package.

An experiment is a TOML file. Each `[[variants]]` names a preset; `r`, `h` and the lists under
`published` may hold several values, which then belong together in order and make one variant each.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from eventful.errors import ConfigError
from eventful.paper.evaluate.variants import SKIP, Published, Variant

Kind = Literal["accuracy", "padding", "runtime", "trace", "masks"]
WORLD = "world-"  # begins the names of experiments on generated videos, which need no files

_LISTS = ("r", "h", "fraction", "per_gate")
_PUBLISHED = tuple(f.name for f in fields(Published))
_VARIANT = tuple(f.name for f in fields(Variant) if f.name not in ("published", "share", "gates"))


@dataclass(frozen=True)
class Experiment:
    """What to evaluate.

    Attributes:
        name: name of its file.
        paper: where the paper shows it.
        kind: `accuracy` against operations, statistics of `padding`, `runtime`, a `trace` of error
            and operations frame by frame, or pictures of `masks`.
        model: `vitdet` or `vivit`; variants may name another.
        data: the dataset it needs.
        metric: the measured accuracy that corresponds to the published numbers.
        remark: differences from the paper, or details the paper does not state.
        source: name of the generated videos it runs on unless other data is given.
        split: of the source; '' for the one to evaluate on.
        shipped: name of the trained model that is used unless other weights are given.
        views: temporal x spatial views of a video, unless others are given; '' for the paper's.
        schedule: of a trace, r by first frame, such as `0:256,16:32`; '' for the variants' own.
    """

    name: str
    title: str
    variants: tuple[Variant, ...]
    model: str = "vitdet"
    kind: Kind = "accuracy"
    paper: str = ""
    data: str = ""
    metric: str = "coco_map50"
    remark: str = ""
    source: str = ""
    split: str = ""
    shipped: str = ""
    views: str = ""
    schedule: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"{self.name}: kind is one of {', '.join(get_args(Kind))}.")
        if not self.variants:
            raise ConfigError(f"{self.name} has no variants; an experiment needs at least one.")
        twice = [key for key, n in Counter(v.key for v in self.variants).items() if n > 1]
        if twice:
            raise ConfigError(f"{self.name} has two variants {twice[0]}; give them two labels.")

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights it needs, in the order they appear."""
        return tuple(dict.fromkeys(variant.weights for variant in self.variants))


def names() -> tuple[str, ...]:
    """The experiments on the paper's data that come with the package."""
    return tuple(name for name in _packaged() if not name.startswith(WORLD))


def world_names() -> tuple[str, ...]:
    """Those on generated videos, with models that come with the package."""
    return tuple(name for name in _packaged() if name.startswith(WORLD))


def _packaged() -> list[str]:
    files = (entry.name for entry in _folder().iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def load(name: str | Path) -> Experiment:
    """An experiment by name, or from a TOML file of your own."""
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return parse(path.read_text("utf-8"), path.stem)
    if str(name) not in _packaged():
        raise ConfigError(
            f"No experiment {str(name)!r}. There are {', '.join(_packaged())}; a path to a .toml "
            "file works, too."
        )
    return parse((_folder() / f"{name}.toml").read_text("utf-8"), str(name))


def parse(text: str, name: str) -> Experiment:
    """An experiment from TOML text."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}.toml is not valid TOML: {error}.") from None
    entries = data.pop("variants", [])
    known = {f.name for f in fields(Experiment)} - {"name", "variants"}
    _refuse_unknown(f"{name}.toml", data, known)
    if "title" not in data:
        raise ConfigError(f"{name}.toml has no title; give it one.")
    variants: list[Variant] = []
    for number, entry in enumerate(entries, start=1):
        where = f"{name}.toml, variant {number}"
        try:
            variants += _expand(where, {"model": data.get("model", "vitdet"), **entry}, variants)
        except (TypeError, ConfigError) as error:
            raise ConfigError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None
    return Experiment(name=name, variants=tuple(variants), **data)


def _folder() -> Any:
    return resources.files("eventful.paper") / "experiments"


def _expand(where: str, entry: dict[str, Any], before: list[Variant]) -> Iterator[Variant]:
    """One variant for each value of the lists in an entry."""
    published = dict(entry.pop("published", {}))
    _refuse_unknown(f"{where}, published", published, _PUBLISHED)
    _refuse_unknown(where, entry, _VARIANT)
    for name in ("label", "preset"):
        if name not in entry:
            raise ConfigError(f"{where}: {name} is missing.")
    if entry["preset"] == SKIP and "like" in entry:
        yield from skips(entry.pop("like"), before, entry["label"])
        return
    lists = {name: entry[name] for name in _LISTS if isinstance(entry.get(name), list)}
    lists |= {name: value for name, value in published.items() if isinstance(value, list)}
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"{where}: lists of different lengths, {lengths}.")
    for i in range(max(lengths.values(), default=1)):
        chosen = {name: values[i] for name, values in lists.items()}
        printed = {name: chosen.get(name, value) for name, value in published.items()}
        own = {name: chosen.get(name, value) for name, value in entry.items()}
        yield Variant(**own, published=Published(**printed))


def skips(label: str | None, others: list[Variant], name: str = "Frame skipping") -> list[Variant]:
    """For each eventful variant (of this label), frame skipping at its cost."""
    chosen = [v for v in others if v.config() is not None and v.preset not in ("dense", SKIP)]
    return [
        Variant(
            label=f"{name}, cost of {variant.label}",
            preset=SKIP,
            model=variant.model,
            size=variant.size,
            r=variant.r,
            fraction=variant.fraction,
            h=variant.h,
            per_gate=variant.per_gate,
            like=variant.key,
            tuned_r=variant.tuned_r,
        )
        for variant in chosen
        if label is None or variant.label == label
    ]


def _refuse_unknown(where: str, given: dict[str, Any], known: Any) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"{where}: unknown {unknown[0]!r}; there are {', '.join(sorted(known))}.")
