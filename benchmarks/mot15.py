"""People in MOT15: a detector on a real ViT-S/14, dense, under every preset, and skipping frames.

    python benchmarks/mot15.py --data MOT15 --weights VIT_S.safetensors --out DIR --device cuda

The backbone stays frozen. A small head is trained on its features of `train`, then mAP50 on `val`
is measured for every preset at several shares of tokens, beside the dense model on fewer frames
at the same number of operations. Results go to benchmarks/results/mot15.{json,csv} and
docs/images/mot15.png, and to DIR. DIR also keeps the head, which is derived from data that is
not ours to share, so it may not lie in a tracked folder. A run that is stopped goes on where it was
when started again with the same DIR.

    python benchmarks/mot15.py --from DIR/mot15.json

stores and draws the results of a run made elsewhere.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from eventful.adapters import libraries  # noqa: E402
from eventful.batch import StreamBatch  # noqa: E402
from eventful.bench.results import origin  # noqa: E402
from eventful.config import PRESETS, Config  # noqa: E402
from eventful.conversion import convert  # noqa: E402
from eventful.data import Box, Video, open_dataset  # noqa: E402
from eventful.evaluate.metrics import Detections, coco_map50  # noqa: E402
from eventful.models.anchor_free import PointHead, PointHeadConfig  # noqa: E402
from eventful.models.vitdet import Target  # noqa: E402
from eventful.policies import Policy, TopFraction  # noqa: E402

BACKBONE = "vit_small_patch14_dinov2"
PATCH = 14
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHARES = (0.03, 0.06, 0.12, 0.25)
OWN_POLICY = ("fast", "exact")  # presets with a policy of their own, which is measured, too
SKIPS = (2, 3, 4, 6, 8, 12, 16, 32)
CLASSES = ("person",)
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "mot15.png"


@dataclass(frozen=True)
class Options:
    """What a run does; everything that changes its numbers."""

    width: int = 644
    steps: int = 4000
    batch: int = 16
    views: int = 6
    lr: float = 1e-3
    train_frames: int | None = None
    val_frames: int | None = None
    sequences: tuple[str, ...] = ()
    shares: tuple[float, ...] = SHARES
    presets: tuple[str, ...] = PRESETS
    seed: int = 0


QUICK = {"width": 210, "steps": 20, "batch": 4, "views": 1, "train_frames": 4, "val_frames": 4}


class Clock:
    """The time a run may take."""

    def __init__(self, minutes: float) -> None:
        self.began, self.seconds = time.monotonic(), 60 * minutes

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the time has passed."""
        return self.spent > share * self.seconds


def say(clock: Clock, text: str) -> None:
    print(f"[{clock.spent:6.1f} s] {text}", flush=True)


# Frames and boxes, at the size the model takes.


@dataclass(frozen=True)
class Clip:
    """One sequence, decoded and resized.

    Attributes:
        frames: uint8 (T, 3, H, W), H and W whole numbers of patches.
        truth: boxes of each frame, in its pixels.
    """

    name: str
    frames: Tensor
    truth: list[list[Box]]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.frames.shape[2], self.frames.shape[3]


def model_size(size: tuple[int, int], width: int) -> tuple[int, int]:
    """The size nearest to `width` pixels wide at the same shape, in whole patches."""
    columns = round(width / PATCH)
    rows = max(1, round(size[0] * columns / size[1]))
    return rows * PATCH, columns * PATCH


def read_image(path: Path) -> Tensor:
    """RGB uint8 (3, H, W), by whichever image reader is installed."""
    if importlib.util.find_spec("PIL") is not None:
        from eventful.video.source import read_image as read

        return read(path)
    import cv2

    pixels = cv2.imread(str(path))
    if pixels is None:
        raise SystemExit(f"{path} does not decode as an image: fetch it again.")
    return torch.from_numpy(np.ascontiguousarray(pixels[:, :, ::-1])).permute(2, 0, 1)


