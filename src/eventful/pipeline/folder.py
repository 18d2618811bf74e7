"""The folder of a run: what is in it, and whether a run may be resumed there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eventful import files
from eventful.errors import ConfigError, RunError, SnapshotError
from eventful.pipeline.results import LINES, PARTS
from eventful.pipeline.settings import RunSettings

RUN, FRAMES, REPORT, STATE = "run.json", "frames.csv", "report.html", "state"


class RunFolder:
    """A folder that holds one run.

    Attributes:
        before: `run.json` of the run that is resumed; empty for a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before: dict[str, Any] = {}

    def begin(self, model: str, sources: Sequence[str], settings: RunSettings) -> None:
        """Make the folder, or take up the run in it.

        Raises:
            ConfigError: There is a run already, or something else.
            RunError: The run there has other settings.
        """
        there = self.path.is_dir() and any(self.path.iterdir())
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file. Choose another folder with --out.")
        if there and not (self.path / RUN).is_file():
            raise ConfigError(
                f"{self.path} is not empty and holds no run. Choose another folder with --out."
            )
        if there and settings.resume:
            self.before = self._read()
            self._compare(model, sources, settings)
        elif there and settings.overwrite:
            self._clear()
        elif there:
            raise ConfigError(
                f"{self.path} holds a run. Go on with it with --resume, replace it with "
                "--overwrite, or choose another folder with --out."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be made: {error}. Choose another --out."
            ) from None

    def about(self, source: str) -> dict[str, Any]:
        """What the run that is resumed says of a source."""
        found = self.before.get("sources", {}).get(source, {})
        return dict(found)

    def video(self, slug: str) -> Path:
        """A new file for the video of a source: `street.mp4`, then `street-2.mp4`."""
        path, number = self.path / f"{slug}.mp4", 1
        while path.exists():
            number += 1
            path = self.path / f"{slug}-{number}.mp4"
        return path

    def state(self, slug: str, kind: str) -> Path:
        """The file of what is remembered of a source."""
        return self.path / STATE / f"{slug}.{kind}"

    def write(self, content: Mapping[str, Any]) -> None:
        """Write `run.json`."""
        files.write_json(self.path / RUN, content)

    def _read(self) -> dict[str, Any]:
        path = self.path / RUN
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return {**found, "sources": dict(found["sources"]), "fixed": dict(found["fixed"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} cannot be read ({error!r}). Use --overwrite.") from None

    def _compare(self, model: str, sources: Sequence[str], settings: RunSettings) -> None:
        """Raise where the run in the folder has other settings, and name them."""
        taken, now = self.before["fixed"], as_json(settings.fixed())
        differ = [
            f"{_option(name)} was {_shown(taken.get(name))} and is {_shown(value)}"
            for name, value in now.items()
            if taken.get(name) != value
        ]
        if self.before.get("model") != model:
            differ.insert(0, f"the model was {self.before.get('model')} and is {model}")
        missing = [name for name in self.before["sources"] if name not in sources]
        if missing:
            differ.append(f"{missing[0]} was a source and is not")
        if differ:
            raise RunError(
                f"The run in {self.path} cannot be resumed: {'; '.join(differ)}. Give the same, "
                "or choose another folder with --out."
            )

    def _clear(self) -> None:
        """Delete what a run wrote, and nothing else."""
        try:
            sources = self._read()["sources"].values()
        except RunError:  # damaged: its videos are not known, and stay
            sources = []
        videos = [name for source in sources for name in source.get("videos", ())]
        for name in (RUN, FRAMES, REPORT, LINES, *videos):
            (self.path / Path(name).name).unlink(missing_ok=True)
        for name in (*PARTS.values(), STATE):
            shutil.rmtree(self.path / name, ignore_errors=True)


def read_state(path: Path) -> dict[str, Tensor]:
    """Tensors that were kept for `--resume`; none if there is no such file.

    Raises:
        SnapshotError: The file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{path} cannot be read: {error}.") from None


def as_json(value: Any) -> Any:
    """A value as it is when it is read from JSON again."""
    return json.loads(json.dumps(value, default=str))


def _option(name: str) -> str:
    return "the update rule" if name == "update rule" else f"--{name}"


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)
