"""Exported steps in OpenVINO: the state is inside an inference request.

Each stream has a request of its own for every step it uses. A state belongs to one request, so it
is copied where a stream goes on with a step of another width, and after a flush.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.errors import ConfigError
from eventful.export.manifest import Manifest
from eventful.export.pure import Numbers
from eventful.export.runtimes.engine import EXTRA, Engine, Made, Memory, blank_state
from eventful.surgery.libraries import load

PRECISIONS = ("f32", "bf16", "f16")


class OpenVinoEngine(Engine):
    """Graphs in OpenVINO on the CPU.

    Args:
        precision: in which products are computed; the state stays as it was exported.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, threads: int | None, precision: str
    ) -> None:
        super().__init__(folder, manifest, threads)
        if precision not in PRECISIONS:
            raise ConfigError(f"precision is one of {', '.join(PRECISIONS)}; got {precision!r}.")
        self.settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY",
        }  # fmt: skip
        if threads is not None:
            self.settings["INFERENCE_NUM_THREADS"] = threads
        self._core: Any = load("openvino").Core()
        self.steps = {one.width: self._open(one.file) for one in manifest.steps}
        self._dense = self._open(manifest.dense).create_infer_request()
        self._one = threading.Lock()  # a request runs once at a time

    def _open(self, file: str) -> Any:
        return self._core.compile_model(str(self.folder / file), "CPU", self.settings)

    def memory(self) -> OpenVinoMemory:
        """See `Engine`."""
        return OpenVinoMemory(self)

    def dense(self, frame: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Run the dense graph; copies of its outputs."""
        with self._one:
            return infer(self._dense, {"frame": frame}, names)


class OpenVinoMemory(Memory):
    """The state of a stream: in `_held`, or in the request of the step that ran last."""

    def __init__(self, engine: OpenVinoEngine) -> None:
        self._engine = engine
        self._held = blank_state(engine.manifest)
        self._owner: int | None = None  # width of the step whose request has the state
        self._requests: dict[int, tuple[Any, dict[str, Any]]] = {}

    def flush(self, frame: Tensor) -> Made:
        """See `Memory`."""
        self._fetch(optional_only=True)
        manifest = self._engine.manifest
        names = (*manifest.leaves, EXTRA[0], *(one.output for one in manifest.written))
        found = self._engine.dense(frame, names)
        for one in manifest.written:
            self._held[one.name] = found[one.output]
        leaves = [found[name] for name in manifest.leaves]
        return Made(leaves, found[EXTRA[0]][0].tolist())

    def step(self, frame: Tensor, numbers: Numbers, width: int) -> Made:
        """See `Memory`."""
        request = self._request(width)
        manifest = self._engine.manifest
        given = {"frame": frame, **numbers._asdict()}
        found = infer(request, given, (*manifest.leaves, *EXTRA))
        report, index, count, score = (found[name] for name in EXTRA)
        leaves = [found[name] for name in manifest.leaves]
        return Made(leaves, report[0].tolist(), index[: int(count)], score)

    def _request(self, width: int) -> Any:
        """The request of a step, with the state in it."""
        if width not in self._requests:
            request = self._engine.steps[width].create_infer_request()
            named = {one.name.partition("/")[0]: one for one in request.query_state()}
            entries = self._engine.manifest.state
            self._requests[width] = (
                request,
                {one.name: named[one.input + one.output] for one in entries},
            )
        request, variables = self._requests[width]
        if self._owner != width:
            self._fetch()
            tensor = load("openvino").Tensor
            for name, value in self._held.items():
                variables[name].state = tensor(value.numpy(), shared_memory=False)
            self._owner = width
        return request

    def _fetch(self, *, optional_only: bool = False) -> None:
        """Bring the state back from the request that has it."""
        if self._owner is None:
            return
        variables = self._requests[self._owner][1]
        for one in self._engine.manifest.state:
            if one.optional or not optional_only:
                self._held[one.name] = torch.from_numpy(variables[one.name].state.data.copy())
        self._owner = None

    def read(self) -> dict[str, Tensor]:
        """See `Memory`."""
        self._fetch()
        return {name: value.clone() for name, value in self._held.items()}

    def write(self, tensors: dict[str, Tensor]) -> None:
        """See `Memory`."""
        self._fetch()
        for name, value in tensors.items():
            self._held[name] = value.clone()


def infer(request: Any, given: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Run a request; copies of some outputs, which the next run would overwrite."""
    ov: Any = load("openvino")
    for name, value in given.items():
        request.set_tensor(name, ov.Tensor(value.contiguous().numpy(), shared_memory=True))
    request.infer()
    return {name: torch.from_numpy(request.get_tensor(name).data.copy()) for name in names}
