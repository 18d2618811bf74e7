"""The benchmark: it measures what it says, keeps its rows, and refuses what is wrong."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
import time

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from eventful import Stream, StreamBatch
from eventful.adapters import libraries
from eventful.bench import cases, dense, measure, memory, parity, results, sweep, timing
from eventful.bench.rows import Setting
from eventful.cli import bench
from eventful.cli.app import app
from eventful.errors import ConfigError, ParityError, UnsupportedError

ASKED = {
    "model", "preset", "r", "tokens", "batch", "device", "dtype", "dense_best_ms", "ms",
    "speedup", "macs_ratio", "peak_bytes", "state_bytes", "ms_pipelined", "dense_ms",
}  # fmt: skip


def tiny_vit(size: int, depth: int) -> nn.Module:
    timm = libraries.load("timm")
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=size, depth=depth, num_classes=0, global_pool=""
    ).eval()


def tiny_windowed(size: int, depth: int) -> nn.Module:
    made = libraries.load("timm.models.vision_transformer_sam").VisionTransformerSAM(
        img_size=size, patch_size=16, embed_dim=48, depth=depth, num_heads=2, window_size=4,
        global_attn_indexes=(1,), use_rel_pos=True, num_classes=0,
    )  # fmt: skip
    for name, parameter in made.named_parameters():
        if "rel_pos" in name:
            nn.init.normal_(parameter, std=0.1)
    made.neck = made.head = nn.Identity()
    return made.eval()


@pytest.fixture
def small(monkeypatch):
    """Models small enough to measure in a test."""
    for name, make in {"small": tiny_vit, "windowed": tiny_windowed}.items():
        about = cases.Subject(make, 96, 5, "a test model", depth=2)
        monkeypatch.setitem(cases.SUBJECTS, name, about)
    return Setting("small", presets=("fast", "exact"), frames=5, compiled=False)


@pytest.fixture
def plan(small):
    return bench.Plan(models=("small",), presets=("fast",), frames=3, compiled=False)


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
    kinds = []
    time_one = timing.timed

    def spy(run, frame):
        result = time_one(run, frame)
        if isinstance(run, Stream):
            kinds.append(run.last.flushed[0])
        return result

    monkeypatch.setattr(measure, "timed", spy)
    measure.measure(dataclasses.replace(small, presets=("fast",)))
    assert kinds == [True] + [False] * 5


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


def test_a_refusal_writes_nothing_and_exits_with_1(plan, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(parity.TOLERANCE, torch.float32, -1.0)
    path = tmp_path / "cpu.csv"
    commands = {
        "run": lambda: bench.run(plan, path, as_json=True),
        "sweep": lambda: bench.sweep(plan, ("r",), (3,), path, as_json=True),
        "verify": lambda: bench.verify(plan, as_json=True),
    }
    for command in commands.values():
        with pytest.raises(SystemExit) as exit_:
            command()
        assert exit_.value.code == 1
        printed = capsys.readouterr()
        assert "differs by" in printed.err
        assert "fast with every token selected" in printed.err
        assert printed.out == ""
    assert not path.exists()


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
def shop():
    torch.manual_seed(0)
    return dense.Workshop(tiny_vit(32, 1), torch.rand(1, 3, 32, 32), compiled=True)


def test_a_dense_path_that_fails_is_noted(shop, monkeypatch):
    def fail(frame):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(dense.Workshop, "compile", lambda self, model: fail)
    found = dense.dense_paths(shop)
    assert "eager" in found.runs
    assert ("bf16" in found.runs) != any("bf16 not measured" in note for note in found.notes)
    assert "compile" not in found.runs
    assert "dense compile failed: RuntimeError: no compiler" in found.notes


def test_a_dense_path_that_strays_is_left_out(shop, monkeypatch):
    monkeypatch.setattr(
        dense.Workshop, "compile", lambda self, model: lambda frame: 2 * model(frame)
    )
    found = dense.dense_paths(shop)
    assert "compile" not in found.runs
    assert any("dense compile left out: differs" in note for note in found.notes)


def test_a_slow_dense_path_does_not_hold_up_every_frame(small, monkeypatch):
    calls = []

    def slow(model):
        def run(frame):
            calls.append(1)
            time.sleep(0.3)
            return model(frame)

        return run

    monkeypatch.setattr(dense.Workshop, "compile", lambda self, model: slow(model))
    row = measure.measure(dataclasses.replace(small, presets=("fast",), compiled=True))[0]
    assert row.dense_ms["compile"] > 300
    assert len(calls) == 3  # built, warmed, tried
    assert "dense compile timed in its trial only: slow" in row.notes
    assert row.dense_best != "compile"


def test_openvino_is_a_dense_path_where_it_is_installed(shop, monkeypatch):
    found = dense.dense_paths(dataclasses.replace(shop, compiled=False))
    if any("not installed" in note for note in found.notes):
        pytest.skip("openvino is not installed")
    assert "openvino-f32" in found.runs


def test_a_missing_openvino_is_noted(shop, monkeypatch):
    find = dense.importlib.util.find_spec
    monkeypatch.setattr(
        dense.importlib.util, "find_spec", lambda name: None if name == "openvino" else find(name)
    )
    found = dense.dense_paths(dataclasses.replace(shop, compiled=False))
    assert "dense openvino not measured: not installed" in found.notes


@pytest.mark.slow
def test_the_compiler_is_a_dense_path(shop):
    found = dense.dense_paths(shop)
    assert "compile" in found.runs, found.notes


def test_rows_are_appended_with_their_origin(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("EVENTFUL_COMMIT", "abc1234")
    path = tmp_path / "results" / "cpu.csv"
    for _ in range(2):
        bench.run(plan, path, as_json=True)
        printed = json.loads(capsys.readouterr().out)
    kept = results.read(path)
    assert len(kept) == 2
    assert {*results.ORIGIN} | ASKED <= set(printed[0])
    assert set(kept[0]) == {*printed[0], "over"}
    assert kept[0]["torch"] == torch.__version__
    assert kept[0]["commit"] == printed[0]["commit"] == "abc1234"
    assert kept[0]["device_name"]
    assert "eager=" in kept[0]["dense_ms"]
    assert not list(path.parent.glob(".*"))


def test_an_older_file_gains_the_new_columns(plan, tmp_path):
    path = tmp_path / "cpu.csv"
    path.write_text("model,ms,colour\nold,3.5,red\n")
    bench.run(plan, path, as_json=True)
    old, new = results.read(path)
    assert (old["model"], old["ms"], old["colour"], old["preset"]) == ("old", "3.5", "red", "")
    assert (new["model"], new["colour"]) == ("small", "")


def test_every_combination_is_measured(small):
    plan = bench.Plan(
        models=("small", "windowed"), presets=("fast",), batches=(1, 2),
        dtypes=("float32", "bfloat16"),
    )  # fmt: skip
    made = [(s.model, s.dtype, s.batch) for s in plan.settings()]
    assert made == [
        (model, dtype, batch)
        for model in ("small", "windowed")
        for dtype in ("float32", "bfloat16")
        for batch in (1, 2)
    ]


def test_quick_is_one_small_run():
    settings = list(bench.Plan(quick=True).settings())
    assert [s.model for s in settings] == ["vit-s-576"]
    assert settings[0].compiled
    assert settings[0].frames == 8
    assert next(bench.Plan(quick=True, frames=3).settings()).frames == 3
    assert next(bench.Plan(models=("vit-s-576",)).settings()).frames == bench.TIMED["cpu"]


def test_nonsense_is_refused(small, monkeypatch):
    with pytest.raises(UnsupportedError, match="vitdet-b-1024"):
        bench.run(bench.Plan(models=("resnet",)), None, as_json=True)
    with pytest.raises(ConfigError, match="tokenwise"):
        bench.run(bench.Plan(models=("small",), presets=("best",)), None, as_json=True)
    with pytest.raises(UnsupportedError, match="--device"):
        bench.run(bench.Plan(models=("small",), devices=("tpu",)), None, as_json=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="CUDA"):
        bench.run(bench.Plan(models=("small",), devices=("cuda",)), None, as_json=True)


def test_what_does_not_fit_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(bench.os, "sysconf", lambda name: 1)
    with pytest.raises(UnsupportedError, match="GB of state"):
        bench.run(bench.Plan(models=("vit-s-576",)), None, as_json=True)


def test_a_preset_nobody_asked_for_is_dropped_where_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(
        bench.os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 200 * 10**6 // 4096
    )
    setting = next(bench.Plan(models=("vit-s-576",)).settings())
    assert setting.presets == ("fast", "exact")
    assert setting.notes == ("paper left out: too much state",)
    with pytest.raises(UnsupportedError, match="paper"):
        next(bench.Plan(models=("vit-s-576",), presets=("paper",)).settings())


def test_the_clip_changes_a_square_and_is_noisy_elsewhere():
    frames = cases.clip(100, batch=1)
    first, second = next(frames), next(frames)
    change = (first - second).abs().amax(dim=1)[0]
    assert 0.08 < float((change > 0.2).float().mean()) < 0.2
    assert float((change > 0).float().mean()) > 0.99


def test_a_sweep_varies_one_quantity(small):
    over_r = sweep.points("r", small)
    assert len(over_r) == 1  # all in one run, so that they meet the same machine
    assert over_r[0].r == tuple(
        sorted({round(36 * s) for s in (1 / 32, 1 / 16, 1 / 8, 0.25, 0.5, 1)})
    )
    assert [s.batch for s in sweep.points("batch", small)] == [1, 2, 4]
    assert [s.depth for s in sweep.points("depth", small, (4, 1))] == [1, 4]
    over_tokens = sweep.points("tokens", small, (9, 144))
    assert [(s.size, s.r) for s in over_tokens] == [(48, (1,)), (192, (20,))]
    with pytest.raises(ConfigError, match="depth"):
        sweep.points("width", small)
    with pytest.raises(ConfigError, match="at least 1"):
        sweep.points("batch", small, (0,))


def test_a_sweep_goes_on_past_a_point_that_does_not_fit(plan, tmp_path, monkeypatch, capsys):
    fit = bench._fitting

    def refuse_two(setting, free_to_drop):
        if setting.batch == 2:
            raise UnsupportedError("too big")
        return fit(setting, free_to_drop)

    monkeypatch.setattr(bench, "_fitting", refuse_two)
    path = tmp_path / "sweep.csv"
    bench.sweep(plan, ("batch",), (1, 2, 3), path, as_json=True)
    assert [row["batch"] for row in results.read(path)] == ["1", "3"]
    assert "left out: too big" in capsys.readouterr().err


@pytest.fixture
def folder(plan, tmp_path, monkeypatch, capsys):
    """A repository with results of every kind, made by the commands themselves."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    bench.run(plan, bench.RESULTS / "cpu.csv", as_json=True)
    quick = dataclasses.replace(plan, frames=2)
    bench.sweep(quick, ("r",), (2, 8), None, as_json=True)
    bench.sweep(quick, ("tokens",), (16, 36), None, as_json=True)
    bench.sweep(quick, ("depth", "batch"), (), None, as_json=True)
    marks = {"docs/benchmarks.md": ("bench", "runtime", "growth"), "README.md": ("bench",)}
    for page, names in marks.items():
        text = "".join(f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in names)
        (tmp_path / page).write_text(f"before\n{text}after\n")
    capsys.readouterr()
    return tmp_path


