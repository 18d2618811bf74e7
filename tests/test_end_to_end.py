"""Whole experiments in miniature, typed as a user types them: train, evaluate, stop, go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

import miniatures
import tiny_models
from eventful.cli import evaluate_run, train_run
from eventful.cli.app import app

pytest.importorskip("PIL")
pytest.importorskip("av")
pytest.importorskip("matplotlib")


def type_in(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def told(*words: object) -> dict[str, Any]:
    """What a command prints, which must be JSON and nothing else."""
    done = type_in(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def press_ctrl_c(patch: pytest.MonkeyPatch, bar: type, method: str, after: int) -> None:
    """From a progress bar, when it is told something for the so-manieth time."""
    left = after
    shown = getattr(bar, method)

    def stop(self: object, what: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        shown(self, what)

    patch.setattr(bar, method, stop)


def trained_in_two_goes(command: list[object], out: Path, stop_after: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        press_ctrl_c(patch, train_run._Training, "step", stop_after)
        assert type_in(*command, "--out", out, "--json").exit_code != 0
    assert not (out / "model.safetensors").exists()
    told(*command, "--out", out)


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_file(out / "model.safetensors") for out in (one, other))
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def evaluated_in_two_goes(command: list[object], out: Path, stop_after: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        press_ctrl_c(patch, evaluate_run._Variants, "advance", stop_after)
        stopped = type_in(*command, "--out", out, "--json")
    assert stopped.exit_code == 130
    assert stopped.stdout == ""
    assert f"{out} keeps the videos that are done" in stopped.stderr.replace("\n", " ")
    kept = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    report = told(*command, "--out", out)
    assert 0 < len(kept) < len(list(out.rglob("*.safetensors")))
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())
    return report


@pytest.mark.slow
def test_a_tiny_vid(tmp_path: Path) -> None:
    """Train a detector on VID and DET, evaluate it dense and eventful."""
    data = miniatures.imagenet(tmp_path / "data", frames=5)
    fresh = tiny_models.write(tiny_models.detector(), tmp_path / "fresh.safetensors")
    assert told("data", "check", data)["verdict"] == "complete"

    train = ["train", "vitdet", "--data", data, "--weights", fresh, "--workers", 0]
    train += ["--split", "val", "--also", "det_train", "--frames-per-video", 0, "--flip", 0]
    train += ["--epochs", 15, "--batch", 4, "--lr", 3e-3, "--warmup", 0, "--decay-epoch", 14]
    trained_in_two_goes(train, tmp_path / "trained", stop_after=20)  # of 45 steps
    trained = tmp_path / "trained/model.safetensors"

    evaluate = ["evaluate", "vitdet", "--data", data, "--weights", trained]
    evaluate += ["--preset", "dense", "--preset", "paper", "--preset", "exact", "--r", 4, "--r", 16]
    first = told(*evaluate, "--out", tmp_path / "first")
    again = evaluated_in_two_goes(evaluate, tmp_path / "again", stop_after=3)
    assert again["rows"] == first["rows"]
    assert again["detail"] == first["detail"]
    rows = {row["key"]: row for row in first["rows"]}
    dense = rows["base-model"]
    raw = told(*evaluate[:4], "--weights", fresh, "--preset", "dense")["rows"][0]
    assert dense["coco_map50"] > raw["coco_map50"] + 5  # it has learned
    for preset in ("paper", "exact"):  # every token selected is dense
        assert rows[f"{preset}-r16"]["coco_map50"] == pytest.approx(dense["coco_map50"], abs=0.1)
        assert rows[f"{preset}-r4"]["operations"] < dense["operations"]
    assert rows["paper-r4"]["coco_map50"] != dense["coco_map50"]
    assert (tmp_path / "again/figure.png").is_file()


def kitchen(root: Path) -> Path:
    """Eight segments, dark ones of one verb and bright ones of another; every other to validate."""
    miniatures.epic(root, frames=True)
    table = []
    for i in range(8):
        verb = ("take", 0) if i < 4 else ("bend", 96)
        times = [f"00:00:{i * 0.2:05.2f}", f"00:00:{i * 0.2 + 0.4:05.2f}"]
        table.append(miniatures.epic_row(f"P01_11_{i}", *times, 1 + 10 * i, 21 + 10 * i, *verb))
    for split, rows in (("train", table), ("validation", table[1::2])):
        miniatures.write_csv(root / f"EPIC_100_{split}.csv", miniatures.EPIC_COLUMNS, rows)
    return root


def test_a_tiny_epic(tmp_path: Path) -> None:
    """Cache the spatial model's outputs, tune the temporal one, evaluate around the tuned r."""
    data = kitchen(tmp_path / "data")
    fresh = tiny_models.write(tiny_models.recogniser(), tmp_path / "fresh.safetensors")
    train = ["train", "vivit", "--data", data, "--weights", fresh, "--cache", tmp_path / "cache"]
    train += ["--r", 5, "--temporal-views", 2, "--spatial-views", 1, "--workers", 0]
    train += ["--epochs", 40, "--batch", 4, "--lr", 3e-3]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    tuned = told(*train, "--out", whole)
    trained_in_two_goes(train, halves, stop_after=50)  # of 80 steps
    assert same_weights(whole, halves)
    scores = {score["r"]: score for score in tuned["scores"] if score["tuning"] == "after"}
    assert sorted(scores) == [3, 4, 5, 6, 7]  # 5 and 20 % and 40 % to both sides

    evaluate = ["evaluate", "vivit", "--data", data, "--weights", halves / "model.safetensors"]
    evaluate += ["--views", "2x1", "--preset", "dense", "--preset", "paper"]
    for r in scores:
        evaluate += ["--r", r]
    first = told(*evaluate, "--out", tmp_path / "first")
    again = evaluated_in_two_goes(evaluate, tmp_path / "again", stop_after=20)
    assert again["rows"] == first["rows"]
    rows = {row["r"]: row for row in first["rows"]}
    for r, score in scores.items():  # training and evaluation see the same
        assert rows[r]["top1"] == pytest.approx(100 * score["top1"])
        assert rows[r]["top5"] == pytest.approx(100 * score["top5"])
    costs = [rows[r]["operations"] for r in (*sorted(scores), None)]
    assert costs == sorted(set(costs))
    before = told(*evaluate[:4], "--weights", fresh, *evaluate[6:12], "--r", 5)["rows"]
    assert rows[5]["top1"] > next(row["top1"] for row in before if row["r"] == 5)
