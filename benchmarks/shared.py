"""Eight cameras, one of them busy: equal shares of the tokens against one pool for all.

python benchmarks/shared.py --device cuda --dtype bfloat16 --json out.json \
    --weights vit_small_patch14_dinov2.safetensors --videos busy.mp4 calm.mp4 calmer.mp4

The dense features are the truth. `Shared` runs twice: with packed rows, and with rows padded to the
busiest stream. Without weights the model is random, without videos the clips are generated.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import eventful
from eventful import files
from eventful.bench.results import origin
from eventful.bench.timing import in_turn, timed
from eventful.engine import widths
from eventful.surgery.libraries import load
from eventful.tokens import packing
from eventful.video.stress import StressClip

PATCH = 14
WARM = 6  # frames that compile, capture graphs and allocate
BUSY, CALM = "pan", ("noise", "cursor", "noise", "keyframes", "noise", "enter", "still")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@contextlib.contextmanager
def padded() -> Iterator[None]:
    """Rows are padded to the busiest stream, not packed."""
    before = packing.WORTH
    packing.WORTH = widths.WORTH = 0.0
    try:
        yield
    finally:
        packing.WORTH = widths.WORTH = before


def generated(streams: int, frames: int, size: tuple[int, int]) -> Iterator[Tensor]:
    """Frames (B, 3, H, W) in [0, 1] of one camera that pans and others that stand still."""
    names = [BUSY, *itertools.islice(itertools.cycle(CALM), streams - 1)]
    clips = [StressClip(name, frames, size, seed=seed) for seed, name in enumerate(names)]
    for images in zip(*clips, strict=True):
        yield torch.stack(images).float() / 255


def filmed(
    videos: list[Path], streams: int, frames: int, size: tuple[int, int]
) -> Iterator[Tensor]:
    """The same of videos: the first is the busy one, the others take turns, each somewhere else."""
    calm = videos[1:] or videos
    clips = [images(videos[0], 0, frames, size)]
    for stream in range(streams - 1):
        clips.append(images(calm[stream % len(calm)], frames * (stream // len(calm)), frames, size))
    for pictures in zip(*clips, strict=True):
        yield torch.cat(pictures)


def images(path: Path, first: int, frames: int, size: tuple[int, int]) -> list[Tensor]:
    """Some frames (1, 3, H, W) in [0, 1] of a video, from the start again after its end."""
    reader = eventful.read(str(path), size=size, fit="stretch", normalize="none")
    found = [torch.as_tensor(frame) for frame in itertools.islice(reader, first + frames)]
    found = [frame if frame.dim() == 4 else frame[None] for frame in found]
    return list(itertools.islice(itertools.cycle(found[first:] or found), frames))


def backbone(weights: Path | None, size: tuple[int, int]) -> nn.Module:
    """A ViT-S/14 that returns its features."""
    torch.manual_seed(0)
    timm: Any = load("timm")
    model = timm.create_model("vit_small_patch14_dinov2", img_size=size, num_classes=0)
    if weights is not None:
        state = {name: value.float() for name, value in load_file(weights).items()}
        state["pos_embed"] = load("timm.layers").resample_abs_pos_embed(
            state["pos_embed"], list(model.patch_embed.grid_size), num_prefix_tokens=1
        )
        missing = model.load_state_dict(state, strict=False).missing_keys
        if missing:
            raise SystemExit(f"The weights lack {', '.join(missing[:4])}.")
    return model.eval()


class Contender:
    """One way to share out the tokens, and what was measured of it."""

    def __init__(self, model: nn.Module, policy: Any, streams: int, *, pack: bool) -> None:
        config = eventful.Config.fast(policy, fallback=False, scene_cut=None)
        self.batch = eventful.StreamBatch(eventful.convert(model, config))
        for stream in range(streams):
            self.batch.join(str(stream))
        self.pack = pack
        self.ms: list[float] = []
        self.errors: list[list[float]] = []
        self.tokens: list[list[int]] = []

    def step(self, frame: Tensor, truth: Tensor) -> None:
        """One frame of each stream."""
        with contextlib.nullcontext() if self.pack else padded():
            out, took = timed(lambda x: self.batch.call("forward_features", x), frame)
        apart = (out.float() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        last = self.batch.last
        assert last is not None
        (gate,) = last.gates.values()
        self.ms.append(took)
        self.errors.append(apart.tolist())
        self.tokens.append(gate.counts.tolist())

    def report(self) -> dict[str, Any]:
        """Means over the frames after the first ones."""
        errors = [statistics.mean(of) for of in zip(*self.errors[WARM:], strict=True)]
        tokens = [statistics.mean(of) for of in zip(*self.tokens[WARM:], strict=True)]
        return {
            "error_mean": statistics.mean(errors),
            "error_worst_stream": max(errors),
            "errors": errors,
            "tokens": tokens,
            "tokens_all": sum(tokens),
            "ms": statistics.median(self.ms[WARM:]),
        }


def compare(model: nn.Module, frames: list[Tensor], fraction: float) -> dict[str, Any]:
    """Equal shares against a pool, in turn in one run."""
    streams = len(frames[0])
    runs = {
        "equal shares": Contender(model, eventful.TopFraction(fraction), streams, pack=True),
        "shared": Contender(model, eventful.Shared(fraction), streams, pack=True),
        "shared, padded": Contender(model, eventful.Shared(fraction), streams, pack=False),
    }
    dense_ms = []
    for time, frame in enumerate(frames):
        with torch.no_grad():
            truth, took = timed(model.forward_features, frame)
        dense_ms.append(took)
        for name in in_turn(list(runs), time):
            runs[name].step(frame, truth.float())
        print(f"\r{fraction:.0%}: frame {time + 1} of {len(frames)}", end="", flush=True)
    print()
    found = {name: run.report() for name, run in runs.items()}
    return {"fraction": fraction, "dense_ms": statistics.median(dense_ms[WARM:]), **found}


def show(row: dict[str, Any]) -> None:
    """One fraction as a table."""
    print(f"dense: {row['dense_ms']:.1f} ms a step")
    for name in ("equal shares", "shared", "shared, padded"):
        run = row[name]
        tokens = " ".join(f"{count:.0f}" for count in run["tokens"])
        print(
            f"{name:15s} error {run['error_mean']:.4f}, worst stream "
            f"{run['error_worst_stream']:.4f}, {run['ms']:.1f} ms, tokens {tokens}"
        )


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--size", default="252x448", help="height x width, multiples of 14")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.06, 0.12])
    parser.add_argument("--weights", type=Path, help="ViT-S/14 dinov2, safetensors")
    parser.add_argument("--videos", type=Path, nargs="+", default=[], help="the busy one first")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.size = tuple(int(side) for side in options.size.split("x"))
    if any(side % PATCH for side in options.size) or options.frames <= WARM:
        parser.error(f"sizes are multiples of {PATCH}, and frames more than {WARM}")
    return options


def main() -> None:
    options = parsed()
    device, dtype = options.device, getattr(torch, options.dtype)
    args = (options.streams, options.frames, options.size)
    clip = filmed(options.videos, *args) if options.videos else generated(*args)
    mean, deviation = (torch.tensor(part).view(3, 1, 1) for part in (MEAN, DEVIATION))
    frames = [((frame - mean) / deviation).to(device, dtype) for frame in clip]
    model = backbone(options.weights, options.size).to(device, dtype)
    record: dict[str, Any] = {
        **origin(device),
        "dtype": options.dtype,
        "size": options.size,
        "weights": options.weights.name if options.weights else "random",
        "videos": [path.name for path in options.videos] or "generated",
        "rows": [],
    }
    for fraction in options.fractions:
        record["rows"].append(compare(model, frames, fraction))
        show(record["rows"][-1])
    if options.json:
        files.write_json(options.json, record)


if __name__ == "__main__":
    main()
