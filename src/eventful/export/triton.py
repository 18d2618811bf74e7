"""A model repository for Triton Inference Server, with the state kept by the server.

Triton keeps the state of each sequence itself (implicit state, `sequence_batching`), one for each
model. So the repository has one model, whose graph holds both the step and the dense one: the
server says at which request a sequence starts, and the graph then recomputes everything, as it
does after a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful.config import Config
from eventful.errors import ArtefactError, ConfigError
from eventful.export.folder import replacing_folder
from eventful.export.manifest import StateEntry, graph_outputs
from eventful.export.onnx import OPSET, WeightsFile, convert
from eventful.export.pure import Numbers, PureStep
from eventful.export.runtimes.engine import EXTRA
from eventful.export.subject import Subject
from eventful.export.triton_config import KINDS, START, Port, config_text, parse_config
from eventful.export.writing import Tick, check_dtypes, modes_kept, plans_of, state_of
from eventful.surgery.libraries import load

CONFIG, VERSION = "config.pbtxt", "1"
_TURN = StateEntry("turn", "state.turn", "next.turn", (1,), "int64", False)


def export_triton(
    model: nn.Module,
    example: Tensor,
    folder: str | Path,
    *,
    r: int,
    config: Config | None = None,
    name: str = "eventful",
    tick: Tick = lambda what, done, total: None,
) -> Path:
    """Write a model repository of one model; returns the folder of the model.

    Args:
        folder: the repository; a model of this name in it is replaced if we wrote it.
        r: tokens that pass by their error, in the only step of the model.
        config: see `export`; the policy cannot be changed afterwards.
        name: of the model in the server.
    """
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"The name of a Triton model has letters, digits, - and _; got {name!r}.")
    target = Path(folder) / name
    with modes_kept(model):
        subject = Subject.of(model.eval(), example, config)
        with replacing_folder(target, _is_ours) as made:
            _write(subject, made, r, name, tick)
    return target


def _write(subject: Subject, folder: Path, r: int, name: str, tick: Tick) -> None:
    pure = PureStep(subject)
    check_dtypes(pure)
    state = state_of(pure)
    plans = plans_of(pure, state, subject.widths([r]))
    parts = []
    for done, plan in enumerate(plans):
        tick(plan.what, done, len(plans) + 1)
        parts.append(convert(plan.program, plan.args, plan.inputs, plan.outputs))
    tick("the repository", len(plans), len(plans) + 1)
    leaves = graph_outputs(pure.skeleton)
    graph = joined(parts[0], parts[1], state, leaves, Numbers.of(subject.params, 1))
    text = config_text(name, *_ports(graph, state), [*state, _TURN])
    parse_config(text)
    version = folder / VERSION
    version.mkdir()
    weights = WeightsFile(version / "weights.bin")
    weights.take(graph)
    weights.close()
    load("onnx").save(graph, str(version / "model.onnx"))
    (folder / CONFIG).write_text(text)


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds a model that we wrote, and nothing else."""
    known = {CONFIG, VERSION, f"{VERSION}/model.onnx", f"{VERSION}/weights.bin"}
    if not {str(path.relative_to(folder)) for path in folder.rglob("*")} <= known:
        return False
    try:
        about = parse_config((folder / CONFIG).read_text(encoding="utf-8"))
        states = about["sequence_batching"]["state"]
        return any(one["input_name"] == _TURN.input for one in states)
    except (ArtefactError, KeyError, TypeError, ValueError, OSError):
        return False


def _ports(graph: Any, state: Sequence[StateEntry]) -> tuple[list[Port], list[Port]]:
    """Inputs and outputs that are not state; the server feeds `start` by itself."""
    own = {one.input for one in (*state, _TURN)} | {one.output for one in (*state, _TURN)}
    kinds = {load("onnx").TensorProto.DataType.Value(_ONNX[name]): name for name in KINDS}

    def ports(values: Any) -> list[Port]:
        return [
            Port(
                one.name, KINDS[kinds[one.type.tensor_type.elem_type]],
                tuple(side.dim_value for side in one.type.tensor_type.shape.dim),
            )
            for one in values if one.name not in own and one.name != START
        ]  # fmt: skip

    return ports(graph.graph.input), ports(graph.graph.output)


_ONNX = {"float32": "FLOAT", "float16": "FLOAT16", "float64": "DOUBLE", "int64": "INT64",
         "int32": "INT32", "uint8": "UINT8", "bool": "BOOL"}  # fmt: skip


