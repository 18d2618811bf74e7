"""The benchmark: it measures what it says, and refuses what is wrong."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import dataclasses
import time

import pytest
import torch

import tiny_models
from benching import small, tiny_vit  # noqa: F401
from eventful import StreamBatch
from eventful.bench import cases, dense, measure, memory, parity, timing
from eventful.cli import bench
from eventful.errors import ParityError
from eventful.paper.evaluate.runtime import Plan
from tolerances import assert_near


def test_rows_hold_what_was_measured(small):
    setting = dataclasses.replace(small, presets=("fast", "exact", "paper"), r=(5, 9))
    rows = measure.measure(setting)
    assert [(row.preset, row.r) for row in rows] == [
        (preset, r) for preset in ("fast", "exact", "paper") for r in (5, 9)
    ]
    for row in rows:
        assert (row.tokens, row.depth, row.batch, row.frames) == (37, 2, 1, 5)
        assert row.ms_p20 <= row.ms <= row.ms_p80
        assert min(row.ms_pipelined, row.flush_ms, row.speedup, row.peak_bytes) > 0
        assert "eager" in row.dense_ms
        assert "bf16" in row.dense_ms or any("bf16 not measured" in note for note in row.notes)
        assert row.dense_best_ms == row.dense_ms[row.dense_best] <= row.dense_eager_ms
        assert row.dense_pipelined_ms / row.ms_pipelined == row.speedup_pipelined
        assert row.skip_ms == row.dense_best_ms / row.skip_every
        assert 0 < row.macs_ratio < 1
        assert 0 < row.feature_error < row.skip_error or row.skip_every == 1
        assert row.state_bytes > 0
    by = {(row.preset, row.r): row for row in rows}
    assert by["fast", 5].macs_ratio < by["fast", 9].macs_ratio
    assert by["fast", 5].paper_ms == by["exact", 5].paper_ms == by["paper", 5].ms


def test_several_streams_are_a_batch_of_streams(small, monkeypatch):
    stepped = []
    step = StreamBatch.__call__
    monkeypatch.setattr(
        StreamBatch, "__call__", lambda self, frame: stepped.append(len(self)) or step(self, frame)
    )
    row = measure.measure(dataclasses.replace(small, presets=("fast",), batch=2))[0]
    assert row.batch == 2
    assert set(stepped) == {2}
    assert row.paper_ms is None


def test_flushes_are_timed_apart_and_steady_frames_are_steady(small, monkeypatch):
    flushed = []
    time_one = timing.timed

    def spy(run, frame):
        result = time_one(run, frame)
        if run.record is not None:
            flushed.append(run.record.flushed[0])
        return result

    monkeypatch.setattr(measure, "timed", spy)
    measure.measure(dataclasses.replace(small, presets=("fast",)))
    assert flushed == [True] + [False] * 5


def test_each_frame_begins_with_another_contender():
    assert ["".join(timing.in_turn("abc", turn)) for turn in range(4)] == [
        "abc", "bca", "cab", "abc",
    ]  # fmt: skip


def test_pipelined_time_is_per_frame(monkeypatch):
    clock = iter([1.0, 1.4])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    frames = [torch.zeros(1)] * 4
    assert timing.pipelined(lambda frame: frame, frames) == pytest.approx(100.0)


def test_peak_memory_is_what_was_held_at_once():
    def call():
        first, second = torch.zeros(10**6), torch.zeros(10**6)
        del first, second
        return torch.zeros(10**6)

    assert 8e6 <= memory.peak_of(call, torch.device("cpu")) < 8.1e6


class Broken:
    """A stream that computes something else than it should, in a way to be caught."""

    def __init__(self, stream, how):
        self.stream, self.how = stream, how

    def __call__(self, frame):
        output = self.stream(frame).clone()
        record = self.stream.last
        if not record.flushed[0]:
            self.how(output, record)
        return output

    def __getattr__(self, name):
        return getattr(self.stream, name)


def everything(output, record):
    output *= 1.01


def selected_row(output, record):
    if not record.mask.all():
        output[record.mask] += 0.1


def kept_row(output, record):
    output[0, (~record.mask[0]).nonzero()[:1]] += 1.0


def selection(output, record):
    """Claims to have updated other tokens, as many; its rows come out as if it had."""
    mask = next(iter(record.gates.values())).mask
    mask.copy_(mask.roll(1, dims=1))


def short(output, record):
    next(iter(record.gates.values())).mask[:, 5:] = False


BREAKS = {
    "every token selected": everything,
    "selected rows": selected_row,
    "kept rows": kept_row,
    "most changed tokens left out": selection,
    "tokens selected, 20 asked": short,
}


@pytest.mark.parametrize("message", BREAKS)
def test_what_is_not_in_parity_is_not_timed(small, monkeypatch, message):
    how = BREAKS[message]
    opened = parity.open_stream

    def broken(model, config, batch, *, maps=False):
        stream = opened(model, config, batch, maps=True)
        whole = config.policy.r == parity.EVERYTHING
        return Broken(stream, how) if whole == (how is everything) else stream

    monkeypatch.setattr(parity, "open_stream", broken)
    monkeypatch.setattr(measure, "timed", lambda *_: pytest.fail("timed all the same"))
    with pytest.raises(ParityError, match=message) as caught:
        measure.measure(dataclasses.replace(small, r=(20,)))
    assert "small" in str(caught.value)


def test_nan_while_timing_is_refused(small, monkeypatch):
    monkeypatch.setattr(measure, "gap", lambda got, expected: float("nan"))
    with pytest.raises(ParityError, match="NaN"):
        measure.measure(small)


@pytest.mark.parametrize("model", ["small", "windowed"])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_preset_is_in_parity(small, model, batch, capsys):
    plan = bench.Plan(
        models=(model,), presets=("fast", "exact", "paper", "tokenwise", "stgt"), r=(1, 7, 36),
        batches=(batch,),
    )  # fmt: skip
    bench.verify(plan, as_json=False)
    assert "in parity" in capsys.readouterr().out


def test_half_precision_is_in_parity_too(small):
    measure.check(dataclasses.replace(small, dtype="bfloat16"))


def test_a_busy_machine_is_remarked_upon():
    assert measure._unsteady([10.0, 11.0, 10.5, 10.0, 12.0]) == []
    assert "10 to 40 ms" in measure._unsteady([10.0, 10.0, 10.0, 40.0, 40.0, 40.0])[0]


@pytest.fixture
def spec():
    torch.manual_seed(0)
    return dense.DenseSpec(tiny_vit(32, 1), torch.rand(1, 3, 32, 32), compiled=True)


def test_a_dense_path_that_fails_is_noted(spec, monkeypatch):
    def fail(frame):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(dense.DenseSpec, "compile", lambda self, model: fail)
    found = dense.dense_paths(spec)
    assert "eager" in found.runs
    assert ("bf16" in found.runs) != any("bf16 not measured" in note for note in found.notes)
    assert "compile" not in found.runs
    assert "dense compile failed: RuntimeError: no compiler" in found.notes


def test_a_dense_path_that_strays_is_left_out(spec, monkeypatch):
    monkeypatch.setattr(
        dense.DenseSpec, "compile", lambda self, model: lambda frame: 2 * model(frame)
    )
    found = dense.dense_paths(spec)
    assert "compile" not in found.runs
    assert any("dense compile left out: differs" in note for note in found.notes)


def test_a_slow_dense_path_does_not_hold_up_every_frame(small, monkeypatch):
    calls = []

    def slow(model):
        def run(frame):
            calls.append(frame.dtype)
            time.sleep(0.3)
            return model(frame)

        return run

    monkeypatch.setattr(dense.DenseSpec, "compile", lambda self, model: slow(model))
    row = measure.measure(dataclasses.replace(small, presets=("fast",), compiled=True))[0]
    assert row.dense_ms["compile"] > 300
    # Built, warmed, tried; on some processors bf16 is compiled, too.
    assert calls.count(torch.float32) == 3
    assert "dense compile timed in its trial only: slow" in row.notes
    assert row.dense_best != "compile"


def test_openvino_is_a_dense_path_where_it_is_installed(spec, monkeypatch):
    found = dense.dense_paths(dataclasses.replace(spec, compiled=False))
    if any("not installed" in note for note in found.notes):
        pytest.skip("openvino is not installed")
    assert "openvino-f32" in found.runs


def test_a_missing_openvino_is_noted(spec, monkeypatch):
    find = dense.importlib.util.find_spec
    monkeypatch.setattr(
        dense.importlib.util, "find_spec", lambda name: None if name == "openvino" else find(name)
    )
    found = dense.dense_paths(dataclasses.replace(spec, compiled=False))
    assert "dense openvino not measured: not installed" in found.notes


def test_a_detector_is_served_in_parts(monkeypatch):
    """Its parts in OpenVINO, or all of it in bf16: they find what the model finds."""
    pytest.importorskip("openvino")
    monkeypatch.setattr(dense, "_bf16_pays", lambda: True)
    model, (first, second) = tiny_models.detector(), torch.rand(2, 1, 3, 64, 64)
    found = dense.dense_paths(Plan(compiled=False).dense_spec(model, first))
    assert {"eager", "bf16", "openvino-f32"} <= set(found.runs), found.notes
    with torch.no_grad():
        model_itself = model(second)
    for name in ("bf16", "openvino-f32"):
        made = found.runs[name](second)
        assert made.scores.dtype == made.boxes.dtype == torch.float32
        if name == "openvino-f32":
            assert_near(made.scores, model_itself.scores)
            assert_near(made.boxes, model_itself.boxes)
            assert torch.equal(made.labels, model_itself.labels)
            assert len(made[0].boxes) > 0
    assert not torch.equal(found.runs["openvino-f32"](first).scores, made.scores)
    assert "forward" not in vars(model.rpn)  # the model is as it was


@pytest.mark.slow
def test_the_compiler_is_a_dense_path(spec):
    found = dense.dense_paths(spec)
    assert "compile" in found.runs, found.notes


def test_the_clip_changes_a_square_and_is_noisy_elsewhere():
    frames = cases.clip(100, batch=1)
    first, second = next(frames), next(frames)
    change = (first - second).abs().amax(dim=1)[0]
    assert 0.08 < float((change > 0.2).float().mean()) < 0.2
    assert float((change > 0).float().mean()) > 0.99
