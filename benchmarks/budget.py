"""How well budgets are held: errors on real and generated video, time beside a busy machine.

python benchmarks/budget.py error --videos VIDEO.mp4 ... --weights VIT_S.safetensors
python benchmarks/budget.py latency
python benchmarks/budget.py draw     # pictures, and the tables of docs/budgets.md

`error` compares every frame with the dense model. `latency` starts processes that compete for the
cores, and changes the budget. Each stores its numbers under results/budget and draws them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import eventful
from eventful import files
from eventful.bench.results import origin
from eventful.bench.timing import gap, timed
from eventful.bench.video.footage import open_footage
from eventful.bench.video.model import Prepare, load_backbone
from eventful.bench.video.rows import rank_correlation
from eventful.budget import Controller, Facts
from eventful.budget.error import ErrorController
from eventful.surgery.libraries import load
from eventful.video.charts import AMBER, BLUE, FAINT, GRID, STYLE
from eventful.video.stress import MARGIN, StressClip

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "budget"
IMAGES = ROOT / "docs" / "images"
ASSETS = ROOT / "assets-local" / "assets"
ERRORS = (0.05, 0.1, 0.2)
STRESS = (
    "still", "noise", "cursor", "enter", "repeat", "flicker", "exposure", "lights-off", "cut",
    "pan", "walk",
)  # fmt: skip
BAND = (0.7, 1.3)  # of the error asked for
COLOURS = (BLUE, AMBER, "#4c9a5b")


@dataclass(frozen=True)
class Watched(eventful.ErrorBudget):
    """An error budget whose controllers can be looked at."""

    made: list[ErrorController] = field(default_factory=list, compare=False)

    def controller(self, facts: Facts) -> Controller:
        """See `Budget`."""
        made = super().controller(facts)
        assert isinstance(made, ErrorController)
        self.made.append(made)
        return made


class Contender:
    """One error on one clip, and what was measured of it."""

    def __init__(self, model: nn.Module, error: float) -> None:
        self.budget = Watched(error)
        self.stream = eventful.Stream(model, budget=self.budget)
        self.errors: list[float] = []
        self.predicted: list[float | None] = []
        self.shares: list[float] = []
        self.dense: list[bool] = []

    def step(self, frame: Tensor, truth: Tensor) -> None:
        """One frame."""
        out = self.stream.call("forward_features", frame)
        last = self.stream.last
        assert last is not None
        dense = all(last.flushed)
        self.dense.append(dense)
        self.errors.append(0.0 if dense else gap(out, truth))
        self.shares.append(last.fraction)
        # A step is heard of when the next one begins.
        if len(self.dense) > 1:
            eventful_before = self.budget.made and not self.dense[-2]
            self.predicted.append(self.budget.made[0].predicted if eventful_before else None)

    def row(self) -> dict[str, Any]:
        """What is stored."""
        summary, report = self.stream.summary(), self.stream.budget_report
        asked, mean = self.budget.error, statistics.mean(self.errors)
        return {
            "asked": asked,
            "error_mean": mean,
            "ratio": mean / asked,
            "error_worst": max(self.errors),
            "tokens": summary.tokens,
            "operations": 1 - summary.operations_saved,
            "dense_steps": sum(self.dense[1:]),
            "compared": summary.audits,
            "least_cost": bool(report and report.limit),
            "limit": report.limit if report else "",
            "errors": [round(value, 5) for value in self.errors],
            "predicted": [None if p is None else round(p, 5) for p in self.predicted],
            "shares": [round(value, 4) for value in self.shares],
        }


def clips(
    videos: list[Path], names: list[str], frames: int, size: tuple[int, int]
) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """Names and frames, uint8 (3, H, W): the videos, then stress clips made of the first."""
    footage = [open_footage(str(path), frames) for path in videos]
    for clip in footage:
        yield clip.name, clip.pictures(size)
    wide = (round(size[0] * MARGIN), round(size[1] * MARGIN))
    film = torch.stack(list(footage[0].pictures(wide))) if footage else None
    ends = [next(clip.pictures(wide)) for clip in (*footage[:1], *footage[-1:])]
    for name in names:
        base = torch.stack(ends) if name == "cut" and ends else film
        yield f"stress: {name}", iter(StressClip(name, frames, size, base))


def run_clip(
    name: str, frames: list[Tensor], model: nn.Module, errors: list[float]
) -> list[dict[str, Any]]:
    """All errors on one clip, beside the dense model."""
    converted = eventful.convert(model)
    runs = [Contender(converted, error) for error in errors]
    for time, frame in enumerate(frames):
        with torch.no_grad():
            truth = model.forward_features(frame)  # type: ignore[operator]
        for run in runs:
            run.step(frame, truth)
        print(f"\r{name}: frame {time + 1} of {len(frames)}", end="", flush=True)
    print()
    rows = [{"clip": name, "frames": len(frames), **run.row()} for run in runs]
    for row in rows:
        print(
            f"  asked {row['asked']:g}: mean {row['error_mean']:.4f} ({row['ratio']:.2f}), worst "
            f"{row['error_worst']:.3f}, tokens {row['tokens']:.1%}, operations "
            f"{row['operations']:.1%}, {row['dense_steps']} dense steps"
            + (", at the least cost" if row["least_cost"] else ""),
            flush=True,
        )
    return rows


def pairs(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Predicted and true error of each eventful frame that was not compared."""
    return [
        (guess, error)
        for row in rows
        for guess, error in zip(row["predicted"], row["errors"], strict=False)
        if guess is not None
    ]


