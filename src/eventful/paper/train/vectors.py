"""The frozen spatial model's outputs on disk: one file per video, one tensor per view.

The spatial model is frozen, so its output for a view is computed once. A cache belongs to its
weights, its update rule and the views; an interrupted run resumes with the missing videos.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful import files
from eventful.config import Config
from eventful.errors import ConfigError, DamagedMediaError, MissingFileError
from eventful.models.vivit import ViViT, prepare, spatial_vectors, steps
from eventful.paper.data import Video, VideoSet, ViewPlan
from eventful.paper.train.processes import Processes
from eventful.stream import Stream
from eventful.surgery.conversion import convert

_PER_FOLDER = 1000


def weights_digest(module: nn.Module) -> str:
    """A short digest of a module's weights."""

    def parts() -> Iterator[str | memoryview]:
        for name, tensor in sorted(module.state_dict().items()):
            yield f"{name} {tuple(tensor.shape)} {tensor.dtype}"
            yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data

    return files.digest(parts())[:16]


@dataclass(frozen=True)
class Cached:
    """One video of a cache: the file of its vectors, and its label."""

    path: Path
    name: str
    label: int

    def views(self, count: int) -> Tensor:
        """Vectors (V, steps, D) of all views."""
        from safetensors import safe_open

        with safe_open(str(self.path), framework="pt") as file:
            views = [file.get_tensor(_view(number)) for number in range(count)]
        return torch.stack(views).float()


class VectorCache:
    """The vectors of one split, under one update rule.

    Args:
        config: the update rule; None is the dense model.
        dtype: of the stored vectors.
    """

    def __init__(
        self,
        folder: Path,
        model: ViViT,
        config: Config | None,
        plan: ViewPlan,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if plan.frames != model.config.frames or plan.size % model.config.patch:
            raise ConfigError(
                f"Views of {plan.frames} frames and {plan.size} px do not suit a model of "
                f"{model.config.frames} frames and {model.config.patch} px patches."
            )
        self.folder, self.plan, self.dtype = folder, plan, dtype
        self.model, self.config = model, config
        self.about = {
            "weights": weights_digest(model.spatial),
            "config": None if config is None else config.to_dict(),
            "views": asdict(plan),
            "dtype": str(dtype).removeprefix("torch."),
        }

    def fill(
        self,
        videos: VideoSet,
        processes: Processes,
        *,
        workers: int = 2,
        on_video: Callable[[int, int], None] = lambda done, count: None,
    ) -> list[Cached]:
        """Compute this process's share of the missing vectors, then list all cached videos.

        A damaged or missing video is noted in a file ending in `.skipped`, and left out; remove
        the file to try it again.

        Args:
            workers: threads that decode ahead.
            on_video: called with videos done and videos to do, of this process.
        """
        self._claim(videos, processes)
        missing = [
            (number, video)
            for number, video in enumerate(videos)
            if not self._path(number).exists() and not self._skip(number).exists()
        ]
        mine = missing[processes.rank :: processes.world]
        run = self._runner(processes.device)
        for done, (number, video, decoded) in enumerate(self._decoded(mine, workers), start=1):
            try:
                self._write(number, video, run(decoded.result()))
            except (DamagedMediaError, MissingFileError) as error:
                self._skip(number).parent.mkdir(parents=True, exist_ok=True)
                self._skip(number).write_text(f"{video.name}: {error}\n")
            on_video(done, len(mine))
        processes.wait()
        return [
            Cached(self._path(number), video.name, _label(video))
            for number, video in enumerate(videos)
            if self._path(number).exists()
        ]

    def _claim(self, videos: VideoSet, processes: Processes) -> None:
        """Refuse a folder that holds vectors of something else."""
        names = files.digest(["\n".join(video.name for video in videos)])
        about = {**self.about, "split": videos.split, "videos": names[:16]}
        path = self.folder / "about.json"
        if processes.first and not path.exists():
            files.write_json(path, about)
        processes.wait()
        there = json.loads(path.read_text())
        if there != json.loads(json.dumps(about)):
            keys = (key for key in about if there.get(key) != json.loads(json.dumps(about[key])))
            raise ConfigError(
                f"{self.folder} holds vectors made with other {', '.join(keys)}. Give another "
                "folder for the cache."
            )

    def _decoded(
        self, todo: Sequence[tuple[int, Video]], workers: int
    ) -> Iterator[tuple[int, Video, Future[Tensor]]]:
        """Videos with their pixels; only a few are decoded ahead, because views are large."""
        with ThreadPoolExecutor(max(1, workers)) as pool:
            left = iter(todo)

            def start(count: int) -> list[tuple[int, Video, Future[Tensor]]]:
                return [(n, v, pool.submit(self._pixels, v)) for n, v in islice(left, count)]

            waiting = start(max(1, workers))
            while waiting:
                yield waiting.pop(0)
                waiting += start(1)

    def _pixels(self, video: Video) -> Tensor:
        """All views of a video, (V, 3, T, S, S) normalised."""
        views = [prepare(view.pixels.permute(0, 2, 3, 1)) for view in self.plan.cut(video.frames)]
        return torch.cat(views)

    def _runner(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Views in, vectors (V, steps, D) out: through a stream that steps all views together."""
        spatial = self.model.spatial.eval().to(device)
        tubelet = self.model.config.tubelet
        if self.config is None:

            @torch.no_grad()
            def dense(views: Tensor) -> Tensor:
                parts = steps(views.to(device), tubelet)
                return torch.stack([spatial(part) for part in parts], dim=1)

            return dense
        stream = Stream(convert(spatial, self.config))
        return lambda views: spatial_vectors(stream, views.to(device), tubelet)

    def _write(self, number: int, video: Video, vectors: Tensor) -> None:
        from safetensors.torch import save_file

        path = self._path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = vectors.to("cpu", self.dtype)
        tensors = {_view(i): view.contiguous().clone() for i, view in enumerate(kept)}
        metadata = {"name": video.name, "label": str(video.label)}
        with files.replacing(path) as partial:
            save_file(tensors, str(partial), metadata=metadata)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number // _PER_FOLDER:04d}" / f"{number:07d}.safetensors"

    def _skip(self, number: int) -> Path:
        return self._path(number).with_suffix(".skipped")

    def skipped(self) -> list[str]:
        """Why videos were left out."""
        return [path.read_text().strip() for path in sorted(self.folder.glob("*/*.skipped"))]


def _view(number: int) -> str:
    return f"view_{number:02d}"


def _label(video: Video) -> int:
    if video.label is None:
        raise ConfigError(f"{video.name} has no label; this dataset is not for recognition.")
    return video.label


def vector_folder(root: Path, split: str, config: Config | None) -> Path:
    """The folder for the vectors of a split under an update rule."""
    if config is None:
        return root / split / "dense"
    text: dict[str, Any] = config.to_dict()
    return root / split / files.digest([json.dumps(text, sort_keys=True)])[:10]
