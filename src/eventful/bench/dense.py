"""The dense paths of a device: eager, CUDA graph, compiled and others, each checked and timed."""

from __future__ import annotations

import copy
import importlib.util
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from eventful.bench.timing import Forward, gap, timed, wait
from eventful.models.blocks import at_size, sharing_weights
from eventful.surgery import libraries

TRIES = {"cpu": (1, 1), "cuda": (3, 5)}  # calls before the trial, calls in it
TOO_FAR = 0.1  # relative error beyond which a path does not compute the same function


@dataclass
class DensePaths:
    """Dense paths by name, with the milliseconds of each one's trial.

    Attributes:
        notes: a line for each path that is not available, with the reason.
    """

    runs: dict[str, Forward] = field(default_factory=dict)
    trial_ms: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _itself(output: Any) -> Tensor:
    assert isinstance(output, Tensor)
    return output


@dataclass(frozen=True)
class DenseSpec:
    """The model and options from which dense paths are built.

    Attributes:
        mode: of `torch.compile`; "" for the default of the device.
        parts: names of the modules to compile each by itself; none for the model as a whole.
        read: a tensor of the model's output to compare paths by.
    """

    model: nn.Module
    example: Tensor
    compiled: bool = True
    mode: str = ""
    parts: tuple[str, ...] = ()
    read: Callable[[Any], Tensor] = _itself

    @property
    def cuda(self) -> bool:
        """Whether the model runs on a GPU."""
        return self.example.is_cuda

    def compile(self, model: nn.Module) -> Callable[[Tensor], Any]:
        """The model, or its parts, through `torch.compile`, for the example's shape alone."""
        usual = "max-autotune-no-cudagraphs" if self.cuda else "default"
        build = partial(torch.compile, mode=self.mode or usual, dynamic=False)
        if not self.parts:
            made: Callable[[Tensor], Any] = build(model)
            return made
        whole = sharing_weights(model)
        for name in self.parts:
            holder, _, last = name.rpartition(".")
            setattr(whole.get_submodule(holder), last, build(whole.get_submodule(name)))
        return whole


def dense_paths(
    spec: DenseSpec, tick: Callable[[str], None] = lambda _: None, *, reset: bool = True
) -> DensePaths:
    """Every path this device offers, in the example's precision or a lower one.

    A path that cannot be built, or differs from eager, is left out with a note. This package's own
    models resize their position tables once, for the example's size, as they do in a stream.

    Args:
        reset: forget what was compiled before, or models of earlier runs would use up the limit of
            recompilations. Paths from before are not valid any more: a CUDA graph of compiled code
            reads memory that goes with it.
    """
    found = DensePaths()
    height, width = spec.example.shape[-2:]
    spec = replace(spec, model=at_size(spec.model, (height, width)))
    if spec.compiled and reset:
        torch.compiler.reset()
    expected = spec.read(_no_grad(spec.model)(spec.example)).clone()
    for name, build in _recipes(spec, found):
        tick(f"building dense {name}")
        try:
            run = build()
            difference = gap(spec.read(run(spec.example)), expected)
            if not difference <= TOO_FAR:
                found.notes.append(f"dense {name} left out: differs from eager by {difference:.1e}")
                continue
            found.trial_ms[name] = _trial(run, spec.example)
            found.runs[name] = run
        except Exception as error:  # compilers raise many types; the other paths remain
            found.notes.append(f"dense {name} failed: {_brief(error)}")
            _recover(spec.example.device)
    return found


def _recipes(spec: DenseSpec, found: DensePaths) -> Iterator[tuple[str, Callable[[], Forward]]]:
    """Names and builders, in order; some depend on the trials of earlier ones."""
    yield "eager", lambda: _no_grad(spec.model)
    if spec.cuda:
        yield "graph", lambda: _graphed(spec.model, spec.example)
    if spec.compiled:
        inner = spec.compile(spec.model)
        yield "compile", lambda: _no_grad(inner)
        if spec.cuda and "compile" in found.runs:
            yield "compile+graph", lambda: _graphed(inner, spec.example)
    if not spec.cuda:
        yield from _cpu_recipes(spec, found)


def _cpu_recipes(spec: DenseSpec, found: DensePaths) -> Iterator[tuple[str, Callable[[], Forward]]]:
    if spec.example.dtype == torch.float32 and not _bf16_pays():
        found.notes.append("dense bf16 not measured: this CPU multiplies slower in it")
    elif spec.example.dtype == torch.float32:
        half = copy.deepcopy(spec.model).to(torch.bfloat16)
        yield "bf16", lambda: _cast(_no_grad(half), torch.bfloat16)
        trial = found.trial_ms
        if spec.compiled and trial.get("bf16", float("inf")) < 1.2 * trial["eager"]:
            compiled_half = spec.compile(half)
            yield "compile-bf16", lambda: _cast(_no_grad(compiled_half), torch.bfloat16)
    if importlib.util.find_spec("openvino") is None:
        found.notes.append("dense openvino not measured: not installed")
        return
    for hint in _openvino_precisions(spec.example.dtype):
        build = _openvino_parts if spec.parts else _openvino
        yield f"openvino-{hint}", partial(build, spec, hint)


