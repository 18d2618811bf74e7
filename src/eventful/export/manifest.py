"""What an exported folder holds, as one JSON file beside the graphs, and how it is checked.

Checksums find damage and mixed-up files. They are no signature: whoever can write the folder can
write a manifest that fits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eventful import files
from eventful.errors import ArtefactError, EventfulError
from eventful.export.manifest_checks import check_manifest
from eventful.export.outputs import Skeleton, leaf_names
from eventful.memory.snapshot import Identity
from eventful.policies import Policy, policy_from_dict

NAME = "manifest.json"
LAYOUT = "layout.txt"
FORMAT = 1
TARGETS = ("onnx", "openvino", "aoti")


@dataclass(frozen=True)
class StateEntry:
    """One tensor of the state.

    Attributes:
        name: in the library's state, e.g. `blocks.3/key`.
        input, output: its names in the graphs.
        shape: (N, D), or (1,).
        optional: NaN stands for a missing value, and a flush does not write it.
    """

    name: str
    input: str
    output: str
    shape: tuple[int, ...]
    dtype: str
    optional: bool


@dataclass(frozen=True)
class StepFile:
    """The graph of a step with `width` slots."""

    file: str
    width: int


@dataclass(frozen=True)
class Manifest:
    """What a folder holds.

    Attributes:
        to: the runtime it is for, one of `TARGETS`.
        model: what the model was called.
        versions: of eventful and of the libraries that wrote the folder.
        config: the update rule, with its policy.
        identity: fingerprint of the weights, rule and settings of the blocks, see `Identity`.
        frame: shape (1, C, height, width) and dtype of the frames.
        tokens: N.
        forced: most tokens of a step that pass whatever their error.
        state: in the order in which the graphs take and return it.
        skeleton: how the model's output is made of tensors, see `outputs`.
        dense: file of the graph that recomputes everything.
        steps: by rising width.
        options: how it was written: `int8`.
        files: SHA-256 of every file.
    """

    to: str
    model: str
    versions: dict[str, str]
    config: dict[str, Any]
    identity: dict[str, Any]
    frame: dict[str, Any]
    tokens: int
    forced: int
    state: tuple[StateEntry, ...]
    skeleton: Skeleton
    dense: str
    steps: tuple[StepFile, ...]
    options: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        """The policy it was exported with."""
        return policy_from_dict(self.config["policy"])

    @property
    def leaves(self) -> list[str]:
        """Names of the model's output tensors in the graphs."""
        return graph_outputs(self.skeleton)

    @property
    def written(self) -> list[StateEntry]:
        """The entries that a flush writes, in the order in which the dense graph returns them."""
        return [one for one in self.state if not one.optional]

    @property
    def widths(self) -> list[int]:
        """Slots of the steps, rising."""
        return [one.width for one in self.steps]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the frames."""
        return dtype_of(self.frame["dtype"])

    def identity_on(self, device: torch.device) -> Identity:
        """What snapshots are tied to."""
        return Identity(**self.identity, device=device)

    def layout(self) -> str:
        """What a program in another language needs, a line for each thing; see docs/export.md."""
        shape = " ".join(map(str, self.frame["shape"]))
        params = self.policy.params(self.tokens)  # type: ignore[attr-defined]
        numbers = (params.level, params.low, params.renewal, float(params.relative))
        lines = [
            f"format {FORMAT}", f"frame {self.frame['dtype']} {shape}", f"tokens {self.tokens}",
            f"forced {self.forced}", f"limits {params.cap} {params.floor}",
            f"levels {' '.join(map(str, numbers))}", f"outputs {len(self.leaves)}",
            f"dense {self.dense}", *(f"step {one.width} {one.file}" for one in self.steps),
        ]  # fmt: skip
        lines += [
            f"state {one.input} {one.output} {one.dtype} {int(one.optional)} "
            + " ".join(map(str, one.shape))
            for one in self.state
        ]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write it into its folder, with the digests of the files that are there."""
        (folder / LAYOUT).write_text(self.layout(), encoding="utf-8")
        content = asdict(self)
        content["files"] = {
            path.name: files.file_digest(path)
            for path in sorted(folder.iterdir())
            if path.is_file() and path.name != NAME
        }
        text = _canonical(content)
        files.write_json(
            folder / NAME, {"format": FORMAT, "checksum": files.digest([text]), **content}
        )