def joined(
    dense: Any, step: Any, state: Sequence[StateEntry], leaves: Sequence[str], numbers: Numbers
) -> Any:
    """One ONNX model of both graphs: dense where a sequence starts or the scene was cut.

    A turn of -1 means that the next request starts over: this frame, or its output, was not finite.
    """
    onnx: Any = load("onnx")
    node, from_array = onnx.helper.make_node, onnx.numpy_helper.from_array
    given = {name: f"now.{name}" for name in Numbers._fields}
    step_nodes, step_weights = _inner(step, "step_", given)
    dense_nodes, dense_weights = _inner(dense, "dense_", {})
    values = {one.name: one for one in step.graph.output}
    kept = [*leaves, EXTRA[0], *(one.output for one in state)]
    constants = [
        from_array(value.numpy(), given[name])
        for name, value in numbers._asdict().items() if name != "turn"
    ]  # fmt: skip
    constants += [from_array(torch.tensor([number]).numpy(), f"number.{number}")
                  for number in (-1, 0, 1, 2, 4)]  # fmt: skip
    nothing = _nothing(values, state, leaves)
    first = node(
        "If", ["starts"], [f"step.{name}" for name in kept],
        then_branch=_branch("start", nothing, [], kept, values, "blank."),
        else_branch=_branch("step", step_nodes, [], kept, values, "step_"),
    )  # fmt: skip
    written = {one.name for one in dense.graph.output}
    passed = [node("Identity", [f"step.{name}"], [f"dense_{name}"])
              for name in kept if name not in written]  # fmt: skip
    through = [node("Identity", [f"step.{name}"], [f"same.{name}"]) for name in kept]
    second = node(
        "If", ["cut"], kept,
        then_branch=_branch("dense", [*dense_nodes, *passed], [], kept, values, "dense_"),
        else_branch=_branch("go_on", through, [], kept, values, "same."),
    )  # fmt: skip
    nodes = [
        node("Cast", [START], ["asked"], to=onnx.TensorProto.BOOL),
        node("Less", [_TURN.input, "number.0"], ["lost"]),
        node("Or", ["asked", "lost"], ["starts.one"]),
        node("Squeeze", ["starts.one", "number.0"], ["starts"]),
        node("Add", [_TURN.input, "number.1"], [given["turn"]]),
        first,
        *_column(f"step.{EXTRA[0]}", 1, "finite"),
        *_column(f"step.{EXTRA[0]}", 2, "far"),
        node("And", ["far", "finite"], ["cut"]),  # an error without bound looks like a cut
        second,
        *_column(EXTRA[0], 4, "sound"),
        node("And", ["finite", "sound"], ["good"]),
        node("Where", ["cut", "number.0", given["turn"]], ["good.turn"]),
        node("Where", ["good", "good.turn", "number.-1"], [_TURN.output]),
    ]
    return _model(step, nodes, kept, values, state, [*constants, *step_weights, *dense_weights])


def _column(report: str, number: int, name: str) -> list[Any]:
    """Nodes for one column of a report as a boolean without axes."""
    onnx: Any = load("onnx")
    node = onnx.helper.make_node
    return [
        node("Gather", [report, f"number.{number}"], [f"{name}.column"], axis=1),
        node("Squeeze", [f"{name}.column"], [f"{name}.one"]),
        node("Cast", [f"{name}.one"], [name], to=onnx.TensorProto.BOOL),
    ]


def _model(
    step: Any, nodes: list[Any], kept: list[str], values: Any, state: Sequence[StateEntry],
    constants: list[Any],
) -> Any:  # fmt: skip
    onnx: Any = load("onnx")

    def value(name: str, kind: str, shape: Sequence[int]) -> Any:
        return onnx.helper.make_tensor_value_info(
            name, onnx.TensorProto.DataType.Value(_ONNX[kind]), list(shape)
        )

    own = {one.input for one in state} | {"frame"}
    inputs = [one for one in step.graph.input if one.name in own]
    inputs += [value(START, "int32", (1,)), value(_TURN.input, "int64", (1,))]
    outputs = [values[name] for name in kept] + [value(_TURN.output, "int64", (1,))]
    graph = onnx.helper.make_graph(nodes, "eventful", inputs, outputs, constants)
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=step.ir_version
    )


def _branch(
    name: str, nodes: list[Any], constants: list[Any], kept: Sequence[str], values: Any, prefix: str
) -> Any:
    """A branch of an If whose outputs have a prefix."""
    onnx: Any = load("onnx")
    outputs = []
    for one in kept:
        made = onnx.ValueInfoProto()
        made.CopyFrom(values[one])
        made.name = prefix + one
        outputs.append(made)
    return onnx.helper.make_graph(nodes, name, [], outputs, constants)


def _inner(model: Any, prefix: str, given: dict[str, str]) -> tuple[list[Any], list[Any]]:
    """The nodes and constants of a model, with names of their own; inputs keep theirs."""
    kept = {one.name: given.get(one.name, one.name) for one in model.graph.input}
    nodes, constants = [], []
    for one in model.graph.node:
        made = type(one)()
        made.CopyFrom(one)
        for names in (made.input, made.output):
            for at, name in enumerate(names):
                names[at] = kept.get(name, prefix + name) if name else name
        made.name = prefix + made.name
        nodes.append(made)
    for tensor in model.graph.initializer:
        made = type(tensor)()
        made.CopyFrom(tensor)
        made.name = prefix + tensor.name
        constants.append(made)
    return nodes, constants


def _nothing(values: Any, state: Sequence[StateEntry], leaves: Sequence[str]) -> list[Any]:
    """Nodes for the first request of a sequence: a report of a cut, and blank values."""
    onnx: Any = load("onnx")
    make, optional = onnx.helper.make_node, {one.output for one in state if one.optional}
    nodes = []
    for name in (*leaves, EXTRA[0], *(one.output for one in state)):
        kind = values[name].type.tensor_type
        shape = [side.dim_value for side in kind.shape.dim]
        if name == EXTRA[0]:
            fill: Any = onnx.helper.make_tensor("v", kind.elem_type, [1], [1])
        else:
            content = [float("nan") if name in optional else 0]
            fill = onnx.helper.make_tensor("v", kind.elem_type, [1], content)
        sides = onnx.helper.make_tensor("s", onnx.TensorProto.INT64, [len(shape)], shape)
        nodes += [
            make("Constant", [], [f"shape.{name}"], value=sides),
            make("ConstantOfShape", [f"shape.{name}"], [f"blank.{name}"], value=fill),
        ]
    return nodes
