"""Data that is not as it should be: each kind of breakage is named, none ends in a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import miniatures
from eventful.errors import DamagedMediaError, MalformedDataError
from eventful.paper.data import Problems, open_dataset
from eventful.paper.data.check import check

pytest.importorskip("PIL")
pytest.importorskip("av")

COCO = "annotations/val.json"
EPIC = "EPIC_100_validation.csv"
MOT = "val/C-seq/gt/gt.txt"
VID = "ILSVRC2015/ImageSets/VID/val.txt"
XML = "ILSVRC2015/Annotations/VID/val/ILSVRC2015_val_00000000/000001.xml"


def added(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def coco_with(root: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = miniatures.coco(root) / COCO
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return root


def refused(root: Path, message: str, split: str | None = None) -> None:
    """Opening stops and says why; a check says the same and calls the split unusable."""

    def read() -> None:
        for video in open_dataset(root, split):
            list(video)

    with pytest.raises(MalformedDataError, match=message) as caught:
        read()
    report = check(root, split)
    assert report.verdict == "unusable"
    assert str(caught.value) in [text for part in report.splits for text in part.malformed]


# Text that is none


@pytest.mark.parametrize(
    ("make", "file"),
    [
        (miniatures.coco, COCO),
        (miniatures.epic, EPIC),
        (miniatures.mot, MOT),
        (miniatures.mot, "val/C-seq/seqinfo.ini"),
        (miniatures.imagenet, VID),
        (miniatures.kinetics, "val.csv"),
    ],
)
def test_other_encodings_are_refused_with_their_line(make, file: str, tmp_path: Path) -> None:
    root = make(tmp_path)
    content = (root / file).read_bytes()
    line = content.count(b"\n") + 1
    (root / file).write_bytes(content + b"caf\xe9")
    split = "val" if make is miniatures.mot else None
    refused(root, rf"{Path(file).name}, line {line}: expected text in UTF-8", split)


@pytest.mark.parametrize(
    ("make", "file", "split"),
    [
        (miniatures.coco, COCO, "val"),
        (miniatures.epic, EPIC, "validation"),
        (miniatures.mot, MOT, "val"),
        (miniatures.mot, "val/C-seq/seqinfo.ini", "val"),
        (miniatures.imagenet, VID, "val"),
        (miniatures.kinetics, "val.csv", "val"),
    ],
)
def test_windows_line_ends_and_a_byte_order_mark_change_nothing(
    make, file: str, split: str, tmp_path: Path
) -> None:
    root = make(tmp_path)
    before = open_dataset(root, split)
    content = (root / file).read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    (root / file).write_bytes(b"\xef\xbb\xbf" + content)
    assert open_dataset(root, split) == before


# COCO-style JSON


def repeated(where: str, **changes: object) -> Callable[[dict[str, Any]], object]:
    """The first entry once more."""
    return lambda content: content[where].append({**content[where][0], **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (repeated("images", frame_id=9), r"images\[8\] \(an earlier entry has its id\)"),
        (repeated("annotations"), r"annotations\[8\] \(an earlier entry has its id\)"),
        (repeated("annotations", id=9, bbox=[float("nan"), 0, 1, 1]), "not finite"),
        (repeated("annotations", id=9, bbox=[0, 0, float("inf"), 1]), "not finite"),
        (repeated("annotations", id=9, bbox=None), r"annotations\[8\].*bbox"),
        (lambda content: content.update(videos=5), "a list under 'videos', or none, found 5"),
        (lambda content: content["images"].append(3), r"images\[8\].*found 3"),
    ],
)
def test_coco_entries_that_make_no_sense(change, message: str, tmp_path: Path) -> None:
    refused(coco_with(tmp_path, change), message)


def test_coco_nested_without_end(tmp_path: Path) -> None:
    (miniatures.coco(tmp_path) / COCO).write_text("[" * 100_000)
    refused(tmp_path, "nested too deeply")


def test_coco_videos_of_one_name_are_told_apart(tmp_path: Path) -> None:
    names = [{"id": 0, "name": "street"}, {"id": 1, "name": "street"}]
    root = coco_with(tmp_path, lambda content: content.update(videos=names))
    assert sorted(v.name for v in open_dataset(root)) == ["street (0)", "street (1)"]


def test_coco_file_names_of_two_folders_are_two_videos(tmp_path: Path) -> None:
    """Both say video 00000000; the folder tells them apart."""
    path = miniatures.coco(tmp_path, videos=1, named=True) / COCO
    content = json.loads(path.read_text())
    for image in list(content["images"]):
        file, other = image["file_name"], f"more/{image['file_name']}"
        (tmp_path / "val" / "more").mkdir(exist_ok=True)
        shutil.copy(tmp_path / "val" / file, tmp_path / "val" / other)
        content["images"].append({**image, "id": image["id"] + 50, "file_name": other})
    path.write_text(json.dumps(content))
    videos = open_dataset(tmp_path)
    assert sorted(len(v) for v in videos) == [4, 4]
    assert len({v.name for v in videos}) == 2


def test_coco_images_without_a_video_are_videos_of_their_own(tmp_path: Path) -> None:
    root = coco_with(tmp_path, lambda c: [image.update(video_id=None) for image in c["images"]])
    assert [len(video) for video in open_dataset(root)] == [1] * 8


def test_coco_finds_its_images_although_the_first_is_missing(tmp_path: Path) -> None:
    path = miniatures.coco(tmp_path) / COCO
    first = json.loads(path.read_text())["images"][0]["file_name"]
    (tmp_path / "val" / first).unlink()
    report = check(tmp_path)
    assert (report.verdict, len(report.splits[0].missing)) == ("partial", 1)


def test_a_set_without_any_box_is_one(tmp_path: Path) -> None:
    root = coco_with(tmp_path, lambda content: content["annotations"].clear())
    assert check(root).verdict == "complete"
    assert all(frame.boxes == () for video in open_dataset(root) for frame in video)


# MOTChallenge


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,3,nan,1,2,3,1,-1,-1,-1", "finite numbers"),
        ("1,3,1,1,inf,3,1,-1,-1,-1", "finite numbers"),
        ("1,inf,1,1,2,3,1,-1,-1,-1", ".*id whole"),
        ("1,1,9,9,2,3,1,-1,-1,-1", r"an id once in a frame \(line 1 has it\)"),
    ],
)
def test_mot_rows_that_make_no_sense(row: str, message: str, tmp_path: Path) -> None:
    added(miniatures.mot(tmp_path) / MOT, row + "\n")
    refused(tmp_path, f"line 6: expected {message}", "val")


def test_mot_boxes_without_an_id_may_be_many(tmp_path: Path) -> None:
    added(miniatures.mot(tmp_path) / MOT, "1,-1,1,1,2,3,1,-1,-1,-1\n1,-1,5,5,2,3,1,-1,-1,-1\n")
    boxes = open_dataset(tmp_path, "val")[0].frame(0).boxes
    assert [box.track for box in boxes] == [1, 2, None, None]


def test_mot_sequences_are_named_by_their_folders(tmp_path: Path) -> None:
    """A copy says the same name in its ini file, and a name may hold a percent sign."""
    miniatures.mot(tmp_path)
    shutil.copytree(tmp_path / "val/C-seq", tmp_path / "val/D-seq")
    info = tmp_path / "val/D-seq/seqinfo.ini"
    info.write_text(info.read_text().replace("C-seq", "50%"))
    assert [v.name for v in open_dataset(tmp_path, "val")] == ["C-seq", "D-seq"]


def test_mot_as_distributed_has_a_test_folder_without_boxes(tmp_path: Path) -> None:
    miniatures.mot(tmp_path)
    (tmp_path / "val").rename(tmp_path / "test")
    (tmp_path / "test/C-seq/gt/gt.txt").unlink()
    report = check(tmp_path)
    assert (report.verdict, [part.split for part in report.splits]) == ("complete", ["train"])
    assert open_dataset(tmp_path).split == "train"


# ImageNet VID


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "well-formed XML"),
        ("<html/>", "expected <annotation>, found '<html>'"),
        (
            "<annotation><object><name>n02691156</name><bndbox><xmin>nan</xmin><xmax>3</xmax>"
            "<ymin>1</ymin><ymax>2</ymax></bndbox></object></annotation>",
            "a number in <xmin>, found 'nan'",
        ),
    ],
)
def test_vid_annotations_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    (miniatures.imagenet(tmp_path) / XML).write_text(text)
    refused(tmp_path, message, "val")


def test_vid_frames_without_objects(tmp_path: Path) -> None:
    (miniatures.imagenet(tmp_path) / XML).write_text("<annotation></annotation>")
    video = next(iter(open_dataset(tmp_path, "val")))
    assert [len(frame.boxes) for frame in video] == [1, 0, 1, 1]


def test_vid_a_frame_listed_twice(tmp_path: Path) -> None:
    path = miniatures.imagenet(tmp_path) / VID
    added(path, path.read_text().splitlines()[0] + "\n")
    refused(tmp_path, r"line 9: expected each frame once \(line 1 has it\)", "val")
    videos = open_dataset(tmp_path, "val", on_problem=Problems())
    assert [len(video) for video in videos] == [4, 4]


def test_vid_lists_with_tabs(tmp_path: Path) -> None:
    path = miniatures.imagenet(tmp_path) / "ILSVRC2015/ImageSets/VID/train_30.txt"
    path.write_text(path.read_text().replace(" ", "\t"))
    assert len(open_dataset(tmp_path, "train")) == 1


# EPIC-Kitchens and Kinetics


@pytest.mark.parametrize(
    ("make", "file"), [(miniatures.epic, EPIC), (miniatures.kinetics, "val.csv")]
)
def test_a_clip_listed_twice(make, file: str, tmp_path: Path) -> None:
    root = make(tmp_path)
    added(root / file, (root / file).read_text().splitlines()[1] + "\n")
    refused(root, "line 4: expected .*that no earlier row")
    assert len(open_dataset(root, on_problem=Problems())) == 2


def test_a_field_without_end(tmp_path: Path) -> None:
    added(miniatures.epic(tmp_path) / EPIC, '"' + "x" * 200_000)
    refused(tmp_path, "a row of a CSV file.*field larger")


def test_kinetics_test_table_without_labels(tmp_path: Path) -> None:
    root = miniatures.kinetics(tmp_path)
    (root / "test.csv").write_text("youtube_id,time_start,time_end,split\nabc,1,2,test\n")
    assert check(root).verdict == "complete"
    assert [video.label for video in open_dataset(root)] == [399, 0]


def test_kinetics_labels_do_not_depend_on_the_other_table(tmp_path: Path) -> None:
    root = miniatures.kinetics(tmp_path)
    (root / "train.csv").write_bytes((root / "train.csv").read_bytes() + b"\xe9,a,1,2,train,0\n")
    assert [video.label for video in open_dataset(root, "val")] == [399, 0]
    with pytest.raises(MalformedDataError, match=r"train.csv, line 3: expected text in UTF-8"):
        open_dataset(root, "train")


# Files of video


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def index_first(path: Path) -> None:
    """Move the index ahead of the frames, so that a file cut short still opens."""
    import av

    moved = path.with_suffix(".moved")
    options = {"movflags": "faststart"}
    with av.open(str(path)) as source, av.open(str(moved), "w", "mp4", options) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    moved.replace(path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("first", [False, True])
def test_a_truncated_video_is_damaged(share: float, first: bool, tmp_path: Path) -> None:
    root = miniatures.epic(tmp_path)
    file = root / "P01/videos/P01_11.MP4"
    if first:
        index_first(file)
    assert all(len(list(video)) == 30 for video in open_dataset(root))
    cut(file, share)
    with pytest.raises(DamagedMediaError, match=r"P01_11\.MP4"):
        list(open_dataset(root)[1])  # it reaches to the end of the file
