"""Outputs of exported steps: their names and types, and that they belong to the caller."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eventful
from eventful import TopR
from eventful.errors import ArtefactError, UnsupportedError
from eventful.export import Runtime, export, exportable
from eventful.export.aoti import AotiWriter
from eventful.export.outputs import flatten, leaf_names, rebuild
from eventful.export.pure import Numbers
from eventful.export.runtimes.aoti import AotiEngine, AotiMemory
from eventful.export.triton import export_triton
from eventful.export.writing import GraphPlan
from exports import changing, tiny_vit
from tolerances import assert_near

pytest.importorskip("onnxscript")


def headless() -> nn.Module:
    """Returns what its last block returns, which is a tensor of the state, too."""

    class Headless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = tiny_vit()
            self.vit.norm = nn.Identity()

        def forward(self, frame: Tensor) -> Tensor:
            return self.vit.forward_features(frame)

    return Headless().eval()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino", "aoti"])
def test_results_do_not_change_after_they_were_returned(to: str, tmp_path: Path) -> None:
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino", "aoti": "torch"}[to])
    model = eventful.convert(headless(), exportable(TopR(6)))
    export(model, torch.rand(1, 3, 64, 64), tmp_path / "graphs", to=to, r=(6,))
    ours, theirs = Runtime(tmp_path / "graphs", threads=1).stream(), eventful.Stream(model)
    held = []
    for number, frame in enumerate(changing(5)):
        got = ours(frame)
        assert_near(got, theirs(frame), "library", number)
        held.append((got, got.clone()))
    assert not ours.last.flushed
    for got, expected in held:
        assert torch.equal(got, expected)


def test_compiled_code_that_returns_the_state_is_copied() -> None:
    manifest = SimpleNamespace(
        state=[SimpleNamespace(name="a", shape=(4, 2), dtype="float32")], leaves=["out.x", "out.y"]
    )
    extra = [torch.ones(1, 6), torch.arange(3), torch.tensor([2]), torch.rand(4)]

    def step(frame: Tensor, *given: Tensor) -> list[Tensor]:
        state = given[-1]
        state += 1
        return [state[1:], frame * 2, *extra]

    engine: Any = SimpleNamespace(manifest=manifest, one=threading.Lock(), steps={3: step})
    memory = AotiMemory(engine)
    numbers = Numbers(*(torch.zeros(1) for _ in range(3)))
    first, second = (memory.step(torch.ones(1), numbers, 3).leaves[0] for _ in range(2))
    assert first.eq(1).all()
    assert second.eq(2).all()


def test_operators_of_a_detector_are_refused_before_they_are_compiled(tmp_path: Path) -> None:
    from eventful.ops import portable

    class Suppress(nn.Module):
        def forward(self, boxes: Tensor) -> tuple[Tensor]:
            return (portable.suppress(boxes, torch.ones(1, 3, dtype=torch.bool), 0.5),)

    plan = GraphPlan("dense", "a graph", Suppress(), (torch.rand(1, 3, 4),), ("boxes",), ("kept",))
    with pytest.raises(UnsupportedError, match="--to onnx or --to openvino"):
        AotiWriter(tmp_path).add(plan)


def test_a_package_that_cannot_be_loaded_is_an_artefact_error(tmp_path: Path) -> None:
    (tmp_path / "dense.pt2").write_text("no package")
    manifest: Any = SimpleNamespace(dense="dense.pt2", steps=())
    with pytest.raises(ArtefactError, match="cannot be loaded"):
        AotiEngine(tmp_path, manifest, None)


def test_names_of_outputs_are_apart() -> None:
    one, two, three = (torch.tensor([number]) for number in range(3))
    for output in ({"a.b": one, "a": {"b": two, "": three}}, {"": one, "output": two, "x": three}):
        leaves, skeleton = flatten(output)
        names = leaf_names(skeleton)
        assert len(set(names)) == 3
        assert rebuild(skeleton, leaves) == output
    with pytest.raises(UnsupportedError, match="read alike"):
        flatten({1: one, "1": two})


class Returning(nn.Module):
    """A model whose output has another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.vit, self.dtype = tiny_vit(depth=1), dtype

    def forward(self, frame: Tensor) -> Tensor:
        return self.vit(frame).to(self.dtype)


@pytest.mark.parametrize("write", ["onnx", "openvino", "triton"])
def test_types_that_no_runtime_passes_on_are_refused_when_exported(write, tmp_path) -> None:
    model, frame = Returning(torch.bfloat16).eval(), torch.rand(1, 3, 64, 64)
    to = {"openvino": {"to": "openvino", "r": (4,)}, "onnx": {"r": (4,)}, "triton": {"r": 4}}
    with pytest.raises(UnsupportedError, match="output is bfloat16"):
        (export_triton if write == "triton" else export)(model, frame, tmp_path / "x", **to[write])
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_outputs_in_double_precision_are_returned(to: str, tmp_path: Path) -> None:
    model = eventful.convert(Returning(torch.float64).eval(), exportable(TopR(4)))
    export(model, torch.rand(1, 3, 64, 64), tmp_path / "x", to=to, r=(4,))
    stream, theirs = Runtime(tmp_path / "x", threads=1).stream(), eventful.Stream(model)
    for frame in changing(3):
        got = stream(frame)
        assert got.dtype == torch.float64
        assert_near(got.float(), theirs(frame).float(), "library")
