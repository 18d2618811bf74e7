"""`sources.toml`: which model runs, on how many workers, over which streams.

The file is read again whenever it changes, so streams are added and removed by editing it; `add`
and `remove` do that. It is the only place where addresses are kept.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from eventful import files
from eventful.cluster.messages import about, shown
from eventful.cluster.placement import Limits
from eventful.errors import ConfigError, EventfulError, MissingFileError
from eventful.live.groups import CHOICES
from eventful.modelspec.size import Size, parse_size
from eventful.paper.data import world as worlds
from eventful.pipeline.sources import SourceName, find_sources
from eventful.pipeline.subject import DTYPES

Mode = Literal["latest", "every"]
ENV = "env:"
_NAME = re.compile(r"[\w.\- ]{1,80}")


@dataclass(frozen=True)
class StreamSpec:
    """One `[[stream]]`.

    Attributes:
        source: what `eventful run` takes, or `env:NAME` for the value of a variable.
        mode: `latest`: as a camera, a new frame replaces one that was not taken; `every`: all
            frames in turn. None: `every` for files, `latest` for cameras and addresses.
        rate: frames a second at which a file is read in mode `latest`; None for its own.
        loop: begin a file again at its end.
    """

    name: str
    source: str = field(repr=False)
    mode: Mode | None = None
    rate: float | None = None
    loop: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} is no name of a stream: letters, digits, spaces, . - and _, at "
                "most 80."
            )
        if self.mode not in (None, "latest", "every"):
            raise ConfigError(f"{self.name}: mode is latest or every, not {self.mode!r}.")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(f"{self.name}: rate is above 0, not {self.rate}.")
        _check_text(self.name, self.source)
        if self.mode == "every" and (self.loop or self.rate is not None):
            raise ConfigError(f"{self.name}: mode every has no rate and no loop. Drop them.")

    def found(self) -> SourceName:
        """The source, with credentials, as a reader opens it.

        Raises:
            ConfigError: It names no source, or a variable that is not set, or more than one.
        """
        text = self.source.strip()
        if text.startswith(ENV):
            variable = text.removeprefix(ENV)
            text = os.environ.get(variable, "").strip()  # from a file: with the end of its line
            if not text:
                raise ConfigError(f"{self.name}: the variable {variable} is not set.")
            _check_text(self.name, text)
        try:
            found = find_sources([text])
        except (EventfulError, OSError, ValueError) as error:
            raise ConfigError(f"{self.name}: {about(str(error), text, shown(text))}") from None
        if len(found) != 1:
            raise ConfigError(f"{self.name}: name one source; {found[0].name} is one of several.")
        source = found[0]
        if self.mode == "every" and source.live:
            raise ConfigError(f"{self.name}: every frame of a camera cannot be kept: mode latest.")
        path = not (source.live or source.listed or text.startswith(worlds.PREFIX))
        if path:  # or an address that was mistyped
            source = replace(source, name=shown(text))
        return source

    def every(self, source: SourceName) -> bool:
        """Whether every frame is wanted."""
        if self.mode is not None:
            return self.mode == "every"
        return not (source.live or self.loop or self.rate is not None)


@dataclass(frozen=True)
class ModelSpec:
    """The model that all workers run; as for `eventful run` and `eventful live`."""

    model: str = "detector"
    weights: str | None = None
    size: Size | None = None
    device: str = "cpu"
    dtype: str = "float32"
    preset: str = "fast"
    share: float | None = None
    score: float = 0.5

    def __post_init__(self) -> None:
        if self.preset not in CHOICES:
            raise ConfigError(f"There is no preset {self.preset!r}: {', '.join(CHOICES)}.")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"share is above 0 and at most 1, not {self.share}.")
        if not 0 <= self.score <= 1:
            raise ConfigError(f"score is from 0 to 1, not {self.score}.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {', '.join(DTYPES)}, not {self.dtype!r}.")
        try:
            torch.device(self.device)  # whether it is there, the workers know
        except RuntimeError:
            what = f"device is cpu, cuda or cuda:0, not {self.device!r}."
            raise ConfigError(what) from None


@dataclass(frozen=True)
class ClusterSpec:
    """`[cluster]`.

    Attributes:
        workers: each has `cpus` cores and `gpus` GPUs, and one batch of streams.
        readers: processes that read the sources.
        results: jsonl, parquet, or module.path:function, called with a list of rows.
        queue: results that may wait while their destination takes none.
        deadline: seconds without a sign of life after which a worker is killed.
        start_deadline: the same while it loads the model or steps its first frames.
        snapshot_every: seconds between two snapshots of a stream; 0 for none.
        snapshot_bytes: larger ones are not kept.
    """

    model: ModelSpec = field(default_factory=ModelSpec)
    workers: int = 1
    readers: int = 1
    cpus: float = 1
    gpus: float = 0
    results: str = "jsonl"
    queue: int = 20_000
    deadline: float = 10.0
    start_deadline: float = 120.0
    snapshot_every: float = 5.0
    snapshot_bytes: int = 4_000_000
    limits: Limits = field(default_factory=Limits)
    object_store: int = 256 << 20

    def __post_init__(self) -> None:
        for name in ("workers", "readers", "queue"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1, not {getattr(self, name)}.")
        for name in ("deadline", "start_deadline"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is above 0 seconds, not {getattr(self, name)}.")
        for name in ("cpus", "gpus", "snapshot_every", "snapshot_bytes", "object_store"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is at least 0, not {getattr(self, name)}.")


@dataclass(frozen=True)
class Plan:
    """What a `sources.toml` says."""

    cluster: ClusterSpec
    streams: tuple[StreamSpec, ...]


def read_plan(path: Path) -> Plan:
    """Read a `sources.toml`.

    Raises:
        MissingFileError: It is not there.
        ConfigError: It cannot be used; the message says where.
    """
    return _plan(_read(path), path)


def add_stream(path: Path, spec: StreamSpec) -> None:
    """Write one more `[[stream]]` to the end of a file.

    Raises:
        ConfigError: There is one of this name.
    """
    text = _read(path)
    if any(each.name == spec.name for each in _plan(text, path).streams):
        raise ConfigError(f"{path} has a stream {spec.name!r}. Remove it first.")
    lines = ["", "[[stream]]"]
    for f in fields(spec):
        value = getattr(spec, f.name)
        if value is not None and value is not False:
            lines.append(f"{f.name} = {_toml(value)}")
    _replace(path, text.rstrip("\n") + "\n" + "\n".join(lines) + "\n")


def remove_stream(path: Path, name: str) -> None:
    """Delete a `[[stream]]` from a file; all else stays, comments too.

    Raises:
        ConfigError: There is none of this name, or the text around it cannot be understood.
    """
    text = _read(path)
    before = _plan(text, path)
    kept = tuple(each for each in before.streams if each.name != name)
    if len(kept) == len(before.streams):
        known = ", ".join(each.name for each in before.streams) or "none"
        raise ConfigError(f"{path} has no stream {name!r} (there: {known}).")
    blocks = re.split(r"(?m)^(?=\s*\[)", text)  # one for each header, with what follows it
    headers = [i for i, block in enumerate(blocks) if re.match(r"\s*\[\[\s*stream\s*\]\]", block)]
    if len(headers) == len(before.streams):
        number = [each.name for each in before.streams].index(name)
        del blocks[headers[number]]
        text = "".join(blocks)
        if _plan(text, path) == Plan(before.cluster, kept):
            _replace(path, text)
            return
    raise ConfigError(f"{path} cannot be changed by this command. Delete {name!r} by hand.")


def _read(path: Path) -> str:
    """The text of a plan."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingFileError(f"{path} is not there. docs/cluster.md shows one.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def _plan(text: str, path: Path) -> Plan:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}.") from None
    unknown = set(found) - {"cluster", "stream"}
    if unknown:
        raise ConfigError(f"{path}: {min(unknown)!r} is unknown; there are cluster and stream.")
    cluster, streams = found.get("cluster", {}), found.get("stream", [])
    if not isinstance(cluster, dict) or not isinstance(streams, list):
        raise ConfigError(f"{path}: write [cluster] once, and [[stream]] for each stream.")
    made = tuple(_made(StreamSpec, each, f"{path}, [[stream]] {i + 1}", path)
                 for i, each in enumerate(streams))  # fmt: skip
    names = [each.name for each in made]
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(f"{path}: two streams are named {twice[0]!r}.")
    return Plan(_cluster(dict(cluster), f"{path}, [cluster]", path), made)