def quality(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How good the predictions are."""
    both = pairs(rows)
    seen = [(guess, error) for guess, error in both if max(guess, error) > 1e-3]
    near = [0.5 < guess / max(error, 1e-9) < 2 for guess, error in seen]
    return {
        "frames": len(both),
        "rank": rank_correlation([guess for guess, _ in both], [error for _, error in both]),
        "rank_changed": rank_correlation(
            [guess for guess, _ in seen], [error for _, error in seen]
        ),
        "within_twice": statistics.mean(near) if near else None,
        "mean_predicted": statistics.mean(guess for guess, _ in both) if both else None,
        "mean_error": statistics.mean(error for _, error in both) if both else None,
    }


def measure_errors(options: argparse.Namespace) -> None:
    """Every clip; what is known is stored after each of them."""
    backbone = load_backbone("vit_small_patch14_dinov2", options.weights)
    height, width = (int(side) for side in options.size.split("x"))
    model, prepare = backbone.at((height, width), options.size, "cpu", torch.float32)
    record: dict[str, Any] = {
        **origin("cpu"),
        "model": backbone.name,
        "weights": options.weights.name if options.weights else "random",
        "size": [height, width],
        "rows": [],
    }
    for name, pictures in clips(options.videos, options.stress, options.frames, (height, width)):
        frames = [prepare(picture) for picture in itertools.islice(pictures, options.frames)]
        record["rows"] += run_clip(name, frames, model, options.errors)
        record["predictions"] = quality(record["rows"])
        files.write_json(options.json, record, indent=None)
    print(json.dumps(record["predictions"], indent=1))


@contextlib.contextmanager
def competing() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that use up the cores, started by the caller; they end with the block."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        stop(started)


def compete(started: list[subprocess.Popen[bytes]], count: int) -> None:
    """Start them."""
    for _ in range(count):
        started.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))


def stop(started: list[subprocess.Popen[bytes]]) -> None:
    """End them."""
    while started:
        process = started.pop()
        process.kill()
        process.wait()


def measure_latency(options: argparse.Namespace) -> None:
    """One stream, asked for half of the dense time, then for another share of it."""
    torch.manual_seed(0)
    height, width = (int(side) for side in options.size.split("x"))
    timm: Any = load("timm")
    model = timm.create_model(options.model, img_size=(height, width), num_classes=0).eval()
    prepare = Prepare((height, width), (0.5,) * 3, (0.5,) * 3)
    clip = StressClip(options.clip, options.frames, (height, width))
    frames = [prepare(picture) for picture in clip]
    with torch.no_grad():
        alone = [timed(model, frame)[1] for frame in frames[:12]][2:]
    dense = statistics.median(alone)
    stream = eventful.Stream(eventful.convert(model))
    first, last = options.busy
    rows, asked = [], options.shares[0] * dense
    stream.budget = eventful.LatencyBudget(asked)
    with competing() as others, warnings.catch_warnings():
        warnings.simplefilter("default")
        for time, frame in enumerate(frames):
            if time == first:
                compete(others, options.processes)
            if time == last:
                stop(others)
            if time == options.change:
                asked = options.shares[1] * dense
                stream.budget = eventful.LatencyBudget(asked)
            _, took = timed(stream, frame)
            step, report = stream.last, stream.budget_report
            assert step is not None
            rows.append(
                {
                    "ms": round(took, 3),
                    "asked": round(asked, 3),
                    "share": round(step.fraction, 4),
                    "most": round(report.share, 4) if report else None,
                    "dense": all(step.flushed),
                    "fallback": step.fallback,
                    "limit": report.limit if report else "",
                }
            )
            print(f"\rframe {time + 1} of {len(frames)}: {took:.1f} ms", end="", flush=True)
    print()
    record = {
        **origin("cpu"),
        "model": options.model,
        "size": [height, width],
        "clip": options.clip,
        "processes": options.processes,
        "cores": os.cpu_count(),
        "busy": options.busy,
        "change": options.change,
        "dense_ms": dense,
        "phases": phases(rows, options),
        "rows": rows,
    }
    print(json.dumps(record["phases"], indent=1))
    files.write_json(options.json, record, indent=None)


def phases(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What was held in each part of the run, the first ten frames of each left out."""
    first, last = options.busy
    edges = {"alone": (0, first), "busy": (first, last), "alone again": (last, options.change)}
    edges["another budget"] = (options.change, len(rows))
    made = []
    for name, (begin, end) in edges.items():
        part = rows[min(begin + 10, end - 1) : end]
        times = sorted(row["ms"] for row in part)
        made.append(
            {
                "phase": name,
                "asked": part[0]["asked"],
                "ms_median": statistics.median(times),
                "ms_p90": times[int(0.9 * (len(times) - 1))],
                "over": statistics.mean(row["ms"] > row["asked"] for row in part),
                "share": statistics.mean(row["share"] for row in part),
                "dense": sum(row["dense"] for row in part),
            }
        )
    return made


def draw_errors(record: dict[str, Any], path: Path) -> None:
    """Ratios per clip, and predictions against true errors."""
    load("matplotlib").use("Agg")
    pyplot: Any = load("matplotlib.pyplot")
    rows = record["rows"]
    names = list(dict.fromkeys(row["clip"] for row in rows))
    errors = sorted({row["asked"] for row in rows})
    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(
            1, 2, figsize=(11.5, 0.9 + 0.31 * len(names)), layout="constrained",
            gridspec_kw={"width_ratios": [1.25, 1]},
        )  # fmt: skip
        left.axvspan(*BAND, color=BLUE, alpha=0.10, lw=0)
        left.axvline(1, color=FAINT, lw=0.8)
        for place, (error, colour) in enumerate(zip(errors, COLOURS, strict=False)):
            own = [row for row in rows if row["asked"] == error]
            up = [names.index(row["clip"]) + 0.22 * (place - 1) for row in own]
            for least, face in ((False, colour), (True, "white")):
                chosen = [i for i, row in enumerate(own) if row["least_cost"] == least]
                left.scatter(
                    [own[i]["ratio"] for i in chosen], [up[i] for i in chosen], s=30, zorder=3,
                    facecolor=face, edgecolor=colour, label=None if least else f"asked {error:g}",
                )  # fmt: skip
        left.scatter([], [], s=30, facecolor="white", edgecolor=FAINT, label="at the least cost")
        left.set_yticks(range(len(names)), names)
        left.invert_yaxis()
        left.set_xlim(0, max(1.55, 0.1 + max(row["ratio"] for row in rows)))
        left.grid(axis="y", color=GRID)
        left.set_axisbelow(True)
        left.set_xlabel(f"mean error / error asked for; shaded: {BAND[0]:g} to {BAND[1]:g}")
        left.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.45, 1))
        _scatter(right, rows, errors, record["predictions"])
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _scatter(axis: Any, rows: list[dict[str, Any]], errors: list[float], found: Any) -> None:
    least = 1e-3
    for error, colour in zip(errors, COLOURS, strict=False):
        both = pairs([row for row in rows if row["asked"] == error])
        guesses, truths = ([max(pair[i], least) for pair in both] for i in (0, 1))
        axis.scatter(guesses, truths, s=7, color=colour, alpha=0.45, lw=0)
    axis.plot([least, 1], [least, 1], color=FAINT, lw=1)
    axis.set(xscale="log", yscale="log", xlim=(least * 0.9, 8), ylim=(least * 0.9, 1))
    axis.grid(color=GRID)
    axis.set_axisbelow(True)
    axis.set_xlabel("predicted error of a frame (below 0.001: at the edge)")
    axis.set_ylabel("true error")
    axis.set_title(f"{found['frames']} frames, rank correlation {found['rank']:.2f}", fontsize=10)


