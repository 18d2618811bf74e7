"""Checkpoints: everything the next training step depends on, on disk."""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful import files
from eventful.errors import CheckpointError

_NAME = re.compile(r"step_(\d{8})\.pt")
_PART = re.compile(r"(step_\d{8}\.pt)\.(\d+)of(\d+)")


@dataclass(frozen=True)
class Position:
    """The progress of a run.

    Attributes:
        step: steps done.
        epoch: the epoch the next step belongs to.
        samples: samples of that epoch already used, over all processes.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume a run in another process.

    Attributes:
        model: state of the trained module, frozen parameters included.
        scaler: state of float16's loss scaling; empty without.
        random: state of the random numbers of each process.
        about: settings of the run; only a run with equal settings resumes from it.
    """

    position: Position
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    random: list[dict[str, Tensor]]
    about: dict[str, Any]


def save(
    checkpoint: Checkpoint, folder: Path, *, keep: int, lasting: bool, shard: int | None = None
) -> Path:
    """Write a checkpoint, whole or not at all, and remove old ones.

    Args:
        keep: number of checkpoints that are not lasting to keep.
        lasting: never remove it, e.g. the end of an epoch.
        shard: most bytes of a file; a larger checkpoint becomes several, `step_*.pt.1of3`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{checkpoint.position.step:08d}.pt"
    content = {**vars(checkpoint), "position": asdict(checkpoint.position)}
    for left in folder.glob(f"*{files.PARTIAL}"):  # of a process that was killed while writing
        left.unlink()
    usable = {file for known in found(folder) for file in [known, *_parts(known)]}
    for left in set(folder.glob("step_*.pt.*of*")) - usable:
        left.unlink()
    for before in [path, *_parts(path)]:  # of this step: parts of two writings must not mix
        before.unlink(missing_ok=True)
    if shard is None:
        with files.replacing(path, durable=True) as partial:
            torch.save(content, partial)
    else:
        whole = io.BytesIO()
        torch.save(content, whole)
        _write_parts(whole.getbuffer(), path, shard)
    marker = path.with_suffix(".lasting")
    if lasting:
        marker.touch()
    passing = [p for p in found(folder) if not p.with_suffix(".lasting").exists()]
    for old in passing[: max(0, len(passing) - keep)]:
        for file in [old, *_parts(old)]:
            file.unlink(missing_ok=True)
    return path


def _write_parts(content: memoryview, path: Path, size: int) -> None:
    count = max(1, -(-len(content) // size))
    for number in range(count):
        part = path.with_name(f"{path.name}.{number + 1}of{count}")
        with files.replacing(part, durable=True) as partial:
            partial.write_bytes(content[number * size : (number + 1) * size])


def _parts(path: Path) -> list[Path]:
    """The files of a checkpoint in several, in order; none if some are missing."""
    sets: dict[int, dict[int, Path]] = {}
    for part in path.parent.glob(f"{path.name}.*of*"):
        named = _PART.fullmatch(part.name)
        if named is not None:
            sets.setdefault(int(named[3]), {})[int(named[2])] = part
    for count, parts in sorted(sets.items()):
        if sorted(parts) == list(range(1, count + 1)):
            return [parts[number] for number in sorted(parts)]
    return []


def found(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest last; of one in several files, what it would be."""
    whole = {path for path in folder.glob("step_*.pt") if _NAME.fullmatch(path.name)}
    named = (_PART.fullmatch(path.name) for path in folder.glob("step_*.pt.*of*"))
    parted = {folder / match[1] for match in named if match is not None}
    return sorted(whole | {path for path in parted if _parts(path)})


def load(path: Path) -> Checkpoint:
    """Read a checkpoint onto the CPU; no code in the file is run."""
    try:
        source: Any = path
        if not path.exists():
            source = io.BytesIO(b"".join(part.read_bytes() for part in _parts(path)))
        content = torch.load(source, map_location="cpu", weights_only=True)
        return Checkpoint(**{**content, "position": Position(**content["position"])})
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint of a training run ({reason})."
        ) from error


def newest(folder: Path) -> tuple[Path, Checkpoint] | None:
    """The newest checkpoint that can be read; None where there is none at all.

    Damaged ones after it are renamed, so that they are not read again.

    Raises:
        CheckpointError: there are some, and all are damaged.
    """
    damaged: list[tuple[Path, CheckpointError]] = []
    for path in reversed(found(folder)):
        try:
            saved = load(path)
        except CheckpointError as error:
            damaged.append((path, error))
            continue
        for broken, why in damaged:
            for part in _parts(broken):
                part.replace(part.with_name(f"{part.name}.damaged"))
            if broken.exists():
                broken.replace(broken.with_suffix(".damaged"))
            broken.with_suffix(".lasting").unlink(missing_ok=True)
            warnings.warn(f"{why} Going on from {path.name}, the one before.", stacklevel=2)
        return path, saved
    if damaged:
        raise CheckpointError(
            f"{damaged[0][1]} No other checkpoint there can be read: remove {folder} to start anew."
        )
    return None


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the random numbers that a step draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
