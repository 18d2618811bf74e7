"""ONNX graphs of a step, with one file of weights for all of them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.errors import UnsupportedError
from eventful.export.rewrites import narrow_sorts, suit_onnxruntime
from eventful.surgery.libraries import load

OPSET = 20
_LEAST = 1024  # bytes; smaller constants stay in the graph, where optimizers read them


def convert(
    program: Any,
    args: Sequence[Tensor],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    runtime: str = "onnxruntime",
) -> Any:
    """An ONNX model of a traced step.

    Args:
        runtime: `onnxruntime`, which gets rewrites of its own, or another one.
    """
    load("onnxscript")
    if runtime == "onnxruntime":
        suit_onnxruntime(program.graph_module.graph)
    narrow_sorts(program.graph_module.graph)
    program.graph_module.recompile()
    try:
        with _quiet():
            made = torch.onnx.export(
                program,
                tuple(args),
                input_names=list(inputs),
                output_names=list(outputs),
                opset_version=OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
                custom_translation_table=_translations(),
            )
    except Exception as error:  # the exporter has many errors, with pages of text
        line = str(error.__cause__ or error).strip().splitlines()[-1][:300]
        raise UnsupportedError(
            f"torch.onnx cannot express this step ({type(error).__name__}: {line}). `--to aoti` "
            "compiles whatever torch.export traces."
        ) from error
    assert made is not None
    return _bare(made.model_proto)


def _bare(model: Any) -> Any:
    """A model without the stack traces and types that the exporter notes at every value."""
    for part in (model, model.graph, *model.graph.node, *model.graph.initializer):
        del part.metadata_props[:]
    for one in (*model.graph.input, *model.graph.output):
        del one.metadata_props[:]
    del model.graph.value_info[:]
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter prints of its progress."""
    import warnings

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [one.level for one in loggers]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        for one in loggers:
            one.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for one, level in zip(loggers, levels, strict=True):
                one.setLevel(level)


def _translations() -> dict[Any, Any]:
    """Operations that torch.onnx does not know, or spells in a slow way."""
    op: Any = load("onnxscript").opset20
    aten: Any = torch.ops.aten

    def sort(x: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        """Of equal numbers ONNX's TopK puts the one with the lower index first: stable."""
        count = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
        return op.TopK(x, count, axis=dim, largest=int(descending), sorted=1)

    def hypot(x: Any, y: Any) -> Any:
        return op.Sqrt(op.Add(op.Mul(x, x), op.Mul(y, y)))

    return {aten.sort.stable: sort, aten.hypot.default: hypot, **_detection(op)}


def _detection(op: Any) -> dict[Any, Any]:
    """NMS and RoIAlign, which ONNX has as operators."""
    import eventful.ops.portable  # noqa: F401 - registers them

    def suppress(boxes: Any, valid: Any, threshold: float) -> Any:
        shape = op.Shape(valid)
        count = op.Gather(shape, op.Constant(value_ints=[1]))
        zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
        last = op.Squeeze(count)
        # The first boxes are the best: scores fall, and those of boxes that do not count are 0.
        ranks = op.Cast(op.Range(last, zero, op.Constant(value_int=-1)), to=1)
        scores = op.Unsqueeze(op.Mul(op.Cast(valid, to=1), ranks), op.Constant(value_ints=[1]))
        limits = [op.Constant(value_floats=[value]) for value in (threshold, 0.5)]
        kept = op.NonMaxSuppression(boxes, scores, count, *limits)
        places = op.Gather(kept, op.Constant(value_ints=[0, 2]), axis=1)
        found = op.Expand(one, op.Gather(op.Shape(kept), op.Constant(value_ints=[0])))
        blank = op.Expand(zero, shape)
        return op.Cast(op.ScatterND(blank, places, found), to=9)

    def align(features: Any, boxes: Any, output: int, scale: float) -> Any:
        count = op.Gather(op.Shape(boxes), op.Constant(value_ints=[0]))
        images = op.Expand(op.Constant(value_int=0), count)
        return op.RoiAlign(
            features, boxes, images, coordinate_transformation_mode="half_pixel", mode="avg",
            output_height=output, output_width=output, sampling_ratio=0, spatial_scale=scale,
        )  # fmt: skip

    mine: Any = torch.ops.eventful
    return {mine.suppress.default: suppress, mine.align_level.default: align}


class WeightsFile:
    """One file that holds every large constant of several graphs once.

    Args:
        path: the file to be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._known: dict[str, tuple[int, int]] = {}
        self.shared = 0  # bytes that graphs share with one before them

    def take(self, model: Any) -> None:
        """Move the large constants of an ONNX model into the file."""
        onnx = load("onnx")
        for tensor in model.graph.initializer:
            data = tensor.raw_data
            if len(data) < _LEAST:
                continue
            offset, length = self._place(data)
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            del tensor.external_data[:]
            for key, value in (
                ("location", self.path.name), ("offset", str(offset)), ("length", str(length)),
            ):  # fmt: skip
                entry = tensor.external_data.add()
                entry.key, entry.value = key, value

    def _place(self, data: bytes) -> tuple[int, int]:
        key = hashlib.sha256(data).hexdigest()
        if key in self._known:
            self.shared += len(data)
        else:
            # Runtimes map the file into memory, page by page.
            self._file.write(b"\0" * (-self._file.tell() % 4096))
            self._known[key] = (self._file.tell(), len(data))
            self._file.write(data)
        return self._known[key]

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


class OnnxWriter:
    """Writes graphs as ONNX files that share one file of weights.

    Args:
        int8: weights of linear layers in 8 bits, with activations quantised as they come.
    """

    def __init__(self, folder: Path, *, int8: bool = False) -> None:
        self.folder, self.int8 = folder, int8
        self.options: dict[str, Any] = {"int8": int8}
        self.versions = {name: str(load(name).__version__) for name in ("onnx", "onnxscript")}
        self._weights = WeightsFile(folder / "weights.bin")

    def __enter__(self) -> OnnxWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self._weights.close()

    def add(self, plan: Any) -> str:
        """Write one graph; returns the name of its file."""
        onnx = load("onnx")
        model = convert(plan.program, plan.args, plan.inputs, plan.outputs)
        if self.int8:
            model = quantised(model)
        self._weights.take(model)
        file = f"{plan.name}.onnx"
        onnx.save(model, str(self.folder / file))
        return file


def quantised(model: Any) -> Any:
    """The same model with the weights of its matrix products in 8 bits, one scale per column."""
    tools = load("onnxruntime.quantization")
    onnx = load("onnx")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.onnx"))
        tools.quantize_dynamic(
            model,
            path,
            weight_type=tools.QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=["MatMul"],
            extra_options={"MatMulConstBOnly": True},
        )
        return onnx.load(path)
