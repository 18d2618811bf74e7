"""Exported steps in OpenVINO: the state is in torch tensors that the graphs read.

A step returns the rows that it writes, and they are written here. So OpenVINO never copies the
state, and all steps of a stream share it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.errors import ArtefactError, ConfigError
from eventful.export.manifest import Manifest, StateEntry
from eventful.export.openvino import INDEX, rows_name
from eventful.export.pure import Numbers
from eventful.export.runtimes.engine import EXTRA, Engine, Made, Memory
from eventful.surgery.libraries import load, openvino_core

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
        self._dense = self._open(manifest.dense, [one.name for one in manifest.written])
        every = [one.name for one in manifest.state]
        self._steps = {one.width: self._open(one.file, every) for one in manifest.steps}

    def _open(self, file: str, written: Iterable[str]) -> _Graph:
        model = openvino_core().compile_model(str(self.folder / file), "CPU", self.settings)
        graph = _Graph(model, self.manifest.state)
        lost = [name for name in written if name not in graph.writes]
        if lost:
            raise ArtefactError(f"{file} does not write {', '.join(lost)}. Export it again.")
        return graph

    def memory(self) -> OpenVinoMemory:
        """See `Engine`."""
        return OpenVinoMemory(self)

    def flush(
        self, frame: Tensor, memory: OpenVinoMemory, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Run the dense graph, which writes the memory; copies of some outputs, by name."""
        return self._dense.run({"frame": frame}, memory, names, reads=False)

    def step(
        self, width: int, given: Mapping[str, Tensor], memory: OpenVinoMemory, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Run a step, which writes the memory; copies of some outputs, by name."""
        return self._steps[width].run(given, memory, names, reads=True)


class _Graph:
    """One compiled graph, with what it returns of the state."""

    def __init__(self, model: Any, state: Iterable[StateEntry]) -> None:
        self._request = model.create_infer_request()
        self._one = threading.Lock()  # a request runs once at a time
        self._reader: weakref.ref[OpenVinoMemory] | None = None  # whose state the inputs are
        names = {name for one in model.outputs for name in one.get_names()}
        places = [name for name in names if name.startswith(INDEX) and "@" not in name]
        self._inputs = {one.name: one.input for one in state}
        self._rows = {
            one.name: (rows_name(one.input, place), place)
            for one in state
            for place in places
            if rows_name(one.input, place) in names
        }
        self._whole = {
            one.name: one.output
            for one in state
            if one.output in names and one.name not in self._rows
        }
        self.writes = {*self._rows, *self._whole}

    def run(
        self, given: Mapping[str, Tensor], memory: OpenVinoMemory, names: Sequence[str],
        *, reads: bool,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Run the graph and write the state; copies of some outputs, by name.

        Args:
            reads: whether the state is an input.
        """
        state = memory.state
        with self._one:
            if reads and (self._reader is None or self._reader() is not memory):
                self._reader = None
                bind(self._request, {self._inputs[name]: one for name, one in state.items()})
                self._reader = weakref.ref(memory)
            found = infer(self._request, given, names)
            for name, output in self._whole.items():
                state[name].copy_(self._output(output))
            places: dict[str, Tensor] = {}
            for name, (rows, place) in self._rows.items():
                if place not in places:
                    places[place] = self._output(place).flatten()
                state[name].index_copy_(0, places[place], self._output(rows))
        return found

    def _output(self, name: str) -> Tensor:
        """An output where OpenVINO has it."""
        return torch.from_numpy(self._request.get_tensor(name).data)


class OpenVinoMemory(Memory):
    """The state of one stream, in memory whose addresses OpenVINO reads."""

    def __init__(self, engine: OpenVinoEngine) -> None:
        super().__init__(engine.manifest)
        self._engine = engine

    def flush(self, frame: Tensor) -> Made:
        """See `Memory`."""
        names = (*self._engine.manifest.leaves, EXTRA[0])
        *leaves, report = self._engine.flush(frame, self, names).values()
        return Made(leaves, report[0].tolist())

    def step(self, frame: Tensor, numbers: Numbers, width: int) -> Made:
        """See `Memory`."""
        given = {"frame": frame, **numbers._asdict()}
        names = (*self._engine.manifest.leaves, *EXTRA)
        found = self._engine.step(width, given, self, names)
        *leaves, report, index, count, score = found.values()
        return Made(leaves, report[0].tolist(), index[: int(count)], score)


def bind(request: Any, given: Mapping[str, Tensor]) -> list[Any]:
    """Let inputs be tensors of ours, at their addresses; returns what must live as long."""
    tensor, kept = load("openvino").Tensor, []
    for name, value in given.items():
        array = value.contiguous().numpy()
        kept.append(array)
        request.set_tensor(name, tensor(array, shared_memory=True))
    return kept


def infer(request: Any, given: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Run a request; copies of some outputs, which the next run would overwrite."""
    kept = bind(request, given)
    request.infer()
    del kept
    return {name: torch.from_numpy(request.get_tensor(name).data.copy()) for name in names}
