"""The commands of the benchmark: plans, sweeps, files of results, and the pages made from them."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import csv
import dataclasses
import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from benching import plan, small  # noqa: F401
from eventful.bench import parity, results, sweep, tables
from eventful.cli import bench
from eventful.cli.app import app
from eventful.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.usefixtures("without_openvino")

ASKED = {
    "model", "preset", "r", "tokens", "batch", "device", "dtype", "dense_best_ms", "ms",
    "speedup", "macs_ratio", "peak_bytes", "state_bytes", "ms_pipelined", "dense_ms",
}  # fmt: skip


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
    parts = ("bench", "runtime", "systems", "backbone", "default", "video", "growth")
    marks = {"docs/benchmarks.md": parts, "README.md": ("bench",)}
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
    for experiment in ("table-2", "systems"):
        shown = tables.runtimes(timed, experiment).strip()
        assert "| ViTDet-B 672 | fast, r = 256 |" in shown
        assert shown in (root / "docs/benchmarks.md").read_text()


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


def test_the_default_on_real_video_as_a_table():
    clip = {
        "clip": "street", "frames": 80, "dense_best": "graph", "dense_ms": {"graph": 1.2},
        "ms": 0.9, "ratio": 0.75, "dense_steps": 3, "updated": 0.39, "error_median": 0.018,
        "error_worst": 0.2,
    }  # fmt: skip
    flush = {"preset": "fast", "against": "graph", "ratio": 1.02, "ratio_in_flight": 0.9}
    record = {
        "cuda": "13.0", "device_name": "NVIDIA H200", "threads": "16", "torch": "2.11",
        "commit": "abc", "dtype": "bfloat16", "tf32": False, "size": "504x896",
        "clips": [clip], "flushes": [flush],
    }  # fmt: skip
    made = tables.defaults([record])
    row = "| street | 39% | 1.2 ms (graph) | 0.9 ms | 0.75x | 3 of 79 | 0.018 / 0.200 |"
    assert row in made
    assert "NVIDIA H200, bf16, 504 x 896 pixels" in made
    assert "takes 1.02x the model's own forward (graph), 0.90x with frames in flight." in made
    assert "commit abc" in made


def test_the_backbone_in_flight_as_a_table():
    settings = {
        "size": 1024, "r": 512, "in_flight_ms": {"eventful": 1.1, "graph": 9.9},
        "ms": {"eventful": 1.4, "graph": 10.0},
    }  # fmt: skip
    record = {
        "device_name": "NVIDIA H200", "threads": "16", "torch": "2.11", "commit": "abc",
        "dtype": "bfloat16", "settings": [settings],
    }  # fmt: skip
    row = "| ViTDet-B 1024 | 512 | 1.1 ms | 9.9 ms (graph) | 9.00x | 1.4 ms |"
    assert row in tables.backbones([record])
