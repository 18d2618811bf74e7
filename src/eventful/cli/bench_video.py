"""`eventful bench video`: clips and labels by name, progress, tables."""

from __future__ import annotations

import glob
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.bench.results import origin
from eventful.bench.video import store, strip
from eventful.bench.video.configs import parse_config
from eventful.bench.video.footage import Footage, footage_of, open_footage
from eventful.bench.video.measure import DEFAULT, DENSE, ORACLE, Head, VideoPlan, measure
from eventful.bench.video.model import Backbone, SizedBackbone, load_backbone
from eventful.bench.video.rows import VideoRow
from eventful.cli.bench import checked_device
from eventful.cli.options import Filmed, Filming
from eventful.cli.progress import shown
from eventful.cli.tables import Column, Grid, show
from eventful.config import Config
from eventful.errors import CheckpointError, ConfigError, MalformedDataError
from eventful.models.anchor_free import PointHead, PointHeadConfig
from eventful.paper.data import Video
from eventful.paper.data.mot import open_sequence, sequence_info
from eventful.paper.data.records import Box
from eventful.video.address import find_source

LEGEND = (
    "Updated, ops: share of tokens and operations, means over all frames. Time: total against the "
    "fastest dense path; +read: with reading the frames. Error: of the output tokens against "
    "dense, median and worst frame. skip: dense on fewer frames at the default's operations, "
    "skip-time at its time; carried: held tokens move with the picture. oracle: as many tokens as "
    "the default, the most wrong ones."
)


@dataclass(frozen=True)
class Job:
    """One clip, with its labels where it has them."""

    footage: Footage
    video: Video | None = None


def run(what: Filmed, how: Filming, out: Path | None, as_json: bool) -> None:
    """Measure every clip, print, and write to `out` after each."""
    checked_device(how.device)
    jobs = open_jobs(what.clips or (), what.labels or (), what.frames, what.size, how.seed)
    if not jobs:
        raise ConfigError("Name a clip: a video file, stress:pan, or --labels with a sequence.")
    backbone = load_backbone(what.model, what.weights, what.size)
    plan = plan_of(backbone, what.size, how, _configs(what.config or ()))
    point_head = None if what.head is None else load_head(what.head, backbone, how.device)
    where, rows = origin(how.device), []
    for job in jobs:
        head = None if point_head is None else head_of(point_head, job)
        with shown(job.footage.name, "frames") as tick:
            made = measure(plan, job.footage, head, tick)
        rows += made.rows
        if out is not None:  # after each clip: an interrupted benchmark keeps what it has
            out.mkdir(parents=True, exist_ok=True)
            store.write(out, rows, where)
            strip.draw(made.rows, made.frames, out / f"{job.footage.name}.png")
        if not as_json:
            _show(made.rows, job.footage.about)
    if as_json:
        print(json.dumps([store.as_data(row, where) for row in rows]))
    else:
        _close(out)


def plan_of(
    backbone: Backbone, size: str, how: Filming, configs: Mapping[str, Config] | None = None
) -> VideoPlan:
    """What to measure, as the options say."""
    return VideoPlan(
        backbone, size, how.device, how.precision.value, configs or {}, how.timed, how.compiled,
        how.compile_mode,
    )  # fmt: skip


def open_jobs(
    clips: Sequence[str], labels: Sequence[Path], frames: int, size: str, seed: int
) -> list[Job]:
    """Clips by name and labelled sequences, at most so many frames of each, under own names."""
    jobs = [Job(open_footage(name, frames, size, seed)) for name in clips]
    jobs += [_labelled(path, frames) for path in labels]
    return _named_apart(jobs)


def _labelled(path: Path, frames: int) -> Job:
    """A MOTChallenge sequence, given its folder; what is read must be the frames of its labels."""
    video, info = open_sequence(path), sequence_info(path / "seqinfo.ini")
    pictures = Path(glob.escape(str(path / info.folder)), f"*{info.extension}")
    if len(find_source(pictures).images) != len(video):
        raise MalformedDataError(
            f"{path / info.folder} holds other pictures beside the frames of the labels. Leave "
            f"only files named by a number, one of each, such as 000001{info.extension}."
        )
    return Job(footage_of(video.name, pictures).first(frames), video)


def _named_apart(jobs: Sequence[Job]) -> list[Job]:
    """Jobs whose clips have different names, so that each has its rows and its picture."""
    seen: dict[str, int] = {}
    made = []
    for job in jobs:
        name = job.footage.name
        seen[name] = seen.get(name, 0) + 1
        again = name if seen[name] == 1 else f"{name}-{seen[name]}"
        made.append(replace(job, footage=replace(job.footage, name=again)))
    return made


