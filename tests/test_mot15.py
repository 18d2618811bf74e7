"""The MOT15 benchmark on a miniature: its parts, a whole run, its resumption."""

from __future__ import annotations

import csv
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import miniatures
from eventful.config import PRESETS, Config
from eventful.models.vitdet import Detections
from eventful.paper.data import Box
from eventful.surgery import libraries

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.mot15 import __main__ as program
from benchmarks.mot15 import clips, contest, predictions, report, settings, training


def test_frames_become_whole_patches_of_about_the_same_shape() -> None:
    assert clips.model_size((360, 640), 644) == (364, 644)
    assert clips.model_size((193, 640), 644) == (196, 644)
    assert clips.model_size((364, 644), 644) == (364, 644)


def test_a_part_of_a_frame_keeps_the_boxes_it_shows() -> None:
    whole = training.cut(Box(20, 20, 40, 60, 0), 10, 10, 100, 100)
    assert (whole.x1, whole.y1, whole.x2, whole.y2, whole.ignore) == (10, 10, 30, 50, False)
    assert training.cut(Box(0, 0, 20, 20, 0), 15, 0, 100, 100).ignore  # a quarter of it is left
    assert training.cut(Box(0, 0, 20, 20, 0), 50, 50, 100, 100) is None


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 5])
def test_views_move_boxes_with_the_pixels(kind: int) -> None:
    frame = torch.zeros(1, 3, 56, 84, dtype=torch.uint8)
    frame[..., 22:34, 36:50] = 255
    seed = random.Random(kind)
    pixels, boxes = training.view(frame, [Box(36, 22, 50, 34, 0)], seed, kind)
    assert pixels.shape == frame.shape
    for box in boxes:
        x1, y1, x2, y2 = (round(v) for v in (box.x1, box.y1, box.x2, box.y2))
        inside = pixels[..., y1 + 2 : y2 - 2, x1 + 2 : x2 - 2].float().mean()
        assert float(inside) > 240
        lit = int((pixels[0, 0] > 127).sum())
        assert lit == pytest.approx((x2 - x1) * (y2 - y1), rel=0.2)


def run_of(frames: int) -> contest.Run:
    found = [
        Detections(torch.full((1, 4), float(t)), torch.ones(1), torch.zeros(1).long())
        for t in range(frames)
    ]
    return contest.Run(found, [10] * frames, [4.0] * frames, [True] * frames)


@pytest.mark.parametrize(("share", "fresh"), [(1.0, 12), (0.5, 6), (0.3, 4), (0.01, 1)])
def test_skipping_spends_its_share_and_keeps_the_last_boxes(share: float, fresh: int) -> None:
    skipped = contest.skipped(run_of(12), share)
    assert sum(skipped.flushed) == fresh
    assert sum(skipped.macs) == 10 * fresh
    last = 0
    for t, new in enumerate(skipped.flushed):
        last = t if new else last
        assert float(skipped.found[t].boxes[0, 0]) == last


def test_runs_come_back_from_json() -> None:
    run = run_of(2)
    again = contest.Run.read(json.loads(json.dumps(run.to_dict())))
    assert torch.equal(again.found[1].boxes, run.found[1].boxes)
    assert (again.macs, again.flushed) == (run.macs, run.flushed)


def test_a_head_may_not_lie_in_the_repository(tmp_path: Path) -> None:
    settings.refuse_tracked(tmp_path)
    settings.refuse_tracked(settings.ROOT / "assets-local" / "mot15")
    with pytest.raises(SystemExit, match="tracked folder"):
        settings.refuse_tracked(settings.ROOT / "benchmarks" / "results")


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A run on a miniature with random weights: what is held is the account, not the accuracy."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    made = libraries.load("timm").create_model(settings.BACKBONE, num_classes=0)
    save_file(made.state_dict(), tmp_path / "random.safetensors")
    data = miniatures.mot(tmp_path / "mot", frames=3)
    return [
        *("--data", str(data), "--weights", str(tmp_path / "random.safetensors")),
        *("--out", str(tmp_path / "out"), "--width", "70", "--steps", "3", "--views", "2"),
        "--no-publish",
    ]