def draw_latency(record: dict[str, Any], path: Path) -> None:
    """Time of each step, and the tokens that it updated."""
    load("matplotlib").use("Agg")
    pyplot: Any = load("matplotlib.pyplot")
    rows = record["rows"]
    with pyplot.rc_context(STYLE):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(9.5, 5.2), sharex=True, layout="constrained",
            gridspec_kw={"height_ratios": [2, 1]},
        )  # fmt: skip
        for axis in (above, below):
            axis.axvspan(*record["busy"], color=AMBER, alpha=0.13, lw=0)
            axis.grid(color=GRID)
            axis.set_axisbelow(True)
        top = 1.25 * max(record["dense_ms"], sorted(row["ms"] for row in rows)[-4])
        above.axhline(record["dense_ms"], color=FAINT, lw=1, ls=":", label="dense model, alone")
        above.plot([row["ms"] for row in rows], color=BLUE, lw=1.2, marker=".", ms=4, label="step")
        above.step(
            range(len(rows)), [row["asked"] for row in rows], where="post", color="#b0473f", lw=1.6,
            label="asked",
        )  # fmt: skip
        above.set_ylim(0, top)
        above.set_ylabel("ms a step")
        others = "another process runs" if record["processes"] == 1 else "other processes run"
        above.text(sum(record["busy"]) / 2, 0.96 * top, others, ha="center", va="top")
        above.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
        below.plot([100 * row["share"] for row in rows], color=BLUE, lw=1.2, marker=".", ms=4)
        below.set_ylim(0, 104)
        below.set_ylabel("tokens updated, %")
        below.set_xlabel("frame")
        below.set_xlim(0, len(rows) - 1)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def error_table(record: dict[str, Any]) -> list[str]:
    """A line for each clip; numbers outside the band are bold, those at the least cost have a *."""
    rows = record["rows"]
    errors = sorted({row["asked"] for row in rows})
    heads = [f"mean error / {error:g}" for error in errors]
    heads += [f"worst at {error:g}" for error in errors] + [f"operations at {e:g}" for e in errors]
    lines = [f"| clip | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}"]
    for name in dict.fromkeys(row["clip"] for row in rows):
        own = sorted((row for row in rows if row["clip"] == name), key=lambda row: row["asked"])
        cells = [_ratio(row) for row in own] + [f"{row['error_worst']:.2f}" for row in own]
        cells += [f"{row['operations']:.0%}".replace("%", " %") for row in own]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _ratio(row: dict[str, Any]) -> str:
    shown = f"{row['ratio']:.2f}"
    shown = shown if BAND[0] <= row["ratio"] <= BAND[1] else f"**{shown}**"
    return shown + (" \\*" if row["least_cost"] else "")