def _cluster(values: dict[str, Any], where: str, path: Path) -> ClusterSpec:
    """The values of `[cluster]`, which stand side by side, as the parts of a `ClusterSpec`."""
    if "size" in values:
        values["size"] = _size(values["size"], where)
    parts: dict[str, Any] = {}
    for name, kind in (("model", ModelSpec), ("limits", Limits)):
        own = {f.name: values.pop(f.name) for f in fields(kind) if f.name in values}
        parts[name] = _made(kind, own, where, path)
    refused = {"limits"} & set(values)
    if refused:
        raise ConfigError(f"{where}: 'limits' is unknown.")
    return _made(ClusterSpec, {**values, **parts}, where, path)


def _size(value: Any, where: str) -> Size | None:
    """A size as text, as a number, or as height and width."""
    if not isinstance(value, str):
        sides = value if isinstance(value, list) and len(value) == 2 else [value]
        if not all(isinstance(side, int) and not isinstance(side, bool) for side in sides):
            raise ConfigError(f'{where}: size is "480x640", 518 or "longest:518".')
        value = "x".join(map(str, sides))
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _made(kind: Any, values: Any, where: str, path: Path) -> Any:
    """An instance from values of the file, of which each is checked."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: write it as a table, with name = ... and source = ....")
    known = {f.name: f for f in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where}: {name!r} is unknown; there are {', '.join(known)}.")
        wanted = str(known[name].type)
        if not _fits(value, wanted):
            raise ConfigError(f"{where}: {name} is {wanted.replace(' | None', '')}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}: {name} is a number, not {value}.")
    missing = [name for name in ("name", "source") if name in known and name not in values]
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing.")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _fits(value: Any, wanted: str) -> bool:
    """Whether a value of TOML is of an annotated type."""
    if wanted.startswith("bool"):
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "Mode": str}
    kind = kinds.get(wanted.partition(" ")[0])
    return kind is None or isinstance(value, kind)


def _toml(value: str | float | bool) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        if re.search(r"[\x00-\x1f\x7f]", escaped):
            raise ConfigError("A name or source has no line breaks and no control characters.")
        return f'"{escaped}"'
    return repr(value)


def _check_text(name: str, text: str) -> None:
    """Raise for a source that cannot be written to a file or a terminal."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: the source is not UTF-8. Rename the file.") from None


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all, with the permissions that it had: it may hold passwords."""
    try:
        mode = path.stat().st_mode
        with files.replacing(path, durable=True) as partial:
            partial.touch(mode & 0o777)
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.") from None
