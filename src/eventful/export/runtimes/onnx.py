"""Exported steps in onnxruntime: state in memory that is bound to inputs and outputs.

A tensor of the state is updated in place, input and output at one address, where the graph shows
that nothing reads the old values after the update (`updated_in_place`). Others have two places, and
the steps go to and fro between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.errors import UnsupportedError
from eventful.export.manifest import Manifest, StateEntry
from eventful.export.manifest_checks import ARRAYS
from eventful.export.pure import Numbers
from eventful.export.runtimes.engine import EXTRA, Engine, Made, Memory
from eventful.surgery.libraries import load

_KINDS: dict[torch.dtype, Any] = {
    one: torch.empty(0, dtype=one).numpy().dtype.type for one in ARRAYS
}
_VIEWS = ("Unsqueeze", "Squeeze", "Reshape", "Identity", "Flatten")


class OnnxEngine(Engine):
    """Graphs in onnxruntime on the CPU."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int | None) -> None:
        super().__init__(folder, manifest, threads)
        self.dense = self._open(manifest.dense)
        self.steps = {one.width: self._open(one.file) for one in manifest.steps}
        self.in_place = set.intersection(
            *(updated_in_place(folder / one.file, manifest.state) for one in manifest.steps)
        )
        self.sizes = {session: _sizes(session) for session in (self.dense, *self.steps.values())}

    def _open(self, file: str) -> Any:
        ort: Any = load("onnxruntime")
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        return ort.InferenceSession(
            str(self.folder / file), options, providers=["CPUExecutionProvider"]
        )

    def memory(self) -> OnnxMemory:
        """See `Engine`."""
        return OnnxMemory(self)


class OnnxMemory(Memory):
    """State in torch tensors whose addresses onnxruntime reads and writes."""

    def __init__(self, engine: OnnxEngine) -> None:
        super().__init__(engine.manifest)
        self._engine = engine
        # The other place of those that are not updated in place.
        self._other = {
            name: torch.empty_like(value)
            for name, value in self.state.items()
            if name not in engine.in_place
        }

    def flush(self, frame: Tensor) -> Made:
        """See `Memory`."""
        manifest = self._engine.manifest
        state = {one.output: self.state[one.name] for one in manifest.written}
        found = self._run(self._engine.dense, {"frame": frame}, state, EXTRA[:1])
        leaves = [found[name] for name in manifest.leaves]
        return Made(leaves, found["step.report"][0].tolist())

    def step(self, frame: Tensor, numbers: Numbers, width: int) -> Made:
        """See `Memory`."""
        manifest = self._engine.manifest
        given = {"frame": frame, **numbers._asdict()}
        given |= {one.input: self.state[one.name] for one in manifest.state}
        state = {
            one.output: self._other.get(one.name, self.state[one.name]) for one in manifest.state
        }
        found = self._run(self._engine.steps[width], given, state, EXTRA)
        for name, value in self._other.items():
            self.state[name], self._other[name] = value, self.state[name]
        leaves = [found[name] for name in manifest.leaves]
        index = found["step.index"][: int(found["step.count"])]
        return Made(leaves, found["step.report"][0].tolist(), index, found["step.score"])

    def _run(
        self, session: Any, given: dict[str, Tensor], state: dict[str, Tensor], extra: Sequence[str]
    ) -> dict[str, Tensor]:
        """Run a graph; its outputs go to `state`, or to new tensors, which are returned."""
        binding = session.io_binding()
        kept = {name: value.contiguous() for name, value in given.items()}
        for name, value in kept.items():
            _bind(binding.bind_input, name, value)
        made: dict[str, Tensor] = {}
        sizes = self._engine.sizes[session]
        for name in (*self._engine.manifest.leaves, *extra):
            shape, dtype = sizes[name]
            made[name] = torch.empty(shape, dtype=dtype)
        for name, value in (*made.items(), *state.items()):
            _bind(binding.bind_output, name, value)
        session.run_with_iobinding(binding)
        return made


def _bind(bind: Any, name: str, value: Tensor) -> None:
    bind(name, "cpu", 0, _KINDS[value.dtype], list(value.shape), value.data_ptr())


def _sizes(session: Any) -> dict[str, tuple[list[int], torch.dtype]]:
    """Shapes and dtypes of a graph's outputs, by name."""
    kinds = {
        "tensor(float)": torch.float32,
        "tensor(float16)": torch.float16,
        "tensor(double)": torch.float64,
        "tensor(int64)": torch.int64,
        "tensor(int32)": torch.int32,
        "tensor(uint8)": torch.uint8,
        "tensor(bool)": torch.bool,
    }
    found = {}
    for one in session.get_outputs():
        if one.type not in kinds or not all(isinstance(side, int) for side in one.shape):
            raise UnsupportedError(
                f"The graph returns {one.name} as {one.type} {one.shape}; a runtime needs a fixed "
                "shape of numbers."
            )
        found[one.name] = (list(one.shape), kinds[one.type])
    return found


def updated_in_place(path: Path, state: Sequence[StateEntry]) -> set[str]:
    """The tensors of the state whose input and output may be one piece of memory.

    Of such a tensor one node makes the new values, and everything else that reads the old ones has
    run before that node, because that node depends on it.
    """
    onnx = load("onnx")
    graph = onnx.load(str(path), load_external_data=False).graph
    makers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return {one.name for one in state if _safe(one, makers, readers)}


def _safe(one: StateEntry, makers: Mapping[str, Any], readers: Mapping[str, list[Any]]) -> bool:
    writer = makers.get(one.output)
    if writer is None or writer.op_type != "ScatterND" or writer.input[0] != one.input:
        return False
    before = _ancestors(writer, makers)
    open_, seen = [one.input], set()
    while open_:
        name = open_.pop()
        for node in readers.get(name, []):
            if node is writer or id(node) in seen:
                continue
            seen.add(id(node))
            if id(node) not in before:
                return False
            if node.op_type in _VIEWS:  # its output is the same memory
                open_ += node.output
    return True


def _ancestors(node: Any, makers: Mapping[str, Any]) -> set[int]:
    """Nodes that have run when this one runs."""
    found: set[int] = set()
    open_ = [node]
    while open_:
        for name in open_.pop().input:
            made = makers.get(name)
            if made is not None and id(made) not in found:
                found.add(id(made))
                open_.append(made)
    return found