def test_a_sweep_is_kept_and_everything_is_rendered_from_the_files(folder, capsys):
    rows = results.read(folder / bench.RESULTS / "sweep-cpu.csv")
    varied = {over: [int(row[over]) for row in rows if row["over"] == over] for over in sweep.AXES}
    assert varied == {"r": [2, 8], "tokens": [17, 37], "depth": [1, 2, 4], "batch": [1, 2, 4]}
    with pytest.raises(ConfigError, match="--over once"):
        bench.sweep(bench.Plan(), ("r", "depth"), (1,), None, as_json=True)

    bench.plot(bench.RESULTS, folder / "docs", folder / "README.md")
    images = folder / "docs" / "images"
    pictures = {path.name: path.read_bytes() for path in images.iterdir()}
    assert len(pictures) == 2
    assert "operations-and-time.png" in pictures
    page, readme = ((folder / name).read_text() for name in ("docs/benchmarks.md", "README.md"))
    for text in (page, readme):
        assert "| small | fp32 | 1 | 5 / 37 | fast |" in text
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "old" not in text
    growth = next(name for name in pictures if name.startswith("growth-"))
    assert f"(images/{growth})" in page
    assert "small" in growth

    bench.plot(bench.RESULTS, folder / "docs", folder / "README.md")
    assert (folder / "README.md").read_text() == readme
    assert {path.name: path.read_bytes() for path in images.iterdir()} == pictures


