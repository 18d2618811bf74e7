"""`eventful calibrate --ray`: clips and models that other processes open, and what is kept."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eventful import __version__, files
from eventful.bench.video.footage import STRESS
from eventful.bench.video.measure import VideoPlan
from eventful.bench.video.model import load_backbone
from eventful.calibrate.measure import Clip, Measured, load_clip
from eventful.calibrate.settings import Setting, distinct
from eventful.calibrate.spread import Spread, clip_digest
from eventful.calibrate.thresholds import tuned_settings
from eventful.cli.bench_video import head_of, load_head, open_jobs
from eventful.cli.options import Calibrated, Filming
from eventful.cli.progress import shown
from eventful.cli.ray_options import OnCluster
from eventful.paper.evaluate.ray_workers import RayWorkers
from eventful.paper.evaluate.runs import RunStore

_SAMPLES = "samples"
_INTERRUPTED = 130


@dataclass(frozen=True)
class ClipOpener:
    """One clip of the command, with the model; paths are absolute.

    Attributes:
        name: of the clip among all.
        video: by name, or the folder of a labelled sequence.
        labelled: which of the two.
    """

    name: str
    video: str
    labelled: bool
    model: str
    weights: str | None
    head: Path | None
    size: str
    precision: str
    frames: int
    seed: int

    def __call__(self, device: str) -> Clip:
        """See `spread.Opener`."""
        backbone = load_backbone(self.model, self.weights, self.size)
        plan = VideoPlan(backbone, self.size, device, self.precision, timed=False, compiled=False)
        videos, labels = ((), (Path(self.video),)) if self.labelled else ((self.video,), ())
        [job] = open_jobs(videos, labels, self.frames, self.size, self.seed)
        head = None if self.head is None else load_head(self.head, backbone, device)
        found = None if head is None else head_of(head, job)
        return load_clip(plan, replace(job.footage, name=self.name), found)


def spread_over(
    what: Calibrated,
    how: Filming,
    on: OnCluster,
    out: Path | None,
    clips: list[Clip],
    settings: list[Setting],
) -> Measured:
    """Every setting on every clip, by processes of Ray; results are kept in `out`."""
    given = (what.weights, what.head)
    used = [Path(path) for path in given if path is not None and Path(path).is_file()]
    assert on.address is not None
    with (
        _store(what, how, out, clips) as store,
        shown(what.model, "frames") as tick,
        RayWorkers(on.address, on.workers, how.device, on.threads, used) as workers,
    ):
        spread = Spread(clips, _openers(what, how, clips), store, workers, tick)
        try:
            if what.per_gate:
                settings = distinct([*tuned_settings(spread, what.preset, tick), *settings])
            return spread.measure(settings)
        except KeyboardInterrupt:
            where = "nothing is kept without --out" if out is None else "run it again to go on"
            print(f"Interrupted; {where}.", file=sys.stderr)
            raise SystemExit(_INTERRUPTED) from None


@contextmanager
def _store(
    what: Calibrated, how: Filming, out: Path | None, clips: list[Clip]
) -> Iterator[RunStore]:
    """The folder of samples; other clips, models or versions have another one beside it."""
    about = {
        "model": what.model,
        "clips": {clip.name: clip_digest(clip) for clip in clips},
        "head": None if what.head is None else files.file_digest(what.head),
        "size": what.size,
        "device": how.device.partition(":")[0],
        "precision": how.precision.value,
        "versions": {"eventful": __version__, "torch": str(torch.__version__)},
    }
    if out is not None:
        folder = out / _SAMPLES / files.digest([repr(about)])[:16]
        yield RunStore.open(folder, about, resume=True)
        return
    with tempfile.TemporaryDirectory(prefix="eventful-") as temporary:
        yield RunStore.open(temporary, about, resume=True)


def _openers(what: Calibrated, how: Filming, clips: list[Clip]) -> list[ClipOpener]:
    named = [(name, False) for name in what.videos or ()]
    named += [(str(path), True) for path in what.labels or ()]
    return [
        ClipOpener(
            clip.name,
            _absolute(video),
            labelled,
            _absolute(what.model),
            None if what.weights is None else _absolute(str(what.weights)),
            None if what.head is None else what.head.resolve(),
            what.size,
            how.precision.value,
            what.frames,
            how.seed,
        )
        for clip, (video, labelled) in zip(clips, named, strict=True)
    ]


def _absolute(name: str) -> str:
    """A name for processes with another working directory."""
    if name.startswith(STRESS):
        kind, colon, file = name.removeprefix(STRESS).partition(":")
        return f"{STRESS}{kind}{colon}{_absolute(file) if file else ''}"
    path = Path(name)
    return str(path.resolve()) if path.exists() else name
