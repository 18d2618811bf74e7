"""`eventful bench export`: what its rows say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eventful.export import Runtime
from eventful.export.measuring import WAYS, Way, measure, step_error
from exports import tiny_vit

pytest.importorskip("onnxscript")


@pytest.mark.slow
def test_a_step_that_does_nothing_has_an_error_of_one(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, frame = tiny_vit(), torch.rand(1, 3, 64, 64)
    made = measure(model, "tiny", frame, 12, [Way("onnx")], frames=5, threads=1, work=tmp_path)
    (row,) = made["rows"]
    assert row["updated"] == 13
    assert row["step_error"] < 0.2, "tokens of equal errors may be ranked otherwise"
    runtime = Runtime(tmp_path / "onnx-f32" / "steps", threads=1)
    take: Any = runtime.load
    outputs: list[torch.Tensor] = []

    def stale(snapshot: bytes) -> Any:
        """A stream that does not see its frame, as one whose steps select nothing."""
        stream = take(snapshot)
        still = torch.zeros(1, 3, 64, 64)
        outputs.append(stream(still))
        return lambda last: outputs[0]

    runtime.load = stale  # type: ignore[method-assign, assignment]
    assert step_error(runtime, model, frame, 12) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_is_measured(way: Way, tmp_path: Path) -> None:
    pytest.importorskip({"aoti": "torch", "onnx": "onnxruntime"}.get(way.to, way.to))
    made = measure(
        tiny_vit(), "tiny", torch.rand(1, 3, 64, 64), 12, [way], frames=5, threads=1, work=tmp_path
    )
    (row,) = made["rows"]
    assert (row["updated"], row["precision"]) == (13, way.precision)
    assert (row["step_error"] is None) is (way.precision != "f32")
    assert (row["step_error"] or 0) < 0.2
