"""Times exported steps beside the dense model in the same runtime, a few frames each in turn."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful.bench.results import origin
from eventful.config import Config
from eventful.export.outputs import flatten
from eventful.export.runtime import Runtime
from eventful.export.subject import exportable
from eventful.export.tracing import traced
from eventful.export.writing import export
from eventful.policies import TopR
from eventful.stream import Stream
from eventful.surgery.conversion import convert
from eventful.surgery.libraries import load, openvino_core

Tick = Callable[[str, int, int], None]
Dense = Callable[[Tensor], Tensor]
_LIBRARY = {"onnx": "onnxruntime", "openvino": "openvino", "aoti": "torch"}
WARM, ROUND = 3, 5  # frames that are not timed; frames of a turn


@dataclass(frozen=True)
class Way:
    """One way to run a model outside of Python.

    Attributes:
        to: see `manifest.TARGETS`.
        precision: `f32`, `bf16` or `int8`, which is that of the weights. With `aoti` in `bf16`
            frames and state are so, too.
    """

    to: str
    precision: str = "f32"

    def __str__(self) -> str:
        return f"{self.to} {self.precision}"


WAYS = (
    Way("onnx"),
    Way("onnx", "int8"),
    Way("openvino"),
    Way("openvino", "bf16"),
    Way("openvino", "int8"),
    Way("aoti"),
    Way("aoti", "bf16"),
)


@dataclass(frozen=True)
class Times:
    """What was measured of one way.

    Attributes:
        dense_ms, step_ms: medians over frames; every frame was run by both.
        updated: tokens of a step, of `tokens`.
        step_error: largest difference of a step's output from that of the library's `Stream` in the
            same step, in units of what the step changed: 1 is a result that is one frame old. None
            but for `f32`: with fewer bits, rounding is as large as what a step changes.
        state_mb: of one stream.
    """

    model: str
    size: str
    runtime: str
    version: str
    precision: str
    tokens: int
    updated: int
    frames: int
    dense_ms: float
    step_ms: float
    step_p80_ms: float
    speed_up: float
    step_error: float | None
    state_mb: float


def measure(
    model: nn.Module,
    name: str,
    example: Tensor,
    r: int,
    ways: Sequence[Way] = WAYS,
    *,
    frames: int = 15,
    threads: int = 2,
    work: Path | None = None,
    tick: Tick = lambda what, done, total: None,
) -> dict[str, Any]:
    """Time every way; rows beside device, versions and commit.

    Args:
        work: folder for the graphs, which are used again where they are there; a temporary one if
            left out.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rows = []
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) if work is None else work
            for done, way in enumerate(ways):
                tick(f"write the graphs of {way}", done, len(ways))
                prepare(*suited(model, example, way), name, r, way, folder)
            for done, way in enumerate(ways):
                tick(str(way), done, len(ways))
                rows.append(
                    _measured(*suited(model, example, way), r, way, folder, frames, threads)
                )
        return {"rows": [vars(row) for row in rows], "origin": origin("cpu")}
    finally:
        torch.set_num_threads(before)


def suited(model: nn.Module, example: Tensor, way: Way) -> tuple[nn.Module, Tensor]:
    """A model and a frame in the type that a way is exported in."""
    if way != Way("aoti", "bf16"):
        return model, example
    return copy.deepcopy(model).bfloat16(), example.bfloat16()


def prepare(model: nn.Module, example: Tensor, name: str, r: int, way: Way, folder: Path) -> None:
    """Write the graphs of a way, unless they are there."""
    place, int8 = _place(folder, way), way.precision == "int8"
    if not (place / "steps" / "manifest.json").is_file():
        place.mkdir(parents=True, exist_ok=True)
        export(
            model, example, place / "steps", to=way.to, r=(r,), config=_config(r), name=name,
            int8=int8,
        )  # fmt: skip
    if not any(place.glob("dense.*")):
        write_dense(model, example, way, place)


def _config(r: int) -> Config:
    return exportable(TopR(r), max_age=None)


def _place(folder: Path, way: Way) -> Path:
    """Where the graphs of a way are; precisions of one file share them."""
    shared = way == Way("openvino", "bf16")
    return folder / f"{way.to}-{'f32' if shared else way.precision}"


def step_error(runtime: Runtime, model: nn.Module, example: Tensor, r: int) -> float:
    """See `Times.step_error`; the step begins with equal state."""
    stream = Stream(convert(model, _config(r)))
    *first, last = moving(example, WARM)
    for frame in first:
        before = flatten(stream(frame))[0][0].float()
    ours = runtime.load(stream.snapshot())
    expected, got = (flatten(run(last))[0][0].float() for run in (stream, ours))
    return float((got - expected).abs().max() / (expected - before).abs().max())


