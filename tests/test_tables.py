"""Tables on a screen of 80 columns: no number is wrapped, no heading is cut."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from eventful.bench.rows import Row as BenchRow
from eventful.bench.video.rows import VideoRow
from eventful.calibrate.choose import Limits
from eventful.calibrate.rows import Row as CalibrateRow
from eventful.calibrate.settings import Setting
from eventful.cli import (
    bench_tables,
    bench_video,
    calibrate,
    data,
    demo,
    evaluate_run,
    inspect,
    reproduce,
    reproduce_run,
)
from eventful.cli.tables import Column, Grid, folded, show
from eventful.config import Config
from eventful.paper.data.check import Report as DataReport
from eventful.paper.data.check import SplitReport
from eventful.paper.evaluate.experiment import load
from eventful.paper.evaluate.report import Report, Row
from eventful.paper.evaluate.variants import DENSE, SKIP, Variant
from eventful.surgery.inspection import BlockMatch, Inspection

WIDTH = 80


@pytest.fixture
def printed(monkeypatch, capsys):
    """What is printed on a screen of 80 columns, with the words that must stand in one piece."""

    def check(show, *words: str) -> str:
        monkeypatch.setenv("COLUMNS", str(WIDTH))
        show()
        text = capsys.readouterr().out
        for line in text.splitlines():
            assert len(line.rstrip()) <= WIDTH, line
        assert "…" not in text
        for word in words:
            assert re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", text), (word, text)
        return text

    return check


def evaluated(**changes: object) -> Row:
    numbers = {"coco_map50": 47.71, "fgfa_map50": 100.0, "operations": 467.4}
    numbers |= {"dense_operations": 467.4, "published_accuracy": 82.93}
    variant = Variant("Base model", DENSE, "vitdet", 1024)
    return Row.of(variant, **(numbers | {"published_operations": 467.4} | changes))


def test_evaluation_beside_published_numbers(printed) -> None:
    made = load("table-1")
    like = Variant("Spatiotemporal", "paper", "vitdet", 1024, r=2048)
    skip = Variant("Frame skipping at equal cost", SKIP, "vitdet", 1024, r=2048, share=0.4643)
    rows = (
        evaluated(),
        Row.of(like, coco_map50=46.2, fgfa_map50=81.34, operations=217.0, dense_operations=467.4),
        Row.of(skip, coco_map50=46.2, fgfa_map50=81.34, operations=217.0, dense_operations=467.4),
    )
    report = Report(made, rows, {}, {})
    text = printed(
        lambda: evaluate_run._show(report, None),
        *("47.71", "100.00", "82.93", "467.4", "81.34", "217.0", "2.2x", "1024", "2048"),
    )
    for heading in ("variant", "size", "COCO", "FGFA", "GFlops", "saved"):
        assert heading in text


def test_evaluation_of_videos(printed) -> None:
    made = load("table-d")
    tuned = Variant("Temporal", "paper", "vivit", 320, r=280, tuned_r=200)
    row = Row.of(
        tuned, top1=64.21, top5=100.0, operations=5.491, dense_operations=7.122,
        published_accuracy=67.14, published_operations=5.49,
    )  # fmt: skip
    report = Report(made, (row,), {}, {})
    printed(
        lambda: evaluate_run._show(report, None),
        *("64.21", "100.00", "67.14", "5.491", "1.3x", "280", "TFlops"),
    )


def test_runtimes(printed) -> None:
    made = load("table-2")
    times = {"ms": 12_345.6, "total_ms": 13_456.7, "first_ms": 23_456.7, "speedup": 10.25}
    times |= {"total_speedup": 9.25, "base_speedup": 11.75}
    row = Row.of(Variant("Spatiotemporal", "paper", "vitdet", 1024, r=512), **times)
    report = Report(made, (row,), {}, {})
    printed(lambda: evaluate_run._show(report, None), "12345.6", "13456.7", "10.25x", "11.75x")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bench(printed, device: str) -> None:
    numbers = dict.fromkeys(BenchRow.__dataclass_fields__, 12_345.6)
    paths = {"eager": 12_345.6, "compile": 11_050.1, "openvino": 10_500.3, "compile+graph": 9_000.0}
    row = BenchRow(**{
        **numbers, "model": "vitdet-b-1024", "preset": "tokenwise", "r": 2048, "tokens": 4096,
        "depth": 12, "batch": 16, "device": device, "dtype": "bfloat16", "dense_best": "compile",
        "speedup": 10.25, "speedup_pipelined": 11.25, "macs_ratio": 0.05, "feature_error": 0.123,
        "skip_error": 0.456, "state_bytes": 20_847_100_000, "dense_ms": paths,
        "notes": ("dense bf16 not measured: this CPU multiplies slower in it",),
    })  # fmt: skip
    headings = ("preset", "speed-up", "fewer", "ops", "flush", "error", "skip", "state")
    printed(
        lambda: bench_tables.show([row], None),
        *headings, "12,346", "10.25x", "20.0x", "0.123", "0.456", "20,847 MB", "tokenwise",
    )  # fmt: skip


def test_bench_of_videos(printed) -> None:
    some = dict.fromkeys(VideoRow.__dataclass_fields__, 0.1234)
    row = VideoRow(**{
        **some, "clip": "PETS09-S2L1", "model": "vit_small_patch14_dinov2", "size": "504x896",
        "contender": "skip-time-carried", "precision": "bfloat16", "device": "cuda", "frames": 240,
        "tokens": 2304, "dense_path": "compile+graph", "ms": 123.4, "dense_ms": 123.4, "notes": (),
        "config": "", "cosine": 0.998, "estimate_rank": 0.87, "error": 0.00012, "map50": 0.512,
        "time": 1.234, "time_read": 1.034,
    })  # fmt: skip
    text = printed(
        lambda: bench_video._show([row], "a street"),
        *("skip-time-carried", "123", "0.00012", "0.87", "51%"),
    )
    assert all(word in text for word in ("contender", "updated", "estimate", "stale", "mAP50"))
    assert "Too narrow for: cosine. --json has them." in text


def test_calibration(printed) -> None:
    name = "fast:NoiseThreshold(3.5),max_age=32,context=None"
    setting = Setting(name, Config.fast())
    row = CalibrateRow(setting, 0.12345, 0.234, 0.0001234, 0.1234, 1.234, 1.02, 1234.5, 0.512)
    dense = CalibrateRow(None, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 12_345.6)
    clip = SimpleNamespace(name="PETS09-S2L1-with-a-long-name", about="", size="504x896")
    about = {"videos": [clip.name], "model": "vit_small_patch14_dinov2", "frames": 240}
    about |= {"precision": "bfloat16", "device": "cuda", "dense_ms": 12_345.6}
    report = SimpleNamespace(
        measured=SimpleNamespace(clips=[clip]), rows=[dense, row], choice=None, notes=[],
        dense=SimpleNamespace(path="compile"), to_dict=lambda: about, dense_is_cheaper=False,
    )  # fmt: skip
    text = printed(lambda: calibrate._show(report), "12,346", "1,234", "0.00012", "51%", "12%")
    parts = [
        line.split()[0] for line in text.splitlines() if line.startswith(("fast", "3.5", "cont"))
    ]
    assert "".join(parts) == name
    assert all(word in text for word in ("setting", "tokens", "ops", "90 %", "worst", "mAP50"))


@pytest.mark.parametrize("cheaper", [False, True])
def test_no_star_on_a_setting_that_costs_as_much_as_dense(capsys, cheaper) -> None:
    row = CalibrateRow(Setting("fast", Config.fast()), 0.1, 0.2, 0.0, 0.0, 0.0, 1.1, 5.0)
    clip = SimpleNamespace(name="a", about="", size="64x64")
    about = {"videos": ["a"], "model": "m", "frames": 9, "precision": "float32", "device": "cpu"}
    choice = SimpleNamespace(row=row, met=True, better_skip=None)
    report = SimpleNamespace(
        measured=SimpleNamespace(clips=[clip]), rows=[row], choice=choice, notes=[], dense=None,
        to_dict=lambda: about, dense_is_cheaper=cheaper, config=Config.fast(), limits=Limits(),
    )  # fmt: skip
    calibrate._show(report)
    calibrate._conclude(report, None, None)
    text = " ".join(capsys.readouterr().out.split())
    assert ("fast *" in text) is ("* Recommended" in text) is (not cheaper)
    assert ("Not recommended, the dense model is cheaper" in text) is cheaper


def test_demo(printed) -> None:
    summary = {
        "model": "timm:vit_small_patch14_reg4_dinov2.lvd142m", "frames": 12345, "updated": 0.1434,
        "operations": 0.185, "ms": 12169.3, "dense_ms": 12308.5, "speedup": 12.821, "error": 0.1,
        "accuracy": {"mAP50": {"eventful": 0.8231, "dense": 0.8334}}, "memory": 16_056_340_000,
    }  # fmt: skip
    text = printed(
        lambda: show(Console(), demo.table(summary)),
        *("82.3%", "83.3%", "14.3%", "18.5%", "12308", "12169", "12.82x", "0.100", "16056.3"),
    )
    assert all(word in text for word in ("dense", "eventful", "operations", "memory"))


def test_data(printed) -> None:
    split = SplitReport(
        split="validation", videos=12_345, frames=None, annotations=12_345_678, labels=3806,
        classes=3806, probed=12_345, missing=(), malformed=(), damaged=(),
    )  # fmt: skip
    report = DataReport("EPIC", "epic-kitchens", "action", {"videos": True}, (split,))
    text = printed(
        lambda: data._show(report),
        *("validation", "12,345", "not counted.", "12,345,678", "3806 of 3806", "complete"),
    )
    assert all(word in text for word in ("split", "annotations", "labels", "decoded", "verdict"))


def test_inspection(printed) -> None:
    reason = "its attention adds a bias that depends on the tokens, which no update rule here keeps"
    miss = BlockMatch("encoder.layers.11.attention", "VeryLongNamedTransformerBlock", "a", reason)
    fits = BlockMatch("encoder.layers.10.attention", "VeryLongNamedTransformerBlock", "timm")
    report = Inspection((fits, miss), (1024, 1024), {"": 4097}, {"paper": 20_847_100_000})
    text = printed(
        lambda: inspect._show("timm:some_model", "bfloat16", report, None),
        *("encoder.layers.11.attention", "VeryLongNamedTransformerBlock", "20,847.1 MB"),
    )
    assert reason.split()[-1] in text


def test_lists_of_experiments(printed) -> None:
    text = printed(lambda: evaluate_run.show_experiments(False), "vivit-untuned", "16 variants")
    assert "EPIC-Kitchens 100" in " ".join(text.split())
    text = printed(lambda: reproduce_run.show_names(False), "world-gate-position", "31 variants")
    assert "Supplement, ablation of the gate position" in " ".join(text.split())


def test_published_costs(printed) -> None:
    printed(lambda: reproduce.counts(False), "467.4", "280 (tuned at 200)", "214.99 to 234.25")
    printed(lambda: reproduce.memory(False), "difference", "+79.50%")


def test_long_names_are_broken_at_signs_and_numbers_never() -> None:
    assert folded("fast:TopR(64),max_age=32", 14) == ["fast:TopR(64),", "max_age=32"]
    assert folded("abcdefgh", 3) == ["abc", "def", "gh"]
    assert folded("", 3) == [""]
    wide = Grid([Column("name", names=True), *[Column(f"number {i}") for i in range(12)]])
    wide.add(["a name that is long", *["1,234,567"] * 12])
    console = Console(width=60, record=True, file=io.StringIO())
    show(console, wide, spare=[f"number {i}" for i in range(11, 3, -1)])
    text = console.export_text()
    assert text.count("1,234,567") == 4
    assert "Too narrow for: number 11, number 10" in text
    show(console, wide)  # nothing to spare
    assert console.export_text().count("1,234,567") == 12


def test_a_wide_screen_shows_every_column() -> None:
    grid = Grid([Column("name", names=True), Column("a"), Column("b")], title="of two numbers")
    grid.add(["a name", "1", "2"], "bold")
    console = Console(width=200, record=True, file=io.StringIO())
    show(console, grid, spare=["b"])
    assert console.export_text().splitlines()[-1].split() == ["a", "name", "1", "2"]
