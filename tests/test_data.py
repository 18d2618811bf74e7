"""Datasets in their own layouts: what they hand out, and what they say when something is wrong."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

import miniatures
from eventful.errors import (
    ConfigError,
    DamagedMediaError,
    DataError,
    MalformedDataError,
    MissingFileError,
)
from eventful.paper.data import Box, Problems, VideoSet, open_dataset, recognise
from eventful.video.source import ImageFiles, VideoFile

pytest.importorskip("av")
pytest.importorskip("PIL")

ASSETS = Path(os.environ.get("EVENTFUL_ASSETS", Path(__file__).parents[2] / "shared" / "assets"))


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One copy of each, for tests that change nothing."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in miniatures.MAKE.items()}


def level(pixels) -> float:
    """Brightness of a corner that no box touches."""
    return pixels[:, -4:, -4:].float().mean().item()


def shows(pixels, t: int) -> bool:
    return abs(level(pixels) - miniatures.grey(t)) < 1


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# Laws of every layout


@pytest.mark.parametrize("layout", miniatures.MAKE)
def test_layout_is_recognised_and_opens(copies: dict[str, Path], layout: str) -> None:
    found = recognise(copies[layout])
    assert found is not None
    assert found.name == layout
    videos = open_dataset(copies[layout])
    assert isinstance(videos, VideoSet)
    assert (videos.format, videos.task) == (layout, found.task)
    for old_or_new in ({"format": layout}, {"layout": layout}):
        assert open_dataset(copies[layout], **old_or_new).layout == layout
    assert videos.split == found.splits(copies[layout])[0]
    assert "val" in videos.split
    assert len({video.name for video in videos}) == len(videos) > 0
    for video in videos:
        assert (video.label is None) == (video.boxes is not None) == (found.task == "detection")
        if video.boxes is not None:
            assert len(video.boxes) == len(video)


@pytest.mark.parametrize("layout", miniatures.MAKE)
def test_opening_decodes_nothing_and_twice_gives_the_same(
    copies: dict[str, Path], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr("eventful.video.source.load", refuse)
    assert open_dataset(copies[layout]) == open_dataset(str(copies[layout]))


@pytest.mark.parametrize("layout", miniatures.MAKE)
def test_a_video_goes_to_another_process(copies: dict[str, Path], layout: str) -> None:
    video = open_dataset(copies[layout])[0]
    copy = pickle.loads(pickle.dumps(video))
    assert copy == video
    assert copy.frame(1).pixels.equal(video.frame(1).pixels)
    assert copy.frame(1).boxes == video.frame(1).boxes


@pytest.mark.parametrize("layout", miniatures.MAKE)
def test_walking_equals_asking(copies: dict[str, Path], layout: str) -> None:
    video = open_dataset(copies[layout])[0]
    walked = list(video)
    assert [frame.index for frame in walked] == list(range(len(video)))
    for t in (0, len(video) // 2, len(video) - 1):
        asked = video.frame(t)
        assert asked.pixels.equal(walked[t].pixels)
        assert asked.boxes == walked[t].boxes


@pytest.mark.parametrize("layout", miniatures.MAKE)
def test_unknown_split_names_those_there(copies: dict[str, Path], layout: str) -> None:
    with pytest.raises(MissingFileError, match="val"):
        open_dataset(copies[layout], "no-such-split")


def test_no_layout(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="imagenet-vid: ILSVRC2015"):
        open_dataset(tmp_path)
    with pytest.raises(ConfigError, match="kinetics"):
        open_dataset(tmp_path, layout="no-such-layout")


# ImageNet


def test_vid_validation(copies: dict[str, Path]) -> None:
    videos = open_dataset(copies["imagenet-vid"] / "ILSVRC2015", "val")
    assert [v.name for v in videos] == ["ILSVRC2015_val_00000000", "ILSVRC2015_val_00001000"]
    assert len(videos.classes) == 30
    frame = videos[1].frame(2)
    assert shows(frame.pixels, 2)
    assert frame.boxes == (Box(*miniatures.square(2), videos.classes.index("car"), track=0),)


def test_vid_training_lists_each_snippet_once_and_det_keeps_vid_classes(
    copies: dict[str, Path],
) -> None:
    train = open_dataset(copies["imagenet-vid"], "train")
    assert [len(video) for video in train] == [4]
    assert {box.label for frame in train[0] for box in frame.boxes} == {29}
    det = open_dataset(copies["imagenet-vid"], "det_train")
    assert [video.name for video in det] == ["a/both", "a/car"]
    assert [[b.label for b in v.frame(0).boxes] for v in det] == [[6], [6]]


def test_vid_splits_a_snippet_at_gaps_but_not_at_its_own_stride(tmp_path: Path) -> None:
    top = miniatures.imagenet(tmp_path, frames=12) / "ILSVRC2015"
    listed, first = top / "ImageSets/VID/val.txt", "ILSVRC2015_val_00000000"
    left = {0, 1, 2, 5, 6, 11}

    def keep(frames: set[int]) -> None:
        lines = "".join(f"{first}/{t:06d} {t + 1}\n" for t in sorted(frames, reverse=True))
        listed.write_text(lines)

    keep(left)
    videos = open_dataset(tmp_path, "val")
    lengths = {f"{first}@0": 3, f"{first}@5": 2, f"{first}@11": 1}
    assert {v.name: len(v) for v in videos} == lengths
    for t, frame in zip(sorted(left), (f for v in videos for f in v), strict=True):
        assert shows(frame.pixels, t)
        assert frame.boxes[0].x1 == miniatures.square(t)[0]
    keep({0, 5, 10})
    assert {v.name: len(v) for v in open_dataset(tmp_path, "val")} == {first: 3}

    snippet = "ILSVRC2015_VID_train_0000/ILSVRC2015_train_00000000"
    for t in set(range(12)) - left:
        (top / f"Data/VID/train/{snippet}/{t:06d}.JPEG").unlink()
    lengths = {f"{snippet}@0": 3, f"{snippet}@5": 2, f"{snippet}@11": 1}
    assert {v.name: len(v) for v in open_dataset(tmp_path, "train")} == lengths


def test_vid_classes_are_distinct_and_in_alphabetical_order() -> None:
    from eventful.paper.data.imagenet import CLASSES

    wordnet, names, det = zip(*CLASSES, strict=True)
    assert list(names) == sorted(names)
    assert list(det) == sorted(det)  # DET's classes are in alphabetical order too
    assert len(set(wordnet)) == 30


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<name>n02691156</name>", "<name>n1</name>", "object 1: expected <name>.*found 'n1'"),
        ("<xmin>4</xmin>", "", "object 1: expected <bndbox> with a number in <xmin>"),
        ("<xmax>24</xmax>", "<xmax>one</xmax>", "<xmax>, found 'one'"),
        ("<xmax>24</xmax>", "<xmax>3</xmax>", "xmin <= xmax"),
        ("<folder>f</folder>", "<folder>f", "line 4: expected well-formed XML"),
    ],
)
def test_vid_malformed_xml(tmp_path: Path, old: str, new: str, message: str) -> None:
    where = "ILSVRC2015/Annotations/VID/val/ILSVRC2015_val_00000000/000000.xml"
    edit(miniatures.imagenet(tmp_path) / where, old, new)
    video = open_dataset(tmp_path)[0]
    with pytest.raises(MalformedDataError, match=message) as caught:
        video.frame(0)
    assert where in str(caught.value)
    assert video.frame(1).boxes


def test_vid_malformed_lists_name_file_and_line(tmp_path: Path) -> None:
    sets = miniatures.imagenet(tmp_path) / "ILSVRC2015/ImageSets/VID"
    edit(sets / "val.txt", "/000002 3", "-000002 3")
    with pytest.raises(MalformedDataError, match=r"val.txt, line 3: expected '<snippet>/"):
        open_dataset(tmp_path, "val")
    edit(sets / "train_30.txt", " 1", " yes")
    with pytest.raises(MalformedDataError, match=r"train_30.txt, line 1.*label -1, 0 or 1"):
        open_dataset(tmp_path, "train")
    (sets / "train_4.txt").unlink()
    with pytest.raises(MissingFileError, match=r"train_4.txt is not there.*bicycle"):
        open_dataset(tmp_path, "train")


def test_missing_frame_is_named_when_read(tmp_path: Path) -> None:
    miniatures.imagenet(tmp_path)
    video = open_dataset(tmp_path)[0]
    assert isinstance(video.frames, ImageFiles)
    video.frames.path(1).unlink()
    with pytest.raises(MissingFileError, match=r"000001.JPEG is not there"):
        list(video)
    assert video.frames.missing() == [video.frames.path(1)]


# COCO-style JSON


def test_coco_names_labels_and_order(copies: dict[str, Path]) -> None:
    videos = open_dataset(copies["coco"])
    assert sorted(v.name for v in videos) == ["clip 0", "clip 1"]
    assert videos.classes == ("car", "dog")  # in order of the ids
    first = next(v for v in videos if v.name == "clip 1")
    assert [shows(frame.pixels, t) for t, frame in enumerate(first)] == [True] * 4
    assert first.frame(3).boxes == (Box(*miniatures.square(3), 1, track=7),)
    assert open_dataset(copies["coco"] / "annotations" / "val.json") == videos


def test_coco_video_and_frame_from_the_file_name(tmp_path: Path) -> None:
    videos = open_dataset(miniatures.coco(tmp_path, named=True))
    assert sorted(v.name for v in videos) == ["00000000", "00000001"]
    assert all(shows(frame.pixels, frame.index) for frame in videos[0])


def test_coco_splits_a_video_at_gaps_but_not_at_its_own_stride(tmp_path: Path) -> None:
    path = miniatures.coco(tmp_path, videos=1, frames=6) / "annotations/val.json"
    content = json.loads(path.read_text())
    for image, frame in zip(content["images"], [30, 20, 10, 4, 2, 0], strict=True):
        image["frame_id"] = frame
    path.write_text(json.dumps(content))
    assert {v.name: len(v) for v in open_dataset(tmp_path)} == {
        "clip 0@0": 3,
        "clip 0@10": 1,
        "clip 0@20": 1,
        "clip 0@30": 1,
    }
    for image, frame in zip(content["images"], [25, 20, 15, 10, 5, 0], strict=True):
        image["frame_id"] = frame
    path.write_text(json.dumps(content))
    assert {v.name: len(v) for v in open_dataset(tmp_path)} == {"clip 0": 6}


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ("images", "file_name", None, r"images\[2\] \(no 'file_name'\): expected an entry with id"),
        ("images", "frame_id", "x", r"images\[2\]"),
        ("images", "frame_id", 2, "one image per frame_id"),
        ("annotations", "bbox", [1, 2, 3], r"annotations\[2\].*bbox"),
        ("annotations", "bbox", [1, 2, -3, 4], "below 0"),
        ("annotations", "category_id", 9, "no category has its category_id"),
        ("annotations", "image_id", 999, "no image has its image_id"),
    ],
)
def test_coco_malformed_entries(
    tmp_path: Path, where: str, key: str, value: object, message: str
) -> None:
    path = miniatures.coco(tmp_path) / "annotations/val.json"
    content = json.loads(path.read_text())
    if value is None:
        del content[where][2][key]
    else:
        content[where][2][key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(MalformedDataError, match=message):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"images": [],\n', "line 2: expected JSON"),
        ("[]", "an object"),
        ('{"images": []}', "'annotations'"),
    ],
)
def test_coco_malformed_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "val.json").write_text(text)
    with pytest.raises(MalformedDataError, match=message):
        open_dataset(tmp_path)


# MOTChallenge


def test_mot_frames_follow_their_numbers(tmp_path: Path) -> None:
    videos = open_dataset(miniatures.mot(tmp_path, step=3), "train")
    assert [v.name for v in videos] == ["A-seq", "B-seq"]
    frames = list(videos[0])
    assert [shows(frame.pixels, t) for t, frame in enumerate(frames)] == [True] * 4
    assert frames[0].boxes[1] == Box(0.5, 0.25, 5.5, 6.25, 0, track=2, ignore=True)
    assert [f.boxes[0].x1 for f in frames] == [miniatures.square(t)[0] for t in range(4)]
    alone = open_dataset(tmp_path / "train")
    assert (alone.split, alone.videos) == ("all", videos.videos)


def test_mot16_classes(tmp_path: Path) -> None:
    path = miniatures.mot(tmp_path) / "val/C-seq/gt/gt.txt"
    rows = ["1,1,0,0,5,5,1,1,0.9", "1,2,0,0,5,5,0,1,0.9", "1,3,0,0,5,5,0,8,1", "1,4,0,0,5,5,0,3,1"]
    path.write_text("\n".join(rows))
    boxes = open_dataset(tmp_path, "val")[0].frame(0).boxes
    assert [(box.track, box.ignore) for box in boxes] == [(1, False), (2, True), (3, True)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,1,2,3,4,5", "frame,id,left,top"),
        ("1,1,2,3,x,5,1,-1,-1,-1", "numbers"),
        ("1,1,2,3,0,5,1,-1,-1,-1", "above 0"),
        ("77,1,2,3,4,5,1,-1,-1,-1", "a frame number that img1 has, found 77"),
    ],
)
def test_mot_malformed_rows(tmp_path: Path, row: str, message: str) -> None:
    path = miniatures.mot(tmp_path) / "val/C-seq/gt/gt.txt"
    path.write_text(path.read_text() + row + "\n")
    with pytest.raises(MalformedDataError, match=rf"gt.txt, line 6: expected .*{message}"):
        open_dataset(tmp_path, "val")
    problems = Problems()
    assert len(open_dataset(tmp_path, "val", on_problem=problems)) == 1
    assert len(problems.malformed) == len(problems) == 1


def test_mot_incomplete_sequences(tmp_path: Path) -> None:
    sequence = miniatures.mot(tmp_path) / "val/C-seq"
    (sequence / "img1/000004.jpg").unlink()
    with pytest.raises(MalformedDataError, match=r"seqLength.*img1, 3, found 4"):
        open_dataset(tmp_path, "val")
    edit(sequence / "seqinfo.ini", "seqLength=4", "seqLength=")
    with pytest.raises(MalformedDataError, match=r"a number of frames in seqLength, found ''"):
        open_dataset(tmp_path, "val")
    (tmp_path / "train/A-seq/gt/gt.txt").unlink()
    with pytest.raises(MissingFileError, match=r"A-seq/gt/gt.txt is not there"):
        open_dataset(tmp_path, "train")
    problems = Problems()
    assert [v.name for v in open_dataset(tmp_path, "train", on_problem=problems)] == ["B-seq"]
    assert len(problems.missing) == 1


@pytest.mark.skipif(
    not (ASSETS / "mot15").is_dir(), reason=f"MOT15 is not at {ASSETS}/mot15 (EVENTFUL_ASSETS)"
)
def test_mot15_itself() -> None:
    train, val = (open_dataset(ASSETS / "mot15", split) for split in ("train", "val"))
    assert (len(train), sum(map(len, train))) == (5, 926)
    assert (len(val), sum(map(len, val))) == (3, 624)
    boxes = [box for split in (train, val) for video in split for row in video.boxes for box in row]
    assert (len(boxes), sum(box.ignore for box in boxes)) == (12399, 1070)
    for video in val:
        frame = video.frame(len(video) - 1)
        height, width = frame.pixels.shape[1:]
        assert width == 640
        assert any(0 <= b.x1 < b.x2 <= width and 0 <= b.y1 < b.y2 <= height for b in frame.boxes)


# Damage


def test_damaged_videos_are_skipped_with_a_count(tmp_path: Path) -> None:
    miniatures.kinetics(tmp_path)
    videos = open_dataset(tmp_path)
    damaged = videos[0].frames
    assert isinstance(damaged, VideoFile)
    damaged.path.write_bytes(damaged.path.read_bytes()[:600])
    with pytest.raises(DamagedMediaError, match=damaged.path.name):
        videos[0].frame(0)
    problems, read = Problems(), []
    for video in videos:
        with problems.skipping():
            video.frame(0)
            read.append(video.name)
    assert read == [videos[1].name]
    assert len(problems) == len(problems.damaged) == 1


def test_skipping_lets_other_errors_through() -> None:
    problems = Problems()
    with pytest.raises(DataError), problems.skipping():
        raise MalformedDataError("a row")
    assert len(problems) == 0


def test_damaged_image_is_named(tmp_path: Path) -> None:
    miniatures.mot(tmp_path)
    path = tmp_path / "val/C-seq/img1/000002.jpg"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DamagedMediaError, match=r"000002.jpg does not decode"):
        list(open_dataset(tmp_path, "val")[0])