@lru_cache(maxsize=1)
def _bf16_pays() -> bool:
    """Whether this CPU multiplies in bf16 at nearly the speed of fp32, or faster."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(512, 512, dtype=dtype)
        seconds[dtype] = min(timed(lambda x: x @ x, a)[1] for _ in range(3))
    return seconds[torch.bfloat16] < 1.5 * seconds[torch.float32]


def _trial(run: Forward, example: Tensor) -> float:
    before, calls = TRIES[example.device.type]
    for _ in range(before):
        run(example)
    return statistics.median(timed(run, example)[1] for _ in range(calls))


def _no_grad(model: Callable[[Tensor], Any]) -> Forward:
    def run(frame: Tensor) -> Any:
        with torch.no_grad():
            return model(frame)

    return run


def _cast(run: Forward, dtype: torch.dtype) -> Forward:
    """A path in another precision; floating-point results come back in that of the frame."""

    def cast(frame: Tensor) -> Any:
        def back(part: Any) -> Any:
            floats = isinstance(part, Tensor) and part.is_floating_point()
            return part.to(frame.dtype) if floats else part

        return pytree.tree_map(back, run(frame.to(dtype)))

    return cast


def _graphed(model: Callable[[Tensor], Any], example: Tensor) -> Forward:
    """A CUDA graph of the forward pass over a static input."""
    static = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        output = model(static)

    def run(frame: Tensor) -> Any:
        static.copy_(frame)
        graph.replay()
        return output

    run.model = model  # type: ignore[attr-defined]  # its constants are read by the graph
    return run


def _openvino_precisions(dtype: torch.dtype) -> list[str]:
    """Precisions OpenVINO supports here, none finer than the row's own."""
    core = libraries.openvino_core()
    native = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return ["f32"] * (dtype == torch.float32) + ["bf16"] * native


def _openvino(spec: DenseSpec, hint: str) -> Forward:
    return _no_grad(_OpenVinoPart(spec.model, (spec.example,), hint))


def _openvino_parts(spec: DenseSpec, hint: str) -> Forward:
    """The model with its parts in OpenVINO; what lies between them runs in torch."""
    whole = sharing_weights(spec.model)
    parts = [whole.get_submodule(name) for name in spec.parts]
    called: dict[nn.Module, tuple[Any, ...]] = {}

    def note(part: nn.Module, given: tuple[Any, ...]) -> None:
        called.setdefault(part, given)

    hooks = [part.register_forward_pre_hook(note) for part in parts]
    _no_grad(whole)(spec.example)
    for hook in hooks:
        hook.remove()
    made = [_OpenVinoPart(part, called[part], hint) for part in parts]
    for part, ready in zip(parts, made, strict=True):
        # Its other attributes may be read, too. A module would not take the method's place.
        part.forward = partial(ready)
    return _no_grad(whole)


class _Flat(nn.Module):
    """A module as a function of tensors that gives some of its tensors."""

    def __init__(self, module: nn.Module, given: pytree.TreeSpec, gives: list[int]) -> None:
        super().__init__()
        self.module, self.given, self.gives = module, given, gives

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        made = pytree.tree_leaves(self.module(*pytree.tree_unflatten(flat, self.given)))
        return tuple(made[place] for place in self.gives)


class _OpenVinoPart(nn.Module):
    """A module compiled by OpenVINO for the shapes of an example; it takes and gives the same."""

    def __init__(self, module: nn.Module, example: tuple[Any, ...], hint: str) -> None:
        super().__init__()
        ov: Any = libraries.load("openvino")
        flat, given = pytree.tree_flatten(example)
        other = pytree.tree_unflatten([part + 1 for part in flat], given)
        with torch.no_grad():
            self.made, self.tree = pytree.tree_flatten(module(*example))
            others = pytree.tree_leaves(module(*other))
        # What does not depend on the input, such as anchors, need not be computed again.
        pairs = enumerate(zip(self.made, others, strict=True))
        self.varies = [place for place, (one, two) in pairs if not torch.equal(one, two)]
        full = _Flat(copy.deepcopy(module).float(), given, self.varies)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer warns about every Python number
            graph = torch.jit.trace(full, tuple(part.float() for part in flat), check_trace=False)
            traced = ov.convert_model(graph, input=[part.shape for part in flat])
        options = {
            "INFERENCE_PRECISION_HINT": hint,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        self.ready = libraries.openvino_core().compile_model(traced, "CPU", options)

    def forward(self, *given: Any) -> Any:
        made = self.ready([part.float().numpy() for part in pytree.tree_leaves(given)])
        parts = list(self.made)
        for place, values in zip(self.varies, made.values(), strict=True):
            parts[place] = torch.from_numpy(values).to(parts[place].dtype)
        return pytree.tree_unflatten(parts, self.tree)


def _brief(error: Exception) -> str:
    """The first line of an error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text[:160]


def _recover(device: torch.device) -> None:
    """Clear the error of a failed capture, which the next call would report otherwise."""
    try:
        wait(device)
    except RuntimeError:
        wait(device)