def test_the_latest_row_of_a_measurement_counts(tmp_path):
    base = {"model": "m", "preset": "fast", "r": "5", "device": "cpu"}
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*base, "ms", "date", "over"])
        writer.writeheader()
        writer.writerow({**base, "ms": "2", "date": "2026-02-01"})
        writer.writerow({**base, "ms": "1", "date": "2026-01-01"})
        writer.writerow({**base, "ms": "3", "date": "2026-01-01", "over": "r"})
    runs, swept = results.read_all(tmp_path)
    assert [row["ms"] for row in runs] == ["2"]
    assert [row["ms"] for row in swept] == ["3"]


def test_plot_says_what_it_misses(tmp_path):
    with pytest.raises(UnsupportedError, match="eventful bench --out"):
        bench.plot(tmp_path, tmp_path, tmp_path / "README.md")
    from eventful.bench import tables

    page = tmp_path / "page.md"
    page.write_text("no markers")
    with pytest.raises(UnsupportedError, match="bench:begin"):
        tables.put(page, "text")
    assert page.read_text() == "no markers"


def test_the_pages_show_the_files(request):
    """If this fails, results were added and not rendered: run `eventful bench plot`."""
    from eventful.bench import tables

    root = request.config.rootpath
    runs, _ = results.read_all(root / "benchmarks" / "results")
    for page, table in {"docs/benchmarks.md": tables.full, "README.md": tables.short}.items():
        assert table(runs).strip() in (root / page).read_text()
    timed = results.read_runtimes(root / "benchmarks" / "results")
    assert {report["settings"]["device"] for report in timed} == {"cpu", "cuda"}
    assert tables.runtimes(timed).strip() in (root / "docs/benchmarks.md").read_text()