def latency_table(record: dict[str, Any]) -> list[str]:
    """A line for each part of the run."""
    lines = [
        "| part | asked | median step | 90 % of the steps below | steps above | tokens |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for part in record["phases"]:
        lines.append(
            f"| {part['phase']} | {part['asked']:.0f} ms | {part['ms_median']:.0f} ms | "
            f"{part['ms_p90']:.0f} ms | {100 * part['over']:.0f} % | {100 * part['share']:.0f} % |"
        )
    return lines


def write_table(name: str, lines: list[str], record: dict[str, Any]) -> None:
    """Put a table between its marks on the page."""
    page = ROOT / "docs" / "budgets.md"
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    about = (
        f"*{record['model']} at {record['size'][0]} x {record['size'][1]} pixels, "
        f"{record['device_name']}, {record['threads']} thread, torch {record['torch']}, commit "
        f"{record['commit']}: [numbers](../benchmarks/results/budget/{name}.json).*"
    )
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text("\n".join([before + begin, *lines, "", about, "", end]) + after)


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parts = parser.add_subparsers(dest="part", required=True)
    error = parts.add_parser("error", help="errors held, on each clip")
    found = sorted((ASSETS / "videos").glob("*.mp4"))
    weights = next(iter(sorted((ASSETS / "weights").glob("*.safetensors"))), None)
    error.add_argument("--videos", type=Path, nargs="*", default=found)
    error.add_argument("--weights", type=Path, default=weights, help="ViT-S/14 dinov2")
    error.add_argument("--stress", nargs="*", default=list(STRESS), help="generated clips")
    error.add_argument("--errors", type=float, nargs="+", default=list(ERRORS))
    error.add_argument("--frames", type=int, default=64)
    error.add_argument("--size", default="224x392", help="height x width, multiples of 14")
    error.add_argument("--json", type=Path, default=RESULTS / "error.json")
    latency = parts.add_parser("latency", help="a time held, while other processes run")
    latency.add_argument("--model", default="vit_tiny_patch16_224")
    latency.add_argument("--size", default="352x352", help="height x width, multiples of 16")
    latency.add_argument("--clip", default="walk", help="a stress clip")
    latency.add_argument("--frames", type=int, default=150)
    latency.add_argument("--busy", type=int, nargs=2, default=[50, 100], help="first, last frame")
    latency.add_argument("--change", type=int, default=120, help="frame with another budget")
    latency.add_argument("--shares", type=float, nargs=2, default=[0.5, 0.7], help="of dense time")
    latency.add_argument("--processes", type=int, default=1, help="that compete")
    latency.add_argument("--json", type=Path, default=RESULTS / "latency.json")
    parts.add_parser("draw", help="pictures and tables of the stored results again")
    return parser.parse_args()


def draw(source: Path, name: str) -> None:
    """One picture and one table from their file, where that is there."""
    if source.is_file():
        record = json.loads(source.read_text())
        if name == "error":
            record["predictions"] = quality(record["rows"])
            files.write_json(source, record, indent=None)
        paint = draw_errors if name == "error" else draw_latency
        paint(record, IMAGES / f"budget-{name}.png")
        tabled = error_table if name == "error" else latency_table
        write_table(name, tabled(record), record)


def main() -> None:
    options = parsed()
    # Start without measured times of this machine.
    os.environ["EVENTFUL_CACHE"] = tempfile.mkdtemp()
    if options.part == "draw":
        for name in ("error", "latency"):
            draw(RESULTS / f"{name}.json", name)
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    measure_errors(options) if options.part == "error" else measure_latency(options)
    if options.json.parent == RESULTS:
        draw(options.json, options.part)


if __name__ == "__main__":
    main()
