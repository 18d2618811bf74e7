"""The default settings on real video, beside the dense model, frame by frame in one run.

python benchmarks/default.py --device cuda --dtype bfloat16 --size 504x896 --out results.json

Videos and weights are found through EVENTFUL_ASSETS, or at ../shared/assets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import eventful
from eventful import files
from eventful.bench.dense import DenseSpec, dense_paths
from eventful.bench.results import origin
from eventful.bench.timing import gap, in_turn, pipelined, timed
from eventful.surgery.libraries import load

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = "weights/vit_small_patch14_dinov2_saliency.fp16.safetensors"
CLIPS = ("bottles-static", "person-static", "cars-static", "dog-handheld")
WARM = 4  # warm-up frames, which compile, capture graphs and allocate
FLUSHES = 24
ROUNDS, IN_FLIGHT = 5, 8  # of frames enqueued together; on a CPU one after another


def assets() -> Path:
    """The folder of videos and weights."""
    folder = Path(os.environ.get("EVENTFUL_ASSETS") or ROOT.parent / "shared" / "assets")
    if not (folder / "videos").is_dir():
        raise SystemExit(f"No videos at {folder}; set EVENTFUL_ASSETS to the folder that has them.")
    return folder


def images(path: Path, count: int) -> Iterator[Tensor]:
    """The first frames of a video as uint8 RGB (3, H, W), by PyAV or, without it, OpenCV."""
    try:
        av = load("av")
    except eventful.errors.EventfulError:
        cv2: Any = __import__("cv2")
        video = cv2.VideoCapture(str(path))
        for _ in range(count):
            good, frame = video.read()
            if not good:
                return
            yield torch.from_numpy(frame[..., ::-1].copy()).permute(2, 0, 1)
        return
    with av.open(str(path)) as video:
        for _, frame in zip(range(count), video.decode(video=0), strict=False):
            yield torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)


def clip(
    path: Path, count: int, size: tuple[int, int], device: str, dtype: torch.dtype
) -> list[Tensor]:
    """Normalised frames (1, 3, H, W) on the device."""
    mean, deviation = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    made = []
    for image in images(path, count):
        frame = nn.functional.interpolate(image[None].float() / 255, size, mode="area")
        frame = (frame - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)
        made.append(frame.to(device, dtype))
    return made


def backbone(size: tuple[int, int], device: str, dtype: torch.dtype) -> nn.Module:
    """The real ViT-S/14, at this frame size."""
    timm: Any = load("timm")
    model = timm.create_model("vit_small_patch14_dinov2", img_size=size, num_classes=0)
    weights = load_file(assets() / WEIGHTS)
    kept = weights["pos_embed"].float()
    weights["pos_embed"] = load("timm.layers").resample_abs_pos_embed(
        kept, list(model.patch_embed.grid_size), num_prefix_tokens=1
    )
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing:
        raise SystemExit(f"The weights lack {', '.join(missing[:4])}.")
    return model.to(device, dtype).eval()


def run_clip(
    name: str, frames: list[Tensor], converted: nn.Module, dense: dict[str, Any]
) -> dict[str, Any]:
    """The default beside every dense path on one clip."""
    stream = eventful.Stream(converted)
    ms: dict[str, list[float]] = {"eventful": [], **{path: [] for path in dense}}
    runs = {"eventful": stream, **dense}
    fell_back, shares, errors = [], [], []
    for t, frame in enumerate(frames):
        outputs = {}
        for path in in_turn(list(runs), t):
            outputs[path], took = timed(runs[path], frame)
            outputs[path] = outputs[path].clone()
            ms[path].append(took)
        last = stream.last
        assert last is not None
        fell_back.append(last.fallback)
        shares.append(last.fraction)
        errors.append(gap(outputs["eventful"], outputs["eager"]))
    own = ms.pop("eventful")[WARM:]
    medians = {path: statistics.median(times[WARM:]) for path, times in ms.items()}
    best = min(medians, key=lambda path: medians[path])
    paired = [a / b for a, b in zip(own, ms[best][WARM:], strict=True)]
    return {
        "clip": name,
        "frames": len(frames),
        "dense_best": best,
        "dense_ms": medians,
        "ms": statistics.median(own),
        "ratio": statistics.median(paired),
        "ratio_of_sums": sum(own) / sum(ms[best][WARM:]),
        "dense_steps": sum(fell_back),
        "updated": statistics.mean(shares[1:]),
        "error_median": statistics.median(errors),
        "error_worst": max(errors),
    }


def run_flushes(
    preset: str, frames: list[Tensor], model: nn.Module, dense: dict[str, Any]
) -> dict[str, Any]:
    """A dense step of a stream beside the model's own forward, in a CUDA graph where there is."""
    own = "graph" if "graph" in dense else "eager"
    stream = eventful.Stream(eventful.convert(model, eventful.Config.preset(preset)))
    for frame in frames[:WARM]:
        stream.flush()
        stream(frame)
    ratios, times = [], []
    for t in range(FLUSHES):
        frame = frames[t % len(frames)]
        stream.flush()
        pair = {}
        for path in in_turn(["stream", own], t):
            pair[path] = timed(stream if path == "stream" else dense[own], frame)[1]
        ratios.append(pair["stream"] / pair[own])
        times.append(pair["stream"])

    def flushed(frame: Tensor) -> Tensor:
        stream.flush()
        return stream(frame)

    in_flight = []
    for t in range(ROUNDS):
        pair = {
            path: pipelined(flushed if path == "stream" else dense[own], frames[:IN_FLIGHT])
            for path in in_turn(["stream", own], t)
        }
        in_flight.append(pair["stream"] / pair[own])
    return {
        "preset": preset,
        "against": own,
        "ms": statistics.median(times),
        "ratio": statistics.median(ratios),
        "ratio_in_flight": statistics.median(in_flight),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--size", default="252x448")
    parser.add_argument("--frames", type=int, default=80)
    parser.add_argument("--compile", action="store_true", help="measure the compiled model, too")
    parser.add_argument("--skip-clips", action="store_true", help="measure dense steps alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["EVENTFUL_CACHE"] = (
        tempfile.mkdtemp()
    )  # start without measured times of this machine
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    size = tuple(int(side) for side in options.size.split("x"))
    dtype = getattr(torch, options.dtype)
    model = backbone(size, options.device, dtype)
    videos = {
        name: clip(assets() / "videos" / f"{name}.mp4", options.frames, size, options.device, dtype)
        for name in CLIPS
    }
    example = videos[CLIPS[0]][0]
    mode = "default"
    dense = dense_paths(DenseSpec(model, example, options.compile, mode), print).runs
    record: dict[str, Any] = {
        **origin(options.device),
        "dtype": options.dtype,
        "tf32": options.tf32,
        "size": options.size,
        "flushes": [],
        "clips": [],
    }
    for preset in ("fast", "exact"):
        record["flushes"].append(run_flushes(preset, videos[CLIPS[0]], model, dense))
        print(json.dumps(record["flushes"][-1]), flush=True)
    converted = eventful.convert(model)
    for name, frames in {} if options.skip_clips else videos.items():
        record["clips"].append(run_clip(name, frames, converted, dense))
        print(json.dumps(record["clips"][-1]), flush=True)
    if options.out:
        files.write_json(options.out, record)


if __name__ == "__main__":
    main()