def test_run_is_what_happens_when_no_command_is_named(monkeypatch):
    plans = []
    monkeypatch.setattr(bench, "run", lambda plan, out, as_json: plans.append((plan, out, as_json)))
    for words in ([], ["--quick"], ["run", "--quick"], ["vit-b-1369", "--r", "7", "--r", "9"]):
        done = CliRunner().invoke(app, ["bench", *words])
        assert done.exit_code == 0, done.output
    assert [plan.quick for plan, *_ in plans] == [False, True, True, False]
    assert (plans[-1][0].models, plans[-1][0].r) == (("vit-b-1369",), (7, 9))
    listed = CliRunner().invoke(app, ["bench", "--list"])
    assert "vitdet-b-672" in listed.output
    helped = CliRunner().invoke(app, ["bench", "--help"])
    for command in ("run", "verify", "sweep", "runtime", "plot"):
        assert command in helped.output


def test_the_command_prints_a_table_and_shows_progress(small, monkeypatch, tmp_path, capsys):
    path = tmp_path / "out.csv"
    words = ["bench", "small", "--preset", "fast", "--dtype", "float32", "--frames", "2"]
    monkeypatch.setattr(sys, "argv", ["eventful", *words, "--no-compile", "--out", str(path)])
    with pytest.raises(SystemExit) as exit_:
        app()
    assert exit_.value.code == 0
    printed = capsys.readouterr()
    assert "37 tokens" in printed.out
    assert "dense: eager" in printed.out
    assert "checking fast" in printed.err
    assert len(results.read(path)) == 1
