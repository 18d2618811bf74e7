"""ViTDet-B's backbone with frames in flight, beside the dense model at one size.

python benchmarks/backbone.py --out results.json      # needs a CUDA device
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import eventful
from eventful import files
from eventful.bench.dense import DenseSpec, dense_paths
from eventful.bench.results import origin
from eventful.bench.timing import in_turn, pipelined, timed
from eventful.models.vitdet.backbone import BackboneConfig, ViTDetBackbone
from eventful.video.synthetic import moving_objects

SETTINGS = ((1024, 512), (672, 256))  # pixels, r
WARM, ROUNDS, IN_FLIGHT = 6, 7, 24


def measure(size: int, r: int, compiled: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ViTDetBackbone(BackboneConfig(size=size)).to("cuda", torch.bfloat16).eval()
    frames = [
        ((frame - 0.45) / 0.225).to("cuda", torch.bfloat16)
        for frame in moving_objects(IN_FLIGHT, (size, size))
    ]
    config = eventful.Config.fast(eventful.TopR(r), fallback=False, scene_cut=None)
    runs: dict[str, Any] = {"eventful": eventful.Stream(eventful.convert(model, config))}
    runs |= dense_paths(DenseSpec(model, frames[0], compiled), print).runs
    for run in runs.values():
        for frame in frames[:WARM]:
            run(frame)
    ms: dict[str, list[float]] = {name: [] for name in runs}
    single: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS):
        for name in in_turn(list(runs), turn):
            ms[name].append(pipelined(runs[name], frames))
            single[name].append(timed(runs[name], frames[turn])[1])
    stream = runs["eventful"]
    return {
        "size": size,
        "r": r,
        "updated": stream.last.updated,
        "in_flight_ms": {name: statistics.median(times) for name, times in ms.items()},
        "ms": {name: statistics.median(times) for name, times in single.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="measure the compiled model, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {**origin("cuda"), "dtype": "bfloat16", "settings": []}
    for size, r in SETTINGS:
        record["settings"].append(measure(size, r, options.compile))
        print(json.dumps(record["settings"][-1]), flush=True)
    if options.out:
        files.write_json(options.out, record)


if __name__ == "__main__":
    main()