@pytest.fixture
def mot15(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs the program with these words."""

    def run(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["mot15", *map(str, words)])
        program.main()

    return run


def test_a_whole_run_is_stored_and_not_run_twice(
    tmp_path: Path, mot15: Callable[..., None], arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments += ["--preset", "fast", "--preset", "paper"]
    mot15(*arguments)
    assert "ran paper-C-seq" in capsys.readouterr().out
    result = json.loads((tmp_path / "out/results.json").read_text())
    rows = {(row["preset"], row["policy"]): row for row in result["rows"]}
    assert {p for p, _ in rows} == {"dense", "skip", "skip-carried", "fast", "paper"}
    assert ("fast", "own") in rows
    assert ("paper", "own") not in rows
    whole = rows["dense", ""]["scores"][0]
    assert (whole["sequence"], whole["frames"], whole["cost"]) == ("all", 3, 1.0)
    costs = [rows["paper", f"top {share}%"]["scores"][0]["cost"] for share in (3, 6, 12, 25)]
    assert costs == sorted(costs)
    assert 1 / 3 < costs[0] < costs[-1] < 1  # the first of three frames is a flush
    for row in rows.values():
        if "skip" in row:
            assert row["skip"][0]["cost"] <= row["scores"][0]["cost"] + 1 / 3
            assert ("skip_carried" in row) == (row["preset"] == "fast")
        if "skip_carried" in row:
            assert row["skip_carried"][0]["cost"] == row["skip"][0]["cost"]
    with (tmp_path / "out/results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * len(rows)  # all, and the one sequence
    assert all(row["commit"] and row["torch"] for row in table)
    assert (tmp_path / "out/figure.png").stat().st_size > 0

    mot15(*arguments)
    assert "ran " not in capsys.readouterr().out
    again = json.loads((tmp_path / "out/results.json").read_text())
    assert again["rows"] == result["rows"]


def test_detecting_and_scoring_may_be_apart(
    tmp_path: Path, mot15: Callable[..., None], arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head is trained, used by another run, and its detections are scored by a third."""
    mot15(*arguments, "--train-only")
    (head,) = (tmp_path / "out").glob("*/head.pt")
    assert not list((tmp_path / "out").glob("**/runs-*"))
    arguments += ["--head", head, "--preset", "none", "--share", 0.06]
    arguments += ["--variant", "fast-plain", "--variant", "fast-both"]
    monkeypatch.setattr(program, "can_score", lambda: False)
    with pytest.raises(SystemExit, match="--predict-only"):
        mot15(*arguments)
    mot15(*arguments, "--predict-only")
    assert not (tmp_path / "out/results.json").exists()
    monkeypatch.undo()

    moved = (tmp_path / "out").rename(tmp_path / "elsewhere")
    (tmp_path / "random.safetensors").unlink()
    monkeypatch.setattr(sys, "argv", ["mot15", "--score", str(moved), "--no-publish"])
    program.main()
    result = json.loads((moved / "results.json").read_text())
    names = [(row["preset"], row["policy"]) for row in result["rows"]]
    assert {n for n in names if n[0].startswith("fast")} == {
        (variant, policy) for variant in ("fast-plain", "fast-both") for policy in ("top 6%", "own")
    }
    assert result["training"]["steps"] == 3
    assert result["rows"][0]["scores"][0]["frames"] == 3


def test_scoring_says_what_is_missing(tmp_path: Path, mot15: Callable[..., None]) -> None:
    with pytest.raises(SystemExit, match="--predict-only"):
        mot15("--score", tmp_path)
    kept = predictions.Kept(tmp_path, settings.Clock(1))
    with pytest.raises(SystemExit, match=r"dense-a\.json"):
        kept.runs("dense-a", lambda detector: [])


def test_predictions_come_back_without_their_frames(tmp_path: Path) -> None:
    frames = torch.zeros(2, 3, 28, 42, dtype=torch.uint8)
    clip = clips.Clip("a", frames, [[Box(1, 2, 3, 4, 0, ignore=True)], []])
    options = settings.Options(shares=(0.1,), sequences=("a",))
    predictions.write_manifest(tmp_path / "run", {"origin": {}}, [clip], options, "runs-1")
    about, (again,), chosen, runs = predictions.read_manifest(tmp_path)
    assert (about, chosen, runs) == ({"origin": {}}, options, tmp_path / "run/runs-1")
    assert (again.size, again.tokens, again.truth) == (clip.size, 7, clip.truth)


def test_variants_are_made_of_their_options() -> None:
    for variant, options in settings.VARIANTS.items():
        config = contest.rule_of(variant)
        assert not config.fallback
        for name, value in options.items():
            assert getattr(config, name) == value
    assert contest.rule_of("paper") == Config.paper()


def test_a_cell_shows_the_best_in_bold() -> None:
    cell = report._compared({"map50": 0.5}, {"map50": 0.4}, {"map50": 0.6})
    assert cell == "50.0 / 40.0 / **60.0**"
    assert report._compared({"map50": 0.5}) == "50.0"
    assert report._compared({"map50": 0.5}, {"map50": 0.5}) == "50.0 / **50.0**"


def test_the_page_shows_the_stored_results() -> None:
    result = json.loads((report.RESULTS / "results.json").read_text())
    _, _, rest = report.PAGE.read_text().partition("<!-- mot15:begin -->")
    assert rest.partition("<!-- mot15:end -->")[0].strip() == report.table(result).strip()
    presets = {row["preset"] for row in result["rows"]}
    assert presets == {"dense", "skip", *PRESETS}
    for preset in PRESETS:
        shares = {row["share"] for row in result["rows"] if row["preset"] == preset}
        assert set(settings.SHARES) <= shares
    with (report.RESULTS / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4 * len(result["rows"])  # all, and three by name
