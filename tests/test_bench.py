"""The benchmark: it measures what it says, keeps its rows, and refuses what is wrong."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from eventful.adapters import libraries
from eventful.bench import cases, measure, results
from eventful.cli import bench
from eventful.errors import ConfigError, ParityError, UnsupportedError


@pytest.fixture
def small(monkeypatch):
    """A model small enough to measure in a test."""
    timm = libraries.load("timm")

    def make() -> nn.Module:
        return timm.create_model(
            "vit_tiny_patch16_224", img_size=96, depth=2, num_classes=0, global_pool=""
        ).eval()

    monkeypatch.setitem(cases.SUBJECTS, "small", cases.Subject(make, 96, 5, "a test model"))
    return measure.Setting("small", presets=("fast", "exact"), frames=5, compiled=False)


def test_rows_hold_what_was_measured(small):
    rows = measure.measure(dataclasses.replace(small, r=(5, 9)))
    assert [(row.preset, row.r) for row in rows] == [
        ("fast", 5), ("fast", 9), ("exact", 5), ("exact", 9),
    ]  # fmt: skip
    for row in rows:
        assert row.tokens == 37
        assert row.ms > 0
        assert row.dense_best_ms <= row.dense_eager_ms
        assert 0 < row.macs_ratio < 1
        assert 0 < row.feature_error < row.skip_error or row.skip_every == 1
        assert row.state_bytes > 0
    assert rows[0].macs_ratio < rows[1].macs_ratio


def test_a_rule_that_is_not_dense_is_not_timed(small, monkeypatch):
    monkeypatch.setitem(measure.TOLERANCE, torch.float32, -1.0)
    with pytest.raises(ParityError, match="nothing was measured"):
        measure.measure(small)


def test_rows_are_appended_with_their_origin(small, tmp_path, capsys):
    path = tmp_path / "results" / "cpu.csv"
    plan = bench.Plan(models=("small",), presets=("fast",), frames=4, compiled=False)
    for _ in range(2):
        bench.run(plan, path, as_json=True)
        printed = json.loads(capsys.readouterr().out)
    kept = results.read(path)
    assert len(kept) == 2
    wanted = {"model", "preset", "r", "tokens", "batch", "device", "dtype", "dense_best_ms", "ms"}
    wanted |= {"speedup", "macs_ratio", "peak_bytes", "state_bytes", *results.ORIGIN}
    assert wanted <= set(printed[0])
    assert set(kept[0]) == set(printed[0])
    assert kept[0]["torch"] == torch.__version__
    assert kept[0]["device_name"]


def test_nonsense_is_refused(small, monkeypatch):
    with pytest.raises(UnsupportedError, match="vitdet-b-1024"):
        bench.run(bench.Plan(models=("resnet",)), None, as_json=True)
    with pytest.raises(ConfigError, match="tokenwise"):
        bench.run(bench.Plan(models=("small",), presets=("best",)), None, as_json=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="CUDA"):
        bench.run(bench.Plan(models=("small",), device="cuda"), None, as_json=True)


def test_what_does_not_fit_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(bench.os, "sysconf", lambda name: 1)
    with pytest.raises(UnsupportedError, match="GB of state"):
        bench.run(bench.Plan(models=("vit-s-576",)), None, as_json=True)


def test_the_clip_changes_a_square_and_is_noisy_elsewhere():
    frames = cases.clip(100, batch=1)
    first, second = next(frames), next(frames)
    change = (first - second).abs().amax(dim=1)[0]
    assert 0.08 < float((change > 0.2).float().mean()) < 0.2
    assert float((change > 0).float().mean()) > 0.99
