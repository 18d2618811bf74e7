"""Results of a run on disk, one file per video, so that an interrupted run can be resumed.

A run is a folder: `run.json` holds its settings, `videos/<variant>/` one file per video, written
whole or not at all. Only a run with the same settings can resume a folder.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eventful import files
from eventful.errors import RunError

FORMAT = 1
ABOUT, VIDEOS = "run.json", "videos"
_SHOWN = 4  # differences to name


@dataclass(frozen=True)
class VideoResult:
    """The result of one video under one variant.

    Attributes:
        tensors: whatever the task keeps, by name.
        facts: further values for JSON.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


@dataclass(frozen=True)
class RunStore:
    """The folder of a run; holds no open file, so it can be pickled."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path, settings: Mapping[str, Any], *, resume: bool) -> RunStore:
        """Start a run in a folder, or resume the one that is there.

        Args:
            settings: everything the results depend on, as values for JSON.
            resume: keep existing results; otherwise they are deleted.

        Raises:
            RunError: the folder holds a run with other settings, or something else, or cannot be
                written to.
        """
        store = cls(Path(folder))
        about = {"format": FORMAT, "settings": json.loads(json.dumps(settings))}
        if not resume:
            store._delete()
        known = store._known()
        if known is None:
            if (store.folder / VIDEOS).exists():
                raise RunError(
                    f"{store.folder} has {VIDEOS}/ and no {ABOUT}, so it is not a run's folder. "
                    "Give another folder with --out."
                )
            try:
                files.write_json(store.folder / ABOUT, about, indent=2, durable=True)
            except OSError as error:
                raise RunError(
                    f"{store.folder} cannot be written to ({error}). Give another folder with "
                    "--out."
                ) from error
        elif known != about:
            raise RunError(_refusal(store.folder, known, about))
        return store

    def path(self, variant: str, index: int, name: str) -> Path:
        """The file of one video."""
        safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[-80:]
        return self.folder / VIDEOS / variant / f"{index:06d}-{safe}.safetensors"

    def has(self, variant: str, index: int, name: str) -> bool:
        """Whether a video is done and its file can be read."""
        path = self.path(variant, index, name)
        if not path.is_file():
            return False
        try:
            with safe_open(str(path), framework="pt"):
                return True
        except (SafetensorError, OSError):
            return False  # damaged, e.g. by a full disk: compute it again

    def save(self, variant: str, index: int, name: str, result: VideoResult) -> None:
        """Write the result of one video."""
        tensors = {key: value.detach().cpu().contiguous() for key, value in result.tensors.items()}
        content = save(tensors, {"facts": json.dumps(result.facts)})
        files.write_bytes(self.path(variant, index, name), content, durable=True)

    def load(self, variant: str, index: int, name: str) -> VideoResult:
        """Read the result of one video."""
        path = self.path(variant, index, name)
        try:
            with safe_open(str(path), framework="pt") as file:
                facts = json.loads((file.metadata() or {})["facts"])
                return VideoResult({key: file.get_tensor(key) for key in list(file.keys())}, facts)
        except (SafetensorError, OSError, KeyError) as error:
            raise RunError(
                f"{path} cannot be read ({error}); delete it and run again with --resume."
            ) from error

    def _known(self) -> dict[str, Any] | None:
        path = self.folder / ABOUT
        if not path.exists():
            return None
        try:
            known: dict[str, Any] = json.loads(path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise RunError(
                f"{path} is not a valid file of a run; use --no-resume to start over, or another "
                "folder with --out."
            ) from None
        return known

    def _delete(self) -> None:
        """Delete an earlier run, and nothing else that may lie in the folder."""
        if (self.folder / ABOUT).exists():
            shutil.rmtree(self.folder / VIDEOS, ignore_errors=True)
            (self.folder / ABOUT).unlink()


def _refusal(folder: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    changed = list(_differences("", known, wanted))
    more = [f"  and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    return "\n".join(
        [
            f"{folder} holds results of a run with other settings:",
            *(f"  {difference}" for difference in changed[:_SHOWN]),
            *more,
            "Give another folder with --out, or --no-resume to delete them and start over.",
        ]
    )


def _differences(name: str, known: Any, wanted: Any) -> Iterator[str]:
    """The differing settings, one line each."""
    where = name.removeprefix("settings.")
    if isinstance(known, dict) and isinstance(wanted, dict):
        for there, keys in (("now", wanted.keys() - known), ("there", known.keys() - wanted)):
            if keys:
                yield f"{where}: {_short(sorted(keys))[1:-1]} only {there}"
        for key in known:
            if key in wanted:
                yield from _differences(f"{name}.{key}".lstrip("."), known[key], wanted[key])
    elif known != wanted:
        yield f"{where}: {_short(known)} there, {_short(wanted)} now"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