def fit(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Frames (T, 3, H, W) of another size, still uint8."""
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    resized = F.interpolate(pixels.float(), size, mode="bilinear", antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8)


def scaled(boxes: Sequence[Box], x: float, y: float) -> list[Box]:
    return [replace(b, x1=b.x1 * x, x2=b.x2 * x, y1=b.y1 * y, y2=b.y2 * y) for b in boxes]


def load_clip(video: Video, width: int, indices: Sequence[int]) -> Clip:
    frames, truth = [], []
    assert video.boxes is not None
    for index in indices:
        pixels = read_image(video.frames.path(index))  # type: ignore[attr-defined]
        original = (pixels.shape[1], pixels.shape[2])
        size = model_size(original, width)
        frames.append(fit(pixels[None], size)[0])
        truth.append(scaled(video.boxes[index], size[1] / original[1], size[0] / original[0]))
    return Clip(video.name, torch.stack(frames), truth)


def load_clips(data: Path, split: str, options: Options) -> list[Clip]:
    """Training frames are taken evenly from each sequence, validation ones from its start."""
    clips = []
    for video in open_dataset(data, split):
        if options.sequences and split == "val" and video.name not in options.sequences:
            continue
        most = options.train_frames if split == "train" else options.val_frames
        count = min(most or len(video), len(video))
        if split == "train":
            indices = [k * len(video) // count for k in range(count)]
        else:
            indices = list(range(count))
        clips.append(load_clip(video, options.width, indices))
    return clips


# The model: a frozen backbone and a head.


def build_backbone(weights: Path, device: torch.device) -> nn.Module:
    timm, safetensors = libraries.load("timm"), importlib.import_module("safetensors.torch")
    model = timm.create_model(BACKBONE, pretrained=False, num_classes=0, dynamic_img_size=True)
    state = {key: value.float() for key, value in safetensors.load_file(weights).items()}
    model.load_state_dict(state)  # strict: a file of another model ends here
    return model.eval().requires_grad_(False).to(device)


def normalised(frames: Tensor, device: torch.device) -> Tensor:
    mean, std = (
        torch.tensor(v, device=device).reshape(1, 3, 1, 1) for v in (PIXEL_MEAN, PIXEL_STD)
    )
    return (frames.to(device).float() / 255 - mean) / std


def as_map(tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """Tokens (B, 1 + h*w, D) behind the last norm as a map (B, D, h, w)."""
    return tokens[:, 1:].transpose(1, 2).unflatten(2, (size[0] // PATCH, size[1] // PATCH))


# Training: features of a few views of every frame are computed once.


@dataclass(frozen=True)
class Example:
    """The features of one view of one frame, and where people are in it."""

    features: Tensor
    target: Target


def view(frames: Tensor, boxes: list[Box], chance: random.Random, kind: int) -> tuple[Tensor, Any]:
    """The frame itself (0), mirrored (1), or a random part of it, enlarged (2 and up)."""
    height, width = frames.shape[-2:]
    kept = boxes
    if kind >= 2:
        zoom = chance.uniform(0.45, 0.95)
        h, w = round(height * zoom), round(width * zoom)
        top, left = chance.randint(0, height - h), chance.randint(0, width - w)
        frames = fit(frames[..., top : top + h, left : left + w], (height, width))
        moved = [cut(b, left, top, w, h) for b in boxes]
        kept = scaled([b for b in moved if b is not None], width / w, height / h)
    if kind == 1 or (kind >= 2 and chance.random() < 0.5):
        frames = frames.flip(-1)
        kept = [replace(b, x1=width - b.x2, x2=width - b.x1) for b in kept]
    return frames, kept


def cut(box: Box, left: float, top: float, width: float, height: float) -> Box | None:
    """A box inside a part of the frame; to be ignored if less than half of it is left."""
    x1, x2 = (min(max(x - left, 0), width) for x in (box.x1, box.x2))
    y1, y2 = (min(max(y - top, 0), height) for y in (box.y1, box.y2))
    if x2 - x1 < 2 or y2 - y1 < 2:
        return None
    share = (x2 - x1) * (y2 - y1) / ((box.x2 - box.x1) * (box.y2 - box.y1))
    return replace(box, x1=x1, x2=x2, y1=y1, y2=y2, ignore=box.ignore or share < 0.5)


def corners(boxes: Sequence[Box], device: torch.device) -> Tensor:
    rows = [(b.x1, b.y1, b.x2, b.y2) for b in boxes]
    return torch.tensor(rows, dtype=torch.float32, device=device).reshape(-1, 4)


@torch.no_grad()
def examples(
    backbone: nn.Module, clips: Sequence[Clip], options: Options, device: torch.device
) -> Iterator[Example]:
    chance = random.Random(options.seed)
    for clip in clips:
        for frame, boxes in zip(clip.frames, clip.truth, strict=True):
            views = [view(frame[None].to(device), boxes, chance, k) for k in range(options.views)]
            pixels = normalised(torch.cat([pixels for pixels, _ in views]), device)
            maps = as_map(backbone.forward_features(pixels), clip.size).half()
            for features, (_, seen) in zip(maps, views, strict=True):
                people = corners([b for b in seen if not b.ignore], device)
                labels = torch.zeros(len(people), dtype=torch.int64, device=device)
                ignored = corners([b for b in seen if b.ignore], device)
                yield Example(features, Target(people, labels, ignored))


PROBE = 50  # steps after which the time of one is known


def train_head(
    head: PointHead, data: Sequence[Example], options: Options, clock: Clock
) -> list[dict[str, float]]:
    """Train on batches of examples of one size; a warm-up, then a cosine to zero.

    Takes at most half of the time: where all steps would take longer, there are fewer.
    """
    by_size: dict[tuple[int, ...], list[Example]] = {}
    for example in data:
        by_size.setdefault(tuple(example.features.shape), []).append(example)
    groups = list(by_size.values())
    chance = random.Random(options.seed)
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.lr, weight_decay=0.05)
    head.train()
    log, steps, step, began = [], options.steps, 0, clock.spent
    while step < steps:
        optimizer.param_groups[0]["lr"] = options.lr * learning_rate(step, steps)
        (group,) = chance.choices(groups, [len(group) for group in groups])
        losses = train_step(head, optimizer, chance.choices(group, k=options.batch))
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            log.append({"step": step, **{name: value.item() for name, value in losses.items()}})
            say(clock, " ".join(f"{name} {value:.4g}" for name, value in log[-1].items()))
        step += 1
        if step == PROBE:
            each = (clock.spent - began) / PROBE
            steps = max(PROBE, min(steps, step + int((clock.seconds / 2 - clock.spent) / each)))
    head.eval()
    return log


def train_step(
    head: PointHead, optimizer: torch.optim.Optimizer, batch: Sequence[Example]
) -> dict[str, Tensor]:
    features = torch.stack([example.features for example in batch]).float()
    losses = head.losses(features, [example.target for example in batch])
    optimizer.zero_grad()
    (losses["score"] + 2 * losses["box"]).backward()
    nn.utils.clip_grad_norm_(head.parameters(), 5.0)
    optimizer.step()
    return {name: value.detach() for name, value in losses.items()}


def learning_rate(step: int, steps: int, warm: int = 50) -> float:
    """The share of the highest rate at a step."""
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


# Evaluation: all budgets of one preset are streams of one batch.


@dataclass(frozen=True)
class Setting:
    """One preset under one policy."""

    preset: str
    policy: str
    share: float | None

    def choose(self) -> Policy | None:
        """The policy; None for the preset's own."""
        return None if self.share is None else TopFraction(self.share)


def settings(preset: str, options: Options) -> list[Setting]:
    made = [Setting(preset, f"top {share:.0%}", share) for share in options.shares]
    return made + ([Setting(preset, "own", None)] if preset in OWN_POLICY else [])


@dataclass
class Run:
    """One setting on one sequence, frame by frame."""

    found: list[Detections]
    macs: list[int]
    updated: list[float]
    flushed: list[bool]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        frames = [
            {"boxes": d.boxes.tolist(), "scores": d.scores.tolist(), "labels": d.labels.tolist()}
            for d in self.found
        ]
        return {**vars(self), "found": frames}

    @classmethod
    def read(cls, data: dict[str, Any]) -> Run:
        """The opposite of `plain`."""
        found = [
            Detections(
                torch.tensor(d["boxes"]).reshape(-1, 4),
                torch.tensor(d["scores"]),
                torch.tensor(d["labels"], dtype=torch.int64),
            )
            for d in data["found"]
        ]
        return cls(found, data["macs"], data["updated"], data["flushed"])


def detect(head: PointHead, tokens: Tensor, size: tuple[int, int]) -> list[Detections]:
    found = head.detect(as_map(tokens, size), size)
    return [Detections(d.boxes.cpu(), d.scores.cpu(), d.labels.cpu()) for d in found]


@torch.no_grad()
def run_dense(backbone: nn.Module, head: PointHead, clip: Clip, device: torch.device) -> Run:
    run = Run([], [], [], [])
    cost, tokens = dense_cost(backbone, clip, device)
    for frame in clip.frames:
        features = backbone.forward_features(normalised(frame[None], device))
        run.found += detect(head, features, clip.size)
        run.macs.append(cost)
        run.updated.append(float(tokens))
        run.flushed.append(True)
    return run


def dense_cost(backbone: nn.Module, clip: Clip, device: torch.device) -> tuple[int, int]:
    """Operations of one frame, and its tokens, from the record of a flush."""
    stream = StreamBatch(convert(backbone, Config.paper(TopFraction(1.0))))
    stream.join("only")
    stream.call("forward_features", normalised(clip.frames[:1], device))
    record = stream.last
    assert record is not None
    return record.dense_macs, next(iter(record.blocks.values())).shape.tokens


@torch.no_grad()
def run_preset(
    backbone: nn.Module,
    head: PointHead,
    clip: Clip,
    made: Sequence[Setting],
    device: torch.device,
) -> list[Run]:
    """Every budget of one preset, as streams stepped together on the same frames."""
    batch = StreamBatch(convert(backbone, Config.preset(made[0].preset)))
    for setting in made:
        batch.join(setting.policy, setting.choose())
    runs = [Run([], [], [], []) for _ in made]
    for frame in clip.frames:
        pixels = normalised(frame[None], device).expand(len(made), -1, -1, -1)
        found = detect(head, batch.call("forward_features", pixels), clip.size)
        record = batch.last
        assert record is not None
        updated = torch.stack([gate.counts for gate in record.gates.values()]).float().mean(0)
        operations = record.operations()
        for i, run in enumerate(runs):
            run.found.append(found[i])
            run.macs.append(operations[i].total)
            run.updated.append(float(updated[i]))
            run.flushed.append(bool(record.flushed[i]))
    return runs


def skipped(dense: Run, share: float) -> Run:
    """The dense model on this share of the frames, evenly, its boxes kept in between."""
    run, last = Run([], [], [], []), 0
    for t in range(len(dense.found)):
        new = t == 0 or math.floor(t * share) > math.floor((t - 1) * share)
        last = t if new else last
        run.found.append(dense.found[last])
        run.macs.append(dense.macs[t] if new else 0)
        run.updated.append(dense.updated[t] if new else 0.0)
        run.flushed.append(new)
    return run


@dataclass(frozen=True)
class Score:
    """A setting on one sequence, or on all of them.

    Attributes:
        map50: COCO's average precision at IoU 0.5 over the frames.
        gmacs: operations a frame, the mean over all frames, the first one included.
        cost: the same as a share of dense.
        updated: share of tokens updated, the mean over gates and frames.
        flushes: frames on which everything was recomputed.
    """

    sequence: str
    frames: int
    map50: float
    gmacs: float
    cost: float
    updated: float
    flushes: int


def score(runs: Sequence[Run], dense: Sequence[Run], clips: Sequence[Clip], name: str) -> Score:
    found = [d for run in runs for d in run.found]
    truth = [boxes for clip in clips for boxes in clip.truth]
    macs = sum(sum(run.macs) for run in runs)
    return Score(
        sequence=name,
        frames=len(found),
        map50=coco_map50(found, truth, CLASSES).value,
        gmacs=macs / len(found) / 1e9,
        cost=macs / sum(sum(run.macs) for run in dense),
        updated=sum(sum(r.updated) for r in runs) / sum(sum(r.updated) for r in dense),
        flushes=sum(sum(run.flushed) for run in runs),
    )


def scores(runs: Sequence[Run], dense: Sequence[Run], clips: Sequence[Clip]) -> list[dict]:
    """Over all sequences, then one by one."""
    made = [score(runs, dense, clips, "all")]
    made += [score([r], [d], [c], c.name) for r, d, c in zip(runs, dense, clips, strict=True)]
    return [asdict(s) for s in made]


def evaluate(
    backbone: nn.Module,
    head: PointHead,
    clips: Sequence[Clip],
    options: Options,
    device: torch.device,
    kept: Path,
    clock: Clock,
) -> list[dict[str, Any]]:
    """Rows of the result. What has run is kept in a folder and not run again."""

    def remembered(key: str, make: Any) -> list[Run]:
        path = kept / f"{key}.json"
        if path.exists():
            return [Run.read(data) for data in json.loads(path.read_text())]
        if clock.over():
            raise SystemExit(f"The time is up before {key}. Start again with the same --out.")
        runs = make()
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps([run.plain() for run in runs]))
        partial.replace(path)
        say(clock, f"ran {key}")
        return runs

    kept.mkdir(parents=True, exist_ok=True)
    dense = [
        remembered(f"dense-{c.name}", lambda c=c: [run_dense(backbone, head, c, device)])[0]
        for c in clips
    ]
    rows = [{"preset": "dense", "policy": "", "share": 1.0, "scores": scores(dense, dense, clips)}]
    for every in SKIPS:
        runs = [skipped(run, 1 / every) for run in dense]
        row = {"preset": "skip", "policy": f"every {every}", "share": 1 / every}
        rows.append({**row, "scores": scores(runs, dense, clips)})
    for preset in options.presets:
        made = settings(preset, options)
        by_clip = [
            remembered(
                f"{preset}-{c.name}", lambda c=c, m=made: run_preset(backbone, head, c, m, device)
            )
            for c in clips
        ]
        for i, setting in enumerate(made):
            runs = [runs[i] for runs in by_clip]
            equal = [
                skipped(d, min(1.0, sum(r.macs) / sum(d.macs)))
                for r, d in zip(runs, dense, strict=True)
            ]
            row = {**asdict(setting), "scores": scores(runs, dense, clips)}
            rows.append({**row, "skip": scores(equal, dense, clips)})
            top = row["scores"][0]
            say(
                clock,
                f"{preset:10} {setting.policy:8} mAP50 {top['map50']:.3f} at {top['cost']:.1%} "
                f"of the operations, skipping {rows[-1]['skip'][0]['map50']:.3f}",
            )
    return rows


