"""Outputs and counts of the paper authors' own code, reproduced frame by frame."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import eventful
from eventful.surgery.adapters import _ADAPTERS
from published import PublishedAdapter, config_from, trunk_from
from tolerances import apart, assert_near

CASES = sorted((Path(__file__).parent / "golden").glob("*.safetensors"))


def read(path):
    with safe_open(str(path), framework="pt") as file:
        meta = json.loads(file.metadata()["meta"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = {k.removeprefix("weight."): v for k, v in tensors.items() if k.startswith("weight.")}
    frames = [(tensors[f"input.{t}"], tensors[f"output.{t}"]) for t in range(meta["frames"])]
    return meta, weights, frames


def test_all_cases_are_here():
    assert len(CASES) == 20


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_outputs_and_counts_match_the_recording(path):
    meta, weights, frames = read(path)
    adapter = eventful.register_adapter(PublishedAdapter(meta["kind"] == "backbone"))
    try:
        model = eventful.convert(trunk_from(meta, weights).eval(), config_from(meta))
        stream = eventful.Stream(model)
        if meta["policy"] is None:  # a dense recording: every frame is a flush
            outputs = []
            for tokens, _ in frames:
                stream.flush()
                outputs.append((stream(tokens), stream.last))
        else:
            outputs = [(stream(tokens), stream.last) for tokens, _ in frames]
    finally:
        _ADAPTERS.remove(adapter)
    half = meta.get("matmul_2_cast") is not None
    for t, ((got, record), (_, expected)) in enumerate(zip(outputs, frames, strict=True)):
        dtype = torch.bfloat16 if half else torch.float32
        assert_near(got, expected, "library", f"frame {t}", dtype=dtype)
        counted = {
            f"{k}_flops": v
            for k, v in record.operations()[0].as_dict().items()
            if k != "total" and v
        }
        recorded = {k: v for k, v in meta["counts"][t].items() if v}
        assert counted == recorded, f"frame {t}"


def test_half_precision_sums_do_not_drift_from_the_recording():
    """Sums rounded in another order than the authors' are 8e-3 away after six frames."""
    (path,) = (path for path in CASES if path.stem == "full_topr_half_av")
    meta, weights, frames = read(path)
    adapter = eventful.register_adapter(PublishedAdapter())
    try:
        stream = eventful.Stream(
            eventful.convert(trunk_from(meta, weights).eval(), config_from(meta))
        )
        outputs = [stream(tokens) for tokens, _ in frames]
    finally:
        _ADAPTERS.remove(adapter)
    assert apart(outputs[-1], frames[-1][1]) < 2e-3
