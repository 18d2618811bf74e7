"""The MOT15 benchmark on a miniature: its parts, a whole run, its resumption, the packed copy."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

import miniatures
from eventful.adapters import libraries
from eventful.data import Box, open_dataset
from eventful.evaluate.metrics import Detections

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import mot15  # noqa: E402
import pack_mot15  # noqa: E402


def test_frames_become_whole_patches_of_about_the_same_shape() -> None:
    assert mot15.model_size((360, 640), 644) == (364, 644)
    assert mot15.model_size((193, 640), 644) == (196, 644)
    assert mot15.model_size((364, 644), 644) == (364, 644)  # a packed frame stays as it is


def test_a_part_of_a_frame_keeps_the_boxes_it_shows() -> None:
    whole = mot15.cut(Box(20, 20, 40, 60, 0), 10, 10, 100, 100)
    assert (whole.x1, whole.y1, whole.x2, whole.y2, whole.ignore) == (10, 10, 30, 50, False)
    assert mot15.cut(Box(0, 0, 20, 20, 0), 15, 0, 100, 100).ignore  # a quarter of it is left
    assert mot15.cut(Box(0, 0, 20, 20, 0), 50, 50, 100, 100) is None


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 5])
def test_views_move_boxes_with_the_pixels(kind: int) -> None:
    frame = torch.zeros(1, 3, 56, 84, dtype=torch.uint8)
    frame[..., 22:34, 36:50] = 255
    seed = mot15.random.Random(kind)
    pixels, boxes = mot15.view(frame, [Box(36, 22, 50, 34, 0)], seed, kind)
    assert pixels.shape == frame.shape
    for box in boxes:
        x1, y1, x2, y2 = (round(v) for v in (box.x1, box.y1, box.x2, box.y2))
        inside = pixels[..., y1 + 2 : y2 - 2, x1 + 2 : x2 - 2].float().mean()
        assert float(inside) > 240
        lit = int((pixels[0, 0] > 127).sum())
        assert lit == pytest.approx((x2 - x1) * (y2 - y1), rel=0.2)


def run_of(frames: int) -> mot15.Run:
    found = [
        Detections(torch.full((1, 4), float(t)), torch.ones(1), torch.zeros(1).long())
        for t in range(frames)
    ]
    return mot15.Run(found, [10] * frames, [4.0] * frames, [True] * frames)


@pytest.mark.parametrize(("share", "fresh"), [(1.0, 12), (0.5, 6), (0.3, 4), (0.01, 1)])
def test_skipping_spends_its_share_and_keeps_the_last_boxes(share: float, fresh: int) -> None:
    skipped = mot15.skipped(run_of(12), share)
    assert sum(skipped.flushed) == fresh
    assert sum(skipped.macs) == 10 * fresh
    last = 0
    for t, new in enumerate(skipped.flushed):
        last = t if new else last
        assert float(skipped.found[t].boxes[0, 0]) == last


def test_runs_come_back_from_json() -> None:
    run = run_of(2)
    again = mot15.Run.read(json.loads(json.dumps(run.plain())))
    assert torch.equal(again.found[1].boxes, run.found[1].boxes)
    assert (again.macs, again.flushed) == (run.macs, run.flushed)


def test_a_head_may_not_lie_in_the_repository(tmp_path: Path) -> None:
    mot15.refuse_tracked(tmp_path)
    mot15.refuse_tracked(mot15.ROOT / "assets-local" / "mot15")
    with pytest.raises(SystemExit, match="tracked folder"):
        mot15.refuse_tracked(mot15.ROOT / "benchmarks" / "results")


def test_the_packed_copy_holds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = miniatures.mot(tmp_path / "mot", frames=2, step=3)
    arguments = ["pack", str(source), str(tmp_path / "packed"), "--width", "140"]
    monkeypatch.setattr(sys, "argv", arguments)
    pack_mot15.main()
    for split in ("train", "val"):
        before, after = open_dataset(source, split), open_dataset(tmp_path / "packed", split)
        assert [v.name for v in before] == [v.name for v in after]
        for old, new in zip(before, after, strict=True):
            assert old.frames.names == new.frames.names
            assert new.frames.image(0).shape == (3, 112, 140)  # from 48 x 64
            for t in range(len(old)):
                for a, b in zip(old.boxes[t], new.boxes[t], strict=True):
                    assert (b.ignore, b.track) == (a.ignore, a.track)
                    expected = [a.x1 * 140 / 64, a.y1 * 112 / 48, a.x2 * 140 / 64, a.y2 * 112 / 48]
                    assert [b.x1, b.y1, b.x2, b.y2] == pytest.approx(expected, abs=0.02)
    with pytest.raises(SystemExit, match="--force"):
        pack_mot15.main()


def test_a_whole_run_is_stored_and_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With random weights: what is held is the account, not the accuracy."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    made = libraries.load("timm").create_model(mot15.BACKBONE, num_classes=0)
    save_file(made.state_dict(), tmp_path / "random.safetensors")
    data = miniatures.mot(tmp_path / "mot", frames=3)
    arguments = [
        *("mot15", "--data", str(data), "--weights", str(tmp_path / "random.safetensors")),
        *("--out", str(tmp_path / "out"), "--width", "70", "--steps", "3", "--views", "2"),
        *("--preset", "fast", "--preset", "paper", "--no-publish"),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    mot15.main()
    assert "ran paper-C-seq" in capsys.readouterr().out
    result = json.loads((tmp_path / "out/mot15.json").read_text())
    rows = {(row["preset"], row["policy"]): row for row in result["rows"]}
    assert {p for p, _ in rows} == {"dense", "skip", "fast", "paper"}
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
    with (tmp_path / "out/mot15.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * len(rows)  # all, and the one sequence
    assert all(row["commit"] and row["torch"] for row in table)
    assert (tmp_path / "out/mot15.png").stat().st_size > 0

    mot15.main()
    assert "ran " not in capsys.readouterr().out
    again = json.loads((tmp_path / "out/mot15.json").read_text())
    assert again["rows"] == result["rows"]