def _measured(
    model: nn.Module, example: Tensor, r: int, way: Way, folder: Path, frames: int, threads: int
) -> Times:
    place, int8 = _place(folder, way), way.precision == "int8"
    precision = way.precision if way.to == "openvino" and not int8 else None
    runtime = Runtime(place / "steps", threads=threads, precision=precision)
    dense, stream = dense_runner(way, place, threads), runtime.stream()
    times: dict[str, list[float]] = {"dense": [], "step": []}
    video = list(moving(example, WARM + frames))
    for frame in video[:WARM]:
        dense(frame), stream(frame)
    for first in range(WARM, len(video), ROUND):  # each in a row, as they run in use
        for what, run in (("dense", dense), ("step", stream)):
            run(video[first - 1])  # threads of the other one may still be spinning
            for frame in video[first : first + ROUND]:
                start = time.perf_counter()
                run(frame)
                times[what].append(1e3 * (time.perf_counter() - start))
    last, name = stream.last, runtime.manifest.model
    assert last is not None
    assert not last.flushed
    exact = way.precision == "f32"
    error = round(step_error(runtime, model, example, r), 5) if exact else None
    return _row(name, way, last, times, error, example, stream.nbytes)


def _row(
    name: str, way: Way, last: Any, times: dict[str, list[float]], error: float | None,
    example: Tensor, nbytes: int,
) -> Times:  # fmt: skip
    dense, step = (statistics.median(times[what]) for what in ("dense", "step"))
    ordered = sorted(times["step"])
    return Times(
        model=name,
        size="x".join(map(str, example.shape[2:])),
        runtime="AOTInductor, torch" if way.to == "aoti" else _LIBRARY[way.to],
        version=version(_LIBRARY[way.to]),
        precision=way.precision,
        tokens=last.tokens,
        updated=last.updated,
        frames=len(ordered),
        dense_ms=round(dense, 2),
        step_ms=round(step, 2),
        step_p80_ms=round(ordered[int(0.8 * (len(ordered) - 1))], 2),
        speed_up=round(dense / step, 3),
        step_error=error,
        state_mb=round(nbytes / 1e6, 1),
    )


def moving(example: Tensor, count: int) -> Iterator[Tensor]:
    """Frames in which a square is new, a fifth of the side."""
    draw = torch.Generator().manual_seed(0)
    frame = example.clone()
    side = max(1, example.shape[3] // 5)
    for number in range(count):
        frame = frame.clone()
        left = number * side // 4 % (example.shape[3] - side)
        frame[..., left : left + side, left : left + side] = torch.rand(
            1, example.shape[1], side, side, generator=draw
        ).to(example.dtype)
        yield frame


def write_dense(model: nn.Module, example: Tensor, way: Way, folder: Path) -> None:
    """Write the model itself, without memory; it returns its first tensor."""

    class First(nn.Module):
        def forward(self, frame: Tensor) -> Tensor:
            return flatten(model(frame))[0][0]

    program = traced(First(), (example,), "the dense model")
    if way.to == "aoti":
        from torch._inductor import aoti_compile_and_package

        with torch.no_grad():
            aoti_compile_and_package(program, package_path=str(folder / "dense.pt2"))
        return
    from eventful.export import onnx as graphs

    runtime = "onnxruntime" if way.to == "onnx" else way.to
    proto = graphs.convert(program, (example,), ("frame",), ("out.first",), runtime=runtime)
    if way == Way("onnx", "int8"):
        proto = graphs.quantised(proto)
    onnx: Any = load("onnx")
    onnx.save(proto, str(folder / "dense.onnx"))


def dense_runner(way: Way, folder: Path, threads: int) -> Dense:
    """Runs what `write_dense` wrote."""
    if way.to == "aoti":
        return _compiled(folder / "dense.pt2")
    if way.to == "onnx":
        return _in_onnxruntime(folder / "dense.onnx", threads)
    return _in_openvino(folder / "dense.onnx", way, threads)


def _in_onnxruntime(path: Path, threads: int) -> Dense:
    ort: Any = load("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda frame: torch.from_numpy(session.run(None, {"frame": frame.numpy()})[0])


def _in_openvino(path: Path, way: Way, threads: int) -> Dense:
    from eventful.export.openvino import compress
    from eventful.export.runtimes.openvino import infer

    core = openvino_core()
    model = core.read_model(str(path))
    if way.precision == "int8":
        compress(model)
    hint = "bf16" if way.precision == "bf16" else "f32"
    settings = {
        "INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
    }  # fmt: skip
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    return lambda frame: infer(request, {"frame": frame}, ("out.first",))["out.first"]


def _compiled(path: Path) -> Dense:
    from torch._inductor import aoti_load_package

    run: Any = aoti_load_package(str(path))

    def dense(frame: Tensor) -> Tensor:
        with torch.no_grad():
            made = run(frame)
        return made if isinstance(made, Tensor) else made[0]

    return dense
