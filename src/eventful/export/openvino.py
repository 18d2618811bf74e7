"""OpenVINO graphs of a step: the state goes in, and the rows that are written come out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eventful.export import onnx as onnx_graphs
from eventful.export.manifest import StateEntry
from eventful.surgery.libraries import load, openvino_core

INDEX = "write."  # begins the names of outputs that say where rows are written


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
        proto = onnx_graphs.convert(
            plan.program, plan.args, plan.inputs, plan.outputs, runtime="openvino"
        )
        onnx = load("onnx")
        temporary = self.folder / f"{plan.name}.onnx"
        onnx.save(proto, str(temporary))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = openvino_core().read_model(str(temporary))
            rank_stably(model)
            if any(one.input in plan.inputs for one in self.state):
                return_rows(model, self.state)
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


def return_rows(model: Any, state: Sequence[StateEntry]) -> None:
    """Return the rows that a step writes to the state, in place of the whole state.

    OpenVINO copies each variable, and each output, whole in every step: 55 MB for ViT-S at 518 px.
    The runtime writes the rows itself. A tensor of which other things change stays an output.
    """
    ov: Any = load("openvino")
    parameters = {name: one for one in model.get_parameters() for name in one.output(0).get_names()}
    results = {name: one for one in model.get_results() for name in one.input_value(0).get_names()}
    places: dict[str, str] = {}  # names of outputs, by the node that makes the indices
    for one in state:
        written = results[one.output].input_value(0)
        node = written.get_node()
        if not _writes_rows(node, parameters[one.input]):
            continue
        index, rows = node.input_value(1), node.input_value(2)
        maker = f"{index.get_node().get_friendly_name()}:{index.get_index()}"
        if maker not in places:
            places[maker] = f"{INDEX}{len(places)}"
            _add_result(model, ov, index, places[maker])
        _add_result(model, ov, rows, rows_name(one.input, places[maker]))
        if _others(results[one.output]):  # it is an output of the model, too
            continue
        model.remove_result(results[one.output])
    model.validate_nodes_and_infer_types()


def rows_name(name: str, index: str) -> str:
    """The name of the output with the rows of a tensor, which says where they belong."""
    return f"{name}@{index}"


def _writes_rows(node: Any, parameter: Any) -> bool:
    """Whether a node writes whole rows of a tensor of the state (N, D) or (N), and nothing else."""
    if node.get_type_name() != "ScatterNDUpdate":
        return False
    held, index, rows = (node.input_value(place) for place in range(3))
    if held.get_node().get_friendly_name() != parameter.get_friendly_name():
        return False
    (count, last), shape = index.get_shape(), list(held.get_shape())
    return last == 1 and list(rows.get_shape()) == [count, *shape[1:]]


def _add_result(model: Any, ov: Any, source: Any, name: str) -> None:
    """One more output of a graph, under a name of its own."""
    # The name is that of the tensor, which may be another output, too.
    own = ov.opset13.reshape(source, ov.opset13.constant(list(source.get_shape())), False)
    own.output(0).set_names({name})
    model.add_results([ov.opset13.result(own.output(0))])


def _others(result: Any) -> set[str]:
    """Names of outputs that a tensor of the state is besides."""
    return {
        name for name in result.input_value(0).get_names()
        if name.startswith(("out.", "step."))
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
