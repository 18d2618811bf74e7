"""Exported steps of every family that is promised, in onnxruntime, against the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eventful
import zoo_timm
import zoo_transformers
from eventful import TopR
from eventful.export import Runtime, export, exportable
from exports import assert_steps_agree
from zoo import Entry

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

TIMM = ("vit", "vit_no_class", "vit_registers", "dinov2", "clip", "siglip", "deit_distilled",
        "eva02", "dinov3", "sam", "beit")  # fmt: skip
TRANSFORMERS = ("vit_own_size", "dinov2", "dinov2_registers", "dinov3", "clip_vision",
                "siglip_vision", "vitdet", "sam_encoder")  # fmt: skip
ENTRIES: dict[str, Entry] = {
    **{f"timm {name}": zoo_timm.ZOO[name] for name in TIMM},
    **{f"hf {name}": zoo_transformers.ZOO[name] for name in TRANSFORMERS},
}


class Called(nn.Module):
    """A model with the call and the output of its entry."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.entry = entry.make(), entry

    def forward(self, frame: Tensor) -> Any:
        return self.entry.output(self.entry.call(self.model, frame))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_steps_of_a_family_agree_with_the_library(name: str, tmp_path: Path) -> None:
    assert_family(name, "onnx", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["openvino", "aoti"])
def test_a_family_with_a_relative_position_agrees_in_every_runtime(to: str, tmp_path: Path) -> None:
    """Its state has tensors of other shapes, too."""
    if to == "openvino":
        pytest.importorskip("openvino")
    assert_family("timm sam", to, tmp_path)


def assert_family(name: str, to: str, tmp_path: Path) -> None:
    """Export a model of a family, and compare its steps with the library's."""
    entry = ENTRIES[name]
    model = eventful.convert(Called(entry).eval(), exportable(TopR(5)))
    height, width = entry.size
    draw = torch.Generator().manual_seed(1)
    example = torch.rand(1, 3, height, width, generator=draw)
    export(model, example, tmp_path / "graphs", to=to, r=(5,))

    def frames() -> Any:
        frame = example
        for _ in range(6):
            frame = frame.clone()
            frame[..., 8:16, 8:16] = torch.rand(1, 3, 8, 8, generator=draw)
            yield frame + 0.01 * torch.randn(frame.shape, generator=draw)

    assert_steps_agree(Runtime(tmp_path / "graphs", threads=1), model, frames())
