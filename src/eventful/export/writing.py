"""Exports a model: graphs of its steps, weights and manifest in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful import __version__, ops
from eventful.config import Config
from eventful.engine.identity import identity_of
from eventful.errors import ConfigError, UnsupportedError
from eventful.export import manifest as manifests
from eventful.export.folder import replacing_folder
from eventful.export.manifest import Manifest, StateEntry, StepFile, dtype_name, graph_outputs
from eventful.export.manifest_checks import ARRAYS
from eventful.export.pure import DenseGraph, Numbers, PureStep, StepGraph, state_values
from eventful.export.runtimes.engine import EXTRA
from eventful.export.subject import DEFAULT_BUCKETS, Subject
from eventful.export.tracing import traced

Tick = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class GraphPlan:
    """One graph to be written.

    Attributes:
        name: without an ending: `dense`, or `step-128`.
        what: in words, for messages and progress.
        inputs, outputs: names.
    """

    name: str
    what: str
    module: nn.Module
    args: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def program(self) -> Any:
        """Traced."""
        return self.traced_as(self.module)

    def traced_as(self, module: nn.Module) -> Any:
        """Another module with the same arguments, traced."""
        return traced(module, self.args, self.what)


def export(
    model: nn.Module,
    example: Tensor,
    folder: str | Path,
    *,
    to: str = "onnx",
    r: Sequence[int] = DEFAULT_BUCKETS,
    config: Config | None = None,
    name: str = "",
    int8: bool = False,
    tick: Tick = lambda what, done, total: None,
) -> Manifest:
    """Write a model as graphs that run without Python: `Runtime` loads the folder.

    Args:
        model: converted, or a model to be converted.
        example: (1, C, height, width) one frame of the size that the graphs will take.
        folder: is made, or replaced if it holds an earlier export and nothing else.
        to: `onnx`, `openvino` or `aoti`.
        r: numbers of tokens; each gets a graph that lets so many pass by their error.
        config: of a model that is not converted yet; `exportable()` if left out.
        name: what the manifest calls the model; its class if left out.
        int8: store the weights of linear layers in 8 bits, where the runtime computes with them.
        tick: is told what is done, and the numbers of graphs done and in all.

    Raises:
        UnsupportedError: the model, its rule or its policy cannot be exported; the message names
            the nearest that can.
        ArtefactError: the folder holds something else, or cannot be written.
        MissingDependencyError: a library is missing; the message is the line that installs it.
    """
    if to not in manifests.TARGETS:
        raise ConfigError(f"to is one of {', '.join(manifests.TARGETS)}; got {to!r}.")
    writer, folder = _writer(to, int8), Path(folder)
    with modes_kept(model):
        subject = Subject.of(model.eval(), example, config)
        with replacing_folder(folder, manifests.is_export) as made:
            return _write(subject, made, to, r, name or type(model).__name__, writer, tick)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Leave every module in the mode, training or not, that it is in."""
    before = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _write(
    subject: Subject,
    folder: Path,
    to: str,
    r: Sequence[int],
    name: str,
    writer: Any,
    tick: Tick,
) -> Manifest:
    widths = subject.widths(r)
    total = len(widths) + 1
    tick("a first step", 0, total)
    pure = PureStep(subject)
    if to != "aoti":
        check_dtypes(pure)
    state = state_of(pure)
    plans = plans_of(pure, state, widths)
    files = []
    with writer(folder, state) as target:
        for done, plan in enumerate(plans):
            tick(plan.what, done, total)
            files.append(target.add(plan))
        options, versions = target.options, target.versions
    tick("the manifest", total, total)
    identity = identity_of(subject.session)
    made = Manifest(
        to=to,
        model=name,
        versions={"eventful": __version__, "torch": str(torch.__version__), **versions},
        config=subject.config.to_dict(),
        identity={
            "fingerprint": identity.fingerprint,
            "rule": identity.rule,
            "settings": identity.settings,
        },
        frame={
            "shape": list(subject.example.shape), "dtype": dtype_name(subject.example.dtype),
        },
        tokens=subject.layout.tokens,
        forced=subject.forced,
        state=state,
        skeleton=pure.skeleton,
        dense=files[0],
        steps=tuple(StepFile(*one) for one in zip(files[1:], widths, strict=True)),
        options=options,
    )  # fmt: skip
    made.write(folder)
    return manifests.read_manifest(folder, verify=False)


def check_dtypes(pure: PureStep) -> None:
    """Raise where a frame, an output or the state is of a type that a runtime cannot pass on."""
    kinds = {f"The output {name}": kind for name, kind in pure.leaves.items()}
    kinds |= {f"The state {one.name}": one.dtype for one in pure.entries}
    kinds |= {"The frame": pure.subject.example.dtype}
    wrong = [f"{what} is {dtype_name(kind)}" for what, kind in kinds.items() if kind not in ARRAYS]
    if wrong:
        known = ", ".join(map(dtype_name, ARRAYS))
        raise UnsupportedError(
            f"{wrong[0]}, which only --to aoti can pass on. onnxruntime, OpenVINO and Triton take "
            f"{known}."
        )


def state_of(pure: PureStep) -> tuple[StateEntry, ...]:
    """The state as graphs name it."""

    def plain(name: str) -> str:
        return name.replace("/", ".")

    return tuple(
        StateEntry(
            one.name, f"state.{plain(one.name)}", f"next.{plain(one.name)}", one.shape,
            dtype_name(one.dtype), one.optional,
        )
        for one in pure.entries
    )  # fmt: skip


def plans_of(pure: PureStep, state: Sequence[StateEntry], widths: Sequence[int]) -> list[GraphPlan]:
    """The graphs to be traced, with arguments as they will be in use."""
    subject = pure.subject
    leaves, example = graph_outputs(pure.skeleton), subject.example
    numbers = Numbers.of(subject.params, 1)
    with torch.no_grad(), ops.use_backend("portable"):
        flushed = pure.run(example, numbers, None, 0).state
    for name, value in pure.initial().items():
        flushed.setdefault(name, value)
    held = state_values(pure.entries, flushed)
    written = [one.output for one in state if not one.optional]
    dense = GraphPlan(
        "dense", "the graph that computes everything", DenseGraph(pure), (example,), ("frame",),
        (*leaves, EXTRA[0], *written),
    )  # fmt: skip
    steps = [
        GraphPlan(
            f"step-{width}", f"the step of {width} tokens", StepGraph(pure, width),
            (example, *numbers, *held), ("frame", *Numbers._fields, *(one.input for one in state)),
            (*leaves, *EXTRA, *(one.output for one in state)),
        )
        for width in widths
    ]  # fmt: skip
    return [dense, *steps]


def _writer(to: str, int8: bool) -> Any:
    """A context manager, made of a folder and the state, that writes graphs."""
    if to == "onnx":
        from eventful.export.onnx import OnnxWriter

        return lambda folder, state: OnnxWriter(folder, int8=int8)
    if to == "openvino":
        from eventful.export.openvino import OpenVinoWriter

        return lambda folder, state: OpenVinoWriter(folder, state, int8=int8)
    if int8:
        raise UnsupportedError(
            "int8 weights are not written for aoti: AOTInductor compiles the weights as they are. "
            "Use --to openvino or --to onnx, or bfloat16: --dtype bfloat16."
        )
    from eventful.export.aoti import AotiWriter

    return lambda folder, state: AotiWriter(folder)
