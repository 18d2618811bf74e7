"""OpenVINO graphs of a step: the state is inside, as OpenVINO's variables."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eventful.export import onnx as onnx_graphs
from eventful.export.manifest import StateEntry
from eventful.surgery.libraries import load


class OpenVinoWriter:
    """Writes graphs in OpenVINO's format, each with a file of weights.

    Args:
        int8: weights of matrix products in 8 bits; they are widened as they are read.
    """

    def __init__(self, folder: Path, state: Sequence[StateEntry], *, int8: bool = False) -> None:
        self.folder, self.state, self.int8 = folder, state, int8
        self.options: dict[str, Any] = {"int8": int8}
        self.versions = {
            name: str(load(name).__version__) for name in ("openvino", "onnx", "onnxscript")
        }

    def __enter__(self) -> OpenVinoWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is open."""

    def add(self, plan: Any) -> str:
        """Write one graph; returns the name of its file."""
        ov: Any = load("openvino")
        proto = onnx_graphs.convert(plan.program, plan.args, plan.inputs, plan.outputs)
        onnx = load("onnx")
        temporary = self.folder / f"{plan.name}.onnx"
        onnx.save(proto, str(temporary))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = ov.Core().read_model(str(temporary))
            rank_stably(model)
            if any(one.input in plan.inputs for one in self.state):
                keep_state(model, self.state)
            if self.int8:
                compress(model)
            file = f"{plan.name}.xml"
            ov.save_model(model, str(self.folder / file), compress_to_fp16=False)
        finally:
            temporary.unlink()
        return file


def rank_stably(model: Any) -> None:
    """Of equal errors the first token wins, as in the library: ONNX's TopK says so, too.

    Reading ONNX loses it.
    """
    ov: Any = load("openvino")
    for node in model.get_ordered_ops():
        if node.get_type_name() == "TopK":
            wanted = node.get_attributes()
            twin = ov.opset11.topk(
                node.input_value(0), node.input_value(1), wanted["axis"], wanted["mode"], "value",
                index_element_type="i64", stable=True,
            )  # fmt: skip
            twin.set_friendly_name(node.get_friendly_name())
            for old, new in zip(node.outputs(), twin.outputs(), strict=True):
                old.replace(new)


def keep_state(model: Any, state: Sequence[StateEntry]) -> None:
    """Turn the inputs and outputs of the state into variables of the graph."""
    ov: Any = load("openvino")
    passes: Any = load("openvino.passes")
    kept: set[str] = set()
    for result in model.get_results():
        kept |= result.input_value(0).get_names()
    parameters = {name: one for one in model.get_parameters() for name in one.output(0).get_names()}
    results = {name: one for one in model.get_results() for name in one.input_value(0).get_names()}
    # A value that is both the model's output and state stays an output by a result of its own.
    shared = [one for one in model.get_results() if len(_ours(one)) > 1]
    for one in shared:
        model.add_results([ov.opset13.result(one.input_value(0))])
    pairs = [(parameters[one.input], results[one.output]) for one in state]
    manager = passes.Manager()
    manager.register_pass(passes.MakeStateful(pairs))
    manager.run_passes(model)


def _ours(result: Any) -> set[str]:
    """Names that we gave to an output."""
    return {
        name for name in result.input_value(0).get_names()
        if name.startswith(("out.", "next.", "step."))
    }  # fmt: skip


def compress(model: Any) -> None:
    """Store the weights of matrix products in 8 bits, with a scale for each column."""
    import numpy as np

    ov: Any = load("openvino")
    ops = ov.opset13
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        constant = node.input_value(1).get_node()
        if constant.get_type_name() != "Constant" or len(constant.get_output_shape(0)) != 2:
            continue
        weights = constant.data
        axis = 1 if node.get_attributes()["transpose_b"] else 0  # of the sum
        scale = np.abs(weights).max(axis=axis, keepdims=True) / 127.0
        scale = np.where(scale == 0, 1.0, scale).astype(weights.dtype)
        small = np.clip(np.round(weights / scale), -127, 127).astype(np.int8)
        wide = ops.convert(ops.constant(small), ov.Type.f32)
        made = ops.multiply(wide, ops.constant(scale))
        node.input(1).replace_source_output(made.output(0))
