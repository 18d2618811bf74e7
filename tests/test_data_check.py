"""`eventful data check`: what is there, what is missing, and the exit code."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
from pathlib import Path

import pytest

import miniatures
from commands import here  # noqa: F401
from eventful.cli import data as command
from eventful.errors import MissingFileError
from eventful.paper.data.check import Report, check

pytest.importorskip("av")
pytest.importorskip("PIL")

COUNTS = {
    # split: videos, frames, annotations
    "imagenet-vid": {"val": (2, 8, 8), "train": (1, 4, 4), "det_train": (2, 2, 2)},
    "coco": {"val": (2, 8, 8)},
    "mot": {"train": (2, 8, 10), "val": (1, 4, 5)},
    "epic-kitchens": {"validation": (2, None, 2), "train": (2, None, 2)},
    "kinetics": {"val": (2, None, 2), "train": (1, None, 1)},
}


def one(report: Report):
    assert len(report.splits) == 1
    return report.splits[0]


@pytest.mark.parametrize("layout", miniatures.MAKE)
def test_whole_copies_are_complete_and_counted(tmp_path: Path, layout: str) -> None:
    report = check(miniatures.MAKE[layout](tmp_path))
    assert (report.format, report.verdict) == (layout, "complete")
    assert all(report.parts.values())
    counted = {s.split: (s.videos, s.frames, s.annotations) for s in report.splits}
    assert counted == COUNTS[layout]
    assert all(split.probed == split.videos for split in report.splits)


def test_missing_frames_and_annotations(tmp_path: Path) -> None:
    top = miniatures.imagenet(tmp_path) / "ILSVRC2015"
    (top / "Data/VID/val/ILSVRC2015_val_00000000/000003.JPEG").unlink()
    (top / "Annotations/VID/val/ILSVRC2015_val_00001000/000001.xml").unlink()
    split = one(check(tmp_path, "val"))
    assert split.verdict == "partial"
    assert len(split.missing) == 2
    assert any("000003.JPEG" in message for message in split.missing)
    assert any("000001.xml" in message for message in split.missing)


def test_absent_parts_are_told(tmp_path: Path) -> None:
    miniatures.epic(tmp_path)
    (tmp_path / "EPIC_100_train.csv").unlink()
    report = check(tmp_path)
    assert report.parts["EPIC_100_train.csv"] is False
    assert [split.split for split in report.splits] == ["validation"]


def test_every_malformed_row_is_listed(tmp_path: Path) -> None:
    path = miniatures.mot(tmp_path) / "val/C-seq/gt/gt.txt"
    path.write_text(path.read_text() + "1,2\nx,1,2,3,4,5,1,-1,-1,-1\n")
    report = check(tmp_path)
    by_name = {split.split: split for split in report.splits}
    assert [("line 6" in m, "line 7" in m) for m in by_name["val"].malformed] == [
        (True, False),
        (False, True),
    ]
    assert by_name["train"].verdict == "complete"
    assert report.verdict == "unusable"


def test_damage_is_found_by_decoding(tmp_path: Path) -> None:
    path = miniatures.kinetics(tmp_path) / "val/aaaaaaaaaaa_000003_000013.mp4"
    path.write_bytes(path.read_bytes()[:600])
    assert len(one(check(tmp_path, "val")).damaged) == 1
    unprobed = one(check(tmp_path, "val", probe=0))
    assert (unprobed.probed, unprobed.damaged) == (0, ())
    assert one(check(tmp_path, "val", probe=1)).probed == 1
    assert one(check(tmp_path, "val", probe=-1)).probed == 2


def test_all_clips_missing_is_unusable(tmp_path: Path) -> None:
    for clip in (miniatures.kinetics(tmp_path) / "val").glob("*.mp4"):
        clip.unlink()
    split = one(check(tmp_path, "val"))
    assert (split.videos, len(split.missing), split.verdict) == (0, 2, "unusable")


def test_a_table_that_does_not_open_is_reported_not_raised(tmp_path: Path) -> None:
    path = miniatures.epic(tmp_path) / "EPIC_100_validation.csv"
    path.write_text("nothing,of,use\n")
    split = one(check(tmp_path, "validation"))
    assert split.verdict == "unusable"
    assert "a header with the columns" in split.malformed[0]


def test_nowhere_and_no_such_split(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no-such-folder is not there"):
        check(tmp_path / "no-such-folder")
    with pytest.raises(MissingFileError, match="test"):
        check(miniatures.mot(tmp_path), "test")


def test_command_prints_a_table(tmp_path: Path, here) -> None:
    done = here("data", "check", miniatures.mot(tmp_path))
    assert done.returncode == 0, done.stderr
    for word in ("mot", "train", "val", "complete"):
        assert word in done.stdout


def test_command_gives_json_and_1_where_unusable(tmp_path: Path, here) -> None:
    done = here("data", "check", tmp_path, "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["layout"], report["verdict"]) == (None, "unusable")
    assert "mot" in report["known_layouts"]


def test_command_exits_with_2_where_there_is_nothing(tmp_path: Path, here) -> None:
    done = here("data", "check", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "nowhere is not there" in done.stderr


def test_text_shows_a_few_problems_and_json_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for image in (miniatures.mot(tmp_path, frames=12) / "val/C-seq/img1").glob("*.jpg"):
        if int(image.stem) > 2:
            image.unlink()
    with pytest.raises(SystemExit) as caught:
        command.run(tmp_path, "val", 32, False)
    assert caught.value.code == 1
    shown = capsys.readouterr().out
    assert "val: 11 malformed" in shown
    assert "and 6 more" in shown
    with pytest.raises(SystemExit):
        command.run(tmp_path, "val", 32, True)
    listed = json.loads(capsys.readouterr().out)["splits"][0]["malformed"]
    assert len(listed) == 11


def test_the_progress_is_told_video_by_video(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    check(miniatures.mot(tmp_path), watch=lambda *where: told.append(where))
    assert told == [("val", 1, 1), ("train", 1, 2), ("train", 2, 2)]