def _configs(texts: Sequence[str]) -> dict[str, Config]:
    """Configs by name; names of other contenders are refused."""
    made = dict(parse_config(text) for text in texts)
    taken = {DENSE, DEFAULT, ORACLE} & set(made) | {name for name in made if name[:4] == "skip"}
    if taken or len(made) < len(texts):
        raise ConfigError(
            f"Two contenders have one name ({', '.join(sorted(taken)) or 'in --config'}): write "
            "NAME=SPEC with names of your own."
        )
    return made


def load_head(path: Path, backbone: Backbone, device: str) -> PointHead:
    """The head that `python -m benchmarks.mot15` trains, from its `head.pt`."""
    if not path.is_file():
        raise CheckpointError(f"{path} is not there. `python -m benchmarks.mot15` trains a head.")
    model: Any = backbone.model
    if isinstance(backbone, SizedBackbone):
        raise ConfigError("--head takes the tokens of a model of timm that takes any size.")
    head = PointHead(PointHeadConfig(model.num_features, model.patch_embed.patch_size[0]))
    try:
        head.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["head"])
    except (KeyError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} holds no head for {backbone.name} ({first}).") from None
    return head.to(device).eval()


def head_of(head: PointHead, job: Job) -> Head | None:
    """Detections and average precision of one labelled clip; None for one without labels."""
    if job.video is None or job.video.boxes is None:
        return None
    boxes, (height, width) = job.video.boxes, job.footage.size
    patch = head.config.patch

    def detect(tokens: Tensor, size: tuple[int, int]) -> Any:
        rows, columns = size[0] // patch, size[1] // patch
        grid = tokens[:, tokens.shape[1] - rows * columns :].float().transpose(1, 2)
        with torch.no_grad():
            return head.detect(grid.unflatten(2, (rows, columns)), size)[0].boxes_on_cpu()

    def score(found: Sequence[Any], size: tuple[int, int]) -> float:
        from eventful.paper.evaluate.metrics import coco_map50

        y, x = size[0] / height, size[1] / width
        truth = [
            [_scaled(box, x, y) for box in frame]
            for frame in map(boxes.__getitem__, range(len(found)))
        ]
        return coco_map50(found, truth, ("person",)).value

    return Head(detect, score)


def _scaled(box: Box, x: float, y: float) -> Box:
    return Box(box.x1 * x, box.y1 * y, box.x2 * x, box.y2 * y, box.label, box.track, box.ignore)


def _show(rows: Sequence[VideoRow], about: str) -> None:
    from rich.console import Console

    first, console = rows[0], Console()
    columns = _columns(rows)
    grid = Grid(
        [Column(heading, names=heading == "contender") for heading in columns],
        title=f"{first.clip}, {first.model}, {first.size}, {first.tokens} tokens, "
        f"{first.frames} frames, {first.precision} on {first.device}",
        caption=f"dense: {first.dense_path}, {number(first.dense_ms, 3)} ms" if first.ms else "",
    )
    for row in rows:
        grid.add([cell(row) for cell in columns.values()])
    if about:
        console.print(about)
    show(console, grid, spare=["cosine", "estimate", "stale", "+read"])
    for note in first.notes:
        console.print(f"[dim]{note}[/]")


def _close(out: Path | None) -> None:
    from rich.console import Console

    Console().print(LEGEND, highlight=False)
    if out is not None:
        print(f"Rows and pictures: {out}")


def _columns(rows: Sequence[VideoRow]) -> dict[str, Callable[[VideoRow], str]]:
    """The columns that some row has a value for; CSV and JSON have all."""
    columns: dict[str, Callable[[VideoRow], str]] = {
        "contender": lambda row: row.contender,
        "updated": lambda row: percent(row.updated),
        "ops": lambda row: percent(row.operations),
        "ms": lambda row: number(row.ms, 3),
        "time": lambda row: percent(row.time),
        "+read": lambda row: percent(row.time_read),
        "error": lambda row: number(row.error, 2),
        "worst": lambda row: number(row.error_worst, 2),
        "cosine": lambda row: number(row.cosine, 3),
        "estimate": lambda row: number(row.estimate_rank, 2),
        "stale": lambda row: percent(row.stale_caught),
        "mAP50": lambda row: percent(row.map50),
    }
    return {name: show for name, show in columns.items() if any(show(row) for row in rows)}


def percent(value: float | None) -> str:
    """A share with two digits or more; "" for None."""
    if value is None:
        return ""
    return f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}"


def number(value: float | None, digits: int) -> str:
    """A number with so many digits; "" for None."""
    return "" if value is None else f"{value:.{digits}g}"