def is_export(folder: Path) -> bool:
    """Whether a folder holds files of one manifest of ours and nothing else.

    Files may be missing or damaged: a folder that a message says to export again can be replaced.
    """
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        del content["format"]
        if content.pop("checksum") != files.digest([_canonical(content)]):
            return False
        known = {NAME, *content["files"]}
        return all(path.name in known and path.is_file() for path in folder.iterdir())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        return False


def read_manifest(folder: str | Path, *, verify: bool = True) -> Manifest:
    """The manifest of a folder.

    Args:
        verify: read every file to see that it is the one that was written.

    Raises:
        ArtefactError: the folder is not there, damaged, or was changed.
    """
    folder = Path(folder)
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
    except OSError:
        raise ArtefactError(
            f"{folder} has no {NAME}: name a folder that `eventful export` wrote."
        ) from None
    except ValueError as error:  # not UTF-8, or a null in the name
        raise ArtefactError(f"{folder / NAME} is damaged ({error}); export again.") from None
    try:
        made = _parsed(json.loads(text))
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
        EventfulError,
    ) as error:
        if isinstance(error, ArtefactError):
            raise
        raise ArtefactError(f"{folder / NAME} is damaged ({error!r}); export again.") from None
    _check_files(folder, made, verify)
    return made


def _parsed(content: Any) -> Manifest:
    known = content.pop("format")
    if known != FORMAT:
        raise ArtefactError(
            f"The folder has format {known}; this version of eventful reads format {FORMAT}. "
            "Export the model again."
        )
    if content.pop("checksum") != files.digest([_canonical(content)]):
        raise ArtefactError(
            f"{NAME} was changed since it was written: its checksum does not match. Export again, "
            "and set what may change (the policy, threads) in Python."
        )
    state = tuple(
        StateEntry(**{**one, "shape": tuple(one["shape"])}) for one in content.pop("state")
    )
    steps = tuple(StepFile(**one) for one in content.pop("steps"))
    made = Manifest(state=state, steps=steps, **content)
    if made.to not in TARGETS or not made.steps:
        raise ArtefactError(
            f"{NAME} names no runtime of {', '.join(TARGETS)}, or no step; export again."
        )
    check_manifest(made)
    return made


def _check_files(folder: Path, made: Manifest, verify: bool) -> None:
    """Raise for a file that is missing, elsewhere, or not the one that was written."""
    for name in (made.dense, *(one.file for one in made.steps)):
        if name not in made.files:
            raise ArtefactError(f"{NAME} lists no digest for {name}; export again.")
    others = {path.name for path in folder.iterdir()} - {NAME, *made.files}
    if others:
        raise ArtefactError(
            f"{folder} holds {', '.join(sorted(others)[:3])}, which {NAME} does not list: a graph "
            "may read it, unchecked. Remove it, or export again."
        )
    for name, digest in made.files.items():
        path = folder / name
        if Path(name).name != name or path.is_symlink():
            raise ArtefactError(f"{name!r} in {NAME} is not a file of the folder; export again.")
        if not path.is_file():
            raise ArtefactError(f"{path} is missing; copy the whole folder, or export again.")
        if verify and files.file_digest(path) != digest:
            raise ArtefactError(
                f"{path} is not the file that was exported: its digest differs from {NAME}. Copy "
                "the folder again, or export again."
            )


def graph_outputs(skeleton: Skeleton) -> list[str]:
    """Names of a model's output tensors in the graphs.

    Names that we give hold a dot, so that none is that of a value inside a graph.
    """
    return [f"out.{name}" for name in leaf_names(skeleton)]


def dtype_of(name: str) -> torch.dtype:
    """A dtype by its name, e.g. `float32`."""
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ArtefactError(f"{name!r} is no dtype.")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))