# Results: files and a picture.


def write(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mot15.json").write_text(json.dumps(result, indent=1) + "\n")
    where = result["origin"]
    with (folder / "mot15.csv").open("w", newline="") as file:
        columns = ["preset", "policy", *Score.__annotations__, "skip_map50", "skip_cost"]
        writer = csv.DictWriter(file, [*columns, *where], lineterminator="\n")
        writer.writeheader()
        for row in result["rows"]:
            blank = [None] * len(row["scores"])
            for mine, skip in zip(row["scores"], row.get("skip") or blank, strict=True):
                values = {"preset": row["preset"], "policy": row["policy"], **mine}
                if skip is not None:
                    values |= {"skip_map50": skip["map50"], "skip_cost": skip["cost"]}
                short = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in values.items()}
                writer.writerow({**short, **where})


COLOURS = {
    "fast": "#d1495b",
    "exact": "#00798c",
    "paper": "#edae49",
    "tokenwise": "#66a182",
    "stgt": "#8d6a9f",
    "skip": "#777777",
}


LEGEND = {"loc": "outside lower center", "ncol": 9, "fontsize": 8, "frameon": False}


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy against operations, as in the paper: all sequences, then each."""
    plt = libraries.load("matplotlib.pyplot")
    names = [s["sequence"] for s in result["rows"][0]["scores"]]
    shape = (3.6 * len(names), 3.9)
    figure, axes = plt.subplots(1, len(names), figsize=shape, layout="constrained")
    for i, (name, axis) in enumerate(zip(names, np.atleast_1d(axes), strict=True)):
        for preset in COLOURS:
            mine = [r for r in result["rows"] if r["preset"] == preset]
            line = sorted(
                (r["scores"][i]["gmacs"], r["scores"][i]["map50"])
                for r in mine
                if r["policy"] != "own"
            )
            style = {"ls": "--", "marker": "."} if preset == "skip" else {"marker": "o", "ms": 4}
            label = "dense, frames skipped" if preset == "skip" else preset
            if line:
                axis.plot(*zip(*line, strict=True), color=COLOURS[preset], label=label, **style)
            for row in mine:
                if row["policy"] == "own":
                    point = (row["scores"][i]["gmacs"], row["scores"][i]["map50"])
                    text = f"{preset}, noise threshold"
                    axis.plot(*point, "*", ms=11, color=COLOURS[preset], label=text, mec="white")
        dense = result["rows"][0]["scores"][i]
        axis.plot(dense["gmacs"], dense["map50"], "ks", ms=6, label="dense")
        axis.axhline(dense["map50"], color="black", lw=0.6, ls=":")
        axis.set_title("all of val" if name == "all" else name, fontsize=10)
        axis.set_xlabel("operations per frame (GMAC)")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
    np.atleast_1d(axes)[0].set_ylabel("mAP50, people")
    figure.legend(*np.atleast_1d(axes)[0].get_legend_handles_labels(), **LEGEND)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(str(path), dpi=130)
    plt.close(figure)


def store(result: dict[str, Any], out: Path, *, publish: bool) -> None:
    """Files and picture in the folder of the run and, unless it was a trial, in the repository."""
    places = [(out, out / "mot15.png")] + ([(RESULTS, PICTURE)] if publish else [])
    for folder, picture in places:
        write(result, folder)
        if importlib.util.find_spec("matplotlib") is None:
            print(f"No matplotlib here: draw elsewhere with --from {folder / 'mot15.json'}")
        else:
            draw(result, picture)


def refuse_tracked(out: Path) -> None:
    """Weights trained on MOT15 are not to be shipped, so a tracked folder is no place for them."""
    inside = out.resolve()
    if not inside.is_relative_to(ROOT):
        return
    rules = (ROOT / ".gitignore").read_text().split()
    ignored = [ROOT / rule.strip("/") for rule in rules if "*" not in rule and rule.startswith("/")]
    if not any(inside.is_relative_to(folder) for folder in ignored):
        raise SystemExit(
            f"{out} is a tracked folder, and the head trained on MOT15 must stay out of the "
            f"repository. Take one outside, or below {', '.join(p.name for p in ignored)}."
        )


def fingerprint(options: Options, weights: Path, device: str) -> str:
    """What a head and its runs belong to; a run with other options starts afresh."""
    text = json.dumps([asdict(options), weights.stat().st_size, weights.name, device])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="MOT15, as it is or packed by pack_mot15.py")
    parser.add_argument("--weights", type=Path, help=f"safetensors of timm's {BACKBONE}")
    parser.add_argument("--out", type=Path, help="folder for the head and the results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop in good order after these")
    parser.add_argument("--quick", action="store_true", help="a few small frames, no results kept")
    parser.add_argument("--width", type=int, help="pixels, in whole patches")
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--views", type=int, help="of each training frame")
    parser.add_argument("--train-frames", type=int, help="per sequence; default all")
    parser.add_argument("--val-frames", type=int, help="per sequence, from its start; default all")
    parser.add_argument("--sequence", action="append", help="of val; default all")
    parser.add_argument("--preset", action="append", choices=PRESETS)
    parser.add_argument("--no-publish", action="store_true", help="write to --out alone")
    parser.add_argument("--from", dest="source", type=Path, help="store and draw a mot15.json")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> Options:
    options = replace(Options(), **QUICK) if arguments.quick else Options()
    given = {
        name: getattr(arguments, name)
        for name in ("width", "steps", "views", "train_frames", "val_frames")
        if getattr(arguments, name) is not None
    }
    if arguments.sequence:
        given["sequences"] = tuple(arguments.sequence)
    if arguments.preset:
        given["presets"] = tuple(arguments.preset)
    return replace(options, **given)


def trained(
    backbone: nn.Module,
    options: Options,
    arguments: argparse.Namespace,
    folder: Path,
    clock: Clock,
) -> tuple[PointHead, dict[str, Any]]:
    """The head of this run: from its folder if it is there, else trained now."""
    device = torch.device(arguments.device)
    torch.manual_seed(options.seed)
    head = PointHead(PointHeadConfig(patch=PATCH)).to(device)
    path = folder / "head.pt"
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        head.load_state_dict(saved["head"])
        return head.eval(), saved["about"]
    clips = load_clips(arguments.data, "train", options)
    say(clock, f"read {sum(len(c.truth) for c in clips)} training frames")
    data = list(examples(backbone, clips, options, device))
    say(clock, f"features of {len(data)} views")
    log = train_head(head, data, options, clock)
    about = {
        "sequences": {clip.name: len(clip.truth) for clip in clips},
        "parameters": sum(p.numel() for p in head.parameters()),
        "steps": int(log[-1]["step"]) + 1,
        "log": log,
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"head": head.state_dict(), "about": about}, path)
    return head, about


def main() -> None:
    arguments = parse()
    if arguments.source is not None:
        result = json.loads(arguments.source.read_text())
        store(result, arguments.source.parent, publish=True)
        return
    missing = [name for name in ("data", "weights", "out") if getattr(arguments, name) is None]
    if missing:
        raise SystemExit(f"Give --{' --'.join(missing)}, or --from a stored result.")
    refuse_tracked(arguments.out)
    options, clock = chosen(arguments), Clock(arguments.minutes)
    folder = arguments.out / fingerprint(options, arguments.weights, arguments.device)
    if arguments.quick:
        shutil.rmtree(folder, ignore_errors=True)
    backbone = build_backbone(arguments.weights, torch.device(arguments.device))
    head, about = trained(backbone, options, arguments, folder, clock)
    clips = load_clips(arguments.data, "val", options)
    say(clock, f"read {sum(len(c.truth) for c in clips)} validation frames")
    device = torch.device(arguments.device)
    rows = evaluate(backbone, head, clips, options, device, folder, clock)
    result = {
        "origin": {**origin(arguments.device), "timm": libraries.load("timm").__version__},
        "data": "MOTChallenge 2015, the part and size of it that was measured: see options",
        "backbone": {"name": BACKBONE, "weights": arguments.weights.name, "frozen": True},
        "options": asdict(options),
        "sequences": [
            {"name": c.name, "frames": len(c.truth), "size": c.size, "tokens": tokens_of(c)}
            for c in clips
        ],
        "training": about,
        "rows": rows,
    }
    store(result, arguments.out, publish=not (arguments.quick or arguments.no_publish))
    say(clock, f"wrote {arguments.out / 'mot15.json'}")


def tokens_of(clip: Clip) -> int:
    return 1 + (clip.size[0] // PATCH) * (clip.size[1] // PATCH)


if __name__ == "__main__":
    main()
